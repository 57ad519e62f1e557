"""Dataset: the tensors of a data set, with a training and a test part and one row per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, Samples, Shape, get_sample_shape, named_tensors
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.preprocessing import Preparation


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set of n training and t test samples.

    Samples are images (n, C, H, W), already normalised, or Pictures; tables (n, f); or symbols (n, L) int64. A sample
    may also be several tensors: train_x and test_x are then dictionaries name -> (n, ...), and the model's `forward`
    gets each tensor under its name, or all of them as one dictionary (fedmpi/common/inputs.py).

    Targets (n, ...) may have any shape that the task accepts; the task also decides whether they may be NaN. Class
    numbers are int64 in 0..classes-1. For real-valued targets `classes` is the number of outputs, usually 1. Raises
    UserError if the parts do not fit together, so that the author of a source learns at once what is wrong.

    >>> Dataset(torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(1, 3), torch.tensor([1]), classes=2).input_shape
    (3,)
    """

    train_x: Any  # (n, ...) float32; int64 for symbols (text); in a dictionary also bool
    train_y: Tensor  # (n, ...) int64, float32 or bool
    test_x: Any  # (t, ...); t may be 0
    test_y: Tensor  # (t, ...)
    classes: int
    site: Tensor | None = None  # (n,) int64, natural owner of each training row
    test_site: Tensor | None = None  # (t,) int64; -1: of no site, so that the row is only in the global test set
    site_names: tuple[str, ...] = ()  # name of site 0, 1, ...
    global_test_x: Tensor | None = None  # (t, ...) rows of the global test set, if they differ from test_x
    input_and_class_names: tuple[
        str, ...
    ] = ()  # names of inputs and classes, in order, which must be equal at all silos
    group: Tensor | None = None  # (n,) int64: training rows of one group, such as a patient, stay together
    preparation: Preparation | None = None  # prepares new rows as these rows were prepared

    def __post_init__(self) -> None:
        if isinstance(self.classes, np.integer):
            object.__setattr__(self, "classes", int(self.classes))
        if not isinstance(self.classes, int) or isinstance(self.classes, bool) or self.classes < 1:
            raise UserError(f"data set: classes is {self.classes!r}; a whole number >= 1 is needed (1 = regression)")
        for part in ("train", "test"):
            given: Any = getattr(self, f"{part}_x")
            if isinstance(given, Mapping):
                if not given or not all(isinstance(key, str) and key.isidentifier() for key in given):
                    needed = "a dictionary of tensors by names such as input_ids is needed"
                    raise UserError(f"data set: {part}_x has the keys {list(given)}; {needed}")
                object.__setattr__(self, f"{part}_x", Inputs(given))
            y = getattr(self, f"{part}_y")
            _check_tensor(f"{part}_y", y)
            for name, x in named_tensors(getattr(self, f"{part}_x"), f"{part}_x"):
                _check_samples(name, x, len(y), single=name == f"{part}_x")
            _check_targets(f"{part}_y", y, self.classes)
        if len(self.train_x) == 0:
            raise UserError("data set: there is no training sample")
        for kind in "xy":
            train, test = (_describe(getattr(self, f"{part}_{kind}")) for part in ("train", "test"))
            if train != test:
                what = f"a row of train_{kind} is {train}, one of test_{kind} {test}"
                raise UserError(f"data set: {what}; they must agree")
        if self.global_test_x is not None:
            _check_samples("global_x", self.global_test_x, len(self.test_y), single=True)
            if _describe(self.global_test_x) != _describe(self.test_x):
                raise UserError(
                    f"data set: a row of global_x is {_describe(self.global_test_x)}; it must be as test_x's"
                )
        for name, part in (("site", "train_y"), ("test_site", "test_y"), ("group", "train_y")):
            if (owner := getattr(self, name)) is not None:
                _check_owners(name, owner, len(getattr(self, part)), () if name == "group" else self.site_names)

    @property
    def input_shape(self) -> Shape:
        """The shape of one sample: (C, H, W) or (f,); shapes by name if a sample is several tensors."""
        return get_sample_shape(self.train_x)


