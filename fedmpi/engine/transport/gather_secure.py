"""The gather mode `secure`: rank 0 learns only the sum of the clients' uploads (privacy.secagg).

The complete upload of a client, with all slots, buffers and the loss, is one vector of 64-bit integers, in the
arithmetic of `server.reduce: local`:

    y_k    = round(p_k x_k / UNIT) + masks of client k         modulo 2^64
    mean   = UNIT (sum over survivors of y_k - masks) / (sum over survivors of p_k)

The sum of the weights is 1, and is left out, if no client has dropped out. Rank 0 reads only a client's flag and the
seconds that it has trained. fedmpi/privacy/secagg describes the protocol. A rank that trains several clients sends the
sum of their y_k, in which the masks that two of them share cancel and need not be computed. All messages are sent after
the training, so that every rank knows from the flags which clients have dropped out, and thus the sizes of all
messages. Clients drop out of the phase in which vectors are sent; if a rank fails, the engine repeats the round with
new keys.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from torch import Tensor

from fedmpi.comm.base import Message, Posted
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.engine.faults.upload_filter import NOT_FINITE, REMEDY
from fedmpi.engine.messages import ENGINE_UPLOAD_FIELDS, FAILED, STOP
from fedmpi.engine.transport.gather import GatherContext, GatheredUploads, SendBuffer, UploadGather, receive_ahead
from fedmpi.engine.transport.gather_sums import MAX_ENTRY, PIECES_AHEAD, UNIT, IntegerSum
from fedmpi.engine.transport.secure_sum import FLAG, LOSS, LOSS_UNIT, SECONDS, SecureSum
from fedmpi.privacy.secagg.masking_client import MaskingClient
from fedmpi.privacy.secagg.masks import MaskStreams
from fedmpi.privacy.secagg.secret_sharing import SHARE_BYTES
from fedmpi.privacy.secagg.session import KEYS_MESSAGE_BYTES, SHARES_MESSAGE_BYTES, SIGNATURE_BYTES, Session
from fedmpi.privacy.secagg.unmasking_server import UnmaskingServer

PIECE_ENTRIES = 1 << 19  # largest number of entries in one message with a part of a masked vector
MAX_LOSS = 2.0**32
MAX_TOTAL = 2**62 + 2**20  # bound on entries of the sum: that of each vector, and the rounding of a million clients
HEADER_FORMAT = struct.Struct("<16sdd")  # random number, seconds, flag
# (round, attempt, client, n) -> numbers (n,) float64 that a client adds to its term p_k x_k of the mean: one for each
# entry of an upload row after the engine's own fields
MakeNoise = Callable[[int, int, int, int], Tensor]


@dataclass(frozen=True)
class SecureAggregation:
    """The settings of secure aggregation on one rank."""

    threshold: int  # smallest number of clients whose uploads are summed
    drops_bad_uploads: bool = False  # whether a client with a bad upload drops out; otherwise it ends the run
    site_names: Mapping[int, str] = field(default_factory=dict)  # client -> name in messages
    public_keys: Mapping[int, Ed25519PublicKey] | None = None  # keys that verify signatures; None: no signatures
    identity: Ed25519PrivateKey | None = None  # the key with which the clients of this rank sign
    # noise for differential privacy, of which each client adds its share; the loss is then withheld
    make_noise: MakeNoise | None = None


class SecureGather(UploadGather):
    """Sends masked uploads of this rank's clients to rank 0, which removes the masks from their sum."""

    def __init__(self, context: GatherContext, p: Tensor, settings: SecureAggregation, attempt: int) -> None:
        """Create the gather.

        Args:
            p: (m,), the weights of the cohort.
            attempt: number of earlier attempts to gather the uploads of this round; only that of rank 0 counts.
        """
        super().__init__(context, SendBuffer(context, 0))
        self.p, self.settings, self.attempt = p, settings, attempt
        memory = context.buffers.get("secure sum", 1, context.upload.packing.size, torch.int64)[0]
        self.sum = IntegerSum(memory.zero_(), context.buffers.like.dtype)  # of this rank's clients, before masking
        self.headers: dict[int, tuple[float, float]] = {}  # client of this rank -> seconds, flag
        self.clients_of = dict[int, list[int]]()  # rank -> its clients
        for k in context.cohort:
            self.clients_of.setdefault(context.placement[k], []).append(k)

    # ---- local training ----
    def submit(self, client: int) -> None:
        """Check the upload of a client, and add it to the sum of this rank's clients, which `finish` masks."""
        row, p = self.send_buffer.acquired_row(client), float(self.p[self.row_index[client]])
        self.headers[client] = float(row[SECONDS]), float(row[FLAG])
        if self.headers[client][1] == FAILED or not self._check_upload(client, row):
            self.headers[client] = float(row[SECONDS]), FAILED
            return
        self.sum.add(row[ENGINE_UPLOAD_FIELDS:], p, offset=ENGINE_UPLOAD_FIELDS)
        if self.settings.make_noise is None:
            self.sum.total[LOSS] += round(float(row[LOSS]) * (p / LOSS_UNIT))

    def _check_upload(self, client: int, row: Tensor) -> bool:
        """Return whether all values of an upload are in the range of the integers.

        Raises:
            UserError: they are not, and the client may not drop out (faults.on_bad_update).
        """
        low, high = torch.aminmax(row[ENGINE_UPLOAD_FIELDS:]) if len(row) > ENGINE_UPLOAD_FIELDS else (row[0], row[0])
        largest, loss = max(-float(low), float(high)), abs(float(row[LOSS]))
        if largest <= MAX_ENTRY and loss <= MAX_LOSS:
            return True
        what = f"values up to {largest:.4g}; privacy.secagg is limited to {MAX_ENTRY:g}"
        if not math.isfinite(largest + loss):
            what = NOT_FINITE
        elif loss > MAX_LOSS:
            what = f"a loss of {loss:.4g}; privacy.secagg is limited to {MAX_LOSS:g}"
        text = f"round {self.context.t}: client {client} would send {what}"
        if not self.settings.drops_bad_uploads:
            raise UserError(f"{text}. {REMEDY}; or set faults.on_bad_update: drop to continue without such uploads")
        warnings.warn(RankWarning(f"{text}; the client drops out (faults.on_bad_update: drop)"), stacklevel=2)
        return False

    # ---- the protocol ----
    def _finish(self) -> GatheredUploads | None:
        if self.comm.rank and self.comm.rank not in self.clients_of:
            return None
        context, cohort = self.context, self.context.cohort
        headers, run_id, attempt = self._exchange_headers()
        table, total = torch.tensor([headers[k] for k in cohort], dtype=torch.float64), None
        if all(flag != STOP for _, flag in headers.values()):
            survivors = [k for k in cohort if headers[k][1] != FAILED]
            total = self._compute_sum(self._make_session(run_id, attempt, survivors), survivors)
        table = table.to(self.comm.device, context.buffers.like.dtype)
        return None if self.comm.rank else SecureSum(context, table, self.p, total)

    def _make_session(self, run_id: str, attempt: int, survivors: Sequence[int]) -> Session:
        settings, cohort = self.settings, self.context.cohort
        # The number of clients may vary between rounds; the threshold must always be above half of it.
        threshold = max(settings.threshold, len(cohort) // 2 + 1)
        names, keys = settings.site_names, settings.public_keys
        session = Session(run_id, self.context.t, attempt, tuple(cohort), threshold, names, keys)
        session.check_enough(survivors, "have an upload to send")
        return session

    def _exchange_headers(self) -> tuple[dict[int, tuple[float, float]], str, int]:
        """Exchange seconds and flags of all clients, and random numbers that make this session different from others.

        Returns:
            client -> (seconds, flag), for all clients of the cohort; the identifier of the session, which depends on
            the random numbers of all clients, so that no rank can repeat messages of an earlier session; the attempt.

        Raises:
            UserError: rank 0 has not passed on the header of a client of this rank.
        """
        mine = dict[int, bytes]()
        for k in self.context.own_clients:
            mine[k] = HEADER_FORMAT.pack(secrets.token_bytes(16), *self.headers[k])
        received, cohort, size = self._send_up("headers", mine, HEADER_FORMAT.size), self.context.cohort, 8
        text = self.attempt.to_bytes(size, "little") + b"".join(received[k] for k in cohort if self.comm.rank == 0)
        text = self._send_to_all("headers", text, size + len(cohort) * HEADER_FORMAT.size)
        parts = split_message(text[size:], HEADER_FORMAT.size, cohort)
        for k, header in mine.items():
            if parts[k] != header:
                raise UserError(
                    f"round {self.context.t}: privacy.secagg: the server has not passed on the header of client {k}, "
                    "which shows that the messages are those of this round; the round was discarded"
                )
        headers = {k: HEADER_FORMAT.unpack(part)[1:] for k, part in parts.items()}
        return headers, hashlib.sha256(text).hexdigest(), int.from_bytes(text[:size], "little")

    def _compute_sum(self, session: Session, survivors: list[int]) -> Tensor | None:
        """Run the protocol; return the sum of the survivors' vectors (row,) int64 on rank 0, and None elsewhere."""
        cohort, own, is_root = self.context.cohort, self.context.own_clients, self.comm.rank == 0
        server = UnmaskingServer(session)  # used on rank 0 only
        clients = {k: MaskingClient(session, k, self.settings.identity) for k in own}

        sent = self._send_up("keys", {k: c.advertise_keys() for k, c in clients.items()}, KEYS_MESSAGE_BYTES)
        text = b"".join(server.collect_keys(sent)[k] for k in cohort) if is_root else b""
        text = self._send_to_all("keys", text, KEYS_MESSAGE_BYTES * len(cohort))
        keys = split_message(text, KEYS_MESSAGE_BYTES, cohort)

        others = {k: [other for other in cohort if other != k] for k in cohort}
        size = SHARES_MESSAGE_BYTES * (len(cohort) - 1)
        shares = {k: join_messages(c.share_keys(keys), others[k]) for k, c in clients.items()}
        arrived = self._send_up("shares", shares, size)
        routed = dict[int, bytes]()
        if is_root:
            messages = {k: split_message(text, SHARES_MESSAGE_BYTES, others[k]) for k, text in arrived.items()}
            parts = {k: join_messages(each, others[k]) for k, each in server.collect_shares(messages).items()}
            routed = {rank: join_messages(parts, theirs) for rank, theirs in self.clients_of.items()}
        received = split_message(self._send_down("shares", routed, size * len(own)), size, own)
        masks = {
            k: clients[k].make_masks(split_message(received[k], SHARES_MESSAGE_BYTES, others[k]))
            for k in own
            if k in survivors
        }
        streams = MaskStreams([each for keys in masks.values() for each in keys])
        total = self._gather_vectors(survivors, streams, session.attempt)

        dropped = [k for k in cohort if k not in survivors]
        if is_root:
            server.choose_survivors(survivors)
        confirmations = {k: clients[k].confirm_survivors(survivors, dropped) for k in masks}
        confirmations = self._exchange_confirmations(server, survivors, confirmations)
        revealed = {k: join_messages(clients[k].reveal_shares(confirmations), cohort) for k in masks}
        answers = self._send_up("unmask", revealed, SHARE_BYTES * len(cohort), survivors)
        if total is None:
            return None
        unmasking = server.make_unmasking({k: split_message(x, SHARE_BYTES, cohort) for k, x in answers.items()})
        self._unmask(total, unmasking)
        return total

    def _exchange_confirmations(
        self, server: UnmaskingServer, survivors: list[int], mine: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        """Return the signatures of all survivors under the list of survivors; without keys they are empty."""
        if self.settings.public_keys is None:
            return dict.fromkeys(survivors, bytes(SIGNATURE_BYTES))
        sent = self._send_up("confirm", mine, SIGNATURE_BYTES, survivors)
        text = join_messages(server.collect_confirmations(sent), survivors) if self.comm.rank == 0 else b""
        text = self._send_to_all("confirm", text, SIGNATURE_BYTES * len(survivors))
        return split_message(text, SIGNATURE_BYTES, survivors)

    # ---- vectors ----
    def _gather_vectors(self, survivors: Sequence[int], masks: MaskStreams, attempt: int) -> Tensor | None:
        """Mask the sum of this rank's vectors and send it; return the sum over all ranks on rank 0, and None elsewhere.

        Args:
            masks: the masks of this rank's clients in the sum.
        """
        comm, total = self.comm, self.sum.total
        mine = [k for k in self.context.own_clients if k in survivors]
        if (make_noise := self.settings.make_noise) is not None:
            for k in mine:
                noise = make_noise(self.context.t, attempt, k, len(total) - ENGINE_UPLOAD_FIELDS)
                total[ENGINE_UPLOAD_FIELDS:] += noise.mul_(1 / UNIT).round_().long().to(total.device)
        sent = list[Posted]()
        for piece in self._pieces(total) if mine else ():
            add_masks(masks, piece)
            if comm.rank:
                comm.message_info = self.context.t, ("masked sum",)
                sent.append(comm.post([(0, piece)], []))
        for posted in sent:
            comm.finish(posted)
        if comm.rank:
            return None
        comm.count_local_message(total.nbytes if mine else 0)
        ranks = [rank for rank, theirs in self.clients_of.items() if rank and not {*theirs}.isdisjoint(survivors)]
        memory = self.context.buffers.get("masked", PIECES_AHEAD + 2, min(len(total), PIECE_ENTRIES), torch.int64)

        def add(piece: Tensor, received: Tensor) -> None:
            piece += received

        def incoming() -> Iterator[tuple[Message, Callable[[], None]]]:
            # Pieces of all ranks alternate, so that they mask their sums at the same time.
            for turn, (piece, rank) in enumerate(product(self._pieces(total), ranks)):
                received = memory[turn % len(memory)][: len(piece)]
                yield (rank, received), partial(add, piece, received)

        receive_ahead(comm, incoming(), PIECES_AHEAD)
        return total

    def _unmask(self, total: Tensor, streams: MaskStreams) -> None:
        """Remove the masks from the sum, in place.

        Raises:
            UserError: the sum is outside of the range of sums of valid vectors, so a client has sent a wrong vector.
        """
        for piece in self._pieces(total):
            add_masks(streams, piece)
            low, high = torch.aminmax(piece)
            if low < -MAX_TOTAL or high > MAX_TOTAL:
                raise UserError(
                    f"round {self.context.t}: privacy.secagg: the sum of the uploads is outside of its range, so a "
                    "client has sent a wrong vector, which cannot be told from the others; the round was discarded"
                )

    @staticmethod
    def _pieces(total: Tensor) -> Sequence[Tensor]:
        """Return the parts of a vector that are masked and sent at a time, as views."""
        return total.split(PIECE_ENTRIES)

    # ---- messages of fixed size ----
    def _send_up(
        self, what: str, mine: Mapping[int, bytes], size: int, clients: Sequence[int] | None = None
    ) -> dict[int, bytes]:
        """Send one message of each client to rank 0; return client -> message on rank 0, and {} elsewhere.

        Args:
            mine: client -> its message of `size` bytes, for the clients of this rank.
            clients: the clients that send a message; by default the cohort.
        """
        comm, context = self.comm, self.context
        clients = context.cohort if clients is None else clients
        senders = {rank: [k for k in theirs if k in clients] for rank, theirs in self.clients_of.items()}
        senders = {rank: theirs for rank, theirs in senders.items() if theirs}
        buffers = {rank: self._bytes_buffer(size * len(theirs)) for rank, theirs in senders.items() if not comm.rank}
        comm.message_info = context.t, (f"secagg {what}",)
        own = senders.get(comm.rank, [])
        comm.exchange([(0, self._as_tensor(join_messages(mine, own)))] if own else [], list(buffers.items()))
        messages = dict[int, bytes]()
        for rank, buffer in buffers.items():
            messages |= split_message(self._as_bytes(buffer), size, senders[rank])
        return messages

    def _send_down(self, what: str, texts: Mapping[int, bytes], size: int) -> bytes:
        """Send one message from rank 0 to each rank that has clients; return that of this rank, b"" if it has none.

        Args:
            texts: rank -> its message, on rank 0.
            size: the number of bytes of this rank's message.
        """
        comm = self.comm
        if comm.rank == 0:
            comm.message_info = self.context.t, (f"secagg {what}",)
            comm.exchange([(rank, self._as_tensor(text)) for rank, text in texts.items() if rank], [])
            return texts.get(0, b"")
        buffer = self._bytes_buffer(size)
        comm.exchange([], [(0, buffer)])
        return self._as_bytes(buffer)

    def _send_to_all(self, what: str, text: bytes, size: int) -> bytes:
        """Send the same message of `size` bytes from rank 0 to all ranks that have clients, and return it."""
        received = self._send_down(what, dict.fromkeys(self.clients_of, text), size)
        return received if self.comm.rank else text

    def _bytes_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.comm.device)

    def _as_tensor(self, text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.comm.device)

    @staticmethod
    def _as_bytes(message: Tensor) -> bytes:
        return message.cpu().numpy().tobytes()


def add_masks(streams: MaskStreams, piece: Tensor) -> None:
    """Add masks to the next piece of a vector (n,) int64, in place, on any device."""
    on_cpu = piece.cpu()
    streams.add_to(on_cpu)
    if on_cpu is not piece:
        piece.copy_(on_cpu)


def join_messages(messages: Mapping[int, bytes], clients: Sequence[int]) -> bytes:
    """Return the messages of these clients as one message, in this order."""
    return b"".join(messages[k] for k in clients)


def split_message(text: bytes, size: int, clients: Sequence[int]) -> dict[int, bytes]:
    """Return client -> its part of `size` bytes of a message; the inverse of `join_messages`."""
    return {k: text[i * size : (i + 1) * size] for i, k in enumerate(clients)}
