"""Whether a module can be trained as one vector, and what of it PyTorch or fedmpi would overlook."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten
from fedmpi.common.user_code_errors import ONE_SAMPLE, attribute_errors, located_error
from fedmpi.config.schema import Settings
from fedmpi.data.federated import Federated
from fedmpi.flat.model import NORM_LAYERS
from fedmpi.models.net import Net


def check_module(where: str, module: Any, made_by: Any) -> None:
    """Check that a module has parameters to train: dense, on a device, and of one type of floats.

    Args:
        where: what made it, for messages: "model.name: cnn".
        module: what was made.
        made_by: the function or class that made it; an error names its file.
    """
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        returned = "a module without any" if isinstance(module, nn.Module) else type(module).__name__
        raise located_error(
            f"{where} must return a torch.nn.Module with trainable parameters; it returned {returned}", made_by
        )
    trained = [p for p in module.parameters() if p.requires_grad]
    kinds = sorted({str(p.dtype) for p in trained})
    if len(kinds) > 1 or not trained[0].is_floating_point():
        raise located_error(
            f"{where} has parameters of {', '.join(kinds)}; all that are trained must be of one type of floats, as "
            "they lie in one vector: module.float()",
            made_by,
        )
    for name, p in module.named_parameters():
        if p.is_meta or p.layout is not torch.strided:
            what = "on the device meta, without values" if p.is_meta else f"a {p.layout} tensor"
            raise located_error(f"{where}: parameter {name} is {what}; dense tensors are needed", made_by)
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise located_error(
                f"{where}: {name} has sparse=True; gradients lie in one dense vector: sparse=False", made_by
            )
    for name, buffer in module.named_buffers():
        finite = not is_lazy(buffer) and buffer.is_floating_point() and buffer.isfinite().all()
        if finite and not buffer.to(trained[0].dtype).isfinite().all():
            raise located_error(
                f"{where}: buffer {name} ({buffer.dtype}) holds numbers beyond {kinds[0]}, the parameters' type, in "
                "which buffers travel",
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
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
            parts = (
                [value]
                if inside is None
                else [p for each in inside for p in (each.parameters() if isinstance(each, nn.Module) else [each])]
            )
            unregistered = [p for p in parts if isinstance(p, Tensor) and id(p) not in registered]
            if inside is not None and any(isinstance(p, nn.Parameter) and p.requires_grad for p in unregistered):
                layers.append(at)
            if not part._forward_pre_hooks and any(not isinstance(p, nn.Parameter) for p in unregistered):
                tensors.append(at)
    for at in layers:
        warnings.warn(
            f"model {name}: PyTorch does not know of the layers in {at}, as it does not look into lists and "
            "dictionaries: they are neither trained nor sent nor saved; use nn.ModuleList or nn.ModuleDict",
            stacklevel=2,
        )
    if tensors:
        warnings.warn(
            f"model {name}: {shorten(', '.join(tensors))}: plain tensors, which are neither trained nor sent nor "
            "saved, and stay on the device where they were made: use register_buffer, with persistent=False for a "
            "constant",
            stacklevel=2,
        )


def check_batch_norm(settings: Settings, data: Federated, net: Net, *, trains_batches: bool) -> None:
    """Check that batch normalisation, where a model has it, has batches to normalise over.

    Args:
        settings: of the run.
        data: the clients, whose sizes may leave a batch of one sample.
        net: the model.
        trains_batches: whether each step of the method takes one batch, of the size in the config.
    """
    train, name = settings.train, settings.model.name
    normalising = [part for part in net.module.modules() if isinstance(part, NORM_LAYERS[0])]
    if not normalising:
        return
    if train.batch_size == 1:
        raise UserError("train.batch_size: 1 gives batch normalisation nothing to normalise over; use at least 2")
    if any(part.running_mean is None for part in normalising):
        warnings.warn(
            f"model {name}: batch normalisation without running statistics (bn_nostats) takes those of each batch in "
            "evaluation, too: figures depend on evaluate.batch_size and on the order of test rows",
            stacklevel=3,
        )
    sizes = data.train_sizes
    last = sizes if train.batch_size == "full" else sizes % train.batch_size
    single = np.flatnonzero((last == 1) & (not train.drop_last or train.batch_size == "full"))
    if not trains_batches or not len(single):
        return
    with attribute_errors(f"model {name}"):
        takes_one = net.takes_one()  # as behind a convolution, which has several values a channel
    if not takes_one:
        k, more = single[0], f" (and {len(single) - 1} more)" if len(single) > 1 else ""
        raise located_error(
            f"train.batch_size: {train.batch_size} leaves client {k}{more} with {sizes[k]} samples a batch of one "
            f"sample, which gives batch normalisation nothing to normalise over; {ONE_SAMPLE}"
        )
