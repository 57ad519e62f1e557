"""Uploads of which every rank holds the same columns of all rows: m d / W entries a rank instead of m d on one.

Clients send each holder its columns; small slots go to rank 0, which alone runs the method's `aggregate`. Where that
asks for a sum, a Gram matrix, products or order statistics of a large slot, rank 0 asks the holders for their columns'
part of it, and puts the parts together in the order of their blocks: the bits are those of rows in one place. A rule
that reads a slot itself is given all of it, at the price of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fedmpi.comm.base import Lost, Message
from fedmpi.engine.travel.gathering import UNSENT, Gathering, Received, Ring, Trip, close_up, scale
from fedmpi.flat import linear
from fedmpi.flat.packing import Views
from fedmpi.method.context import Span, Uploads

END, COMBINE, GRAM, PRODUCTS, TRIMMED, NORMS, FETCH, SCALE, ONLY = range(9)  # what rank 0 may ask for
ROW_WISE = (GRAM, PRODUCTS, NORMS)  # answered block by block, in float64; the others column by column


class Shard:
    """One holder's columns of the large slots, and what it can tell of them."""

    def __init__(self, trip: Trip) -> None:
        self.trip, self.cuts, self.holders = trip, trip.cuts, trip.comm.alive
        self.me, self.m = self.holders.index(trip.comm.rank), len(trip.members)
        self.names = list(self.cuts.large)
        self.rows = {}
        for name in self.names:
            a, b = self.cuts.share(name, self.me, len(self.holders))
            self.rows[name] = trip.memory.rows(f"shard {name}", self.m, b - a)

    def coming(self) -> list[Message]:
        """Of other ranks' clients, in the order in which they send."""
        where = self.trip.where
        return [
            (where[k], self.rows[name][i])
            for i, k in enumerate(self.trip.members)
            if where[k] != self.trip.comm.rank
            for name in self.names
            if self.rows[name].shape[1]
        ]

    def within(self, holder: int, name: str, span: Span) -> Span:
        """The part of a span of columns that a holder has."""
        a, b = self.cuts.share(name, holder, len(self.holders))
        return max(a, span[0]), max(max(a, span[0]), min(b, span[1]))

    def answer(self, what: int, name: str, span: Span, numbers: Tensor) -> Tensor:
        """This holder's part. numbers: coefficients, or this part of a vector, or the one number that is asked with."""
        a, b = self.within(self.me, name, span)
        first = self.cuts.share(name, self.me, len(self.holders))[0]
        rows, width = self.rows[name][:, a - first : b - first], self.cuts.large[name][1]
        if what == COMBINE:
            return linear.combine(rows, numbers, a, width)
        if what == GRAM:
            return linear.gram_parts(rows, a)
        if what == PRODUCTS:
            return linear.product_parts(rows, numbers, a)
        if what == TRIMMED:
            return linear.trimmed_mean(rows, float(numbers))
        return linear.norm_parts(rows) if what == NORMS else rows[int(numbers)]

    def change(self, what: int, numbers: Sequence[float]) -> None:
        if what == SCALE:
            scale(self.rows["dw"][int(numbers[0])], numbers[1])
        else:
            self.m = len(numbers)
            self.rows = {name: close_up(rows, [int(i) for i in numbers]) for name, rows in self.rows.items()}

    def answer_size(self, what: int, holder: int, name: str, span: Span) -> tuple[int, ...]:
        """Of what that holder answers."""
        a, b = self.within(holder, name, span)
        if what not in ROW_WISE:
            return (b - a,)
        block = self.cuts.block
        blocks = -(-b // block) - a // block if a < b else 0
        return (blocks, self.m, self.m) if what == GRAM else (blocks, self.m)


class Sharded(Gathering):
    """Every rank that lives is a holder, rank 0 and those that do not train too."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip)
        self.shard, comm, cuts = Shard(trip), trip.comm, trip.cuts
        self.order = {client: i for i, client in enumerate(trip.members)}
        # What it sends is asked for already. Where nothing is under way before the end, no row may wait for another.
        self.ring = Ring(trip, UNSENT // 8 if comm.begins else 2**62)
        coming = self.shard.coming()
        if comm.rank == 0:
            self.heads = trip.memory.rows("heads", len(trip.members), cuts.small.size)
            heads = [
                (trip.where[k], place)
                for i, k in enumerate(trip.members)
                if trip.where[k]
                for place in cuts.places(self.heads[i])
            ]
            coming = _in_turn(trip, heads, coming)
        self.posted = comm.post([], coming)

    def row(self, client: int) -> Tensor:
        return self.ring.row(client)

    def done(self, client: int) -> None:
        row, cuts, shard, rank = self.ring.of(client), self.cuts, self.shard, self.comm.rank
        i, messages = self.order[client], list[Message]()
        if rank == 0:
            for source, place in zip(cuts.small_parts(row), cuts.places(self.heads[i]), strict=True):
                place.copy_(source)
        else:
            messages += [(0, part) for part in cuts.small_parts(row)]
        own = 0 if rank else sum(b - a for a, b in cuts.runs)
        for name in shard.names:
            for number, holder in enumerate(shard.holders):
                a, b = cuts.share(name, number, len(shard.holders))
                part = cuts.part(row, name, a, b)
                if holder == rank:
                    shard.rows[name][i].copy_(part)
                    own += b - a
                elif a < b:
                    messages.append((holder, part))
        self.comm.count_own(own * row.element_size())
        self.ring.send(client, messages)

    def finish(self) -> Received | None:
        self.ring.wait()
        self.comm.finish(self.posted)
        if self.comm.rank == 0:
            return Spread(self.trip, self.shard, self.heads)
        while self._serve():
            pass
        return None

    def _serve(self) -> bool:
        """Answer one question of rank 0's; whether there may be more."""
        comm, shard = self.comm, self.shard
        asked = torch.empty(5, dtype=torch.int64, device=comm.device)
        comm.exchange([], [(0, asked)])
        what, which, a, b, count = asked.tolist()
        if what == END:
            return False
        name, span = shard.names[which], (a, b)
        kind = self.trip.memory.like.dtype if what == PRODUCTS else torch.float64
        numbers = torch.empty(count, dtype=kind, device=comm.device)
        if count:
            comm.exchange([], [(0, numbers)])
        if what in (SCALE, ONLY):
            shard.change(what, numbers.tolist())
            return True
        found = shard.answer(what, name, span, numbers).to(comm.device)
        if found.numel():
            comm.exchange([(0, found.flatten())], [])
        return True


def _in_turn(trip: Trip, heads: list[Message], shards: list[Message]) -> list[Message]:
    """Rank 0's messages in the order in which each client sends them: small parts, then its columns."""
    a, b = iter(heads), iter(shards)
    theirs = [k for k in trip.members if trip.where[k]]
    many, more = (len(each) // max(len(theirs), 1) for each in (heads, shards))
    return [next(source) for _ in theirs for source, count in ((a, many), (b, more)) for _ in range(count)]


class Spread(Received):
    """Rank 0's view: the small slots of all rows, and the holders to ask."""

    def __init__(self, trip: Trip, shard: Shard, heads: Tensor) -> None:
        self.trip, self.shard, self.heads, self.comm = trip, shard, heads, trip.comm
        self.small = trip.cuts.small.views(heads)

    def ask(self, what: int, name: str, numbers: Callable[[Span], Tensor], span: Span | None = None) -> list[Tensor]:
        """What each holder answers, in their order. numbers: for the part of the span that a holder has."""
        shard, comm, device = self.shard, self.comm, self.comm.device
        span = span or (0, self.trip.cuts.large[name][1])
        parts = [shard.within(holder, name, span) for holder in range(len(shard.holders))]
        leaving: list[Message] = []
        coming, found = [], []
        for holder, rank in enumerate(shard.holders):
            kind = torch.float64 if what in ROW_WISE else self.heads.dtype
            size = shard.answer_size(what, holder, name, span)
            answer = torch.empty(size, dtype=kind, device=device)
            found.append(answer)
            if rank == comm.rank:
                continue
            with_ = numbers(parts[holder]).to(device).contiguous()
            asked = torch.tensor([what, shard.names.index(name), *span, len(with_)], device=device)
            leaving += [(rank, asked)] + ([(rank, with_)] if len(with_) else [])
            if answer.numel():
                coming.append((rank, answer.view(-1)))
        posted = comm.post(leaving, coming)
        if what not in (SCALE, ONLY):
            found[shard.me].copy_(shard.answer(what, name, span, numbers(parts[shard.me])))
        comm.finish(posted)
        return found

    def tell(self, what: int, numbers: Sequence[float]) -> None:
        """Something that every holder does."""
        if self.shard.names:
            with_ = torch.tensor(numbers, dtype=torch.float64)
            self.ask(what, self.shard.names[0], lambda _: with_, (0, 0))
            self.shard.change(what, numbers)

    def norms(self) -> Tensor:
        if "dw" in self.shard.names:
            return self._norms("dw")
        return linear.norms(linear.norm_parts(self.small.dw if "dw" in self.small else self.heads[:, :0]))

    def _norms(self, name: str) -> Tensor:
        return linear.norms(torch.cat(self.ask(NORMS, name, _nothing)).cpu())

    def finite(self) -> list[bool]:
        found = linear.norm_parts(self.heads).sum(0) + sum(self._norms(name) for name in self.shard.names)
        return [bool(each) for each in found.isfinite()]

    def scale(self, place: int, factor: float) -> None:
        if "dw" in self.shard.names:
            self.tell(SCALE, [place, factor])
        else:
            scale(self.small.dw[place].view(-1), factor)

    def only(self, places: Sequence[int]) -> None:
        self.heads = close_up(self.heads, places)
        self.small = self.trip.cuts.small.views(self.heads)
        self.tell(ONLY, [float(place) for place in places])

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return ShardedUploads(clients, n, p, self)

    def tensors(self) -> dict[str, Tensor]:
        return {"up": self.heads}

    def release(self) -> None:
        others = [rank for rank in self.shard.holders if rank != self.comm.rank]
        end = torch.tensor([END, 0, 0, 0, 0], device=self.comm.device)
        with suppress(Lost):  # the round is over all the same; the next message meets the loss
            self.comm.exchange([(rank, end) for rank in others], [])


class ShardedUploads(Uploads):
    """The parts of large slots come from their holders, small ones lie here."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, spread: Spread) -> None:
        super().__init__(clients, n, p, Views({}, tuple(spread.trip.cuts.packing.shapes), self._slot))
        self.spread = spread

    def _slot(self, name: str) -> Tensor:
        spread, large = self.spread, self.spread.trip.cuts.large
        if name not in large:
            return getattr(spread.small, name)
        rows = [torch.cat(spread.ask(FETCH, name, _just(i))) for i in range(len(self))]
        return torch.stack(rows).view(len(self), *spread.trip.cuts.packing.shapes[name])

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.spread.trip.cuts.large:
            return super().combine(coefficients, slot, span)
        c = coefficients.double()
        found = torch.cat(self.spread.ask(COMBINE, slot, lambda _: c, span))
        return found if span else found.view(self.spread.trip.cuts.packing.shapes[slot])

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.spread.trip.cuts.large:
            return super().gram(slot, span)
        return self._sum(GRAM, slot, _nothing, span)

    def products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.spread.trip.cuts.large:
            return super().products(v, slot, span)
        flat, first = v.flatten().to(self.spread.heads.dtype), span[0] if span else 0
        return self._sum(PRODUCTS, slot, lambda part: flat[part[0] - first : part[1] - first], span)

    def trimmed(self, trim: float, slot: str = "dw") -> Tensor:
        if slot not in self.spread.trip.cuts.large:
            return super().trimmed(trim, slot)
        found = torch.cat(self.spread.ask(TRIMMED, slot, _just(trim)))
        return found.view(self.spread.trip.cuts.packing.shapes[slot])

    def _sum(self, what: int, slot: str, numbers: Callable[[Span], Tensor], span: Span | None) -> Tensor:
        return linear.total(torch.cat(self.spread.ask(what, slot, numbers, span))).cpu()


def _just(number: float) -> Callable[[Span], Tensor]:
    return lambda _: torch.tensor([number], dtype=torch.float64)


def _nothing(_: Span) -> Tensor:
    return torch.empty(0, dtype=torch.float64)
