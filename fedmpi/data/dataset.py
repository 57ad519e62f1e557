"""The class Dataset: the tensors of a data set, divided into a training and a test part, with one row per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, Samples, Shape, get_sample_shape, list_named_tensors
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.preprocessing import Preparation


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set of n training and t test samples.

    Samples are normalised images (n, C, H, W), as a tensor or LazyImages; table rows (n, f); or symbols (n, L) int64. A
    sample may also consist of several tensors. Then train_x and test_x are dictionaries that map the name of a tensor
    to its rows (n, ...), and the model's `forward` gets each tensor as the argument of that name, or all of them as one
    dictionary (fedmpi/common/inputs.py).

    Targets (n, ...) may have any shape that the task accepts; the task also decides whether they may be NaN. Class
    numbers are int64 in 0..classes-1. For real-valued targets `classes` is the number of outputs, usually 1.

    Raises:
        UserError: a tensor has invalid values or types, or shapes do not agree; the message names the tensor.

    >>> Dataset(torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(1, 3), torch.tensor([1]), classes=2).input_shape
    (3,)
    """

    train_x: Any  # (n, ...) float32; int64 for symbols (text); in a dictionary also bool
    train_y: Tensor  # (n, ...) int64, float32 or bool
    test_x: Any  # (t, ...); t may be 0
    test_y: Tensor  # (t, ...)
    classes: int
    site: Tensor | None = None  # (n,) int64, the natural site, such as a hospital, of each training row
    test_site: Tensor | None = None  # (t,) int64; -1: the row belongs to no site, only to the global test set
    site_names: tuple[str, ...] = ()  # names of sites 0, 1, ...
    global_test_x: Tensor | None = None  # (t, ...) rows of the global test set, if they differ from test_x
    input_and_class_names: tuple[str, ...] = ()  # names of inputs and classes, in order; equal at all silos
    group: Tensor | None = None  # (n,) int64; training rows of one group, such as a patient, stay together
    preparation: Preparation | None = None  # prepares new rows for prediction as these rows were prepared

    def __post_init__(self) -> None:
        if isinstance(self.classes, np.integer):
            object.__setattr__(self, "classes", int(self.classes))
        if not isinstance(self.classes, int) or isinstance(self.classes, bool) or self.classes < 1:
            raise UserError(f"data set: classes is {self.classes!r}; must be an integer >= 1 (1 for regression)")
        for part in ("train", "test"):
            samples: Any = getattr(self, f"{part}_x")
            if isinstance(samples, Mapping):
                if not samples or not all(isinstance(key, str) and key.isidentifier() for key in samples):
                    needed = "there must be at least one key, and all must be identifiers such as input_ids"
                    raise UserError(f"data set: the keys of the dictionary {part}_x are {list(samples)}; {needed}")
                object.__setattr__(self, f"{part}_x", Inputs(samples))
            y = getattr(self, f"{part}_y")
            _check_tensor(f"{part}_y", y)
            for name, x in list_named_tensors(getattr(self, f"{part}_x"), f"{part}_x"):
                _check_samples(name, x, len(y), single=name == f"{part}_x")
            _check_targets(f"{part}_y", y, self.classes)
        if len(self.train_x) == 0:
            raise UserError("data set: there are no training samples; return at least one")
        for kind in "xy":
            train, test = (_describe_row_format(getattr(self, f"{part}_{kind}")) for part in ("train", "test"))
            if train != test:
                what = f"a row of train_{kind} is {train}, but a row of test_{kind} is {test}"
                raise UserError(f"data set: {what}; shapes and types must be equal")
        if self.global_test_x is not None:
            _check_samples("global_test_x", self.global_test_x, len(self.test_y), single=True)
            if _describe_row_format(self.global_test_x) != _describe_row_format(self.test_x):
                raise UserError(
                    f"data set: a row of global_test_x is {_describe_row_format(self.global_test_x)}; it must be like "
                    f"a row of test_x, {_describe_row_format(self.test_x)}"
                )
        for name, part in (("site", "train_y"), ("test_site", "test_y"), ("group", "train_y")):
            if (owner := getattr(self, name)) is not None:
                _check_owners(name, owner, len(getattr(self, part)), () if name == "group" else self.site_names)

    @property
    def input_shape(self) -> Shape:
        """The shape of one sample, (C, H, W) or (f,); if a sample consists of several tensors, their shapes by name."""
        return get_sample_shape(self.train_x)


