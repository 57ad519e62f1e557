"""Dataset: the tensors of one data set, training and test part, one row per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, Samples, Shape, named_tensors, sample_shape
from fedmpi.data.pictures import Pictures
from fedmpi.data.preparation import Preparation


@dataclass(frozen=True, eq=False)
class Dataset:
    """n training and t test samples. Images (n, C, H, W), already normalised, or Pictures; tables (n, f); symbols
    (n, L) int64.

    A sample may be several tensors: then train_x and test_x are dictionaries, name -> (n, ...), of which the model's
    `forward` gets each under its name, or all of them as one dictionary (fedmpi/common/inputs.py).
    Targets (n, ...) may have any shape; the task says what it needs, and whether they may be NaN. Class numbers are
    int64 in 0..classes-1; for real targets classes is the number of outputs, 1 mostly. Raises UserError if the parts do
    not fit together, so that the author of a source learns at once what is wrong.

    >>> Dataset(torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(1, 3), torch.tensor([1]), classes=2).input_shape
    (3,)
    """

    train_x: Any  # (n, ...) float32; int64 for symbols (text); bool too, where there are several
    train_y: Tensor  # (n, ...) int64, float32 or bool
    test_x: Any  # (t, ...); t may be 0
    test_y: Tensor  # (t, ...)
    classes: int
    site: Tensor | None = None  # (n,) int64, natural owner of each training row
    test_site: Tensor | None = None  # (t,) int64; -1: of no site, so that the row is in the global test set alone
    site_names: tuple[str, ...] = ()  # name of site 0, 1, ...
    global_x: Tensor | None = None  # (t, ...) the rows of test_x as the global test set has them, if otherwise
    meaning: tuple[str, ...] = ()  # what inputs and classes stand for, in order: silos must agree in it
    group: Tensor | None = None  # (n,) int64: training rows with one number, such as a patient's, stay together
    preparation: Preparation | None = None  # by which the rows were prepared, and new ones will be

    def __post_init__(self) -> None:
        if isinstance(self.classes, np.integer):
            object.__setattr__(self, "classes", int(self.classes))
        if not isinstance(self.classes, int) or isinstance(self.classes, bool) or self.classes < 1:
            raise UserError(f"data set: classes is {self.classes!r}; a whole number >= 1 is needed (1 = regression)")
        for name in ("train_x", "test_x"):
            given: Any = getattr(self, name)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, _named(name, given))
        for name in ("train_x", "train_y", "test_x", "test_y", "site", "test_site", "group"):
            for said, x in named_tensors(getattr(self, name), name):
                _check_tensor(said, x, optional=name in ("site", "test_site", "group"))
        if len(self.train_x) == 0:
            raise UserError("data set: there is no training sample")
        for name, x, y_name, y in (
            ("train_x", self.train_x, "train_y", self.train_y),
            ("test_x", self.test_x, "test_y", self.test_y),
        ):
            for said, part in named_tensors(x, name):
                if len(part) != len(y):
                    has = f"{said} has {len(part)} rows, {y_name} the shape {tuple(y.shape)}"
                    raise UserError(f"data set: {has}; both need one row a sample")
                if not isinstance(part, Pictures):  # those are of bytes, all of which are numbers
                    _check_values(said, part, single=said == name)
            _check_targets(y_name, y, self.classes)
        if (sample_shape(self.train_x), self.train_x.dtype) != (sample_shape(self.test_x), self.test_x.dtype):
            raise UserError(
                f"data set: a row of train_x is {_look(self.train_x)}, one of test_x {_look(self.test_x)}; they "
                "must agree"
            )
        if (self.train_y.shape[1:], self.train_y.dtype) != (self.test_y.shape[1:], self.test_y.dtype):
            raise UserError(
                f"data set: a row of train_y is {_look(self.train_y)}, one of test_y {_look(self.test_y)}; they "
                "must agree"
            )
        if self.global_x is not None:
            _check_tensor("global_x", self.global_x, optional=False)
            _check_values("global_x", self.global_x, single=True)
            if len(self.global_x) != len(self.test_x) or _look(self.global_x) != _look(self.test_x):
                raise UserError(f"data set: global_x is {_look(self.global_x)} a row; it must be as test_x, row by row")
        _check_sites("site", self.site, "train_x", self.train_x, self.site_names)
        _check_sites("test_site", self.test_site, "test_x", self.test_x, self.site_names)
        _check_sites("group", self.group, "train_x", self.train_x, ())

    @property
    def input_shape(self) -> Shape:
        """Shape of one sample: (C, H, W) or (f,); by name where it is several tensors."""
        return sample_shape(self.train_x)


def is_labels(y: Tensor, classes: int) -> bool:
    """Whether a sample's target is the number of its class."""
    return classes > 1 and y.dtype == torch.int64 and y.ndim == 1


