"""The messages of a round on one rank: the broadcast to all ranks, downloads for individual clients, and uploads.

Every rank stores the complete broadcast. If only some layout groups of the model have changed, a message contains only
these groups, and each rank updates its copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.engine.base_weights import BaseWeights
from fedmpi.engine.hook_checks import check_finite
from fedmpi.engine.messages import (
    COMMAND,
    ENGINE_DOWNLOAD_FIELDS,
    ENGINE_UPLOAD_FIELDS,
    BroadcastLayout,
    MessageLayouts,
)
from fedmpi.engine.server import FederationServer
from fedmpi.engine.transport.gather import BufferPool, GatherContext, RowGather, UploadGather
from fedmpi.engine.transport.gather_sharded import ShardedGather
from fedmpi.engine.transport.gather_sums import ReducingGather, StreamingGather
from fedmpi.method.base import get_mean_only_slots

if TYPE_CHECKING:
    from fedmpi.engine.transport.gather_secure import SecureAggregation

Placement = Mapping[int, int]  # client -> rank
ALIGNED = 64  # bytes; torch aligns its allocations in the same way


class RoundTransport:
    """Sends and receives all messages of a round on one rank: broadcast, downloads for individual clients, and uploads.

    Attributes:
        broadcast_row: the complete broadcast (model and declared server state), on the communicator's device.
        broadcast_copy: a copy of `broadcast_row` on the device on which clients train.
        changed_groups: the layout groups that the server has changed since the last broadcast; the next broadcast
            contains them.
    """

    def __init__(
        self,
        comm: Communicator,
        messages: MessageLayouts,
        model: Tensor,
        gather_mode: str = "rows",
        *,
        acknowledges: bool = False,
        base_weights: BaseWeights | None = None,
        secure_aggregation: SecureAggregation | None = None,
        reads_means_only: bool = False,
    ) -> None:
        """Allocate the buffers for broadcasts.

        Args:
            model: any tensor with the dtype and device of the clients' model.
            gather_mode: how uploads are gathered: "rows", "sharded", "streaming" or "reducing" (see gather.py). If the
                server needs more than the means of a round's uploads, "rows" is used in place of "streaming" and
                "reducing".
            acknowledges: whether ranks without clients in a round confirm to rank 0 that the broadcast has arrived, so
                that no rank is more than one round behind.
            base_weights: the base weights to which each broadcast adds the server's change (server.lora).
            secure_aggregation: the settings of secure aggregation, which replaces `gather_mode`; None: it is not used.
            reads_means_only: whether the server reads nothing but the weighted mean of each slot, whatever the method
                declares (differential privacy of clients).
        """
        self.reads_means_only = reads_means_only
        self.comm, self.messages, self.gather_mode, self.acknowledges = comm, messages, gather_mode, acknowledges
        self.base_weights, self.secure_aggregation = base_weights, secure_aggregation
        self._attempts = -1, -1  # the latest round whose uploads were gathered, and the number of earlier attempts
        self.full_layout = messages.broadcast_layout()
        pin_memory = model.is_cuda and comm.device.type == "cpu"
        # Rank 0 evaluates the model in this memory. The rounding of kernels depends on the alignment of the weights.
        # Ordinary tensors start at a cache line, and therefore w must also start at one.
        most, (before, _) = ALIGNED // model.dtype.itemsize, self.full_layout.packing.spans["_w"]
        place = torch.zeros(
            self.full_layout.packing.size + most, dtype=model.dtype, device=comm.device, pin_memory=pin_memory
        )
        first = -(before + place.data_ptr() // model.dtype.itemsize) % most
        self.broadcast_row = place[first:][: self.full_layout.packing.size]
        self.broadcast_copy = self.broadcast_row.to(model.device, copy=self.broadcast_row.device != model.device)
        # the download row of a client that receives no values of its own
        self.empty_download = self.broadcast_row.new_zeros(messages.per_client_download.size)
        self.changed_groups = messages.shared_groups
        self.traffic = ClientTrafficCounter(messages)
        self.buffers = BufferPool(self.broadcast_row, pin_memory)

    def model_storage(self) -> tuple[Tensor, Tensor]:
        """Return the buffers in which rank 0 stores the global w and b.

        They are views of the broadcast row if all entries are sent, otherwise separate tensors.
        """
        fields, messages = self.full_layout.packing.views(self.broadcast_row), self.messages
        w = fields._w if messages.shared.selects_all else self.broadcast_row.new_empty(messages.sizes["d"])
        b = fields._b if messages.shared_b.selects_all else self.broadcast_row.new_empty(messages.sizes["b"])
        return w, b

    # ---- downloads ----
    def broadcast(self, command: float, server: FederationServer | None) -> float:
        """Broadcast rank 0's command and the changed parts of model and server state; return the command.

        Args:
            command: the command on rank 0; ignored on other ranks.
            server: the server on rank 0; None on other ranks.
        """
        messages, layout = self.messages, self.messages.broadcast_layout(self.changed_groups)
        if server is not None:  # w and b need no copy if `model_storage` returned parts of this row
            values = {COMMAND: command, **{name: getattr(server.state, name) for name in messages.method.receives}}
            values |= {name: getattr(server.rule_state, name) for name in server.rule_state}
            if not messages.shared.selects_all:
                values["_w"] = messages.shared.take(server.w)
            if not messages.shared_b.selects_all:
                values["_b"] = messages.shared_b.take(server.b)
            self.full_layout.packing.write(self.broadcast_row, values)
        if layout is self.full_layout:
            self.comm.broadcast(self.broadcast_row)
        else:
            self._broadcast_changes(layout)
        if self.broadcast_copy is not self.broadcast_row:
            self.broadcast_copy.copy_(self.broadcast_row)
        if self.base_weights is not None:
            self.base_weights.add_change(self.full_layout.packing.views(self.broadcast_copy))
        return float(self.full_layout.packing.views(self.broadcast_row)._command)

    def _broadcast_changes(self, layout: BroadcastLayout) -> None:
        """Send only the parts of the broadcast row that have changed, and update every rank's copy of the row."""
        full_fields, row = (
            self.full_layout.packing.views(self.broadcast_row),
            self.broadcast_row.new_empty(layout.packing.size),
        )
        if self.comm.rank == 0:
            values = {name: getattr(full_fields, name) for name in full_fields}
            layout.packing.write(
                row, values | {"_w": layout.w.take(full_fields._w), "_b": layout.b.take(full_fields._b)}
            )
        self.comm.broadcast(row)
        if self.comm.rank:
            changed = layout.packing.views(row)
            rest = {name: getattr(changed, name) for name in changed if name not in ("_w", "_b")}
            self.full_layout.packing.write(self.broadcast_row, rest)
            layout.w.put(changed._w, full_fields._w)
            layout.b.put(changed._b, full_fields._b)

    def send_downloads(
        self, t: int, clients: Iterable[int], placement: Placement, server: FederationServer | None
    ) -> dict[int, Tensor]:
        """Send each client its own download of round t.

        Args:
            clients: the clients that receive a download.
            placement: client -> the rank that trains it.
            server: the server on rank 0; None on other ranks.

        Returns:
            client -> download row, for the clients of this rank; on rank 0 for all `clients`.
        """
        packing, rank = self.messages.per_client_download, self.comm.rank
        mine = [k for k in clients if server is not None or placement[k] == rank]
        if not packing.size:
            return dict.fromkeys(mine, self.empty_download)
        rows = {k: self.empty_download.clone() for k in mine}
        if server is None:
            self.comm.exchange([], [(0, row) for row in rows.values()])
            return rows
        for k, row in rows.items():
            packing.write(row, server.download(t, k))
            check_finite(server.method, "download", packing, row, f"round {t}, client {k}")
        # Rows of rank 0's own clients also go through the communicator, so that they are counted like their uploads.
        own = [(0, row) for k, row in rows.items() if placement[k] == 0]
        self.comm.exchange([(placement[k], row) for k, row in rows.items()], own)
        return rows

    # ---- uploads ----
    def begin_gather(self, t: int, cohort: Sequence[int], placement: Placement, p: Tensor) -> UploadGather:
        """Start gathering the uploads of round t; return this rank's `UploadGather`.

        Args:
            placement: client -> the rank that trains it.
            p: (m,), the weights of the cohort.
        """
        context = GatherContext(self.comm, t, self.messages.upload_layout(t), cohort, placement, self.buffers)
        large, means = context.chunks.large, get_mean_only_slots(self.messages.method)
        if self.reads_means_only:
            means = dict.fromkeys(large, ("p",))
        sums = bool(large and cohort) and means is not None and set(large) <= {*means, "_b"}
        gather: UploadGather
        if self.secure_aggregation is not None:
            from fedmpi.engine.transport.gather_secure import SecureGather  # needs an optional package

            self._attempts = t, self._attempts[1] + 1 if self._attempts[0] == t else 0
            gather = SecureGather(context, p, self.secure_aggregation, self._attempts[1])
        elif self.gather_mode == "sharded" and large and len(self.comm.alive) > 1:
            gather = ShardedGather(context)
        elif self.gather_mode == "reducing" and sums:
            gather = ReducingGather(context, means or {}, p)
        elif self.gather_mode == "streaming" and sums:
            gather = StreamingGather(context, means or {}, p)
        else:
            gather = RowGather(context)
        if self.acknowledges:
            gather.acknowledge_broadcast()
        return gather


