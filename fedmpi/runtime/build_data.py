"""Build the data of a federation, as one rank sees them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.common import registry, seeds
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.text import count
from fedmpi.common.user_code_errors import attribute_errors, located_error
from fedmpi.config.schema import Settings
from fedmpi.data import partitions, sources
from fedmpi.data.augment.operation import Operation
from fedmpi.data.augment.pipeline import operation
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import Federated, augmented, split
from fedmpi.data.leaks import warn_of_leaks
from fedmpi.data.pictures import Pictures
from fedmpi.data.silos import COLUMNS, WIDTH, describe, label_table, open_silos, silo_federation
from fedmpi.data.sources.common import ignoring
from fedmpi.data.streaming import Stream, choosing
from fedmpi.data.validation import hold_out
from fedmpi.engine import scheduler
from fedmpi.runtime import target_scaling
from fedmpi.tasks.base import ignored_value, is_counted

# Warned of: the root mean square of targets; that of inputs, and their maximum (pixels in 0..255 have more than both).
LARGE_TARGET, LARGE_INPUT, PEAK = 100, 20, 200
GLANCE = 5000  # rows of inputs that are looked at for that
LABELS = ("label counts",)
HELD = ("validation samples",)
TARGETS = ("number, sum and sum of squares of targets",)


def training_ranks(settings: Settings, size: int) -> list[int]:
    """Return the ranks that train: all but rank 0, which trains only if it is alone or server.trains is set."""
    return list(range(0 if size == 1 or settings.server.trains else 1, size))


def open_source(settings: Settings) -> partial[Any]:
    """Return the data source with its checked options; call it with data.root."""
    chosen = registry.Selection(settings.data.source, settings.data.options, settings.data.reserved_keys)
    source = registry.make(sources.KIND, chosen, settings.origins("data"))
    if not settings.data.download:
        return source
    parameters = inspect.signature(source.func).parameters.values()
    if not any(each.name == "download" or each.kind is each.VAR_KEYWORD for each in parameters):
        where = settings.origins("data").get("download")
        reason = f"data.download: true, but data set {settings.data.source} cannot fetch its files; leave it out"
        raise UserError(f"{where}: {reason}" if where else reason)
    chosen = replace(chosen, options={**settings.data.options, "download": True})
    return registry.make(sources.KIND, chosen, settings.origins("data"))


def operations(settings: Settings) -> list[Operation]:
    """Return the operations of data.augment, with checked options."""
    parsed = []
    for i, item in enumerate(settings.data.augment):
        name, given = (item, None) if isinstance(item, str) else next(iter(item.items()))
        parsed.append(operation(name, given, f"data.augment.{i}", settings.origins(f"data.augment.{i}.{name}")))
    return parsed


def partitioned(settings: Settings) -> Federated:
    """Build the federation of one partitioned data set, of which every rank holds all."""
    source, cut, augment = open_source(settings), settings.data.partition, operations(settings)
    assert cut is not None
    registry.make(partitions.KIND, cut, settings.origins("data.partition"))  # before data are read, and with the line
    check_settings(settings)
    waiting: AbstractContextManager[None] = nullcontext()
    if settings.data.download:
        from fedmpi.data.fetching.getting import one_at_a_time  # and the catalogue, which no other run needs

        waiting = one_at_a_time(settings.data.root)
    with waiting, attribute_errors("data"):
        ignored = settings.task.options.get("ignore")
        with choosing(settings.data.stream), ignoring(ignored), seeds.seeded(settings.seed, "source"):
            dataset = require_dataset(source((settings.working_dir / settings.data.root).absolute()), source.func)
        check_dataset(settings, dataset)
    with attribute_errors("data.partition"), seeds.seeded(settings.seed, "scheme"):
        federation = split(dataset, cut.scheme, cut.clients, settings.seed, settings.data.client_test, **cut.options)
    if settings.data.standardise_target:
        federation = target_scaling.scaled(settings, federation, dataset)
    return augmented(hold_out(federation, settings.data.validation, settings.seed), augment)


def check_settings(settings: Settings) -> None:
    """Raise UserError where sections of the settings contradict each other, before data are read."""
    data, task, cut = settings.data, settings.task.name, settings.data.partition
    label, how = data.options.get("label_column", "label"), data.standardise_target
    only = cut and cut.options.get("only")
    if only and data.source in sources.registry and data.options.get("standardise") == "pooled":
        raise UserError(
            "data.partition.only leaves sites out of training, but with data.standardise: pooled all sites' training "
            "rows say how numbers are standardised; say data.standardise: site"
        )
    if only and how == "pooled":
        raise UserError(
            "data.partition.only leaves sites out of training, but with data.standardise_target: pooled all sites' "
            "training rows say how targets are standardised; say data.standardise_target: site"
        )
    if how and task != "regression":
        raise UserError(
            f"data.standardise_target: {how} goes with task.name: regression, and it is {task}; leave it out"
        )
    if task == "survival" and data.source == "table" and (isinstance(label, str) or len(label) != 2):
        raise UserError(
            f"task survival needs two label columns, and data.label_column is {label}: say the event (1: seen, 0: "
            "censored) and the time, data.label_column: [EVENT, TIME]"
        )


def check_dataset(settings: Settings, dataset: Dataset, whose: str = "") -> None:
    """Check that samples are streamed if they are to be; warn of leaks, and of numbers that training may diverge on.

    Args:
        settings: of the run.
        dataset: all rows, or those of one site.
        whose: " of SITE", for messages.
    """
    x, y = dataset.train_x, dataset.train_y
    if settings.data.stream is True and not (isinstance(x, Pictures) and isinstance(x.stored, Stream)):
        raise UserError(
            f"data.stream: true, but source {settings.data.source} gives these samples as a whole: what can stay on "
            "disk are uint8 pictures in HDF5 or in a .npz that is not compressed (numpy.savez), and picture files; "
            "leave it out"
        )
    warn_of_leaks(dataset, settings.task.name == "survival", whose)
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and len(x):
        some = x[:: max(len(x) // GLANCE, 1)].double()
        size = some.square().mean([0, *range(2, some.ndim)]).sqrt().max().item()
        if size > LARGE_INPUT and some.abs().max().item() >= PEAK:
            span = f"{some.min().item():g}..{some.max().item():g}"
            kind = "raw pixels" if x.ndim > 2 else "columns that are not standardised"
            how = "pixel_range, or mean and std" if x.ndim > 2 else "standardise"
            warnings.warn(
                f"data{whose}: inputs are in {span}, as {kind} are; training expects numbers about 1, and may diverge: "
                f"scale them (options of data sources: {how}; 8-bit pixels that are stored as uint8 become 0..1)",
                stacklevel=2,
            )
    scaled = settings.task.name != "regression" or settings.data.standardise_target
    if not scaled and y.is_floating_point() and len(y):
        counted = is_counted(y, ignored_value(settings.task.options.get("ignore")))
        size = y.double()[counted].square().mean().sqrt().item()
        if size > LARGE_TARGET:
            warnings.warn(
                f"data{whose}: the targets have a root mean square of {size:.3g}, and a model's first outputs are near "
                "0: training may diverge at any learning rate; say data.standardise_target: pooled (metrics and "
                "predictions stay in the unit of the targets)",
                stacklevel=2,
            )


def require_dataset(dataset: Any, source: Any) -> Dataset:
    """Return what a source returned. Raises UserError if it is no data set."""
    if not isinstance(dataset, Dataset):
        name = getattr(source, "__name__", type(source).__name__)
        text = f"source {name} returned {type(dataset).__name__}; it must return fedmpi.Dataset(...)"
        raise located_error(f"data: {text}", source)
    name = f"{getattr(source, '__module__', '')}:{getattr(source, '__name__', '')}"
    # What a user's source does to the rows that one of ours has prepared is nowhere written down.
    return dataset if name in sources.registry.values() else replace(dataset, preparation=None)


def site_ranks(settings: Settings, size: int) -> dict[int, int]:
    """Return number of a site -> rank that opens its files.

    Raises:
        UserError: a rank would open the files of two sites, and data.share_ranks does not allow it. One process alone
            opens all, as it must.
    """
    names, ranks = settings.data.silos, training_ranks(settings, size)
    assert names is not None
    owner = scheduler.pinned(range(len(names)), ranks)
    if len(names) > len(ranks) and size > 1 and not settings.data.share_ranks:
        both = ", ".join(names[k] for k in owner if owner[k] == ranks[0])
        needed = f"{len(names)} ranks" if settings.server.trains else f"{len(names) + 1} ranks (rank 0 is the server)"
        raise UserError(
            f"data.silos: {len(names)} sites, but {count(len(ranks), 'rank')} to train: rank {ranks[0]} would open the "
            f"files of {both}. Start {needed}, or let sites share a rank: data.share_ranks=true"
        )
    return owner


def siloed(settings: Settings, comm: Communicator) -> Federated:
    """Build the federation of silos: this rank opens only the files of its own clients.

    Ranks exchange sizes and, where data.share_label_counts is true, label counts.
    """
    source, names, augment = open_source(settings), settings.data.silos, operations(settings)
    assert names is not None
    check_settings(settings)
    owner = site_ranks(settings, comm.size)
    mine = [k for k in owner if owner[k] == comm.rank]
    with attribute_errors("data"), _warnings_of_any_rank():
        with choosing(settings.data.stream), ignoring(settings.task.options.get("ignore")):
            root = (settings.working_dir / settings.data.root).absolute()
            opened = open_silos(source.func, root, names, mine, settings.seed, **source.keywords)
        datasets = {k: require_dataset(dataset, source.func) for k, dataset in opened.items()}
        for k, dataset in datasets.items():
            check_dataset(settings, dataset, f" of {names[k]}")
    table = np.zeros((len(names), WIDTH), dtype=np.int64)
    table[mine] = describe(datasets)
    table = from_owners(comm, table, owner, COLUMNS)
    own, shared = label_table(datasets, table, names), settings.data.share_label_counts
    unsplit = silo_federation(datasets, table, from_owners(comm, own, owner, LABELS) if shared else own, names)

    def exchange(rows: np.ndarray) -> np.ndarray:
        return from_owners(comm, rows.view(np.int64), owner, TARGETS).view(np.float64)

    if settings.data.standardise_target:
        unsplit = target_scaling.scaled_silos(settings, unsplit, datasets, exchange)
    federation = augmented(hold_out(unsplit, settings.data.validation, settings.seed), augment)
    federation = replace(federation, counts_shared=shared)
    if not settings.data.validation:
        return federation
    # Where groups of rows stay together a site alone knows how many it has put aside.
    sizes = from_owners(comm, federation.validation_sizes[:, None], owner, HELD)[:, 0]
    federation = replace(federation, validation_sizes=sizes, train_sizes=unsplit.train_sizes - sizes)
    return (
        replace(federation, label_counts=from_owners(comm, federation.label_counts, owner, LABELS))
        if shared
        else federation
    )


def site_federation(settings: Settings, client: int) -> Federated:
    """Build the federation of silos from the files of one site: the others are assumed to have its sizes."""
    source, names = open_source(settings), settings.data.silos
    assert names is not None
    with attribute_errors("data"), choosing(settings.data.stream), ignoring(settings.task.options.get("ignore")):
        root = (settings.working_dir / settings.data.root).absolute()
        opened = open_silos(source.func, root, names, [client], settings.seed, **source.keywords)
    datasets = {k: require_dataset(dataset, source.func) for k, dataset in opened.items()}
    table = describe(datasets).repeat(len(names), axis=0)
    table[:, 0] = np.arange(len(names))
    unsplit = silo_federation(datasets, table, label_table(datasets, table, names), names)
    # With `pooled` the sums of the other sites are not at hand: its own stand in for them.
    if settings.data.standardise_target:
        unsplit = target_scaling.scaled_silos(settings, unsplit, datasets, lambda rows: rows)
    federation = augmented(hold_out(unsplit, settings.data.validation, settings.seed), operations(settings))
    return replace(federation, counts_shared=False)


@contextmanager
def _warnings_of_any_rank() -> Iterator[None]:
    """Have warnings on a site's data shown by any rank, as only one rank opens them, and not by rank 0 alone."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for each in caught:
        warnings.warn(RankWarning(str(each.message)), stacklevel=2)


def from_owners(comm: Communicator, table: np.ndarray, owner: Mapping[int, int], what: tuple[str, ...]) -> np.ndarray:
    """Collect row k of a table from rank owner[k]. Returns (N, columns) int64, the same on every rank."""
    rows = torch.from_numpy(table).to(comm.device)
    clients_of = {rank: [k for k in owner if owner[k] == rank] for rank in set(owner.values())}
    if comm.rank == 0:
        received = {rank: rows[clients].flatten() for rank, clients in clients_of.items() if rank != 0}
        comm.exchange([], list(received.items()))
        for rank, part in received.items():
            rows[clients_of[rank]] = part.view(-1, rows.shape[1])
    elif comm.rank in clients_of:
        comm.about = None, what
        comm.exchange([(0, rows[clients_of[comm.rank]].flatten())], [])
    flat = rows.flatten()
    comm.broadcast(flat)
    return flat.cpu().view(table.shape).numpy()
