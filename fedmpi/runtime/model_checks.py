"""Whether a module can be trained as one vector, and what of it PyTorch or fedmpi would overlook."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from fedmpi.common.text import shorten
from fedmpi.common.user_code_errors import located_error


def check_module(where: str, module: Any, made_by: Any) -> None:
    """Check that a module has parameters to train, of one type of floats.

    Args:
        where: what made it, for messages: "model.name: cnn".
        module: what was made.
        made_by: the function or class that made it; an error names its file.
    """
    trained = [p for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []
    if not trained:
        returned = "a module without any" if isinstance(module, nn.Module) else type(module).__name__
        raise located_error(
            f"{where} must return a torch.nn.Module with trainable parameters; it returned {returned}", made_by
        )
    kinds = sorted({str(p.dtype) for p in trained})
    if len(kinds) > 1 or not trained[0].is_floating_point():
        raise located_error(
            f"{where} has parameters of {', '.join(kinds)}; all that are trained must be of one type of floats, as "
            "they lie in one vector: module.float()",
            made_by,
        )


def warn_of_untracked(name: str, module: nn.Module) -> None:
    """Warn of layers and tensors that PyTorch does not know of: neither registered, nor parameters, nor buffers.

    Layers with forward pre-hooks are left out: weight_norm and pruning make tensors in each pass.
    """
    registered = {id(x) for x in (*module.parameters(), *module.buffers())}
    ours, layers, tensors = vars(nn.Module()).keys(), list[str](), list[str]()
    for path, part in module.named_modules():
        for key in sorted(vars(part).keys() - ours):
            value, at = vars(part)[key], f"{path}.{key}" if path else key
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            parameters = [p for each in inside if isinstance(each, nn.Module) for p in each.parameters()]
            if any(p.requires_grad and id(p) not in registered for p in parameters):
                layers.append(at)
            unregistered = [x for x in (value, *inside) if isinstance(x, Tensor) and id(x) not in registered]
            if not part._forward_pre_hooks and unregistered:
                tensors.append(at)
    if layers:
        warnings.warn(
            f"model {name}: PyTorch does not know of the layers in {', '.join(layers)}, as it does not look into lists "
            "and dictionaries: they are neither trained nor sent nor saved; use nn.ModuleList or nn.ModuleDict",
            stacklevel=2,
        )
    if tensors:
        warnings.warn(
            f"model {name}: {shorten(', '.join(tensors))}: plain tensors, which are neither trained nor sent nor "
            "saved: use register_buffer, with persistent=False for a constant, or nn.ParameterList",
            stacklevel=2,
        )
