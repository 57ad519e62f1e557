"""Build the data of a federation, as one rank sees them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fedmpi.common.target_scale import TargetScale, target_sums
from fedmpi.common.text import count
from fedmpi.common.user_code_errors import attribute_errors, located_error
from fedmpi.config.schema import Settings
from fedmpi.data import partitions, sources
from fedmpi.data.augment.operation import Operation
from fedmpi.data.augment.pipeline import operation
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import Federated, augmented, hold_out, split
from fedmpi.data.leaks import warn_of_leaks
from fedmpi.data.pictures import Pictures
from fedmpi.data.silos import COLUMNS, WIDTH, describe, label_table, open_silos, silo_federation
from fedmpi.data.sources.common import ignoring
from fedmpi.data.streaming import Stream, choosing
from fedmpi.engine import scheduler
from fedmpi.tasks.base import is_counted

LABELS, HELD, TARGETS = ("label counts",), ("validation samples",), ("number, sum and sum of squares of targets",)
Targets = tuple[Tensor, Tensor | None]  # of some rows, and the number of the site of each row


def training_ranks(settings: Settings, size: int) -> list[int]:
    """Return the ranks that train: all but rank 0, which trains only if it is alone or server.trains is set."""
    return list(range(0 if size == 1 or settings.server.trains else 1, size))


def open_source(settings: Settings) -> partial[Any]:
    """Return the data source with its checked options; call it with data.root."""
    chosen = registry.Selection(settings.data.source, settings.data.options, settings.data.reserved_keys)
    source = registry.make(sources.KIND, chosen, settings.origins("data"))
    if not settings.data.download:
        return source
    if "download" not in inspect.signature(source.func).parameters:
        at = settings.origin("data.download")
        reason = f"data.download: true, but data set {settings.data.source} cannot fetch its files; leave it out"
        raise UserError(f"{at}: {reason}" if at else reason)
    return partial(source, download=True)


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
        train, test = (dataset.train_y, dataset.site), (dataset.test_y, dataset.test_site)
        if settings.data.standardise_target == "site" and any(site is None and len(y) for y, site in (train, test)):
            raise UserError(
                "data.standardise_target: site needs a data set that knows the sites of its rows (data.site_column), "
                "or data.silos; say data.standardise_target: pooled"
            )
        federation = standardise_targets(settings, federation, [train], [test], dataset.site_names, np.stack)
    return augmented(hold_out(federation, settings.data.validation, settings.seed), augment)


def standardise_targets(
    settings: Settings,
    data: Federated,
    train: Sequence[Targets],
    test: Sequence[Targets],
    names: Sequence[str],
    exchange: Callable[[list[np.ndarray]], np.ndarray],
) -> Federated:
    """Return a federation with its targets standardised by training rows, as data.standardise_target says.

    Args:
        train: the targets of each data set that this rank has opened.
        test: those for tests.
        names: of the sites; where there are none, sites are named by their numbers.
        exchange: given a row of `target_sums` for each of `train`, returns the rows of all ranks. It is called for
            `pooled`; else what is known of a site stays with its rank.
    """
    scales, all_targets = dict[str, TargetScale](), [*train, *test]
    if kind := next((y.dtype for y, _ in all_targets if not y.is_floating_point()), None):
        raise UserError(
            f"data.standardise_target: targets are {kind}, and real numbers are needed (of a table: "
            "data.target: number)"
        )

    def sums(y: Tensor) -> np.ndarray:
        return target_sums(y, is_counted(y, settings.task.options.get("ignore")))

    if settings.data.standardise_target == "pooled":
        scales[""] = TargetScale.of_sums(exchange([sums(y) for y, _ in train]))
        new = {id(y): scales[""].beside(y) for y, _ in all_targets}
    else:
        new = {id(y): torch.stack([y, y, y], dim=1) for y, _ in all_targets}
        owned = [(y, site) for y, site in all_targets if site is not None]
        for k in sorted({k for _, site in owned for k in site.unique().tolist()}):
            rows = torch.cat([y[site == k] for y, site in train])
            scale = scales[names[k] if names else str(k)] = TargetScale.of_sums([sums(rows)])
            for y, site in owned:
                new[id(y)][site == k] = scale.beside(y[site == k])
    data = data.with_samples(lambda x: x, lambda y: new[id(y)])
    return replace(data, target_scales=scales, target_shape=(3, *data.target_shape))


def check_settings(settings: Settings) -> None:
    """Raise UserError where sections of the settings contradict each other, before data are read."""
    data, task, cut = settings.data, settings.task.name, settings.data.partition
    if data.standardise_target and task != "regression":
        raise UserError(
            f"data.standardise_target: {data.standardise_target} goes with task.name: regression, and it is {task}; "
            "leave it out"
        )
    inputs_by = data.options.get("standardise") if data.source in sources.registry else None
    for key, how in (("standardise", inputs_by), ("standardise_target", data.standardise_target)):
        if how == "pooled" and cut is not None and cut.options.get("only"):
            raise UserError(
                f"data.partition.only leaves sites out of training, but with data.{key}: pooled all sites' training "
                f"rows say how numbers are standardised; say data.{key}: site"
            )


def check_dataset(settings: Settings, dataset: Dataset, whose: str = "") -> None:
    """Check that samples are streamed if they are to be, and warn of leaks. whose: " of SITE", for messages."""
    x = dataset.train_x
    if settings.data.stream is True and not (isinstance(x, Pictures) and isinstance(x.stored, Stream)):
        raise UserError(
            f"data.stream: true, but source {settings.data.source} gives these samples as a whole: what can stay on "
            "disk are uint8 pictures in HDF5, and picture files; leave it out"
        )
    warn_of_leaks(dataset, whose)


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
    check_settings(settings)
    names, shared, owner = settings.data.silos or (), settings.data.share_label_counts, site_ranks(settings, comm.size)
    mine = [k for k in owner if owner[k] == comm.rank]
    with _warnings_of_any_rank():
        datasets = _open_sites(settings, mine)
        for k, dataset in datasets.items():
            check_dataset(settings, dataset, f" of {names[k]}")
    table = np.zeros((len(names), WIDTH), dtype=np.int64)
    table[mine] = describe(datasets)
    table = from_owners(comm, table, owner, COLUMNS)
    own = label_table(datasets, table, names)
    unsplit = silo_federation(datasets, table, from_owners(comm, own, owner, LABELS) if shared else own, names)

    def exchange(rows: list[np.ndarray]) -> np.ndarray:
        sums = np.zeros((len(names), 3 * int(np.prod(unsplit.target_shape, dtype=np.int64))))
        for k, row in zip(datasets, rows, strict=True):
            sums[k] = row
        return from_owners(comm, sums.view(np.int64), owner, TARGETS).view(np.float64)

    federation = replace(_prepare_sites(settings, unsplit, datasets, exchange), counts_shared=shared)
    if not settings.data.validation:
        return federation
    # Where groups of rows stay together a site alone knows how many it has put aside.
    sizes = from_owners(comm, federation.validation_sizes[:, None], owner, HELD)[:, 0]
    counts = federation.label_counts
    counts = from_owners(comm, counts, owner, LABELS) if shared else counts
    train_sizes = unsplit.train_sizes - sizes
    return replace(federation, validation_sizes=sizes, train_sizes=train_sizes, label_counts=counts)


def site_federation(settings: Settings, client: int) -> Federated:
    """Build the federation of silos from the files of one site: the others are assumed to have its sizes, and with
    data.standardise_target: pooled its targets."""
    names, datasets = settings.data.silos or (), _open_sites(settings, [client])
    table = describe(datasets).repeat(len(names), axis=0)
    table[:, 0] = np.arange(len(names))
    unsplit = silo_federation(datasets, table, label_table(datasets, table, names), names)
    return replace(_prepare_sites(settings, unsplit, datasets, np.stack), counts_shared=False)


def _open_sites(settings: Settings, clients: Sequence[int]) -> dict[int, Dataset]:
    """Open the files of some sites."""
    source, names = open_source(settings), settings.data.silos or ()
    root = (settings.working_dir / settings.data.root).absolute()
    with attribute_errors("data"), choosing(settings.data.stream), ignoring(settings.task.options.get("ignore")):
        opened = open_silos(source.func, root, names, clients, settings.seed, **source.keywords)
    return {k: require_dataset(dataset, source.func) for k, dataset in opened.items()}


def _prepare_sites(
    settings: Settings,
    unsplit: Federated,
    datasets: Mapping[int, Dataset],
    exchange: Callable[[list[np.ndarray]], np.ndarray],
) -> Federated:
    """Standardise the targets of sites, hold validation rows out, and augment, as the settings say."""
    if settings.data.standardise_target:
        train = [(each.train_y, torch.full((len(each.train_y),), k)) for k, each in datasets.items()]
        test = [(each.test_y, torch.full((len(each.test_y),), k)) for k, each in datasets.items()]
        unsplit = standardise_targets(settings, unsplit, train, test, unsplit.site_names, exchange)
    return augmented(hold_out(unsplit, settings.data.validation, settings.seed), operations(settings))


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
