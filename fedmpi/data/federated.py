"""The data of all clients as one rank sees them: rows by client, and the sizes and label counts of all clients.

Without silos every rank holds the whole data set once, and clients are index arrays into it (`split`). With silos a
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
from fedmpi.data.batches import ClientShards, LazyClientMapping, Shard, distinct_samples, replace_samples
from fedmpi.data.client_test import ClientTest, select_client_tests
from fedmpi.data.dataset import Dataset, is_labels
from fedmpi.data.lazy_images import MAX_FLOAT_BYTES, LazyImages
from fedmpi.data.partitions import KIND
from fedmpi.data.partitions.base import Partition, validate_indices
from fedmpi.data.partitions.site_and_file import file, site
from fedmpi.data.preprocessing import Preparation, make_ready_inputs
from fedmpi.data.transforms.base import Transform, to_memory_format
from fedmpi.data.transforms.pipeline import ImagePipeline, config_name


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of N clients as one rank sees them."""

    classes: int
    input_shape: Shape
    x_dtype: Type  # type of the samples
    target_shape: tuple[int, ...]  # shape of the target of one sample
    target_dtype: torch.dtype
    clients: int
    train_sizes: np.ndarray  # (N,) int64
    test_sizes: np.ndarray  # (N,) int64
    label_counts: np.ndarray  # (N, classes) int64, training part; zeros if targets are not class numbers
    train: Mapping[int, Shard]  # training rows of the clients that this rank can train
    test: Mapping[int, Shard]  # test rows of these clients; may be empty
    global_test: Shard | None  # None in silo mode, where no rank has all test rows
    parts: Partition | None  # training indices by client; None in silo mode
    site_names: tuple[str, ...] = ()
    test_by_site: Mapping[str, Shard] = field(default_factory=dict)  # test rows of every site, client or not
    label_counts_shared: bool = True  # False: label_counts is zero for clients of other ranks
    validation: Mapping[int, Shard] = field(default_factory=dict)  # held out of train, if data.validation > 0
    validation_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,), if any
    group: Mapping[int, Tensor] = field(default_factory=dict)  # (n_k,) group of each training row, if any
    preparation: Preparation | None = None  # preparation of the data set that all ranks hold; None in silo mode
    target_scales: Mapping[str, TargetScale] = field(default_factory=dict)  # by site, or "" for all sites
    silo_preparations: Mapping[int, Preparation] = field(default_factory=dict)  # preparations of the silos of this rank

    def example_targets(self) -> Tensor:
        """Return two targets of the shape and type of the data, (2, ...): classes 0 and 1, or zeros."""
        y = torch.zeros(2, *self.target_shape, dtype=self.target_dtype)
        return torch.arange(2) if is_labels(y, self.classes) else y

    def to(self, device: torch.device | str, channels_last: bool = False) -> FederatedData:
        """Return the same federation with samples and targets on `device`; tensors shared by shards are moved once.

        Test pictures become floats, unless they take much memory, because they are read often and always in the same
        way.

        Args:
            channels_last: store images as (n, H, W, C) blocks, with (n, C, H, W) views.
        """
        trained = {id(x) for _, x, _ in distinct_samples(self.train)}

        def move(x: Any) -> Any:
            if isinstance(x, LazyImages):
                new = x.to(device, channels_last)
                return new if id(x) in trained or 4 * new.shape.numel() > MAX_FLOAT_BYTES else new.all_inputs()
            new = x.to(device)
            return to_memory_format(new, channels_last) if isinstance(new, Tensor) else new

        return self.with_samples(move, lambda y: y.to(device))

    def with_samples(self, x: Callable[[Any], Any], y: Callable[[Tensor], Tensor] = lambda y: y) -> FederatedData:
        """Return a copy with all samples replaced by x(samples) and all targets by y(targets), each tensor once."""
        x, y = _memoize_by_identity(x), _memoize_by_identity(y)
        test = {"": self.global_test} if self.global_test else {}
        return replace(
            self,
            train=replace_samples(self.train, x, y),
            test=replace_samples(self.test, x, y),
            validation=replace_samples(self.validation, x, y),
            test_by_site=replace_samples(self.test_by_site, x, y),
            global_test=replace_samples(test, x, y).get(""),
        )