def _named(name: str, given: Mapping[Any, Any]) -> Inputs:
    odd = next((key for key in given if not isinstance(key, str) or not key.isidentifier()), None)
    if not given or odd is not None:
        text = "is empty" if not given else f"has the key {odd!r}"
        raise UserError(f"data set: {name} {text}; a dictionary of tensors by names such as input_ids is needed")
    return Inputs(given)


def _check_tensor(name: str, x: Any, optional: bool) -> None:
    """A dense tensor of rows on the CPU without a graph."""
    if x is None and optional:
        return
    if isinstance(x, Pictures) and name in ("train_x", "test_x"):
        return
    if not isinstance(x, Tensor):
        advice = ": torch.from_numpy(...)" if isinstance(x, np.ndarray) else ""
        raise UserError(f"data set: {name} is {type(x).__name__}; a torch.Tensor is needed{advice}")
    odd = "a number without rows" if x.ndim == 0 else "a complex tensor" if x.is_complex() else ""
    odd = odd or ("a sparse tensor" if x.layout is not torch.strided else "")
    odd = odd or (f"a tensor on {x.device}" if x.device.type != "cpu" else "")
    odd = odd or ("a tensor that requires gradients (.detach() it)" if x.requires_grad else "")
    if odd:
        raise UserError(f"data set: {name} is {odd}; a dense tensor of real numbers on the CPU is needed")


def _look(x: Samples) -> str:
    return "; ".join(
        f"{said} {tuple(part.shape[1:])} {str(part.dtype).removeprefix('torch.')}".strip()
        for said, part in named_tensors(x, "")
    )


def _check_values(name: str, x: Tensor, single: bool) -> None:
    if x.dtype not in (torch.float32, torch.int64) and (single or x.dtype != torch.bool):
        whole = not (x.is_floating_point() or x.dtype == torch.bool)
        how = f"{name}.long() for symbols, {name}.float() for numbers" if whole else f"{name}.float()"
        raise UserError(f"data set: {name} is {x.dtype}; float32 (or int64 for symbols) is needed: {how}")
    # By blocks of rows: what isfinite makes on its way takes as much memory as they do.
    if x.is_floating_point() and not all(bool(torch.isfinite(some).all()) for some in x.split(1 << 14)):
        row = int((~torch.isfinite(x)).nonzero()[0, 0])
        raise UserError(f"data set: {name} holds a value that is not finite, first in row {row}; fill or drop it")


def _check_targets(name: str, y: Tensor, classes: int) -> None:
    if y.dtype not in (torch.int64, torch.float32, torch.bool):
        raise UserError(
            f"data set: {name} is {y.dtype}; int64 class numbers or float32 targets are needed: {name}.long() or "
            f"{name}.float()"
        )
    if y.is_floating_point() and bool(y.isinf().any()):  # NaN may be a target to ignore, which the task knows
        row = int(y.isinf().nonzero()[0, 0])
        raise UserError(f"data set: {name} holds a target that is infinite, first in row {row}; correct or drop it")
    if is_labels(y, classes) and len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
        row = int(((y < 0) | (y >= classes)).nonzero()[0, 0])
        raise UserError(
            f"data set: {name} holds labels {int(y.min())}..{int(y.max())}; with classes={classes} 0..{classes - 1} "
            f"is allowed; the first other one is in row {row}"
        )


def _check_sites(name: str, site: Tensor | None, x_name: str, x: Samples, names: tuple[str, ...]) -> None:
    if site is None:
        return
    if site.dtype != torch.int64 or tuple(site.shape) != (len(x),):
        raise UserError(
            f"data set: {name} is {site.dtype} of shape {tuple(site.shape)}; int64 ({len(x)},), one a row of "
            f"{x_name}, is needed"
        )
    lowest = -1 if name == "test_site" else 0
    if len(site) and (int(site.min()) < lowest or (names and int(site.max()) >= len(names))):
        raise UserError(
            f"data set: {name} holds sites {int(site.min())}..{int(site.max())}, but {len(names)} sites are named: "
            f"{names}"
        )
