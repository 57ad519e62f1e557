"""Declarations: what a client keeps, sends and receives, packed to flat rows of known size, and when it travels.

    class Scaffold(Method):
        client_state = Slots(c_i=FLAT)          # the engine creates, stores, moves and checkpoints it
        sends = Slots(dw=SHARED, dc=FLAT)       # one flat row a client, gathered without headers
A slot's shape is written in whole numbers and in dimension letters that the engine fills in for the model at hand:
    d parameters, s those of them that travel, h those of the head, b float buffers, c classes, z features, N clients,
in names of layout groups, and in names of the method's own options:  Slot(("models", "d")). Letters and groups come
before options of the same name. In `sends` s is what travels in the round at hand, elsewhere what travels in any.
A slot is of the model's type: float32, unless the model is double. A counter that is float32 ends at 2^24, and what a
hook returns in float64 is rounded. The model is double where it is one of your own that calls .double(), and in forward
x.double(), as samples are float32; then w, updates, slots, checkpoints and model.safetensors are.

State lives in slots alone. A method is frozen: self.x = ... is an error. What is kept in a list or dictionary on self,
or in a variable of a module, runs; but it is lost when the run goes on from a checkpoint, and each rank has its own, so
that results depend on the number of ranks and on who trains whom. `fedmpi verify RUN_DIR --rounds all` finds it: its
replay of the last rounds begins after the checkpoints that the run has kept, without what was remembered (with
checkpoint.every 0 it may find nothing).
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
    """Shape, and what it starts at: a number, or the initial model (`initial`; the last dimension is d, s, h or b).

    `initial` and `start` are of client_state and server_state; `scratch` starts at zero, what is sent at nothing.

    start: a number, the name of an option, or, in server_state, of a hook of the method
    `f(self, shape, generator) -> tensor of that shape`, called once, with a generator (CPU) of the run's seed: networks
    of the server's own, several global models that differ.

    change: what is sent is added to what the server has, as dw is (comm.wire: int8 is for such slots).
    """

    dims: tuple[str | int, ...] = ()
    initial: bool = False
    start: float | str = 0.0
    change: bool = False

    def times(self, n: str | int) -> Slot:
        """n of them, one below the other: FLAT.times("N") is (N, d)."""
        return replace(self, dims=(n, *self.dims))


SCALAR = Slot()  # one number
FLAT = Slot(("d",))  # like the parameters
SHARED = Slot(("s",))  # like the parameters that travel
CHANGE = Slot(("d",), change=True)  # of something like the parameters
HEAD_FLAT = Slot(("h",))  # like the head's parameters
PER_CLASS = Slot(("c",))  # one number a class
PROTOTYPES = Slot(("c", "z"))  # one feature vector a class
INITIAL = Slot(("d",), initial=True)  # starts as the initial model
BUFFERS = Slot(("b",))  # like the float buffers
INITIAL_BUFFERS = Slot(("b",), initial=True)  # starts as the initial float buffers


class Slots(dict[str, Slot]):
    """Slots(name=SLOT, ...): names and shapes, in order. TypeError for a name that `updates.name` has for something
    else.

    Such names are refused in every declaration, be it sent or not.
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
        """The packing of these slots for a model with these sizes."""
        shapes = dict[str, tuple[int, ...]]()
        for name, slot in self.items():
            unknown = [dim for dim in slot.dims if isinstance(dim, str) and dim not in sizes]
            if unknown:
                raise TypeError(f"slot dimension {unknown[0]!r} is not known; known: {', '.join(sizes)}, whole numbers")
            shapes[name] = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in slot.dims)
        return Packing(shapes)


@dataclass(frozen=True)
class Travel:
    """What goes up in a round: the model's layout `groups` without those in `but`, and the declared upload `slots`.

    What goes up is what the server steps, and what it then tells again. A group that never travels is the client's own;
    one that rests in some rounds stays as it is on the server, and what clients make of it is theirs to keep or lose.
    """

    groups: tuple[str, ...] = (EVERYTHING,)  # all
    but: tuple[str, ...] = ()
    slots: tuple[str, ...] | None = None  # None: all of `sends`
