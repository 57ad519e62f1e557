"""Whether data, model, task and method go together: what would fail later, or run and mean nothing."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation import suited
from fedmpi.common.blame import ONE_SAMPLE, blaming, told
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.text import brief, lower_is_better, nearest
from fedmpi.config.schema import Settings
from fedmpi.data.batches import samples_of
from fedmpi.data.federated import Federated
from fedmpi.engine import scheduler
from fedmpi.engine.best import Choice
from fedmpi.engine.messages import Messages
from fedmpi.flat.model import NORM_LAYERS
from fedmpi.method.base import (
    CLASSES,
    FEATURES,
    LABEL_COUNTS,
    LAST_LAYER,
    ONE_CLASS,
    PLAIN_SERVER,
    PLAIN_SGD,
    SGD_STEPS,
    VALIDATION,
    Method,
    overrides,
)
from fedmpi.models.net import Net
from fedmpi.runtime.recipe import recipe
from fedmpi.tasks import contract
from fedmpi.tasks.next_symbol import NextSymbol
from fedmpi.tasks.survival import Survival

SHOWN = 5  # sites in a line
MANY = 1000  # clients, of more of which no rows are read for a warning
REMEDIES = {  # what to set where a method needs something else
    "train.optim": "sgd",
    "train.clip_norm": "null",
    "train.clip_value": "null",
    "train.keep_optim": "false",
    "train.momentum": "0",
    "data.share_label_counts": "true",
    "data.validation": "0.1, say",
    "task.label_smoothing": "0",
}


def check_module(said: str, module: Any, made_by: Any) -> None:
    """A module of which w can be made: parameters to train, dense, on a device, all of one type of real numbers."""
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        found = "a module without any" if isinstance(module, nn.Module) else type(module).__name__
        raise told(f"{said} must return a torch.nn.Module with trainable parameters; it returned {found}", made_by)
    trained = [p for p in module.parameters() if p.requires_grad]
    kinds = sorted({str(p.dtype) for p in trained})
    if len(kinds) > 1 or not trained[0].is_floating_point():
        raise told(
            f"{said} has parameters of {', '.join(kinds)}; all that are trained must be of one type of floats, as they "
            "lie in one vector: module.float()",
            made_by,
        )
    for name, p in module.named_parameters():
        if p.is_meta or p.layout is not torch.strided:
            what = "on the device meta, without values" if p.is_meta else f"a {p.layout} tensor"
            raise told(f"{said}: parameter {name} is {what}; dense tensors are needed", made_by)
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise told(f"{said}: {name} has sparse=True; gradients lie in one dense vector: sparse=False", made_by)
        for key in _unseen(part, {id(p) for p in module.parameters()}):
            hidden = f"PyTorch does not know of the layers in {name}{'.' if name else ''}{key}, as it does not look"
            use = "they are neither trained nor sent nor saved; use nn.ModuleList or nn.ModuleDict"
            warnings.warn(f"{said}: {hidden} into lists and dictionaries: {use}", stacklevel=2)


def tell_plain_tensors(said: str, module: nn.Module) -> None:
    """Warn of tensors that PyTorch does not know of, as they are no parameters and no buffers."""
    known = {id(x) for x in (*module.parameters(), *module.buffers())}
    loose = [f"{name}.{key}" if name else key for name, part in module.named_modules() for key in _loose(part, known)]
    if loose:
        use = "stay on the device where they were made: use register_buffer, with persistent=False for a constant"
        which = f"{said}: {brief(', '.join(loose))}: plain tensors"
        warnings.warn(f"{which}, which are neither trained nor sent nor saved, and {use}", stacklevel=2)


def _loose(part: nn.Module, known: Collection[int]) -> list[str]:
    """Attributes that are, or hold in a list, tuple or dictionary, tensors that are neither parameters nor buffers.
    known: those that are, by id. Hooks make some in each pass (weight_norm, pruning): layers with such are left out."""
    found = []
    for key in sorted(vars(part).keys() - vars(nn.Module()).keys()) if not part._forward_pre_hooks else ():
        value = vars(part)[key]
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and id(x) not in known for x in inside):
            found.append(key)
    return found


def _unseen(part: nn.Module, known: Collection[int]) -> list[str]:
    """Attributes that hold what could be trained in a plain list, tuple or dictionary. known: parameters, by id."""
    found = []
    for key in sorted(vars(part).keys() - vars(nn.Module()).keys()):
        value = vars(part)[key]
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        every = (p for each in inside for p in (each.parameters() if isinstance(each, nn.Module) else [each]))
        if any(isinstance(p, nn.Parameter) and p.requires_grad and id(p) not in known for p in every):
            found.append(key)
    return found


def check_needs(settings: Settings, method: Method, task: Any, net: Net, module: nn.Module) -> None:
    name, beyond = settings.method.name, recipe(settings).beyond_sgd()
    model, momentum, server = settings.model.name, settings.train.momentum, settings.server
    cannot = f"model {model} does not end in a linear layer that can be split off"
    rows = f"model {model} gives more than one row of features, or of outputs, a sample"
    lacking = {
        FEATURES: net.feature_dim is None and (cannot if net.head is None else rows),
        LAST_LAYER: net.head is None and cannot,
        CLASSES: not getattr(task, "classification", False)
        and f"task {settings.task.name} does not say that it is one (classification = True in the class)",
        SGD_STEPS: beyond,
        PLAIN_SGD: beyond or (momentum and f"train.momentum is {momentum}"),
        PLAIN_SERVER: (server.optim, server.lr, server.rule.name) != ("sgd", 1.0, "auto")
        and f"server is {{optim: {server.optim}, lr: {server.lr:g}, rule: {server.rule.name}}}",
        LABEL_COUNTS: not settings.data.share_label_counts and "data.share_label_counts is false",
        ONE_CLASS: settings.task.options.get("label_smoothing")
        and f"task.label_smoothing is {settings.task.options['label_smoothing']:g}",
        VALIDATION: not settings.data.validation and "data.validation is 0",
    }
    for needed in sorted(method.needs):
        if needed not in lacking:
            known = (
                "PLAIN_SGD, SGD_STEPS, PLAIN_SERVER, FEATURES, LAST_LAYER, CLASSES, ONE_CLASS, LABEL_COUNTS, "
                "VALIDATION of fedmpi.method"
            )
            raise UserError(f"method {name}: needs holds {needed!r}; it takes {known}")
        if lacking[needed]:
            raise UserError(f"method {name} needs {needed}, but {_with_remedy(settings, str(lacking[needed]))}")
    tell_plain_tensors(f"model {model}", module)
    batch_norm = any(isinstance(m, NORM_LAYERS[0]) for m in module.modules())
    if batch_norm and settings.train.batch_size == 1:
        raise UserError("train.batch_size: 1 gives batch normalisation nothing to normalise over; use at least 2")
    given = [key for key in ("epochs", "steps") if getattr(settings.train, key) not in (None, 1)]
    if method.own_length and given:
        warnings.warn(f"train.{given[0]} plays no part in method {name}, whose options say how long", stacklevel=2)
    kind = next(module.parameters()).dtype
    if settings.train.keep_optim and kind.itemsize < 4:
        raise UserError(f"train.keep_optim: model {model} is of {kind}, which cannot count an optimiser's steps")
    if settings.train.drop_last and settings.train.batch_size == "full":
        warnings.warn("train.drop_last has no effect with batch_size: full", stacklevel=2)


def _with_remedy(settings: Settings, found: str) -> str:
    """`train.momentum is 0.9`, where that was written, and what to set."""
    key = found.partition(" ")[0]
    if key not in REMEDIES:
        return found
    at = settings.origin(key)
    return f"{found}{f' ({at})' if at and '=' not in at else ''}; set {key}={REMEDIES[key]}"


def check_cohort(settings: Settings, clients: int) -> None:
    """Raise UserError where there are fewer clients than a round is to have (cohort.size)."""
    size, at = settings.cohort.size, settings.origin("cohort.size")
    if size is not None and size > clients:
        raise UserError(
            f"{f'{at}: ' if at else ''}cohort.size: {size} clients a round, but there are {clients}; set it to at most "
            f"{clients}, or have more clients"
        )


def check_sense(settings: Settings, method: Method, data: Federated, task: Any, net: Net) -> None:
    """What would run, and mean nothing."""
    check_cohort(settings, data.clients)
    choice(settings, task, data)
    train = settings.train
    if getattr(task, "classification", False) and net.output_shape != (data.classes,):
        has = net.outputs if len(net.output_shape) == 1 else net.output_shape
        texts = len(net.output_shape) == 2 and data.classes in net.output_shape
        raise UserError(
            f"model {settings.model.name} has {has} outputs, but the data have {data.classes} classes; "
            f"a classification needs one output a class{' (of texts: task.name=next_symbol)' if texts else ''}"
        )
    check_targets(settings.task.name, data, task, net)
    square = len(net.output_shape) == 2 and len({*net.output_shape}) == 1
    if square and isinstance(task, NextSymbol) and ":" in settings.model.name:
        shown = f"({net.output_shape[0]}, {net.output_shape[0]})"
        warnings.warn(
            f"model {settings.model.name} gives {shown} for a sample, with as many symbols as targets; that is taken "
            "as (targets, symbols)",
            stacklevel=3,
        )
    _tell_of_poor_sites(data, task)
    if isinstance(task, Survival):
        _check_risk_sets(settings, data)
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
    if settings.server.rule.name != "auto" and overrides(method, "aggregate"):
        warnings.warn(
            f"server.rule: {settings.server.rule.name} takes the place of the direction that method "
            f"{settings.method.name} makes of the uploads, without which it is another method",
            stacklevel=3,
        )
    if method.batches_a_step == 1:
        _check_single_samples(settings, data, net)
    if data.global_test is not None and not len(data.global_test):
        split = settings.data.options.get("split_column")
        remedy = (
            f"; no row is {split}: test: mark some (validation rows are no test rows), or leave data.split_column out, "
            "so that data.test_fraction of the rows are the test part"
        )
        said = "data: the test set is empty; the global model will have no loss and no metrics"
        warnings.warn(f"{said}{remedy if split else ''}", stacklevel=3)


def check_targets(name: str, data: Federated, task: Any, net: Net) -> None:
    """Whether targets are what the task is for; of clients whose rows this rank sees, each tensor once."""
    whole = {} if data.global_test is None else {"test data": data.global_test.y}
    parts = whole | {
        f"{part} of {data.site_names[k] if data.site_names else f'client {k}'}" if data.parts is None else part: y
        for part, shards in (("training data", data.train), ("test data", data.test))
        for k, _, y in samples_of(shards)
    }
    for part, y in parts.items():
        contract.check_targets(name, task, y, net.output_shape, part)


def _tell_of_poor_sites(data: Federated, task: Any) -> None:
    """Sites with one sample, or with samples of one class, are often a mistake in a file, and sometimes the matter."""
    single = [data.site_names[k] for k in np.flatnonzero(data.train_sizes == 1)] if data.site_names else []
    alone = []
    if data.site_names and getattr(task, "classification", False):
        classes = (data.label_counts > 0).sum(1)
        alone = [f"{data.site_names[k]} ({data.label_counts[k].argmax()})" for k in np.flatnonzero(classes == 1)]
    if len(data.site_names) == 1 and {*data.test_by_site} <= {*data.site_names}:  # else partition.only names it
        warnings.warn(f"data: all samples are of one site, {data.site_names[0]}", stacklevel=4)
    for names, what in ((single, "one training sample"), (alone, "training samples of one class alone")):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            warnings.warn(f"data: {what} at {', '.join(names[:SHOWN])}{more}", stacklevel=4)


def _check_risk_sets(settings: Settings, data: Federated) -> None:
    """A batch without an event, or of one row, has the loss 0, and what trains on no other one learns nothing."""
    if settings.train.batch_size == 1:
        raise UserError(
            "train.batch_size: 1: task survival compares the rows of a batch with each other, and a row alone has the "
            "loss 0, so that nothing is learned; use 32, say, or full"
        )
    names = [
        data.site_names[k] if data.site_names else f"client {k}"
        for k, shard in (data.train.items() if data.clients <= MANY else ())
        if len(shard) and not bool((shard.y[shard.index, 0] == 1).any())
    ]
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        text = (
            f"data: no event in the training rows of {', '.join(names[:SHOWN])}{more}: the loss is 0 there and nothing "
            "is learned, but updates of 0 count in the mean, and as much as others in rules such as median and krum"
        )
        warnings.warn(RankWarning(text), stacklevel=4)


def warn_of_nothing_shared(settings: Settings, messages: Messages) -> None:
    """Warn that no weight of the model travels, as with a method that keeps the head of a model which is only that."""
    warnings.warn(
        f"method {settings.method.name} shares no weights of model {settings.model.name}: all of it "
        f"({', '.join(sorted(messages.every))}) stays with the clients, each of which trains alone, as with method "
        "local; choose a model with other parts, or another method",
        stacklevel=3,
    )


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


def choice(settings: Settings, task: Any, data: Federated) -> Choice | None:
    """By what the best model is chosen (evaluate.best)."""
    best, names = settings.evaluate.best, ("loss", *task.names)
    if best.metric is None:
        return None
    if best.metric not in names:
        at = settings.origin("evaluate.best.metric")
        raise UserError(
            f"{f'{at}: ' if at else ''}evaluate.best.metric: task {settings.task.name} has no {best.metric!r}; "
            f"{nearest(best.metric, names)}"
        )
    if not data.validation_sizes.any():
        raise UserError(
            f"evaluate.best.metric: {best.metric} is measured on validation rows, and no client has two samples (or "
            "groups of them), to hold one out"
        )
    lowest = best.goal == "lowest" or (
        best.goal == "auto" and lower_is_better(best.metric, getattr(task, "falling", ()))
    )
    return Choice(f"validation_{best.metric}", lowest, best.patience, best.min_delta)


def check_buffers(settings: Settings, module: nn.Module) -> None:
    """Float buffers travel in the type of the parameters."""
    kind = next(p for p in module.parameters() if p.requires_grad).dtype
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.isfinite().all() and not buffer.to(kind).isfinite().all():
            raise UserError(
                f"model {settings.model.name}: buffer {name} ({buffer.dtype}) holds numbers beyond {kind}, the "
                "parameters' type, in which buffers travel"
            )
    if any(isinstance(part, NORM_LAYERS[0]) and part.running_mean is None for part in module.modules()):
        warnings.warn(
            f"model {settings.model.name}: batch normalisation without running statistics (bn_nostats) takes those of "
            "each batch in evaluation, too: figures depend on evaluate.batch_size and on the order of test rows",
            stacklevel=3,
        )


def check_rule(settings: Settings, data: Federated, messages: Messages) -> None:
    """Whether server.rule can do what it is chosen for."""
    rule, train, size = settings.server.rule, settings.train, settings.train.batch_size
    idle = np.flatnonzero(data.train_sizes < size).tolist() if train.drop_last and size != "full" else []
    members = scheduler.cohort_size(data.clients, settings.cohort.fraction, settings.cohort.size)
    suited.check(rule.name, rule.options, members, idle, messages.upload(0).b.size)
