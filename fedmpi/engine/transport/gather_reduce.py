"""Uploads of which each rank adds up its own clients' before it sends one sum (`server.reduce: local`).

    total_r = sum over clients i of rank r of round(p_i x_i / UNIT)     64-bit integers, entry by entry
    mean    = UNIT sum_r total_r                                        the ranks' totals come up a binomial tree
Sums of integers do not depend on their order: the bits depend neither on ranks nor on who trains whom. They are not
those of rows that come one by one, which are rounded otherwise: here each p_i x_i is, once to float64 and once to UNIT,
and their sum is exact. What a rank sends and rank 0 receives no longer grows with the cohort. For rules that read means
alone (`means`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from fedmpi.comm.base import Posted, tree
from fedmpi.common.errors import UserError
from fedmpi.engine.transport.gather import GatherContext, GatheredUploads, UploadGather
from fedmpi.engine.transport.gather_streaming import AHEAD, GatheredSums, Means
from fedmpi.flat import linear

UNIT = 2.0**-50  # of the sums: 9e-16
LARGEST = 2.0**12  # of an entry. Weights sum to one, so a sum is at most as large: half of what 64 bits hold


class IntegerSum(linear.Sum):
    """sum_i round(c_i x_i / UNIT) in any order, in a place (n,) of int64."""

    def add(self, x: Tensor, c: float, first: bool = False, at: int = 0) -> None:
        """Nothing is first: the place holds zeros to begin with."""

        def piece(span: tuple[int, int]) -> None:
            some = x[span[0] - at : span[1] - at].to(torch.float64, copy=True)  # others read x after us
            self.total[slice(*span)] += some.mul_(c / UNIT).round_().long()

        linear.spread(piece, linear.chunks(x, at, at + len(x)), x)

    def value(self) -> Tensor:
        out = torch.empty(len(self.total), dtype=self.kind, device=self.total.device)

        def piece(span: tuple[int, int]) -> None:
            out[slice(*span)] = self.total[slice(*span)].double().mul_(UNIT)

        linear.spread(piece, linear.chunks(out, 0, len(out)), out)
        return out


class GatheredIntegerSums(GatheredSums):
    """What is left of a rank's rows; at the end, of all: the small slots, totals of the large ones, and their norms."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        """p: (m,) the cohort's weights, on every rank."""
        super().__init__(context, means, p)
        shape = len(context.members), len(self.chunks.large)
        self.long = torch.zeros(shape, dtype=torch.float64, device=self.heads.device)

    def make_sum(self, name: str, kind: str, n: int) -> linear.Sum:
        memory = self.context.buffers
        return IntegerSum(memory.rows(f"total {name} {kind}", 1, n, torch.int64)[0].zero_(), memory.like.dtype)

    def add_row(self, i: int, row: Tensor) -> None:
        """Add row i, of a client that this rank has trained."""
        self.chunks.copy_small(row, self.heads[i])
        for j, (name, (a, n)) in enumerate(self.chunks.large.items()):
            x = row[a : a + n]
            self.long[i, j] = norm = linear.row_norms(linear.block_norms(x[None]))[0]
            if norm > LARGEST and (largest := float(x.abs().max())) > LARGEST:
                client = self.context.members[i]
                raise UserError(
                    f"server.reduce: local takes entries of at most {LARGEST:g}, and client {client} has one of "
                    f"{largest:.4g} in {name}; use server.reduce: root"
                )
            for (slot, _), (total, weights) in self.means.items():
                if slot == name and norm.isfinite():  # else the run ends (`is_complete`), or does without the round
                    total.add(x, weights[i], False)

    @property
    def is_complete(self) -> bool:  # type: ignore[override]
        return bool(self.long.isfinite().all())

    def large_norms(self, name: str) -> Tensor:
        return self.long[:, [*self.chunks.large].index(name)]


class ReducingGather(UploadGather):
    """Every rank sends the small slots of its clients to rank 0, and the sum of the large ones up a binomial tree."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        super().__init__(context)
        self.totals = GatheredIntegerSums(context, means, p)
        self.one = context.buffers.rows("rows", 1, context.upload.packing.size, uploads=True)[0]
        train = {context.where[k] for k in context.members}  # the others have nothing to add
        self.ranks = [rank for rank in self.comm.alive if rank == 0 or rank in train]

    def row(self, client: int) -> Tensor:
        return self.one

    def done(self, client: int) -> None:
        self.totals.add_row(self.order[client], self.one)
        if self.comm.rank == 0:
            self.comm.count_own(self.one.element_size() * self.chunks.small.size)

    def _finish(self) -> GatheredUploads | None:
        comm, context, totals = self.comm, self.context, self.totals
        if comm.rank == 0:
            theirs = [(i, context.where[k]) for i, k in enumerate(context.members) if context.where[k]]
            comm.exchange([], [(rank, x) for i, rank in theirs for x in (totals.heads[i], totals.long[i])])
            self._reduce()
            return totals
        if comm.rank in self.ranks:
            comm.about = context.t, tuple(context.upload.packing.shapes)
            own = [self.order[k] for k in context.here]
            heads = comm.post([(0, x) for i in own for x in (totals.heads[i], totals.long[i])], [])
            self._reduce()
            comm.finish(heads)
        return None

    def _reduce(self) -> None:
        """Add the totals of the ranks below to this rank's, and send the sums up, piece by piece."""
        comm, me, slots = self.comm, self.ranks.index(self.comm.rank), tuple(self.context.upload.packing.shapes)
        parent, below = tree(me, len(self.ranks))
        pieces, sent = list(self._pieces()), list[Posted]()
        coming = deque[tuple[Posted, Tensor, Tensor, int]]()
        memory = self.context.buffers.rows("came", AHEAD + 1, max(map(len, pieces), default=0), torch.int64)

        def send_up(piece: Tensor) -> None:
            if me:
                comm.about = self.context.t, slots
                sent.append(comm.post([(self.ranks[parent], piece)], []))

        def add_next() -> None:
            posted, came, piece, child = coming.popleft()
            comm.finish(posted)
            piece.add_(came)
            if child == below[-1]:
                send_up(piece)

        for turn, (piece, child) in enumerate(product(pieces, below)):
            came = memory[turn % len(memory)][: len(piece)]
            coming.append((comm.post([], [(self.ranks[child], came)]), came, piece, child))
            if len(coming) > AHEAD:
                add_next()
        while coming:
            add_next()
        for piece in pieces if not below else ():
            send_up(piece)
        for posted in sent:
            comm.finish(posted)

    def _pieces(self) -> Iterator[Tensor]:
        """Yield all totals as they travel."""
        for (name, _), (total, _) in self.totals.means.items():
            for slot, a, b in self.chunks.pieces():
                if slot == name:
                    yield total.total[a:b]
