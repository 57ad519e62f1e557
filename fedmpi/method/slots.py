"""Slots: named tensors that a client or the server keeps, sends or receives, and the rounds in which they are sent.

    class Scaffold(Method):
        client_state = Slots(c_i=FLAT)          # the engine creates, stores, moves and checkpoints it
        sends = Slots(dw=SHARED, dc=FLAT)       # one flat row per client, gathered without headers

The dimensions of a slot are whole numbers; letters, whose values the engine takes from the model:
    d parameters, s parameters that are sent, h parameters of the head, b float buffers, c classes, z features,
    N clients;
names of layout groups; and names of the method's own options, as in Slot(("models", "d")). Letters and groups take
precedence over options of the same name. In `sends`, s counts the parameters that are sent in the round at hand;
elsewhere those that are sent in any round.

A slot has the type of the model: float32, or float64 for a model of your own that calls .double() (and x.double() in
forward, since samples are float32). Values that a hook returns in float64 are rounded to that type. A counter in
float32 is exact up to 2^24.

Keep state in slots only. A method is frozen, so self.x = ... is an error. A value in a list or dictionary on self, or
in a module's variable, would be lost when the run resumes from a checkpoint, and each rank would have its own, so that
results depend on the number of ranks. `fedmpi verify RUN_DIR --rounds all` detects this: it replays the last rounds
from the checkpoints of the run (not with checkpoint.every 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedmpi.flat.layout import EVERYTHING
from fedmpi.flat.packing import Packing
from fedmpi.method.context import State, Uploads

# Names that `updates.name` and `client.state.name` have for other things.
RESERVED = {name for name in (*dir(Uploads), *Uploads.__annotations__, *dir(State)) if not name.startswith("_")}


@dataclass(frozen=True)
class Slot:
    """The shape and the initial value of one named tensor.

    `initial` and `start` apply to client_state and server_state. Slots of `scratch` start at zero.

    dims: the dimensions (see above).

    initial: whether it starts as the initial model. The last dimension is then d, s, h or b.

    start: a number; the name of an option that holds it; or, in server_state, the name of a function of the method
    `f(self, shape, generator) -> tensor`, which is called once with a random generator on the CPU (for networks of the
    server's own, or several different global models).

    change: whether the server adds the value to what it has, as it does with dw. `comm.compression: int8` applies to
    such slots.
    """

    dims: tuple[str | int, ...] = ()
    initial: bool = False
    start: float | str = 0.0
    change: bool = False

    def times(self, n: str | int) -> Slot:
        """Return a slot with one more leading dimension n: FLAT.times("N") is (N, d)."""
        return replace(self, dims=(n, *self.dims))


SCALAR = Slot()  # one number
FLAT = Slot(("d",))  # like the parameters
SHARED = Slot(("s",))  # like the parameters that are sent
CHANGE = Slot(("d",), change=True)  # a change of a vector like the parameters
HEAD_FLAT = Slot(("h",))  # like the parameters of the head
PER_CLASS = Slot(("c",))  # one number per class
PROTOTYPES = Slot(("c", "z"))  # one feature vector per class
INITIAL = Slot(("d",), initial=True)  # starts as the initial model
BUFFERS = Slot(("b",))  # like the float buffers
INITIAL_BUFFERS = Slot(("b",), initial=True)  # starts as the initial float buffers


class Slots(dict[str, Slot]):
    """Named slots in order: Slots(name=SLOT, ...).

    Raises TypeError for a name that an attribute of `updates` already has, in every declaration.
    """

    def __init__(self, **slots: Slot) -> None:
        for name, slot in slots.items():
            if not isinstance(slot, Slot):
                raise TypeError(
                    f"slot {name!r} is {slot!r}; it must be a Slot, such as FLAT, SCALAR or Slot(('c', 'z'))"
                )
            if name in RESERVED or name.startswith("_"):
                raise TypeError(f"a slot cannot be called {name!r}; taken: _..., {', '.join(sorted(RESERVED))}")
        super().__init__(slots)

    def bind(self, sizes: Mapping[str, int]) -> Packing:
        """Return the packing of these slots into one flat vector.

        Args:
            sizes: the value of each dimension letter, group and option.
        """
        shapes = dict[str, tuple[int, ...]]()
        for name, slot in self.items():
            unknown = [dim for dim in slot.dims if isinstance(dim, str) and dim not in sizes]
            if unknown:
                raise TypeError(f"slot dimension {unknown[0]!r} is not known; known: {', '.join(sizes)}, whole numbers")
            shapes[name] = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in slot.dims)
        return Packing(shapes)


@dataclass(frozen=True)
class Travel:
    """What clients upload in a round: the layout `groups` without those in `but`, and the `slots` of `sends`.

    The server updates and broadcasts the same groups. A group that is sent in no round belongs to the client. A group
    that is left out of some rounds does not change on the server in these rounds, and the clients' changes to it are
    lost unless the method stores them.
    """

    groups: tuple[str, ...] = (EVERYTHING,)
    but: tuple[str, ...] = ()
    slots: tuple[str, ...] | None = None  # None: all
