"""The layouts of messages between server and clients: flat rows whose sizes all ranks know in advance.

    broadcast      [command | declared server state | state of the server rule | float buffers | w]   to all ranks
    per client     [declared per_client_download]                                   one row per client, if declared
    upload         [loss, seconds, flag | float buffers | declared slots, large ones last]   one row per client
    client state   [own weights | own float buffers | declared client state | optimiser state]   stays with the client

Entries have the dtype of the model; w are its weights. The names of the engine's own fields (command, loss, seconds,
flag) begin with an underscore. The layout groups of w and of the buffers that a message contains depend on the round
(`Method.shared_parts`); each set of groups has its own message layout. With comm.compression, the large slots of an
upload, which are as wide as the model or one of its groups, are encoded in another format (flat/formats.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import add_error_context, make_located_error
from fedmpi.engine.hook_checks import check_declarations, numeric_options
from fedmpi.flat import linear
from fedmpi.flat.formats import Format, RowCodec
from fedmpi.flat.layout import ALL_GROUPS, ATOM, BODY, COEF, HEAD, NORM, Layout, Selection
from fedmpi.flat.model import FlatModel
from fedmpi.flat.packing import Packing
from fedmpi.method.base import Method
from fedmpi.method.slots import SharedParts, Slot, Slots

STANDARD_GROUPS = (BODY, NORM, HEAD, ATOM, COEF)
COMMAND = "_command"
# Under differential privacy of clients: the clip norm of the round, in the broadcast, and, with adaptive clipping,
# whether the norm of an upload was below it, in the upload.
CLIP, UNCLIPPED = "_clip", "_unclipped"
ENGINE_UPLOAD_NAMES = ("_loss", "_seconds", "_flag", UNCLIPPED)
# Number of values that the engine adds to a broadcast (the command) and to an upload (loss, seconds, flag).
ENGINE_DOWNLOAD_FIELDS, ENGINE_UPLOAD_FIELDS = 1, 3
# Flags of an upload: the rank was asked to stop; the code of the client failed; the client took no steps, so that there
# is no loss. 0: none of these.
STOP, FAILED, NO_STEPS = 1.0, 2.0, 3.0
Groups = frozenset[str]


@dataclass(frozen=True, eq=False)
class UploadLayout:
    """The layout of the uploads of one round: the fields of an upload row, and the parts of w and b in it."""

    packing: Packing
    w: Selection  # entries of w (d,)
    b: Selection  # entries of the float buffers
    dw_layout: Layout  # layout of the slot dw
    codec: RowCodec | None  # encoding of the large slots; None: rows are sent as they are
    size: int  # size of a row as sent (encoded, if there is a codec), in entries of the model's type

    @property
    def payload_start(self) -> int:
        """The first entry of a row after the engine's own fields."""
        return max(end for name, (_, end) in self.packing.spans.items() if name in ENGINE_UPLOAD_NAMES)

    def write_header(self, row: Tensor, loss: Tensor | float | None, seconds: float, flag: float) -> None:
        """Write the engine's own fields at the beginning of an upload row.

        Args:
            loss: the client's training loss; None if the client took no steps. A tensor means that the loss is already
                in the row; it is then not written again.
            seconds: the duration of the client's training.
            flag: STOP (the rank was asked to stop), FAILED (the client's code raised an error) or 0.
        """
        loss, flag = (0.0, flag or NO_STEPS) if loss is None else (loss, flag)
        first_field = int(isinstance(loss, Tensor))
        numbers = (loss, seconds, flag)[first_field:]
        # numpy writes three numbers four times as fast as torch
        if row.is_cpu and row.dtype != torch.bfloat16:
            row.numpy()[first_field:ENGINE_UPLOAD_FIELDS] = numbers
        else:  # numpy does not support bfloat16
            self.packing.write(row, dict(zip(("_loss", "_seconds", "_flag")[first_field:], numbers, strict=True)))


@dataclass(frozen=True)
class BroadcastLayout:
    """The layout of a broadcast: the fields of its row, and the parts of the shared w and b in it."""

    packing: Packing
    w: Selection  # entries of the shared vector (s,)
    b: Selection  # entries of the shared buffers


