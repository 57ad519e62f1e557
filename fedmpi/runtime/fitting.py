"""Whether data, model, task and method go together: what would fail later, or run and mean nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from fedmpi.common.blame import ONE_SAMPLE, blaming, told
from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data.federated import Federated
from fedmpi.engine.packed import together
from fedmpi.flat.model import NORM_LAYERS, FlatModel
from fedmpi.method.base import CLASSES, FEATURES, LABEL_COUNTS, PLAIN_SERVER, PLAIN_SGD, VALIDATION, Method
from fedmpi.models.net import Net


def check_module(said: str, module: Any, made_by: Any) -> None:
    """A module of which w can be made: parameters to train, dense, on a device, all of one type of real numbers."""
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        found = "a module without any" if isinstance(module, nn.Module) else type(module).__name__
        raise told(f"{said} must return a torch.nn.Module with trainable parameters; it returned {found}", made_by)
    kinds = sorted({str(p.dtype) for p in module.parameters()})
    if len(kinds) > 1 or not next(module.parameters()).is_floating_point():
        raise told(
            f"{said} has parameters of {', '.join(kinds)}; all must be of one type of floats, as they lie in one "
            "vector: module.float()",
            made_by,
        )
    for name, p in module.named_parameters():
        if p.is_meta or p.layout is not torch.strided:
            what = "on the device meta, without values" if p.is_meta else f"a {p.layout} tensor"
            raise told(f"{said}: parameter {name} is {what}; dense tensors are needed", made_by)
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise told(f"{said}: {name} has sparse=True; gradients lie in one dense vector: sparse=False", made_by)


def compiler(device: torch.device) -> None:
    """UserError if torch.compile, which makes C++ for a CPU, would find no compiler at the first step."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(name) is None:
        raise UserError(
            f"compute.compile: true needs a C++ compiler, and host {platform.node()} has no {name}; install it, name "
            "another one in the environment variable CXX, or set compute.compile: false"
        )


def check_needs(settings: Settings, method: Method, task: Any, net: Net, module: nn.Module) -> None:
    name = settings.method.name
    model, momentum, server = settings.model.name, settings.train.momentum, settings.server
    lacking = {
        FEATURES: not net.has_features and f"model {model} does not end in a linear layer that can be split off",
        CLASSES: not getattr(task, "classification", False)
        and f"task {settings.task.name} does not say that it is one (classification = True in the class)",
        PLAIN_SGD: momentum and f"train.momentum is {momentum}",
        PLAIN_SERVER: (server.optim, server.lr, server.rule.name) != ("sgd", 1.0, "auto")
        and f"server is {{optim: {server.optim}, lr: {server.lr:g}, rule: {server.rule.name}}}",
        LABEL_COUNTS: not settings.data.share_label_counts and "data.share_label_counts is false",
        VALIDATION: not settings.data.validation and "data.validation is 0",
    }
    for needed in sorted(method.needs):
        if needed not in lacking:
            known = "PLAIN_SGD, PLAIN_SERVER, FEATURES, CLASSES, LABEL_COUNTS, VALIDATION of fedmpi.method"
            raise UserError(f"method {name}: needs holds {needed!r}; it takes {known}")
        if lacking[needed]:
            raise UserError(f"method {name} needs {needed}, but {lacking[needed]}")
    batch_norm = any(isinstance(m, NORM_LAYERS[0]) for m in module.modules())
    if batch_norm and settings.train.batch_size == 1:
        raise UserError("train.batch_size: 1 gives batch normalisation nothing to normalise over; use at least 2")
    if settings.train.drop_last and settings.train.batch_size == "full":
        warnings.warn("train.drop_last has no effect with batch_size: full", stacklevel=2)


def check_sense(settings: Settings, method: Method, data: Federated, task: Any, net: Net) -> None:
    """What would run, and mean nothing."""
    train = settings.train
    if getattr(task, "classification", False) and net.outputs != data.classes:
        raise UserError(
            f"model {settings.model.name} has {net.outputs} outputs, but the data have {data.classes} classes; "
            "a classification needs one output a class"
        )
    if train.drop_last and train.batch_size != "full":
        without = int((data.train_sizes < train.batch_size).sum())
        if without == data.clients:
            raise UserError(
                f"train.drop_last: true leaves out every batch: train.batch_size is {train.batch_size}, and the "
                f"largest client has {data.train_sizes.max()} samples; lower train.batch_size, or set drop_last: false"
            )
        if without:
            warnings.warn(
                f"train.drop_last: {without} of {data.clients} clients have fewer than train.batch_size = "
                f"{train.batch_size} samples and will not train",
                stacklevel=3,
            )
    if method.batches_a_step == 1:
        _check_single_samples(settings, data, net)
    if data.global_test is not None and not len(data.global_test):
        warnings.warn("data: the test set is empty; the global model will have no loss and no metrics", stacklevel=3)


def _check_single_samples(settings: Settings, data: Federated, net: Net) -> None:
    """A batch of one sample, which some clients' sizes leave over, has no batch statistics."""
    size, sizes = settings.train.batch_size, data.train_sizes
    last = sizes if size == "full" else sizes % size
    single = np.flatnonzero((last == 1) & (not settings.train.drop_last or size == "full"))
    normalises = any(isinstance(part, NORM_LAYERS[0]) for part in net.module.modules())
    with blaming(f"model {settings.model.name}"):
        fine = not (len(single) and normalises) or net.takes_one()
    if not fine:
        k = single[0]
        more = f" (and {len(single) - 1} more)" if len(single) > 1 else ""
        raise told(
            f"train.batch_size: {size} leaves client {k}{more} with {sizes[k]} samples a batch of one sample, which "
            f"gives batch normalisation nothing to normalise over; {ONE_SAMPLE}"
        )


def clients_at_once(settings: Settings, method: Method, model: FlatModel) -> int:
    """How many clients a rank trains at once (compute.pack)."""
    compute, pack = settings.compute, settings.compute.pack
    many = together.many(pack, model)
    reason = together.why_not(method, model, bf16=compute.precision == "bf16", compiled=compute.compile)
    if pack == 1 or not reason:
        return many
    if pack != "auto":
        raise UserError(f"compute.pack: {pack}: clients cannot be trained together: {reason}; {together.REMEDY}")
    warnings.warn(f"compute.pack: auto: {reason}; clients are trained one by one", stacklevel=3)
    return 1


def check_buffers(settings: Settings, module: nn.Module) -> None:
    """Float buffers travel in the type of the parameters."""
    kind = next(module.parameters()).dtype
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.isfinite().all() and not buffer.to(kind).isfinite().all():
            raise UserError(
                f"model {settings.model.name}: buffer {name} ({buffer.dtype}) holds numbers beyond {kind}, the "
                "parameters' type, in which buffers travel"
            )
