"""Whether a module can be trained as one vector, and what of it PyTorch or fedmpi would overlook."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedmpi.common.text import shorten
from fedmpi.common.user_code_errors import ONE_SAMPLE, attribute_errors, located_error
from fedmpi.config.schema import Settings
from fedmpi.data.federated import Federated
from fedmpi.flat.model import NORM_LAYERS
from fedmpi.models.net import Net


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


def check_batch_norm(settings: Settings, data: Federated, net: Net, *, trains_batches: bool) -> None:
    """Check that no client has a last batch of one sample where batch normalisation cannot take it: that may show in a
    late round.

    Args:
        settings: of the run.
        data: the clients, whose sizes may leave a batch of one sample.
        net: the model.
        trains_batches: whether each step of the method takes one batch, of the size in the config.
    """
    train, sizes = settings.train, data.train_sizes
    full = train.batch_size == "full"
    last = sizes if full else sizes % train.batch_size
    single = np.flatnonzero((last == 1) & (full or not train.drop_last))
    has_batch_norm = any(isinstance(part, NORM_LAYERS[0]) for part in net.module.modules())
    if not trains_batches or not has_batch_norm or not len(single):
        return
    with attribute_errors(f"model {settings.model.name}"):
        takes_one = net.takes_one()  # as behind a convolution, which has several values a channel
    if not takes_one:
        k, more = single[0], f" (and {len(single) - 1} more)" if len(single) > 1 else ""
        raise located_error(
            f"train.batch_size: {train.batch_size} leaves client {k}{more} with {sizes[k]} samples a batch of one "
            f"sample, which gives batch normalisation nothing to normalise over; {ONE_SAMPLE}"
        )