class ClientTrafficCounter:
    """Counts the values that clients upload and download.

    They are counted for each client, as in papers, no matter which rank trains it. Values that a client already has are
    not counted, and neither are the engine's own fields. With comm.compression, bytes are counted and converted to the
    equivalent number of values of the model's dtype.
    """

    def __init__(self, messages: MessageLayouts) -> None:
        """Begin the count; no client has received anything yet."""
        self.messages = messages
        # layout group -> the last round in which the server changed it
        self.last_changed = dict.fromkeys(messages.shared_groups, -1)
        self.last_seen: dict[int, int] = {}  # client -> the last round in which it took part
        self.latest_count: tuple[int, dict[str, int]] = -1, {}  # the latest round that was counted, and its numbers

    def count(self, t: int, cohort: Sequence[int]) -> dict[str, int]:
        """Return up_parameters and down_parameters of round t, and record that the cohort has received the model.

        A round that is repeated after a rank failure is counted once.
        """
        if self.latest_count[0] == t:
            return self.latest_count[1]
        messages, before = self.messages, [self.last_seen.get(k, -1) for k in cohort]
        sizes = {
            r: self._download_size_since(r) + messages.per_client_download.size - ENGINE_DOWNLOAD_FIELDS
            for r in {*before}
        }
        up = len(cohort) * (messages.upload_layout(t).size - ENGINE_UPLOAD_FIELDS)
        self.latest_count = t, {"up_parameters": up, "down_parameters": sum(sizes[r] for r in before)}
        self.last_seen |= dict.fromkeys(cohort, t)
        self.last_changed |= dict.fromkeys(messages.groups_in_round(t) & messages.shared_groups, t)
        return self.latest_count[1]

    def _download_size_since(self, r: int) -> int:
        """Return how many numbers a client downloads if it last took part in round r (-1: never)."""
        return self.messages.broadcast_layout(
            frozenset(g for g, last in self.last_changed.items() if last >= r)
        ).packing.size
