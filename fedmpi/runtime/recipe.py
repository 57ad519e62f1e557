"""The section `train` as the engine wants it, and how many clients a rank trains at once."""

from __future__ import annotations

import warnings
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data.federated import Federated
from fedmpi.engine.local.recipe import Recipe
from fedmpi.engine.packed import together
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides
from fedmpi.models.net import Net
from fedmpi.tasks.base import Task
from fedmpi.tasks.classification import Classification


def recipe(settings: Settings) -> Recipe:
    """How clients train."""
    train = settings.train
    own: dict[str, Any] = {"betas": tuple(train.betas) if train.betas else None, "eps": train.eps, "alpha": train.alpha}
    return Recipe(
        epochs=train.epochs,
        steps=train.steps,
        batch_size=None if train.batch_size == "full" else train.batch_size,
        drop_last=train.drop_last,
        optim=train.optim,
        momentum=train.momentum,
        dampening=train.dampening,
        nesterov=train.nesterov,
        weight_decay=train.weight_decay,
        clip_norm=train.clip_norm,
        clip_value=train.clip_value,
        keep=train.keep_optim,
        **{key: value for key, value in own.items() if value is not None},
    )


def clients_at_once(
    settings: Settings, method: Method, task: Any, model: FlatModel, net: Net, how: Recipe, data: Federated
) -> int:
    """How many clients a rank trains at once (compute.pack)."""
    compute, pack, named = settings.compute, settings.compute.pack, isinstance(data.input_shape, dict)
    reason = together.why_not(method, model, how, bf16=compute.precision == "bf16", compiled=compute.compile)
    reason = "a sample is several tensors" if named else reason
    if not settings.data.share_label_counts and _weighs(settings, task):
        reason = reason or "what the task weighs by are each client's own counts (data.share_label_counts: false)"
    if pack == 1 or not reason:
        full = how.momentum or how.weight_decay or any(overrides(method, hook) for hook in ("loss", "gradient"))
        most = int(data.train_sizes.max(initial=0))
        samples = 0 if full else int(how.epochs or 0) * most
        return together.many(pack, model, net, min(how.batch_size or most, most), samples)
    if pack != "auto":
        raise UserError(f"compute.pack: {pack}: clients cannot be trained together: {reason}; {together.REMEDY}")
    warnings.warn(f"compute.pack: auto: {reason}; clients are trained one by one", stacklevel=3)
    return 1


def _weighs(settings: Settings, task: Any) -> bool:
    """Whether a task's loss depends on the label counts that it is told."""
    own = getattr(type(task), "weigh", Task.weigh)
    return settings.task.options.get("weights") == "balanced" if own is Classification.weigh else own is not Task.weigh
