"""The lines about each site that `fedmpi validate` shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmpi.common.text import brief, count
from fedmpi.data.batches import Shard
from fedmpi.data.dataset import is_labels
from fedmpi.data.federated import Federated
from fedmpi.tasks.base import Task
from fedmpi.tasks.survival import Survival

SHOWN = 20  # sites that have a line each


def site_rows(data: Federated, task: Task) -> list[tuple[str, str]]:
    """Rows (label, text): how many samples each site has for training and tests, and of which classes or events.

    A data set without sites has no rows, and of many sites the first ones are shown.
    """
    rows = []
    for client, name in list(enumerate(data.site_names))[:SHOWN]:
        preparation = data.own_preparation.get(client, data.preparation)
        names = preparation.class_names if preparation else ()
        parts = [
            f"{count(len(shards[client]), f'{part} sample')}{_targets(shards[client], names, task)}"
            for part, shards in (("training", data.train), ("validation", data.validation), ("test", data.test))
            if client in shards
        ]
        rows.append((f"site {name}", ", ".join(parts) or f"{data.train_sizes[client]} training samples"))
    more = len(data.site_names) - len(rows)
    return [*rows, ("sites", f"{more} more; fedmpi partition shows all")] if more > 0 else rows


def _targets(shard: Shard, names: Sequence[str], task: Task) -> str:
    """The number of events of a survival task, or of samples of each class, in brackets; "" for other targets."""
    y: Tensor = shard.y[shard.index]
    if isinstance(task, Survival):
        return f" ({count(int((y[:, 0] == 1).sum()), 'event')})"
    if y.ndim != 1 or not is_labels(y) or not task.classification:
        return ""
    values, amounts = torch.unique(y[y >= 0], return_counts=True)
    each = (f"{names[k] if k < len(names) else k}: {n}" for k, n in zip(values.tolist(), amounts.tolist(), strict=True))
    return f" ({brief(', '.join(each), 100)})" if len(values) else ""
