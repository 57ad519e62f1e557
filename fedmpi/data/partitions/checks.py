"""What several schemes ask of the samples."""

from __future__ import annotations

import numpy as np

from fedmpi.common.errors import UserError

LEAVE_OUT = "leave `clients` out (data.partition.clients=null, where a base sets it)"


def check_enough(samples: int, parts: int, scheme: str, unit: str = "") -> None:
    if samples < parts:
        what = unit or f"clients={parts} parts"
        raise UserError(f"data.partition: {scheme} cannot cut {samples} samples into {what}; lower `clients`")


def check_least(samples: int, clients: int, min_size: int) -> None:
    if min_size * clients > samples:
        raise UserError(
            f"data.partition: min_size={min_size} cannot hold: {samples} samples for clients={clients} are "
            f"{samples / clients:.1f} each; lower `clients`, or set min_size to at most {samples // clients}"
        )


def check_classes(labels: np.ndarray, scheme: str) -> None:
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        found = f"{labels.dtype} (regression)" if labels.ndim == 1 else f"arrays {labels.shape[1:]}"
        raise UserError(
            f"data.partition: {scheme} divides by class, but the labels are {found}; take iid, quantity or site"
        )
