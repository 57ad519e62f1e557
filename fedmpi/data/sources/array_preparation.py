"""How the arrays of an .npz file become inputs, those of the training and new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.data.preparation import NewRows, Preparation, Request, array_rows, check_sample


@dataclass(frozen=True)
class ArrayPreparation(Preparation):
    """The array of an .npz file whose rows are samples.

    sample: the shape of one as a model sees it; uint8: whether the array held bytes, which are scaled to 0..1; mean,
    std: one number a channel, by which x becomes (x - mean) / std.
    """

    sample: tuple[int, ...]
    uint8: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    kind: ClassVar[str] = "arrays"

    def read(self, request: Request) -> NewRows:
        from fedmpi.data.sources.npz import inputs, own_names, targets_of  # which imports this module

        named, where = array_rows(request, "an .npz file")
        arrays = own_names(named)
        part = "" if "x" in arrays else "test_"
        if f"{part}x" not in arrays:
            raise UserError(f"{where} has no array 'x'; it holds {', '.join(named) or 'none'}")
        array = arrays[f"{part}x"]
        if (array.dtype == np.uint8) != self.uint8:
            wanted = "uint8, which is scaled to 0..1" if self.uint8 else "not uint8, which would be scaled to 0..1"
            raise UserError(f"{where}: {part}x is {array.dtype}; that of the training was {wanted}")
        x = inputs(array, f"{part}x", where, self.mean, self.std)
        check_sample(x, self.sample, where)
        ids, y = {"row": np.arange(len(x))}, arrays.get(f"{part}y")
        if y is None:
            return NewRows(ids, x)
        if len(y) != len(x):
            return NewRows(ids, x, no_targets=f"{where}: {part}y has {len(y)} rows, {part}x {len(x)}")
        return NewRows(ids, x, targets_of(y, f"{part}y", where))
