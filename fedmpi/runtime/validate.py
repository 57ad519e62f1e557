"""Check everything about a config that can be checked without training (`fedmpi validate`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm import Job, detect
from fedmpi.common.host_memory import format_bytes
from fedmpi.common.inputs import Shape, describe_axes
from fedmpi.common.text import pluralize, shorten
from fedmpi.config import Settings
from fedmpi.data.batches import Shard
from fedmpi.data.dataset import is_labels
from fedmpi.data.federated import FederatedData
from fedmpi.runtime import build, build_data, memory
from fedmpi.runtime.device import configure_numerics
from fedmpi.runtime.record import console_text
from fedmpi.runtime.record.loggers import make_loggers
from fedmpi.tasks.base import Task
from fedmpi.tasks.survival import Survival

MAX_SITES_SHOWN = 20  # largest number of sites that are listed, one line each


def validate_settings(settings: Settings, job: Job | None = None) -> list[tuple[str, str]]:
    """Check everything about a config that can be checked without training. This reads the data and builds the model.

    Args:
        job: The job for which the memory of this host is checked; None: a job with a single process.

    Returns:
        Rows (label, text) that describe the experiment, for the console.

    Raises:
        UserError: The settings are invalid, do not fit the data, or need more memory than is free.
    """
    from fedmpi.comm.base import SingleProcess

    configure_numerics(settings)
    comm = SingleProcess(torch.device("cpu"))
    data = (
        build_data.build_silo_data(settings, comm)
        if settings.data.silos
        else build_data.build_partitioned_data(settings)
    )
    experiment = build.make_experiment(settings, data, comm.device)
    build.make_federation(experiment, comm, lambda: False)
    make_loggers(settings)
    needs, entry = memory.check_host_memory(experiment, job or detect({})), experiment.itemsize

    data, messages = experiment.data, experiment.messages
    sizes, tests, held_out = data.train_sizes, data.test_sizes, data.validation_sizes
    training = f"{sizes.min()} to {sizes.max()} training samples (median {np.median(sizes):.0f})"
    validation = f", {held_out.min()} to {held_out.max()} more for validation" if len(held_out) else ""
    shared = "no global test set" if data.global_test is None else f"{pluralize(len(data.global_test), 'sample')}"
    states = [format_bytes(part.size * entry) for part in (messages.client_state, messages.server_state)]
    root, trainer = format_bytes(needs[memory.RANK_0]), format_bytes(needs[memory.TRAINING_RANK])
    per_round = console_text.describe_training(settings, data.clients, messages.method.sets_training_length)
    return [
        (settings.name, console_text.describe_experiment(experiment)),
        ("clients", f"{data.clients}, {training}{validation}"),
        ("rounds", f"{settings.rounds}, with {per_round}"),
        ("test", f"{shared}; {tests.min()} to {tests.max()} samples per client"),
        *_describe_sites(data, experiment.task),
        ("sample", _describe_sample(data.input_shape)),
        ("message", console_text.describe_message_sizes(messages, settings.rounds, entry)),
        ("state", f"{states[0]} per client, {states[1]} on the server"),
        *(("initial", text) for text in experiment.initial_lines),
        (
            "memory",
            f"{root} on rank 0 and {trainer} on a training rank for models and messages; `fedmpi plan` shows the total",
        ),
        ("result", "ok"),
    ]


def _describe_sample(shape: Shape) -> str:
    """Format the shape of one sample; for images and volumes, name each axis."""
    if isinstance(shape, dict):
        return ", ".join(f"{name} {part}" for name, part in shape.items())
    axes = {3: "CHW", 4: "CDHW"}.get(len(shape))
    return f"{shape}: {describe_axes(shape, axes)} ({', '.join(axes)})" if axes else f"{shape}"


def _describe_sites(data: FederatedData, task: Task) -> list[tuple[str, str]]:
    """Return a row (label, text) for each site: the number of samples in each part of its data.

    The numbers of samples per class, or of events in survival data, are also given.
    """
    rows = []
    for client, name in list(enumerate(data.site_names))[:MAX_SITES_SHOWN]:
        preparation = data.silo_preparations.get(client, data.preparation)
        names = preparation.class_names if preparation else ()
        parts = [
            f"{pluralize(len(shards[client]), f'{part} sample')}{_describe_class_counts(shards[client], names, task)}"
            for part, shards in (("training", data.train), ("validation", data.validation), ("test", data.test))
            if client in shards
        ]
        rows.append((f"site {name}", ", ".join(parts) or f"{data.train_sizes[client]} training samples"))
    more = len(data.site_names) - len(rows)
    return [*rows, ("sites", f"{more} more; fedmpi partition shows all")] if more > 0 else rows


def _describe_class_counts(shard: Shard, names: Sequence[str], task: Task) -> str:
    """Return the number of events (survival) or of samples of each class, in parentheses; "" for other targets."""
    y: Tensor = shard.y[shard.index]
    if isinstance(task, Survival):
        return f" ({pluralize(int((y[:, 0] == 1).sum()), 'event')})"
    if not is_labels(y, task.classes) or not task.classification:
        return ""
    values, amounts = torch.unique(y[y >= 0], return_counts=True)
    each = (f"{names[k] if k < len(names) else k}: {n}" for k, n in zip(values.tolist(), amounts.tolist(), strict=True))
    return f" ({shorten(', '.join(each), 100)})" if len(values) else ""