def is_labels(y: Tensor, classes: int) -> bool:
    """Return whether targets y consist of one class number per sample."""
    return classes > 1 and y.dtype == torch.int64 and y.ndim == 1


def _describe_row_format(x: Samples) -> str:
    """Return the shape and type of one row of the samples or targets x as a string."""
    return "; ".join(
        f"{name} {tuple(part.shape[1:])} {str(part.dtype).removeprefix('torch.')}".strip()
        for name, part in list_named_tensors(x, "")
    )


def _check_tensor(name: str, x: Any) -> None:
    """Raise UserError unless x is a dense, detached tensor of real numbers on the CPU with at least one dimension."""
    if not isinstance(x, Tensor):
        advice = "; use torch.from_numpy" if isinstance(x, np.ndarray) else ""
        raise UserError(f"data set: {name} is {type(x).__name__}; must be a torch.Tensor{advice}")
    if x.ndim == 0 or x.is_complex() or x.layout is not torch.strided or x.device.type != "cpu" or x.requires_grad:
        what = f"{x.dtype}, {x.layout}, of shape {tuple(x.shape)}, on {x.device}, with requires_grad={x.requires_grad}"
        raise UserError(
            f"data set: {name} is {what}; must be a dense, detached tensor of real numbers on the CPU, with at least "
            "one dimension"
        )


def _check_samples(name: str, x: Any, targets: int, single: bool) -> None:
    """Raise UserError unless samples x are finite, have an allowed type, and contain one row per target."""
    if not isinstance(x, LazyImages):  # the bytes of lazy images are always finite
        _check_tensor(name, x)
        if x.dtype not in (torch.float32, torch.int64) and (single or x.dtype != torch.bool):
            how = f"use {name}.float(), or {name}.long() for symbols"
            raise UserError(f"data set: {name} is {x.dtype}; must be float32, or int64 for symbols; {how}")
        # Blocks of rows limit the memory of temporary tensors.
        if x.is_floating_point() and not all(bool(torch.isfinite(block).all()) for block in x.split(1 << 14)):
            row = int((~torch.isfinite(x)).nonzero()[0, 0])
            raise UserError(
                f"data set: {name} contains values that are not finite (nan or inf), first in row {row}; fill them in, "
                "or "
                "drop the rows"
            )
    if len(x) != targets:
        raise UserError(f"data set: {name} has {len(x)} rows, but there are {targets} targets; both must be equal")


def _check_targets(name: str, y: Tensor, classes: int) -> None:
    """Raise UserError if targets y have the wrong type, are infinite, or are class numbers outside 0..classes-1."""
    if y.dtype not in (torch.int64, torch.float32, torch.bool):
        how = f"use {name}.long() or {name}.float()"
        raise UserError(f"data set: {name} is {y.dtype}; must be int64 for class numbers, or float32; {how}")
    if y.is_floating_point() and bool(y.isinf().any()):  # the task decides whether NaN is allowed
        row = int(y.isinf().nonzero()[0, 0])
        raise UserError(
            f"data set: {name} contains infinite targets, first in row {row}; correct them, or drop the rows"
        )
    if is_labels(y, classes) and bool((invalid := (y < 0) | (y >= classes)).any()):
        row = int(invalid.nonzero()[0, 0])
        raise UserError(
            f"data set: {name} contains labels from {int(y.min())} to {int(y.max())}, but with classes={classes} they "
            f"must be from 0 to {classes - 1}; the first invalid one is in row {row}"
        )


def _check_owners(name: str, owner: Any, rows: int, names: tuple[str, ...]) -> None:
    """Raise UserError unless `owner` has one site or group number per row, and each site number has a name."""
    _check_tensor(name, owner)
    if owner.dtype != torch.int64 or tuple(owner.shape) != (rows,):
        what = f"{name} is {owner.dtype} of shape {tuple(owner.shape)}"
        raise UserError(f"data set: {what}; must be int64 of shape ({rows},), one number per row")
    lowest = -1 if name == "test_site" else 0
    if rows and (int(owner.min()) < lowest or (names and int(owner.max()) >= len(names))):
        what = f"{name} contains numbers from {int(owner.min())} to {int(owner.max())}"
        allowed = (
            f"from {lowest} to {len(names) - 1}, the numbers of the sites {names}" if names else f"at least {lowest}"
        )
        raise UserError(f"data set: {what}; must be {allowed}")
