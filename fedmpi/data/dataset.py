"""Dataset: the tensors of one data set, training and test part, one row per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError


@dataclass(frozen=True, eq=False)
class Dataset:
    """n training and t test samples. Images (n, C, H, W), already normalised; tables (n, f).

    Labels are int64 in 0..classes-1, or float32 with classes=1 (regression). Raises UserError if the parts do not fit
    together, so that the author of a source learns at once what is wrong.

    >>> Dataset(torch.zeros(2, 3), torch.tensor([0, 1]), torch.zeros(1, 3), torch.tensor([1]), classes=2).input_shape
    (3,)
    """

    train_x: Tensor  # (n, ...) float32; int64 for symbols (text)
    train_y: Tensor  # (n,)
    test_x: Tensor  # (t, ...); t may be 0
    test_y: Tensor  # (t,)
    classes: int
    site: Tensor | None = None  # (n,) int64, natural owner of each training row
    test_site: Tensor | None = None  # (t,) int64
    site_names: tuple[str, ...] = ()  # name of site 0, 1, ...

    def __post_init__(self) -> None:
        if isinstance(self.classes, np.integer):
            object.__setattr__(self, "classes", int(self.classes))
        if not isinstance(self.classes, int) or isinstance(self.classes, bool) or self.classes < 1:
            raise UserError(f"data set: classes is {self.classes!r}; a whole number >= 1 is needed (1 = regression)")
        for name in ("train_x", "train_y", "test_x", "test_y", "site", "test_site"):
            _check_tensor(name, getattr(self, name), optional=name in ("site", "test_site"))
        if len(self.train_x) == 0:
            raise UserError("data set: there is no training sample")
        _check_rows("train_x", self.train_x, "train_y", self.train_y)
        _check_rows("test_x", self.test_x, "test_y", self.test_y)
        if self.train_x.shape[1:] != self.test_x.shape[1:] or self.train_x.dtype != self.test_x.dtype:
            raise UserError(
                f"data set: a row of train_x is {_look(self.train_x)}, one of test_x {_look(self.test_x)}; they "
                "must agree"
            )
        for name, x in (("train_x", self.train_x), ("test_x", self.test_x)):
            _check_values(name, x)
        for name, y in (("train_y", self.train_y), ("test_y", self.test_y)):
            _check_labels(name, y, self.classes)
        _check_sites("site", self.site, "train_x", self.train_x, self.site_names)
        _check_sites("test_site", self.test_site, "test_x", self.test_x, self.site_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample: (C, H, W) or (f,)."""
        return tuple(self.train_x.shape[1:])


def _check_tensor(name: str, x: Any, optional: bool) -> None:
    """A dense tensor of rows on the CPU without a graph."""
    if x is None and optional:
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


def _look(x: Tensor) -> str:
    return f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"


def _check_rows(x_name: str, x: Tensor, y_name: str, y: Tensor) -> None:
    if y.ndim != 1 or len(x) != len(y):
        raise UserError(
            f"data set: {x_name} has {len(x)} rows, {y_name} the shape {tuple(y.shape)}; ({len(x)},) is needed"
        )


def _check_values(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.int64):
        raise UserError(f"data set: {name} is {x.dtype}; float32 (or int64 for symbols) is needed: {name}.float()")
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        row = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0, 0]) if x.ndim > 1 else 0
        raise UserError(f"data set: {name} holds a value that is not finite, first in row {row}; fill or drop it")


def _check_labels(name: str, y: Tensor, classes: int) -> None:
    if y.dtype == torch.float32 and classes == 1:
        if not bool(torch.isfinite(y).all()):
            raise UserError(f"data set: {name} holds a target that is not finite")
        return
    if y.dtype != torch.int64:
        raise UserError(f"data set: {name} is {y.dtype}; int64 class numbers, or float32 with classes=1, are needed")
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise UserError(
            f"data set: {name} holds labels {int(y.min())}..{int(y.max())}; with classes={classes} 0..{classes - 1} "
            "is allowed"
        )


def _check_sites(name: str, site: Tensor | None, x_name: str, x: Tensor, names: tuple[str, ...]) -> None:
    if site is None:
        return
    if site.dtype != torch.int64 or tuple(site.shape) != (len(x),):
        raise UserError(
            f"data set: {name} is {site.dtype} of shape {tuple(site.shape)}; int64 ({len(x)},), one a row of "
            f"{x_name}, is needed"
        )
    if len(site) and (int(site.min()) < 0 or (names and int(site.max()) >= len(names))):
        raise UserError(
            f"data set: {name} holds sites {int(site.min())}..{int(site.max())}, but {len(names)} sites are named: "
            f"{names}"
        )