def is_labels(y: Tensor, classes: int) -> bool:
    """Return whether each target is a class number."""
    return classes > 1 and y.dtype == torch.int64 and y.ndim == 1


def _describe(x: Samples) -> str:
    """Return the shape and type of a row as text."""
    return "; ".join(
        f"{name} {tuple(part.shape[1:])} {str(part.dtype).removeprefix('torch.')}".strip()
        for name, part in named_tensors(x, "")
    )


def _check_tensor(name: str, x: Any) -> None:
    """Raise UserError unless x is a dense tensor of real numbers on the CPU, with rows and without a graph."""
    if not isinstance(x, Tensor):
        advice = ": torch.from_numpy(...)" if isinstance(x, np.ndarray) else ""
        raise UserError(f"data set: {name} is {type(x).__name__}; a torch.Tensor is needed{advice}")
    if x.ndim == 0 or x.is_complex() or x.layout is not torch.strided or x.device.type != "cpu" or x.requires_grad:
        what = f"of shape {tuple(x.shape)}, {x.dtype}, {x.layout}, on {x.device}, requires_grad={x.requires_grad}"
        raise UserError(f"data set: {name} is {what}; a dense, detached tensor of real numbers on the CPU is needed")


def _check_samples(name: str, x: Any, targets: int, single: bool) -> None:
    if not isinstance(x, LazyImages):  # Pictures are made of bytes, which are always finite
        _check_tensor(name, x)
        if x.dtype not in (torch.float32, torch.int64) and (single or x.dtype != torch.bool):
            how = f"{name}.long() for symbols, {name}.float() for numbers"
            raise UserError(f"data set: {name} is {x.dtype}; float32 (or int64 for symbols) is needed: {how}")
        # In blocks of rows, because the temporary tensors of isfinite take as much memory as the rows.
        if x.is_floating_point() and not all(bool(torch.isfinite(some).all()) for some in x.split(1 << 14)):
            row = int((~torch.isfinite(x)).nonzero()[0, 0])
            raise UserError(f"data set: {name} holds a value that is not finite, first in row {row}; fill or drop it")
    if len(x) != targets:
        raise UserError(f"data set: {name} has {len(x)} rows, its targets {targets}; both need one row a sample")


def _check_targets(name: str, y: Tensor, classes: int) -> None:
    if y.dtype not in (torch.int64, torch.float32, torch.bool):
        how = f"{name}.long() or {name}.float()"
        raise UserError(f"data set: {name} is {y.dtype}; int64 class numbers or float32 targets are needed: {how}")
    if y.is_floating_point() and bool(y.isinf().any()):  # the task decides whether NaN is an ignored target
        row = int(y.isinf().nonzero()[0, 0])
        raise UserError(f"data set: {name} holds a target that is infinite, first in row {row}; correct or drop it")
    if is_labels(y, classes) and bool((odd := (y < 0) | (y >= classes)).any()):
        row = int(odd.nonzero()[0, 0])
        raise UserError(
            f"data set: {name} holds labels {int(y.min())}..{int(y.max())}; with classes={classes} 0..{classes - 1} "
            f"is allowed; the first other one is in row {row}"
        )


def _check_owners(name: str, owner: Any, rows: int, names: tuple[str, ...]) -> None:
    _check_tensor(name, owner)
    if owner.dtype != torch.int64 or tuple(owner.shape) != (rows,):
        what = f"{name} is {owner.dtype} of shape {tuple(owner.shape)}"
        raise UserError(f"data set: {what}; int64 ({rows},), one a row, is needed")
    lowest = -1 if name == "test_site" else 0
    if rows and (int(owner.min()) < lowest or (names and int(owner.max()) >= len(names))):
        what = f"{name} holds sites {int(owner.min())}..{int(owner.max())}"
        raise UserError(f"data set: {what}, but {len(names)} sites are named: {names}")
