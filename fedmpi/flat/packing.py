"""Named tensors in one flat row, and read-only views of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

from torch import Tensor


class Packing:
    """The layout of named tensors in one flat row of `size` entries."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name, shape in self.shapes.items():
            self.spans[name] = (at, at + prod(shape))
            at += prod(shape)
        self.size = at

    def views(self, rows: Tensor) -> Views:
        """Return views of the tensors in a row (size,) or in rows (m, size), with shapes (*shape) or (m, *shape)."""
        return Views({}, self.spans, partial(self.view, rows))

    def view(self, rows: Tensor, name: str) -> Tensor:
        """Return a view of one named tensor in a row (size,) or in rows (m, size)."""
        (a, b), shape = self.spans[name], self.shapes[name]
        columns = rows.narrow(-1, a, b - a)
        return columns if len(shape) == 1 else columns.view((*rows.shape[:-1], *shape))

    def write(self, row: Tensor, values: Mapping[str, Any]) -> None:
        """Write named values into a row, in place; slots without a value do not change.

        Args:
            values: tensors with the shape of the slot, or numbers for all of its entries; they may be views of the row
                itself.

        Raises:
            ValueError: a tensor has another shape.
        """
        new = dict[str, Any]()
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.shape != self.shapes[name]:
                    raise ValueError(f"slot {name!r} holds {self.shapes[name]}, not {tuple(value.shape)}")
                value = value.detach()  # a row must not keep a graph of autograd alive
                value = (value.clone() if have_same_storage(value, row) else value).reshape(-1)
            new[name] = value
        for name, value in new.items():
            a, b = self.spans[name]
            if a < b:
                row[a:b] = value


def have_same_storage(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same storage."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


class Views:
    """Read-only access to named tensors as attributes: views.c_i. Each view is created at its first use."""

    __slots__ = ("_make", "_names", "_tensors")

    def __init__(
        self, tensors: Mapping[str, Tensor], names: Collection[str] = (), make: Callable[[str], Tensor] | None = None
    ) -> None:
        """Args:
        tensors: tensors that exist already.
        names: names of all tensors; by default those of `tensors`.
        make: function that creates a tensor by its name.
        """
        object.__setattr__(self, "_tensors", dict(tensors))
        object.__setattr__(self, "_names", names or self._tensors)
        object.__setattr__(self, "_make", make)

    _tensors: dict[str, Tensor]
    _names: Collection[str]
    _make: Callable[[str], Tensor]

    def merge(self, other: Views) -> Views:
        """Return views of these tensors and of `other`'s, which take precedence."""
        if not other._names:
            return self
        names = dict.fromkeys((*self._names, *other._names))
        return Views({}, names, lambda name: getattr(other if name in other else self, name)) if names else self

    def __getattr__(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            if name not in self._names:
                declared = ", ".join(each for each in self._names if not each.startswith("_")) or "none"
                raise AttributeError(f"no slot {name!r} is declared here (declared: {declared})")
            tensor = self._tensors[name] = self._make(name)
        return tensor

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"slot {name!r} is read-only: return the new value, the engine stores it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names
