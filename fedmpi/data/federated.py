"""The data of a federation on one rank: samples of the clients that it can train, and counts for all clients.

Without silos, every rank holds the whole data set, and a client is an array of row numbers (`split`). In silo mode a
rank opens only the sites of its own clients (data/silos.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common import registry, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type
from fedmpi.common.target_scale import TargetScale
from fedmpi.common.text import shorten, suggest_name
from fedmpi.common.user_code_errors import make_located_error
from fedmpi.data.batches import (
    LazyClientMapping,
    Shard,
    ShardsOfAllClients,
    iter_samples_once_if_shared,
    map_samples_and_targets,
)
from fedmpi.data.client_test import ClientTest, select_client_tests
from fedmpi.data.dataset import Dataset, is_labels
from fedmpi.data.lazy_images import MAX_FLOAT_BYTES, LazyImages
from fedmpi.data.partitions import KIND
from fedmpi.data.partitions.base import Partition, validate_indices
from fedmpi.data.partitions.site_and_file import partition_by_site, partition_from_file
from fedmpi.data.preprocessing import Preparation, make_ready_inputs
from fedmpi.data.transforms.base import Transform, to_memory_format
from fedmpi.data.transforms.pipeline import ImagePipeline, config_name


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of N clients, as held by one rank.

    A rank has the samples of the clients that it can train, and the sample counts of all clients.
    """

    classes: int
    input_shape: Shape
    x_dtype: Type  # type of the samples
    target_shape: tuple[int, ...]  # shape of the target of one sample
    target_dtype: torch.dtype
    clients: int
    train_sizes: np.ndarray  # (N,) int64
    test_sizes: np.ndarray  # (N,) int64
    label_counts: np.ndarray  # (N, classes) int64, of training rows; zeros if targets are not class numbers
    train: Mapping[int, Shard]  # training rows of the clients that this rank can train
    test: Mapping[int, Shard]  # test rows of these clients, possibly none
    global_test: Shard | None  # None in silo mode, where no rank has all test rows
    parts: Partition | None  # training rows of each client; None in silo mode
    site_names: tuple[str, ...] = ()
    test_by_site: Mapping[str, Shard] = field(
        default_factory=dict
    )  # test rows of every site, also if it is not a client
    label_counts_shared: bool = True  # if not, label_counts is zero for clients of other ranks
    validation: Mapping[int, Shard] = field(default_factory=dict)  # rows held out of train if data.validation > 0
    validation_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,), or empty
    group: Mapping[int, Tensor] = field(default_factory=dict)  # (n_k,) group of each training row, if any
    preparation: Preparation | None = None  # how new rows are prepared; None in silo mode
    target_scales: Mapping[str, TargetScale] = field(default_factory=dict)  # by site, or "" for all sites
    silo_preparations: Mapping[int, Preparation] = field(default_factory=dict)  # the same for each silo of this rank
    files_digest: str = ""  # of the preparation; equal at all sites

    def example_targets(self) -> Tensor:
        """Return two targets (2, ...), with the data's shape and type: 0 and 1 if they are classes, otherwise zeros."""
        y = torch.zeros(2, *self.target_shape, dtype=self.target_dtype)
        return torch.arange(2) if is_labels(y, self.classes) else y

    def to(self, device: torch.device | str, channels_last: bool = False) -> FederatedData:
        """Return a copy with samples and targets on `device`.

        Test images are never augmented, so they are converted to floats here once, unless the floats need too much
        memory.

        Args:
            channels_last: whether images (n, C, H, W) are stored in the memory format channels_last.
        """
        trained = {id(x) for _, x, _ in iter_samples_once_if_shared(self.train)}

        def move(x: Any) -> Any:
            if isinstance(x, LazyImages):
                new = x.to(device, channels_last)
                return new if id(x) in trained or 4 * new.shape.numel() > MAX_FLOAT_BYTES else new.all_inputs()
            new = x.to(device)
            return to_memory_format(new, channels_last) if isinstance(new, Tensor) else new

        return self.with_mapped_samples(move, lambda y: y.to(device))

    def with_mapped_samples(
        self, x: Callable[[Any], Any], y: Callable[[Tensor], Tensor] = lambda y: y
    ) -> FederatedData:
        """Return a copy in which samples are replaced by x(samples) and targets by y(targets), for functions x and y.

        Tensors that several clients share are converted only once.
        """
        x, y = _memoize_by_identity(x), _memoize_by_identity(y)
        test = {"": self.global_test} if self.global_test else {}
        return replace(
            self,
            train=map_samples_and_targets(self.train, x, y),
            test=map_samples_and_targets(self.test, x, y),
            validation=map_samples_and_targets(self.validation, x, y),
            test_by_site=map_samples_and_targets(self.test_by_site, x, y),
            global_test=map_samples_and_targets(test, x, y).get(""),
        )