def _memoize_by_identity(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls `change` only once for each object, and then returns the same result."""
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
        scheme: a name in data/partitions, path/to/file.py:function or package.module:function.
        clients: number of clients; None: one for each site (scheme site), or as many as the file has (scheme file).
        client_test: how the test rows of each client are chosen, see client_test.py.
        options: options of the scheme.

    Raises:
        UserError: the data do not allow this division.
    """
    with_options = registry.make_component(KIND, registry.Selection(scheme, options))
    scheme_function, options = with_options.func, with_options.keywords
    keys = dataset.train_y.numpy().copy()  # a copy, since a user's own scheme might write to it
    keys.flags.writeable = False
    if scheme_function is site:
        if dataset.site is None:
            raise UserError(
                "data.partition: scheme site needs a data set that says whose each sample is, and this one does not "
                "(Dataset.site is None); take iid, shards or dirichlet"
            )
        keys = dataset.site.numpy()
        names = dataset.site_names or tuple(map(str, range(int(keys.max()) + 1)))
        only = _find_site_numbers(options.get("only", ()), names)
        with_options = partial(site, only=only)
        clients = clients or len(only or names)
    if clients is None and scheme_function is not file:
        raise UserError(f"data.partition: scheme {scheme} needs `clients`, the number of clients")
    if clients is not None and clients < 1:
        raise UserError(f"data.partition: clients={clients}; at least 1 is needed")
    parts = with_options(keys, clients, seeds.numpy_generator(seed, "partition"))
    parts = _validate_partition(parts, len(keys), clients, f"data.partition: scheme {scheme}", scheme_function)

    counts = count_labels_by_client(dataset.train_y, dataset.classes, parts)
    site_of_client = (
        keys[parts.order[parts.offsets[:-1]]] if scheme_function is site else None
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
        train=ClientShards(dataset.train_x, dataset.train_y, parts),
        test=ClientShards(dataset.test_x, dataset.test_y, test_rows),
        global_test=Shard(global_x, dataset.test_y, torch.arange(len(global_x))),
        parts=parts,
        site_names=tuple(dataset.site_names[k] for k in site_of_client)
        if site_of_client is not None and dataset.site_names
        else (),
        test_by_site={} if dataset.test_site is None else _test_by_site(dataset, dataset.test_site),
        preparation=dataset.preparation or make_ready_inputs(dataset.input_shape, dataset.train_x.dtype),
        group={} if group is None else LazyClientMapping(len(parts), lambda k: group[torch.from_numpy(parts[k])]),
    )


def _find_site_numbers(only: Sequence[Any], names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the sites in data.partition.only, ascending; a site may be given by name or number."""
    for place, name in enumerate(only):
        if str(name) not in names:
            raise UserError(f"data.partition.only: the data set has no site {name!r}; {suggest_name(str(name), names)}")
        if name in only[:place]:
            raise UserError(f"data.partition.only: {name!r} is a site that stands there already; name each one once")
    return tuple(sorted(names.index(str(name)) for name in only))


def _test_by_site(dataset: Dataset, test_site: Tensor) -> dict[str, Shard]:
    """Return the test rows of each site that has any, by the name or number of the site."""
    present = torch.unique(test_site[test_site >= 0]).tolist()
    rows = {k: torch.nonzero(test_site == k).flatten() for k in present}
    names = dataset.site_names or {k: str(k) for k in present}
    return {names[k]: Shard(dataset.test_x, dataset.test_y, index) for k, index in rows.items()}


def _validate_partition(result: Any, samples: int, clients: int | None, where: str, scheme_function: Any) -> Partition:
    """Return the result of a scheme, which may be a user's own, as a checked partition; it may leave samples out."""
    if not isinstance(result, Partition):
        if not isinstance(result, Iterable) or isinstance(result, (str, Mapping)):
            kind = type(result).__name__
            raise make_located_error(
                f"{where} returned {kind}; it must return a list of index arrays, one a client", scheme_function
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
        raise make_located_error(f"{where} returned {len(parts)} index arrays for clients={clients}", scheme_function)
    if (parts.sizes == 0).any():
        k = int((parts.sizes == 0).argmax())
        raise make_located_error(
            f"{where} left client {k} without a training sample; lower `clients` or its skew", scheme_function
        )
    times = np.bincount(parts.order, minlength=samples)
    if (times > 1).any():
        raise make_located_error(f"{where} handed out sample {(times > 1).argmax()} more than once", scheme_function)
    if len(parts.order) < samples and scheme_function is not site:  # with scheme site the user has left sites out
        missing = f"{samples - len(parts.order)} of {samples} training samples"
        warnings.warn(f"{where} leaves {missing} with nobody", stacklevel=3)
    return parts


def count_labels_by_client(y: Tensor, classes: int, parts: Partition) -> np.ndarray:
    """Return how often each class occurs at each client, (N, classes) int64; zeros if targets are not class numbers."""
    if not is_labels(y, classes):
        return np.zeros((len(parts), classes), dtype=np.int64)
    cells = parts.owner * classes + y.numpy()[parts.order]
    return np.bincount(cells, minlength=len(parts) * classes).reshape(len(parts), classes)


def count_labels(y: Tensor, classes: int) -> np.ndarray:
    """Return how often each class occurs, (classes,) int64; zeros if targets are not class numbers."""
    return count_labels_by_client(y, classes, Partition.from_owners(np.zeros(len(y), dtype=np.int64), 1))[0]


def hold_out_validation(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Return the federation with validation rows held out of each client's training samples, drawn for each client.

    If rows belong to groups (`Dataset.group`), whole groups are held out: groups are drawn one after the other, and one
    is taken if it brings the number of samples nearer to the share. If none does, the smallest group is taken. Nothing
    is held out of a client with a single group, with a warning.

    With silos the label counts and validation_sizes of clients on other ranks are zero, and their train_sizes
    unchanged.

    Args:
        share: share of a client's training samples, 0 <= share < 1; 0 returns the data unchanged.
    """
    if not share:
        return data
    train, validation = {}, {}
    sizes, counts = np.zeros(data.clients, dtype=np.int64), np.zeros_like(data.label_counts)
    for k, shard in data.train.items():
        out = _validation_rows(data.group.get(k), len(shard), share, seeds.torch_generator(seed, "validation", k))
        validation[k] = replace(shard, index=shard.index[out])
        train[k] = replace(shard, index=shard.index[~out])
        sizes[k] = len(validation[k])
    alone = [k for k in data.train if data.train_sizes[k] > 1 and not sizes[k]]
    if alone:
        reason = "the rows there are all of one group (data.group_column), and stay together"
        warnings.warn(f"data.validation holds out nothing of clients {shorten(str(alone))}: {reason}", stacklevel=2)
    new = replace(data, validation_sizes=sizes, train_sizes=data.train_sizes - sizes)
    if not isinstance(data.train, ClientShards):
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
        train=ClientShards(x, y, parts),
        validation=ClientShards(x, y, validation_parts),
        label_counts=counts,
        parts=parts,
    )


def _validation_rows(group: Tensor | None, n: int, share: float, generator: torch.Generator) -> Tensor:
    """Return which of a client's n samples are held out for validation, (n,) bool.

    These are floor(share n) samples, at least one if the client has two, and never all.

    Args:
        group: the group of each sample, (n,). At least one group remains for training.
    """
    wanted, out = min(max(int(share * n + 1e-9), 1), n - 1), torch.zeros(n, dtype=torch.bool)
    if group is None:
        out[torch.randperm(n, generator=generator)[:wanted]] = True
        return out
    _, number, sizes = group.unique(return_inverse=True, return_counts=True)
    order, size = torch.randperm(len(sizes), generator=generator).tolist(), sizes.tolist()
    chosen: list[int] = []
    total = 0
    for g in order:
        if abs(total + size[g] - wanted) < abs(total - wanted) and len(chosen) < len(order) - 1:
            chosen.append(g)
            total += size[g]
    if not chosen and len(order) > 1:  # all groups are large
        chosen = [min(order, key=size.__getitem__)]
    return torch.isin(number, torch.tensor(chosen, dtype=torch.int64))


def add_augmentation(data: FederatedData, transforms: Sequence[Transform]) -> FederatedData:
    """Return the federation whose clients train on augmented pictures; at tests no random operation is applied.

    Raises:
        UserError: the operations do not suit the pictures or their targets, or yield two sizes in training and at
            tests.
    """
    if not transforms:
        return data
    moving_transform = next((each for each in transforms if each.moves_pixels), None)
    if moving_transform and len(data.target_shape) > 1:
        has = " x ".join(map(str, data.target_shape))
        raise UserError(
            f"data.augment: {config_name(moving_transform)} moves pixels, and the targets of these data are masks "
            f"({has}), which would "
            "stay where they are; color_jitter, normalize and cutout go with masks"
        )
    shape = data.input_shape
    if not isinstance(shape, tuple) or data.x_dtype != torch.float32:
        what = f"several tensors ({', '.join(shape)})" if isinstance(shape, dict) else f"of {data.x_dtype}"
        raise UserError(f"data.augment is for pictures, and a sample of these data is {what}; leave it out")
    new_shape = ImagePipeline(transforms=tuple(transforms)).output_shape(shape)
    return replace(data.with_samples(lambda x: _add_transforms(x, transforms)), input_shape=new_shape)


def _add_transforms(x: Tensor | LazyImages, transforms: Sequence[Transform]) -> LazyImages:
    pipeline = replace(x.pipeline if isinstance(x, LazyImages) else ImagePipeline(), transforms=tuple(transforms))
    pipeline.steps  # noqa: B018  raises UserError for an order that makes no sense
    stored = x.stored if isinstance(x, LazyImages) else x
    trained, tested = (pipeline.output_shape(tuple(stored.shape[1:]), drawn) for drawn in (True, False))
    if trained != tested:
        sizes = [" x ".join(map(str, shape[1:])) for shape in (trained, tested)]
        raise UserError(
            f"data.augment: pictures are {sizes[0]} pixels in training, but at tests {sizes[1]}; what draws nothing "
            f"is done to both, so end with center_crop: {min(trained[1:])}, behind a resize where pictures are smaller"
        )
    return LazyImages(stored, pipeline)
