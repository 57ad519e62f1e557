"""partition.json and partition.npz of a run directory: which client holds which samples, and how many of each class.

partition.json has `sizes` and `label_counts` by client. Of more than MANY clients it has a `summary` in their place,
and partition.npz the rest: `offsets`, whose differences are the sizes, and `label_counts`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.data.partitions.parts import Partition

MANY = 1_000


def contents(
    sizes: np.ndarray, label_counts: np.ndarray | None, parts: Partition | None, validation: Partition | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the two files hold beside scheme and seed; no arrays in silo mode, which has no common numbering of samples.

    Args:
        sizes: (N,) training samples by client.
        label_counts: (N, classes); None where sites keep theirs to themselves.
        parts: training samples by client; None in silo mode.
        validation: the samples that data.validation has held out, if any.
    """
    arrays: dict[str, np.ndarray] = {}
    if parts is not None:
        arrays = {"indices": parts.order, "offsets": parts.offsets}
    if validation is not None:
        arrays |= {"validation_indices": validation.order, "validation_offsets": validation.offsets}
    facts: dict[str, Any] = {"clients": len(sizes)}
    if parts is None or len(sizes) <= MANY:
        return {**facts, "sizes": sizes, "label_counts": label_counts}, arrays
    summary = {"samples": int(sizes.sum()), "sizes": _spread(sizes)}
    if label_counts is not None and label_counts.any():
        summary |= {"label_counts": label_counts.sum(0), "classes_a_client": _spread((label_counts > 0).sum(1))}
        arrays["label_counts"] = label_counts.astype(np.min_scalar_type(label_counts.max()))
    return {**facts, "summary": summary}, arrays


def by_client(run_dir: Path, facts: dict[str, Any]) -> tuple[Any, Any]:
    """Sizes and label counts of a run's clients, None where there are none; arrays where there are many clients.

    Args:
        facts: what partition.json holds.

    Raises:
        ValueError: partition.npz is needed for it, and cannot be read.
    """
    if "summary" not in facts:
        return facts.get("sizes"), facts.get("label_counts")
    try:
        with np.load(run_dir / "partition.npz", allow_pickle=False) as found:
            return np.diff(found["offsets"]), found.get("label_counts")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"partition.npz cannot be read ({error})") from error


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "least": int(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "most": int(values.max()),
    }
