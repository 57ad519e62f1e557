"""Build the federated data of a run: partition a data set, or open the files of the silos that this rank owns."""

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
from fedmpi.common.target_scale import TargetScale, sum_targets
from fedmpi.common.text import locate_key, pluralize
from fedmpi.common.user_code_errors import add_error_context, make_located_error
from fedmpi.config.schema import Settings
from fedmpi.data import partitions, sources
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import FederatedData, add_augmentation, hold_out_validation, split
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.leaks import warn_about_label_leaks
from fedmpi.data.silos import (
    TABLE_COLUMNS,
    TABLE_WIDTH,
    build_silo_federation,
    count_local_labels,
    describe_silos,
    open_silos,
)
from fedmpi.data.sources.source_utils import set_ignored_target
from fedmpi.data.streaming import Stream, use_streaming_mode
from fedmpi.data.transforms.base import Transform
from fedmpi.data.transforms.pipeline import make_transform
from fedmpi.engine import scheduler
from fedmpi.tasks.base import is_counted

# Names of the numbers that ranks exchange, for the audit.
LABEL_COUNTS, VALIDATION_SIZES = ("label counts",), ("validation samples",)
TARGET_SUMS = ("number, sum and sum of squares of targets",)
TargetsAndSites = tuple[Tensor, Tensor | None]  # targets of some rows, and the number of each row's site if it is known


def training_ranks(settings: Settings, size: int) -> list[int]:
    """Return the ranks that train clients in a job of `size` ranks.

    If server.trains_clients is true or there is only one rank, these are all ranks, otherwise all except rank 0.
    """
    return list(range(0 if size == 1 or settings.server.trains_clients else 1, size))


def make_source(settings: Settings) -> partial[Any]:
    """Check the options of the configured data source, and return a function that loads its data from a folder.

    Raises UserError if data.download is true and the source cannot download its files.
    """
    chosen = registry.Selection(settings.data.source, settings.data.options, settings.data.reserved_keys)
    source = registry.make_component(sources.KIND, chosen, settings.key_origins("data"))
    if not settings.data.download:
        return source
    if "download" not in inspect.signature(source.func).parameters:
        where = locate_key(settings.origin("data.download"), "data.download")
        raise UserError(f"{where}: data source {settings.data.source} cannot download its files; remove data.download")
    return partial(source, download=True)


def make_augmentations(settings: Settings) -> list[Transform]:
    """Make the image operations in data.augment, after checking their options."""
    parsed = []
    for i, item in enumerate(settings.data.augment):
        name, given = (item, None) if isinstance(item, str) else next(iter(item.items()))
        parsed.append(
            make_transform(name, given, f"data.augment.{i}", settings.key_origins(f"data.augment.{i}.{name}"))
        )
    return parsed


def build_partitioned_data(settings: Settings) -> FederatedData:
    """Load one data set and partition it among clients (data.partition). Every rank loads the complete data set.

    Raises:
        UserError: The settings contradict each other, or do not fit the data set.
    """
    source, cut, augment = make_source(settings), settings.data.partition, make_augmentations(settings)
    assert cut is not None
    # Checks the options before data are read, with the line of the config in error messages.
    registry.make_component(partitions.KIND, cut, settings.key_origins("data.partition"))
    check_data_settings(settings)
    waiting: AbstractContextManager[None] = nullcontext()
    if settings.data.download:
        from fedmpi.data.download.fetch import download_lock  # imports the catalogue, which no other run needs

        waiting = download_lock(settings.data.root)
    with waiting, add_error_context("data"):
        ignored = settings.task.options.get("ignore")
        with (
            use_streaming_mode(settings.data.stream),
            set_ignored_target(ignored),
            seeds.temporary_seed(settings.seed, "source"),
        ):
            dataset = require_dataset(source((settings.working_dir / settings.data.root).absolute()), source.func)
        check_streaming_and_leakage(settings, dataset)
    with add_error_context("data.partition"), seeds.temporary_seed(settings.seed, "scheme"):
        federation = split(dataset, cut.scheme, cut.clients, settings.seed, settings.data.client_test, **cut.options)
    if settings.data.standardise_target:
        train, test = (dataset.train_y, dataset.site), (dataset.test_y, dataset.test_site)
        if settings.data.standardise_target == "site" and any(site is None and len(y) for y, site in (train, test)):
            raise UserError(
                "data.standardise_target: site needs the site of each row, which this data set does not provide; set "
                "data.site_column or data.silos, or data.standardise_target: pooled"
            )
        federation = standardise_targets(settings, federation, [train], [test], dataset.site_names, np.stack)
    return add_augmentation(hold_out_validation(federation, settings.data.validation, settings.seed), augment)


