"""Named tensors in one flat row, and read-only views of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from torch import Tensor


class Packing:
    """Named tensors <-> one flat row. `size` is in entries."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name, shape in self.shapes.items():
            self.spans[name] = (at, at + prod(shape))
            at += prod(shape)
        self.size = at

    def views(self, rows: Tensor) -> Views:
        """Views into a row (size,) or rows (m, size); each has the row's leading shape, then the slot's own."""
        lead = rows.shape[:-1]
        return Views({n: rows[..., a:b].view((*lead, *self.shapes[n])) for n, (a, b) in self.spans.items()})

    def write(self, row: Tensor, values: Mapping[str, Any]) -> None:
        """Write named values into a row, in place; slots that are not named stay as they were.

        values: tensors of the slot's shape, or numbers for all of its entries; they may be views of the row itself, in
        any order. Raises ValueError for another shape.
        """
        of_row = {n: v.detach().clone() for n, v in values.items() if isinstance(v, Tensor) and share_memory(v, row)}
        for name, value in {**values, **of_row}.items():
            a, b = self.spans[name]
            if not isinstance(value, Tensor):
                row[a:b] = value
            elif tuple(value.shape) == self.shapes[name]:
                row[a:b] = value.detach().reshape(-1)  # a row keeps no graph alive
            else:
                raise ValueError(f"slot {name!r} holds {self.shapes[name]}, not {tuple(value.shape)}")


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


class Views:
    """Read-only attribute access to named tensors: views.c_i."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        object.__setattr__(self, "_tensors", dict(tensors))

    _tensors: dict[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            declared = ", ".join(each for each in self._tensors if not each.startswith("_")) or "none"
            raise AttributeError(f"no slot {name!r} is declared here (declared: {declared})") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"slot {name!r} is read-only: return the new value, the engine stores it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors
