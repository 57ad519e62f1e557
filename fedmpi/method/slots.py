"""Slots: named tensors that a client or the server keeps, sends or receives, and the rounds in which they are sent.

    class Scaffold(Method):
        client_state = Slots(c_i=FLAT)          # created, stored, moved and checkpointed by the engine
        sends = Slots(dw=SHARED, dc=FLAT)       # sent as one flat row per client

A dimension of a slot is one of
- an integer;
- a letter, whose value the engine takes from the model: d parameters, s parameters that are sent, h parameters of the
  head, b float buffers, c classes, z features, N clients;
- the name of a layout group, which stands for its number of parameters;
- the name of an option of the method, as in Slot(("models", "d")).
Letters and groups take precedence over options of the same name. In `sends`, s is the number of parameters that are
sent in the current round; elsewhere it is the number of parameters that are sent in at least one round.

A slot has the dtype of the model: float32, or float64 for a custom model that calls .double() (and x.double() in
forward, since samples are float32). Values that a hook returns in float64 are rounded to this dtype. A counter in
float32 is exact up to 2^24.

Keep state in slots only. A method is frozen, so self.x = ... raises an error. A value in a list or dictionary held by
self, or in a global variable, would be lost when the run resumes from a checkpoint. Each rank would also have its own
value, so that results would depend on the number of ranks. `fedmpi verify RUN_DIR --rounds all` detects such state: it
replays the last rounds from the checkpoints of the run (unless checkpoint.every is 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedmpi.flat.layout import ALL_GROUPS
from fedmpi.flat.packing import Packing
from fedmpi.method.context import State, Uploads

# Names that slots cannot have, because `updates.NAME` or `client.state.NAME` is another attribute.
RESERVED = {name for name in (*dir(Uploads), *Uploads.__annotations__, *dir(State)) if not name.startswith("_")}


@dataclass(frozen=True)
class Slot:
    """The shape and the initial value of one named tensor.

    `from_initial_model` and `start` apply to client_state and server_state. Slots of `accumulators` start at zero.

    dims: the dimensions, as described at the top of this module.

    from_initial_model: whether the tensor starts as a copy of the initial model's weights (last dimension d, s or h) or
    float buffers (last dimension b).

    start: the initial value: a number; the name of an option of the method whose value is this number; or, in
    server_state, the name of the method's own function f(self, shape, generator), which returns the tensor. It is
    called once, with a random generator on the CPU. It can, for example, initialise a network on the server.

    is_update: whether the slot, like dw, is an update, which the server adds to a value that it stores.
    `comm.compression: int8` applies only to such slots.
    """

    dims: tuple[str | int, ...] = ()
    from_initial_model: bool = False
    start: float | str = 0.0
    is_update: bool = False

    def with_leading_dim(self, n: str | int) -> Slot:
        """Return this slot with an additional first dimension n: FLAT.with_leading_dim("N") has shape (N, d)."""
        return replace(self, dims=(n, *self.dims))


SCALAR = Slot()  # one number
FLAT = Slot(("d",))  # like the parameters
SHARED = Slot(("s",))  # like the parameters that are sent
UPDATE = Slot(("d",), is_update=True)  # a difference of vectors like the parameters
HEAD_FLAT = Slot(("h",))  # like the parameters of the head
PER_CLASS = Slot(("c",))  # one number per class
PROTOTYPES = Slot(("c", "z"))  # one feature vector per class
INITIAL = Slot(("d",), from_initial_model=True)  # like the parameters; starts as the initial model
BUFFERS = Slot(("b",))  # like the float buffers
INITIAL_BUFFERS = Slot(("b",), from_initial_model=True)  # like the float buffers; starts as the initial ones


class Slots(dict[str, Slot]):
    """Ordered mapping of names to slots: Slots(name=SLOT, ...).

    Raises:
        TypeError: a value is not a Slot, or a name is reserved for an attribute of `updates` or `client.state`.
    """

    def __init__(self, **slots: Slot) -> None:
        for name, slot in slots.items():
            if not isinstance(slot, Slot):
                raise TypeError(
                    f"slot {name!r} is {slot!r}; it must be a Slot, for example FLAT, SCALAR or Slot(('c', 'z'))"
                )
            if name in RESERVED or name.startswith("_"):
                raise TypeError(
                    f"slot name {name!r} is not allowed; reserved names: _..., {', '.join(sorted(RESERVED))}"
                )
        super().__init__(slots)

    def to_packing(self, sizes: Mapping[str, int]) -> Packing:
        """Return the packing of these slots into one flat vector.

        Args:
            sizes: the value of each letter, layout group and option that a dimension may name.

        Raises:
            TypeError: a dimension has an unknown name.
        """
        shapes = dict[str, tuple[int, ...]]()
        for name, slot in self.items():
            unknown = [dim for dim in slot.dims if isinstance(dim, str) and dim not in sizes]
            if unknown:
                raise TypeError(
                    f"slot {name!r}: dimension {unknown[0]!r} is unknown; allowed: {', '.join(sizes)}, or an integer"
                )
            shapes[name] = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in slot.dims)
        return Packing(shapes)


@dataclass(frozen=True)
class SharedParts:
    """What clients upload in a round: layout groups of the model, and slots of the method's `sends`.

    The server updates and broadcasts the same groups. A group that is never sent is personal: each client keeps its own
    values. If a group is sent only in some rounds, its values on the server do not change in the other rounds, and the
    clients' changes in those rounds are lost unless the method stores them.

    groups: the layout groups that are sent; "*": all.

    exclude: groups that are not sent, although `groups` includes them.

    slots: the slots that are sent; None: all slots of `sends`.
    """

    groups: tuple[str, ...] = (ALL_GROUPS,)
    exclude: tuple[str, ...] = ()
    slots: tuple[str, ...] | None = None  # None: all
