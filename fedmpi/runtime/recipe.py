"""The section `train` as the engine wants it."""

from __future__ import annotations

from typing import Any

from fedmpi.config.schema import Settings
from fedmpi.engine.local.recipe import Recipe


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