class MessageLayouts:
    """The layouts of all messages, and of the states of the server and the clients, in one experiment."""

    def __init__(
        self,
        method: Method,
        model: FlatModel,
        classes: int,
        features: int,
        clients: int,
        rounds: int,
        upload_format: Format | None = None,
        optim: Mapping[str, tuple[int, ...]] = {},
        rule_state: Mapping[str, tuple[int, ...]] = {},
        upload_fields: Sequence[str] = (),
    ) -> None:
        """Determine the layouts from the method's declarations.

        Args:
            classes, features, clients: the sizes c, z and N to which declared shapes may refer.
            upload_format: the format of large slots in uploads; None: the model's own type.
            optim: the shapes of the optimiser state that each client keeps (engine/local/client_optimizers.py).
            rule_state: the shapes of the values that the server rule sends to all clients (aggregation/lora.py).
            upload_fields: further fields of the engine in an upload, each with one entry.
        """
        self.method, self.model, self.rounds, self.upload_format = method, model, rounds, upload_format
        self.rule_state, self.upload_fields = Packing(rule_state), tuple(upload_fields)
        check_declarations(method)
        self.all_groups: Groups = frozenset(model.layout.groups() | model.buffer_layout.groups())
        self.check_groups(method.trains, "trains")
        self.shared_groups: Groups = frozenset[str]().union(*(self.groups_in_round(t) for t in range(max(rounds, 1))))
        layouts = model.layout, model.buffer_layout
        self.shared, self.shared_b = (layout.select(self.shared_groups) for layout in layouts)
        self.personal, self.personal_b = (layout.select(self.all_groups - self.shared_groups) for layout in layouts)
        self._shared_layouts = (
            model.layout.sub_layout(self.shared_groups),
            model.buffer_layout.sub_layout(self.shared_groups),
        )
        self._upload_layouts: dict[tuple[Groups, tuple[str, ...]], UploadLayout] = {}
        self._last: tuple[int, Any] = (-1, None)  # the latest round that was asked for, and its upload layout
        self._broadcast_layouts: dict[Groups, BroadcastLayout] = {}
        self.head = model.layout.select({HEAD})
        self.options = numeric_options(method)
        integer_options = {name: value for name, value in self.options.items() if isinstance(value, int)}
        group_sizes = {group: model.layout.select({group}).size for group in (*STANDARD_GROUPS, *model.layout.groups())}
        symbols = {"d": model.layout.size, "s": self.shared.size, "h": self.head.size, "b": model.buffer_layout.size}
        self.sizes = {**integer_options, **group_sizes, **symbols, "c": classes, "z": features, "N": clients}

        bound: dict[str, Packing] = {}
        for declaration in ("server_state", "per_client_download", "accumulators", "client_state"):
            try:
                bound[declaration] = getattr(method, declaration).to_packing(self.sizes)
            except TypeError as error:
                raise UserError(f"method {type(method).__name__}, {declaration}: {error}") from error
        self.server_state, self.per_client_download, self.accumulators, state_slots = bound.values()
        own = {"_w": (self.personal.size,), "_b": (self.personal_b.size,)}
        self.client_state = Packing(own | state_slots.shapes | dict(optim))

    def check_groups(self, groups: Collection[str], where: str) -> None:
        """Raise UserError if a group is neither a standard layout group nor a group of this model."""
        method = f"method {type(self.method).__name__}, {where}"
        if isinstance(groups, str):
            raise UserError(
                f"{method}: {groups!r} is a string, but must be a tuple of layout groups; write ({groups!r},)"
            )
        for group in groups:
            if group not in (ALL_GROUPS, *STANDARD_GROUPS, *self.all_groups):
                has = ", ".join(sorted(self.all_groups))
                raise UserError(f"{method}: {group!r} is not a layout group; those of this model are {has}")

    # ---- rounds ----
    def shared_parts(self, t: int) -> SharedParts:
        """Return the layout groups and slots that the method sends in round t, after checking that they exist."""
        with add_error_context(f"round {t}"):
            parts = self.method.shared_parts(t, self.rounds)
        hook = f"method {type(self.method).__name__}, hook shared_parts, round {t}"
        if not isinstance(parts, SharedParts):
            text = f"{hook} returned {type(parts).__name__}; it must return SharedParts(...)"
            raise make_located_error(text, self.method.shared_parts)
        for groups in (parts.groups, parts.exclude):
            self.check_groups(groups, f"hook shared_parts, round {t}")
        for slot in parts.slots or ():
            if slot not in self.method.sends:
                raise UserError(f"{hook}: slot {slot!r} is not declared in `sends`")
        return parts

    def groups_in_round(self, t: int) -> Groups:
        """Return the layout groups that clients upload and the server changes in round t."""
        parts = self.shared_parts(t)
        return (self.all_groups if ALL_GROUPS in parts.groups else self.all_groups & set(parts.groups)) - set(
            parts.exclude
        )

    def upload_layout(self, t: int) -> UploadLayout:
        """Return the layout of the rows that clients upload in round t."""
        if self._last[0] != t:
            slots = self.shared_parts(t).slots
            key = groups, names = self.groups_in_round(t), tuple(self.method.sends) if slots is None else slots
            if key not in self._upload_layouts:
                w, b = self.model.layout.select(groups), self.model.buffer_layout.select(groups)
                sent = Slots(**{name: self.method.sends[name] for name in names})
                declared = sent.to_packing(self.sizes | {"s": w.size})
                fields: dict[str, tuple[int, ...]] = dict.fromkeys(
                    ("_loss", "_seconds", "_flag", *self.upload_fields), ()
                )
                shapes = {**fields, "_b": (b.size,), **declared.shapes}
                # Large slots come last, as ChunkPlan (transport/gather.py) requires.
                packing = Packing(dict(sorted(shapes.items(), key=lambda slot: prod(slot[1]) > linear.BLOCK)))
                codec = None if self.upload_format is None else self._build_codec(packing, sent, self.upload_format)
                size = packing.size if codec is None else codec.num_entries
                self._upload_layouts[key] = UploadLayout(
                    packing, w, b, self.model.layout.sub_layout(groups), codec, size
                )
            self._last = t, self._upload_layouts[key]
        return self._last[1]

    def max_upload_size(self) -> int:
        """Return the size of the longest upload row of any round, in entries before encoding."""
        return max(self.upload_layout(t).packing.size for t in range(max(self.rounds, 1)))

    # ---- formats ----
    def _build_codec(self, packing: Packing, slots: Slots, fmt: Format) -> RowCodec | None:
        """Return the codec that encodes the large slots of upload rows in this format; None if no slot is encoded."""
        encoded_slots = [
            n for n, slot in slots.items() if self.is_large(slot) and (is_change(n, slot) or not fmt.changes_only)
        ]
        codec = RowCodec(packing, dict.fromkeys(encoded_slots, fmt), self.model.w.dtype)
        return codec if codec.formats else None

    def is_large(self, slot: Slot) -> bool:
        """Return whether a slot is as wide as the model or as one of its layout groups."""
        return bool(slot.dims) and slot.dims[-1] in {"d", "s", "h", *STANDARD_GROUPS, *self.model.layout.groups()}

    def broadcast_layout(self, groups: Groups | None = None) -> BroadcastLayout:
        """Return the layout of a broadcast with these layout groups of the model; by default all shared groups."""
        groups = self.shared_groups if groups is None else groups & self.shared_groups
        if groups not in self._broadcast_layouts:
            w, b = (layout.select(groups) for layout in self._shared_layouts)
            state = {name: self.server_state.shapes[name] for name in self.method.receives}
            packing = Packing({COMMAND: (), **state, **self.rule_state.shapes, "_b": (b.size,), "_w": (w.size,)})
            self._broadcast_layouts[groups] = BroadcastLayout(packing, w, b)
        return self._broadcast_layouts[groups]

    # ---- state ----
    def initial_state(self, declaration: str, w: Tensor, b: Tensor) -> Tensor:
        """Return the initial state row of the server or of a client.

        It contains the start values of declared slots and, for a client, the initial values of the parts of the model
        that the client keeps.

        Args:
            declaration: "server_state" or "client_state".
            w: the initial weights (d,).
            b: the initial float buffers.
        """
        packing: Packing = getattr(self, declaration)
        row = w.new_zeros(packing.size)
        if not packing.size:
            return row
        if packing is self.client_state:
            packing.write(row, {"_w": self.personal.take(w), "_b": self.personal_b.take(b)})
        source = {"d": w, "s": self.shared.take(w), "h": self.head.take(w), "b": b}
        for name, slot in getattr(self.method, declaration).items():
            # A string that is not an option names a hook of the method, which the server calls later.
            start: Tensor | float = self.options.get(slot.start, 0.0) if isinstance(slot.start, str) else slot.start
            if slot.from_initial_model:  # a leading dimension (N, h) repeats the initial value
                start = source[str(slot.dims[-1])].expand(packing.shapes[name])
            packing.write(row, {name: start})
        return row


def is_change(name: str, slot: Slot) -> bool:
    """Return whether an upload slot contains differences from the server's values (like dw), rather than new values."""
    return slot.is_update or name == "dw"


def compose_vector(shared: Selection, received: Tensor, personal: Selection, own: Tensor) -> Tensor:
    """Combine the entries that a client received from the server with the entries that it keeps, into one vector.

    Args:
        shared: the positions of the received entries in the vector.
        received: the received entries.
        personal: the positions of the client's own entries in the vector.
        own: the client's own entries.
    """
    out = torch.empty(shared.size + personal.size, dtype=received.dtype, device=received.device)
    shared.put(received, out)
    personal.put(own, out)
    return out