def standardise_targets(
    settings: Settings,
    data: FederatedData,
    train: Sequence[TargetsAndSites],
    test: Sequence[TargetsAndSites],
    names: Sequence[str],
    exchange: Callable[[list[np.ndarray]], np.ndarray],
) -> FederatedData:
    """Return the data with targets standardised by the mean and standard deviation of the training targets.

    These statistics are computed for each site separately, or over all sites (data.standardise_target: site or pooled).

    Args:
        train: For each data set that this rank has opened, its training targets and the site of each target.
        test: The same for the test targets of these data sets.
        names: The names of the sites; if empty, sites are named by their numbers.
        exchange: Function that takes a list with the result of `sum_targets` for each item of `train`, and returns
            the results of all ranks. Called only for `pooled`; with `site`, no statistics of a site leave its rank.

    Raises:
        UserError: The targets are not floating-point numbers.
    """
    scales, all_targets = dict[str, TargetScale](), [*train, *test]
    if kind := next((y.dtype for y, _ in all_targets if not y.is_floating_point()), None):
        raise UserError(
            f"data.standardise_target: the targets are {kind}, but must be real numbers (for a table, set data.target: "
            "number)"
        )

    def sum_counted_targets(y: Tensor) -> np.ndarray:
        return sum_targets(y, is_counted(y, settings.task.options.get("ignore")))

    if settings.data.standardise_target == "pooled":
        scales[""] = TargetScale.from_sums(exchange([sum_counted_targets(y) for y, _ in train]))
        new = {id(y): scales[""].stack_with_targets(y) for y, _ in all_targets}
    else:
        new = {id(y): torch.stack([y, y, y], dim=1) for y, _ in all_targets}
        owned = [(y, site) for y, site in all_targets if site is not None]
        for k in sorted({k for _, site in owned for k in site.unique().tolist()}):
            rows = torch.cat([y[site == k] for y, site in train])
            scale = scales[names[k] if names else str(k)] = TargetScale.from_sums([sum_counted_targets(rows)])
            for y, site in owned:
                new[id(y)][site == k] = scale.stack_with_targets(y[site == k])
    data = data.with_mapped_samples(lambda x: x, lambda y: new[id(y)])
    return replace(data, target_scales=scales, target_shape=(3, *data.target_shape))


def check_data_settings(settings: Settings) -> None:
    """Raise UserError if the section `data` contradicts itself or another section. Reads no data."""
    data, task, cut = settings.data, settings.task.name, settings.data.partition
    if data.standardise_target and task != "regression":
        raise UserError(
            f"data.standardise_target: {data.standardise_target} needs task.name: regression, but task.name is {task}; "
            "remove data.standardise_target"
        )
    inputs_by = data.options.get("standardise") if data.source in sources.registry else None
    for key, how in (("standardise", inputs_by), ("standardise_target", data.standardise_target)):
        if how == "pooled" and cut is not None and cut.options.get("only"):
            raise UserError(
                f"data.partition.only excludes sites from training, but if data.{key} is pooled, the mean and standard "
                f"deviation are computed from the training rows of all sites; set data.{key}: site"
            )


