"""Declared state and messages: what a client keeps, sends and receives, packed to flat rows of known size.

    class Scaffold(Method):
        client_state = Slots(c_i=FLAT)          # the engine creates, stores, moves and checkpoints it
        sends = Slots(dw=SHARED, dc=FLAT)       # one flat row a client, gathered without headers
A slot's shape is written in dimension letters that the engine fills in for the model at hand:
    d parameters, s those of them that travel, h those of the head, b float buffers, c classes, z features, N clients,
or as the name of a layout group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Shape in dimension letters or groups; starts at 0, or as the initial model does (`initial`; d, h, b)."""

    dims: tuple[str, ...] = ()
    initial: bool = False

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[d] for d in self.dims)


SCALAR = Slot()
FLAT = Slot(("d",))  # like the parameters
SHARED = Slot(("s",))  # like the parameters that travel
HEAD = Slot(("h",))  # like the head's parameters
PER_CLASS = Slot(("c",))
PROTOTYPES = Slot(("c", "z"))  # one feature vector a class
INITIAL = Slot(("d",), initial=True)  # starts as the initial model
INITIAL_BUFFERS = Slot(("b",), initial=True)


class Slots(dict[str, Slot]):
    """Slots(name=SLOT, ...): names and shapes, in order."""

    def __init__(self, **slots: Slot) -> None:
        super().__init__(slots)

    def bind(self, sizes: Mapping[str, int]) -> Packing:
        """The packing of these slots for a model with these sizes."""
        return Packing({name: slot.shape(sizes) for name, slot in self.items()})


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
        """Views into a row (size,) or rows (m, size); each has the row's leading shape, then the slot's own.

        Rows that end early hold the beginning of their last slot, which is flat.
        """
        *lead, length = rows.shape
        shapes = {n: shape if self.spans[n][1] <= length else (-1,) for n, shape in self.shapes.items()}
        return Views({n: rows[..., a:b].view((*lead, *shapes[n])) for n, (a, b) in self.spans.items()})

    def write(self, row: Tensor, values: Mapping[str, Any]) -> None:
        """Write named values into a row, in place; what a row that ends early has no place for is left out."""
        for name, value in values.items():
            a, b = self.spans[name]
            if isinstance(value, Tensor):
                if value.numel() not in (b - a, len(row) - a):
                    raise ValueError(f"slot {name!r} holds {self.shapes[name]}, not {tuple(value.shape)}")
                row[a:b] = value.reshape(-1)[: len(row) - a]
            else:
                row[a:b] = value


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
            declared = ", ".join(self._tensors) or "none"
            raise AttributeError(f"no slot {name!r} is declared here (declared: {declared})") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"slot {name!r} is read-only: return the new value, the engine stores it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors
