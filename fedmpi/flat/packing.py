"""Packing of named tensors into one flat row, and read-only access to them by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

from torch import Tensor


class Packing:
    """The positions of named tensors (slots) in one flat row of `size` entries."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Arrange slots with these shapes one after another, in the order of the mapping."""
        self.shapes = dict(shapes)
        self.spans: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, shape in self.shapes.items():
            self.spans[name] = (offset, offset + prod(shape))
            offset += prod(shape)
        self.size = offset

    def views(self, rows: Tensor) -> Views:
        """Return views of all slots of a row (size,) or of rows (m, size); they have shapes (*shape) or (m, *shape)."""
        return Views({}, self.spans, partial(self.view, rows))

    def view(self, rows: Tensor, name: str) -> Tensor:
        """Return a view of one slot of a row (size,) or of rows (m, size)."""
        (a, b), shape = self.spans[name], self.shapes[name]
        columns = rows.narrow(-1, a, b - a)
        return columns if len(shape) == 1 else columns.view((*rows.shape[:-1], *shape))

    def write(self, row: Tensor, values: Mapping[str, Any]) -> None:
        """Write named values into a row, in place; slots that are not named keep their values.

        Args:
            values: slot name -> a tensor of the slot's shape, or a number that fills the slot. Tensors may be views of
                the row itself.

        Raises:
            ValueError: a tensor does not have the shape of its slot.
        """
        new = dict[str, Any]()
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.shape != self.shapes[name]:
                    raise ValueError(
                        f"slot {name!r} has shape {self.shapes[name]}, but the tensor has shape {tuple(value.shape)}"
                    )
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
    """Read-only access to named tensors as attributes, for example `views.c_i`."""

    __slots__ = ("_make", "_names", "_tensors")

    def __init__(
        self, tensors: Mapping[str, Tensor], names: Collection[str] = (), make: Callable[[str], Tensor] | None = None
    ) -> None:
        """Set up access to tensors by name; tensors that do not exist yet are created on first use.

        Args:
            tensors: the tensors that exist already, by name.
            names: the names of all tensors; by default the names in `tensors`.
            make: a function that creates the tensor with a given name.
        """
        object.__setattr__(self, "_tensors", dict(tensors))
        object.__setattr__(self, "_names", names or self._tensors)
        object.__setattr__(self, "_make", make)

    _tensors: dict[str, Tensor]
    _names: Collection[str]
    _make: Callable[[str], Tensor]

    def with_overrides(self, other: Views) -> Views:
        """Return one object with the tensors of both; if a name is in both, the tensor of `other` is used."""
        if not other._names:
            return self
        names = dict.fromkeys((*self._names, *other._names))
        return Views({}, names, lambda name: getattr(other if name in other else self, name)) if names else self

    def __getattr__(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            if name not in self._names:
                declared = ", ".join(each for each in self._names if not each.startswith("_")) or "none"
                raise AttributeError(f"there is no slot {name!r} here; the declared slots are: {declared}")
            tensor = self._tensors[name] = self._make(name)
        return tensor

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"slot {name!r} is read-only; return its new value from the hook, and the engine stores it"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names
