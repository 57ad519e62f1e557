"""Whether a robust rule can do in an experiment what it is chosen for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import floor
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import brief

ROBUST = ("krum", "geometric_median", "median", "trimmed_mean")


def check(rule: str, options: Mapping[str, Any], members: int, idle: Sequence[int], buffers: int) -> None:
    """rule: its name; members: of a cohort; idle: clients that make no step; buffers: float buffers that travel.

    Raises UserError where updates of those who make no step, zeros, would be taken for the others' middle.
    """
    if rule not in ROBUST:
        return
    if idle:
        whose = f"client{'s' if len(idle) > 1 else ''} {brief(', '.join(map(str, idle)))}"
        raise UserError(
            f"server.rule: {rule} would count the updates of {whose}, who make no step (train.drop_last), and are "
            "zero; lower train.batch_size, or set drop_last: false"
        )
    if buffers:
        warnings.warn(
            f"server.rule: {rule} is for weights alone: the model's {buffers:,} batch statistics travel, too, and "
            "their mean is taken, which one client can move; a model without them (norm: gn, say) has none",
            stacklevel=3,
        )
    if rule == "trimmed_mean":
        trim = options.get("trim", 0.1)
        if trim and not floor(trim * members + 1e-9):
            warnings.warn(
                f"server.rule: trimmed_mean with trim {trim:g} leaves out nobody of {members} clients a round: it is "
                f"their plain mean; from {1 / members:.3g} on it leaves out one at each end",
                stacklevel=3,
            )
    if rule == "krum":
        f, select = options.get("byzantine", 1), options.get("select", 1)
        if members < 2 * f + 3:
            warnings.warn(
                f"server.rule: krum with byzantine {f} has its guarantee from {2 * f + 3} clients a round on; here are "
                f"{members}",
                stacklevel=3,
            )
        if select >= members:
            warnings.warn(
                f"server.rule: krum with select {select} of {members} clients is their plain mean", stacklevel=3
            )