def _memoize_by_identity(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls `change` once per object, and returns the stored result for the same object."""
    changed: dict[int, Any] = {}

    def call(value: Any) -> Any:
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    return call


def split(
    dataset: Dataset, scheme: str, clients: int | None, seed: int, client_test: ClientTest = "auto", **options: Any
) -> FederatedData:
    """Divide a data set among clients.

    Args:
        scheme: the partition scheme: a name in data/partitions, path/to/file.py:function or package.module:function.
        clients: number of clients. None: one for each site (scheme `site`), or as many as the file lists (scheme
            `file`).
        seed: the seed of the run.
        client_test: the rule that chooses the test rows of each client; client_test.py describes the rules.
        options: options of the partition scheme.

    Raises:
        UserError: the data set cannot be divided in this way.
    """
    with_options = registry.make_component(KIND, registry.Selection(scheme, options))
    scheme_function, options = with_options.func, with_options.keywords
    keys = dataset.train_y.numpy().copy()  # a copy that a user's own scheme cannot change
    keys.flags.writeable = False
    if scheme_function is partition_by_site:
        if dataset.site is None:
            raise UserError(
                "data.partition: scheme site needs a data set with a site for each sample, but this one has none "
                "(Dataset.site is None); set data.partition.scheme to iid, shards or dirichlet"
            )
        keys = dataset.site.numpy()
        names = dataset.site_names or tuple(map(str, range(int(keys.max()) + 1)))
        only = _find_listed_sites(options.get("only", ()), names)
        with_options = partial(partition_by_site, only=only)
        clients = clients or len(only or names)
    if clients is None and scheme_function is not partition_from_file:
        raise UserError(f"data.partition: scheme {scheme} needs the number of clients; set data.partition.clients")
    if clients is not None and clients < 1:
        raise UserError(f"data.partition.clients: {clients} is not allowed; must be at least 1")
    parts = with_options(keys, clients, seeds.numpy_generator(seed, "partition"))
    parts = _validate_partition(parts, len(keys), clients, f"data.partition: scheme {scheme}", scheme_function)

    counts = count_labels_by_client(dataset.train_y, dataset.classes, parts)
    site_of_client = (
        keys[parts.order[parts.offsets[:-1]]] if scheme_function is partition_by_site else None
    )  # the site of each client
    test_sizes, test_rows = select_client_tests(dataset, counts, client_test, site_of_client, seed, parts.label_matrix)
    global_x, group = dataset.test_x if dataset.global_test_x is None else dataset.global_test_x, dataset.group
    return FederatedData(
        classes=dataset.classes,
        input_shape=dataset.input_shape,
        x_dtype=dataset.train_x.dtype,
        target_shape=tuple(dataset.train_y.shape[1:]),
        target_dtype=dataset.train_y.dtype,
        clients=len(parts),
        train_sizes=parts.sizes,
        test_sizes=test_sizes,
        label_counts=counts,
        train=ShardsOfAllClients(dataset.train_x, dataset.train_y, parts),
        test=ShardsOfAllClients(dataset.test_x, dataset.test_y, test_rows),
        global_test=Shard(global_x, dataset.test_y, torch.arange(len(global_x))),
        parts=parts,
        site_names=tuple(dataset.site_names[k] for k in site_of_client)
        if site_of_client is not None and dataset.site_names
        else (),
        test_by_site={} if dataset.test_site is None else _make_test_shards_by_site(dataset, dataset.test_site),
        files_digest=dataset.preparation.files_digest if dataset.preparation else "",
        preparation=dataset.preparation or make_ready_inputs(dataset.input_shape, dataset.train_x.dtype),
        group={} if group is None else LazyClientMapping(len(parts), lambda k: group[torch.from_numpy(parts[k])]),
    )


def _find_listed_sites(only: Sequence[Any], names: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the sites that data.partition.only lists, in ascending order.

    Args:
        only: data.partition.only: names of sites, or their numbers if sites have no names.
        names: the names of all sites.
    """
    for position, name in enumerate(only):
        if str(name) not in names:
            raise UserError(f"data.partition.only: the data set has no site {name!r}; {suggest_name(str(name), names)}")
        if name in only[:position]:
            raise UserError(f"data.partition.only: site {name!r} is listed twice; list each site once")
    return tuple(sorted(names.index(str(name)) for name in only))


def _make_test_shards_by_site(dataset: Dataset, test_site: Tensor) -> dict[str, Shard]:
    """Return {site: its test rows} for all sites with test rows; a site without a name is identified by its number."""
    present = torch.unique(test_site[test_site >= 0]).tolist()
    rows = {k: torch.nonzero(test_site == k).flatten() for k in present}
    names = dataset.site_names or {k: str(k) for k in present}
    return {names[k]: Shard(dataset.test_x, dataset.test_y, index) for k, index in rows.items()}


def _validate_partition(result: Any, samples: int, clients: int | None, where: str, scheme_function: Any) -> Partition:
    """Check the result of a partition scheme, which may be user code, and return it as a Partition.

    Args:
        result: a Partition, or one array of row numbers per client. If samples are left out, a warning says how many.
        samples: number of training samples.
        clients: the required number of clients; None: any number.
        where: the name of the scheme for messages.
        scheme_function: the function of the scheme, whose file and line are added to error messages.

    Raises:
        UserError: the result is not a partition for this number of clients, or a client has no sample.
    """
    if not isinstance(result, Partition):
        if not isinstance(result, Iterable) or isinstance(result, (str, Mapping)):
            kind = type(result).__name__
            raise make_located_error(
                f"{where} returned {kind}; it must return a list of one index array per client", scheme_function
            )
        arrays = []
        for k, part in enumerate(result):
            try:
                arrays.append(validate_indices(part, samples))
            except ValueError as error:
                raise make_located_error(f"{where} gave client {k} {error}", scheme_function) from error
        result = Partition.from_parts(arrays)
    parts: Partition = result
    if clients is not None and len(parts) != clients:
        raise make_located_error(
            f"{where} returned {len(parts)} index arrays, but must return {clients}, one per client", scheme_function
        )
    if (parts.sizes == 0).any():
        k = int((parts.sizes == 0).argmax())
        raise make_located_error(
            f"{where} gives client {k} no training samples; lower data.partition.clients, or choose a less skewed "
            "partition",
            scheme_function,
        )
    times = np.bincount(parts.order, minlength=samples)
    if (times > 1).any():
        raise make_located_error(
            f"{where} assigns sample {(times > 1).argmax()} more than once; parts must be disjoint", scheme_function
        )
    # With scheme site, the user has left sites out.
    if len(parts.order) < samples and scheme_function is not partition_by_site:
        missing = f"{samples - len(parts.order)} of {samples} training samples"
        warnings.warn(f"{where} assigns {missing} to no client", stacklevel=3)
    return parts


def count_labels_by_client(y: Tensor, classes: int, parts: Partition) -> np.ndarray:
    """Return the number of samples by client and class, (N, classes) int64; zeros if targets are not class numbers."""
    if not is_labels(y, classes):
        return np.zeros((len(parts), classes), dtype=np.int64)
    cells = parts.owner * classes + y.numpy()[parts.order]
    return np.bincount(cells, minlength=len(parts) * classes).reshape(len(parts), classes)


def count_labels(y: Tensor, classes: int) -> np.ndarray:
    """Return the number of samples of each class, (classes,) int64; zeros if targets are not class numbers."""
    return count_labels_by_client(y, classes, Partition.from_owners(np.zeros(len(y), dtype=np.int64), 1))[0]


def hold_out_validation(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Move a random part of each client's training samples to validation.

    If rows belong to groups (`Dataset.group`), whole groups are moved. The groups are visited in random order, and a
    group is moved if this brings the number of moved samples closer to the requested one. If no group qualifies, the
    smallest one is moved. At least one group remains for training; a client with a single group therefore keeps all its
    samples, and a warning is issued.

    In silo mode a rank has only the rows of its own clients. For all other clients, label counts and validation sizes
    are set to zero, and training sizes are not changed.

    Args:
        data: the data of all clients.
        share: fraction of each client's training samples to move, 0 <= share < 1; for 0 the data are returned
            unchanged.
        seed: the seed of the run.
    """
    if not share:
        return data
    train, validation = {}, {}
    sizes, counts = np.zeros(data.clients, dtype=np.int64), np.zeros_like(data.label_counts)
    for k, shard in data.train.items():
        is_held_out = _draw_validation_rows(
            data.group.get(k), len(shard), share, seeds.torch_generator(seed, "validation", k)
        )
        validation[k] = replace(shard, index=shard.index[is_held_out])
        train[k] = replace(shard, index=shard.index[~is_held_out])
        sizes[k] = len(validation[k])
    without_validation = [k for k in data.train if data.train_sizes[k] > 1 and not sizes[k]]
    if without_validation:
        reason = "all rows of these clients belong to a single group (data.group_column), and groups are never split"
        warnings.warn(
            f"data.validation holds out no rows of clients {shorten(str(without_validation))}, because {reason}",
            stacklevel=2,
        )
    new = replace(data, validation_sizes=sizes, train_sizes=data.train_sizes - sizes)
    if not isinstance(data.train, ShardsOfAllClients):
        for k, own in train.items():
            counts[k] = count_labels(own.y[own.index], data.classes)
        return replace(new, train=train, validation=validation, label_counts=counts)
    x, y = data.train.x, data.train.y
    parts, validation_parts = (
        Partition.from_parts(own.index.numpy() for own in shards.values()) for shards in (train, validation)
    )
    counts = count_labels_by_client(y, data.classes, parts)
    return replace(
        new,
        train=ShardsOfAllClients(x, y, parts),
        validation=ShardsOfAllClients(x, y, validation_parts),
        label_counts=counts,
        parts=parts,
    )


def _draw_validation_rows(group: Tensor | None, n: int, share: float, generator: torch.Generator) -> Tensor:
    """Draw the validation samples among a client's n samples; return a mask, (n,) bool.

    Without groups, floor(share * n) samples are drawn: at least one if n >= 2, but never all. With groups, whole groups
    are drawn, as `hold_out_validation` describes.

    Args:
        group: the group of each sample, (n,); None if there are no groups.
        n: number of samples.
        share: fraction of samples to hold out.
        generator: draws the samples or groups.
    """
    target_size, is_held_out = min(max(int(share * n + 1e-9), 1), n - 1), torch.zeros(n, dtype=torch.bool)
    if group is None:
        is_held_out[torch.randperm(n, generator=generator)[:target_size]] = True
        return is_held_out
    _, number, sizes = group.unique(return_inverse=True, return_counts=True)
    order, size = torch.randperm(len(sizes), generator=generator).tolist(), sizes.tolist()
    held_out_groups: list[int] = []
    total = 0
    for g in order:
        if abs(total + size[g] - target_size) < abs(total - target_size) and len(held_out_groups) < len(order) - 1:
            held_out_groups.append(g)
            total += size[g]
    if not held_out_groups and len(order) > 1:  # all groups are large
        held_out_groups = [min(order, key=size.__getitem__)]
    return torch.isin(number, torch.tensor(held_out_groups, dtype=torch.int64))


def add_augmentation(data: FederatedData, transforms: Sequence[Transform]) -> FederatedData:
    """Add image transforms (data.augment) to all samples; random transforms are applied only in training.

    Args:
        data: the data of all clients.
        transforms: the transforms in order; if empty, the data are returned unchanged.

    Raises:
        UserError: the transforms do not suit the samples or targets, or training and evaluation images would have
            different sizes.
    """
    if not transforms:
        return data
    moving_transform = next((each for each in transforms if each.moves_pixels), None)
    if moving_transform and len(data.target_shape) > 1:
        size = " x ".join(map(str, data.target_shape))
        raise UserError(
            f"data.augment: {config_name(moving_transform)} moves pixels, but the targets are masks ({size}), which "
            "would "
            f"not be moved; remove {config_name(moving_transform)} (with masks, only color_jitter, normalize and "
            "cutout are allowed)"
        )
    shape = data.input_shape
    if not isinstance(shape, tuple) or data.x_dtype != torch.float32:
        what = (
            f"consists of several tensors ({', '.join(shape)})"
            if isinstance(shape, dict)
            else f"has type {data.x_dtype}"
        )
        raise UserError(f"data.augment needs images, but a sample of this data set {what}; remove data.augment")
    new_shape = ImagePipeline(transforms=tuple(transforms)).output_shape(shape)
    return replace(data.with_mapped_samples(lambda x: _add_transforms(x, transforms)), input_shape=new_shape)


def _add_transforms(x: Tensor | LazyImages, transforms: Sequence[Transform]) -> LazyImages:
    """Return samples as LazyImages with these transforms; raise UserError if the size of test images would change."""
    pipeline = replace(x.pipeline if isinstance(x, LazyImages) else ImagePipeline(), transforms=tuple(transforms))
    pipeline.steps  # noqa: B018  raises UserError if the order of transforms is not possible
    stored = x.stored if isinstance(x, LazyImages) else x
    trained, tested = (pipeline.output_shape(tuple(stored.shape[1:]), training) for training in (True, False))
    if trained != tested:
        sizes = [" x ".join(map(str, shape[1:])) for shape in (trained, tested)]
        raise UserError(
            f"data.augment: images are {sizes[0]} pixels in training, but {sizes[1]} in evaluation, where random "
            f"transforms are not applied; append center_crop: {min(trained[1:])}, preceded by a resize if "
            f"some images are smaller than {sizes[0]} pixels"
        )
    return LazyImages(stored, pipeline)
