"""What crosses between server and client, as flat rows whose size every rank knows beforehand.

    download  [w shared | float buffers shared | declared server state | word]      broadcast, one for all
    own       [declared receives_own]                                               one row a client, where declared
    upload    [declared slots | float buffers shared | loss, seconds, stop flag]    one row a client
    kept      [own weights | own float buffers | declared client state]             stays with the client
Entries have the model's type. The engine's own fields begin with an underscore.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fedmpi.layout import EVERYTHING, HEAD, FlatModel, Part
from fedmpi.method import Method
from fedmpi.slots import Packing, Slots


class Wire:
    """Sizes and packings of all messages of one experiment."""

    def __init__(self, method: Method, model: FlatModel, classes: int, features: int, clients: int) -> None:
        self.model = model
        layout, buffers = model.layout, model.buffer_layout
        every = layout.groups() | buffers.groups()
        shared = every if EVERYTHING in method.shared else set(method.shared)
        self.shared = Part(layout.size, layout.ranges(shared))
        self.shared_b = Part(buffers.size, buffers.ranges(shared))
        self.own = Part(layout.size, layout.ranges(every - shared))
        self.own_b = Part(buffers.size, buffers.ranges(every - shared))
        self.head = Part(layout.size, layout.ranges({HEAD}))
        self.sizes = {
            "d": layout.size,
            "s": self.shared.size,
            "h": self.head.size,
            "b": buffers.size,
            "c": classes,
            "z": features,
            "N": clients,
        }
        self.server_slots, self.client_slots = method.server_state, method.client_state
        self.server = method.server_state.bind(self.sizes)
        received = {name: method.server_state[name].shape(self.sizes) for name in method.receives}
        self.download = Packing({"_w": (self.shared.size,), "_b": (self.shared_b.size,), **received, "_word": (1,)})
        self.own_download = method.receives_own.bind(self.sizes)
        sent = method.sends.bind(self.sizes).shapes
        self.upload = Packing({**sent, "_b": (self.shared_b.size,), "_loss": (), "_seconds": (), "_stop": ()})
        kept = method.client_state.bind(self.sizes).shapes
        self.kept = Packing({"_w": (self.own.size,), "_b": (self.own_b.size,), **kept})
        self.scratch = method.scratch.bind(self.sizes)

    def shared_segments(self) -> list[tuple[str, int, int]]:
        """(name, start, stop) of the tensors that travel, in the shared vector (s,)."""
        found, at = [], 0
        for segment in self.model.layout.segments:
            if any(a <= segment.start and segment.stop <= b for a, b in self.shared.ranges):
                found.append((segment.name, at, at + segment.stop - segment.start))
                at = found[-1][2]
        return found

    def initial_server_state(self, w: Tensor, b: Tensor, device: torch.device) -> Tensor:
        """The server's declared state at the start, one flat row."""
        row = torch.zeros(self.server.size, dtype=w.dtype, device=device)
        self._fill(self.server, self.server_slots, row, w, b)
        return row

    def initial_client_state(self, w: Tensor, b: Tensor) -> Tensor:
        """A client's kept row at the start: the initial model's own parts, declared slots at their start values."""
        row = torch.zeros(self.kept.size, dtype=w.dtype, device=w.device)
        self.kept.write(row, {"_w": self.own.take(w), "_b": self.own_b.take(b)})
        self._fill(self.kept, self.client_slots, row, w, b)
        return row

    def _fill(self, packing: Packing, slots: Slots, row: Tensor, w: Tensor, b: Tensor) -> None:
        source = {"d": w, "s": self.shared.take(w), "h": self.head.take(w), "b": b}
        for name, slot in slots.items():
            if slot.initial:
                # A leading dimension (N, h) repeats the initial value.
                start = source[slot.dims[-1]].to(row.device).expand(packing.shapes[name])
                packing.write(row, {name: start})

    def compose(self, part: Part, received: Tensor, own: Part, kept: Tensor, out: Tensor | None = None) -> Tensor:
        """The full flat vector of a client: what was received, and its own parts. No copy where everything travels."""
        if part.whole:
            return received
        out = torch.empty(part.size + own.size, dtype=received.dtype, device=received.device) if out is None else out
        part.put(received, out)
        own.put(kept, out)
        return out


def group_part(model: FlatModel, groups: Collection[str]) -> Part:
    """The part of the flat vector that some groups cover."""
    return Part(model.layout.size, model.layout.ranges(groups))