def check_streaming_and_leakage(settings: Settings, dataset: Dataset, whose: str = "") -> None:
    """Check that the data set is streamed if data.stream is true, and warn about features that reveal the target.

    whose: The owner of the data, for messages: " of SITE" in silo mode, else "".
    """
    x = dataset.train_x
    if settings.data.stream is True and not (isinstance(x, LazyImages) and isinstance(x.stored, Stream)):
        raise UserError(
            f"data.stream: true is not possible, because the data source {settings.data.source} loads the whole data "
            "set into memory; only image files, and uint8 images in HDF5 files, can be streamed; remove data.stream"
        )
    warn_about_label_leaks(dataset, whose)


def require_dataset(dataset: Any, source: Any) -> Dataset:
    """Return the value that a data source returned, or raise UserError if it is not a `Dataset`."""
    if not isinstance(dataset, Dataset):
        name = getattr(source, "__name__", type(source).__name__)
        text = f"source {name} returned {type(dataset).__name__}; it must return fedmpi.Dataset(...)"
        raise make_located_error(f"data: {text}", source)
    name = f"{getattr(source, '__module__', '')}:{getattr(source, '__name__', '')}"
    # A user's source may change rows that a source of fedmpi has prepared; their preparation is then unknown.
    return dataset if name in sources.registry.values() else replace(dataset, preparation=None)


def assign_sites_to_ranks(settings: Settings, size: int) -> dict[int, int]:
    """Return a dict that maps the index of each site to the rank that opens its files.

    size: number of ranks.

    Raises:
        UserError: A job with several ranks has fewer training ranks than sites, and data.share_ranks is false.
    """
    names, ranks = settings.data.silos, training_ranks(settings, size)
    assert names is not None
    owner = scheduler.assign_pinned(range(len(names)), ranks)
    if len(names) > len(ranks) and size > 1 and not settings.data.share_ranks:
        both = ", ".join(names[k] for k in owner if owner[k] == ranks[0])
        trains = settings.server.trains_clients
        needed = f"{len(names)} ranks" if trains else f"{len(names) + 1} ranks (rank 0 is the server)"
        raise UserError(
            f"data.silos: there are {len(names)} sites, but only {pluralize(len(ranks), 'training rank')}, so rank "
            f"{ranks[0]} would open the files of {both}; start {needed}, or let sites share a rank with "
            "data.share_ranks=true"
        )
    return owner


def build_silo_data(settings: Settings, comm: Communicator) -> FederatedData:
    """Build the federated data described by data.silos; each rank opens only the files of its own clients.

    Ranks exchange the numbers of samples. They also exchange label counts if data.share_label_counts is true, and sums
    of the targets if data.standardise_target is `pooled`.
    """
    check_data_settings(settings)
    names, shared, owner = (
        settings.data.silos or (),
        settings.data.share_label_counts,
        assign_sites_to_ranks(settings, comm.size),
    )
    mine = [k for k in owner if owner[k] == comm.rank]
    with _show_warnings_of_every_rank():
        datasets = _open_sites(settings, mine)
        for k, dataset in datasets.items():
            check_streaming_and_leakage(settings, dataset, f" of {names[k]}")
    table = np.zeros((len(names), TABLE_WIDTH), dtype=np.int64)
    table[mine] = describe_silos(datasets)
    table = gather_rows_from_owners(comm, table, owner, TABLE_COLUMNS)
    own = count_local_labels(datasets, table, names)
    unsplit = build_silo_federation(
        datasets, table, gather_rows_from_owners(comm, own, owner, LABEL_COUNTS) if shared else own, names
    )

    def exchange(rows: list[np.ndarray]) -> np.ndarray:
        sums = np.zeros((len(names), 3 * int(np.prod(unsplit.target_shape, dtype=np.int64))))
        for k, row in zip(datasets, rows, strict=True):
            sums[k] = row
        return gather_rows_from_owners(comm, sums.view(np.int64), owner, TARGET_SUMS).view(np.float64)

    federation = replace(
        _scale_split_and_augment_sites(settings, unsplit, datasets, exchange), label_counts_shared=shared
    )
    if not settings.data.validation:
        return federation
    # If validation rows are chosen in groups, only the rank of a site knows how many validation samples it has.
    sizes = gather_rows_from_owners(comm, federation.validation_sizes[:, None], owner, VALIDATION_SIZES)[:, 0]
    counts = federation.label_counts
    counts = gather_rows_from_owners(comm, counts, owner, LABEL_COUNTS) if shared else counts
    train_sizes = unsplit.train_sizes - sizes
    return replace(federation, validation_sizes=sizes, train_sizes=train_sizes, label_counts=counts)


def build_one_site_data(settings: Settings, client: int) -> FederatedData:
    """Build the federated data described by data.silos from the files of a single site (number `client`).

    All other sites are assumed to have the same sample counts as this site, and the same targets if targets are
    standardised over all sites (data.standardise_target: pooled).
    """
    names, datasets = settings.data.silos or (), _open_sites(settings, [client])
    table = describe_silos(datasets).repeat(len(names), axis=0)
    table[:, 0] = np.arange(len(names))
    unsplit = build_silo_federation(datasets, table, count_local_labels(datasets, table, names), names)
    return replace(_scale_split_and_augment_sites(settings, unsplit, datasets, np.stack), label_counts_shared=False)


def _open_sites(settings: Settings, clients: Sequence[int]) -> dict[int, Dataset]:
    """Open the files of the sites in `clients`, and return a dict from client number to data set."""
    source, names = make_source(settings), settings.data.silos or ()
    root = (settings.working_dir / settings.data.root).absolute()
    with (
        add_error_context("data"),
        use_streaming_mode(settings.data.stream),
        set_ignored_target(settings.task.options.get("ignore")),
    ):
        opened = open_silos(source.func, root, names, clients, settings.seed, **source.keywords)
    return {k: require_dataset(dataset, source.func) for k, dataset in opened.items()}


def _scale_split_and_augment_sites(
    settings: Settings,
    unsplit: FederatedData,
    datasets: Mapping[int, Dataset],
    exchange: Callable[[list[np.ndarray]], np.ndarray],
) -> FederatedData:
    """Standardise the targets of the sites, hold out validation rows, and add augmentation, as configured."""
    if settings.data.standardise_target:
        train = [(each.train_y, torch.full((len(each.train_y),), k)) for k, each in datasets.items()]
        test = [(each.test_y, torch.full((len(each.test_y),), k)) for k, each in datasets.items()]
        unsplit = standardise_targets(settings, unsplit, train, test, unsplit.site_names, exchange)
    return add_augmentation(
        hold_out_validation(unsplit, settings.data.validation, settings.seed), make_augmentations(settings)
    )


@contextmanager
def _show_warnings_of_every_rank() -> Iterator[None]:
    """Show the warnings of every rank, not only of rank 0, because only one rank opens the files of a site."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for each in caught:
        warnings.warn(RankWarning(str(each.message)), stacklevel=2)


def gather_rows_from_owners(
    comm: Communicator, table: np.ndarray, owner: Mapping[int, int], what: tuple[str, ...]
) -> np.ndarray:
    """Collect the row of each client from the rank that owns it, and return the complete table on every rank.

    Args:
        table: The table (N, columns) int64 of this rank, in which the rows of its own clients are filled in.
        owner: A dict from client to the rank that has its row.
        what: What the rows contain, such as "label counts", for the audit log.
    """
    rows = torch.from_numpy(table).to(comm.device)
    clients_of = {rank: [k for k in owner if owner[k] == rank] for rank in set(owner.values())}
    if comm.rank == 0:
        received = {rank: rows[clients].flatten() for rank, clients in clients_of.items() if rank != 0}
        comm.exchange([], list(received.items()))
        for rank, part in received.items():
            rows[clients_of[rank]] = part.view(-1, rows.shape[1])
    elif comm.rank in clients_of:
        comm.message_info = None, what
        comm.exchange([(0, rows[clients_of[comm.rank]].flatten())], [])
    flat = rows.flatten()
    comm.broadcast(flat)
    return flat.cpu().view(table.shape).numpy()
