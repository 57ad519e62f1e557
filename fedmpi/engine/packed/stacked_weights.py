"""The weights of n clients as rows of one tensor, and their SGD steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.packed.low_rank import LowRankWeights
from fedmpi.flat.layout import Layout, Selection


class StackedWeights:
    """Tensor by tensor: weights `raw` (n, entries), velocities `v` (of momentum). Weights in factors are in `thin`.

    flat: the same memory as (n, d), where hooks want whole vectors; else each tensor of the model lies by itself, which
    batched products write to faster.
    """

    def __init__(
        self,
        layout: Layout,
        rows: Sequence[Tensor],
        lr: float,
        config: LocalTrainingConfig,
        flat: bool,
        thin: Mapping[int, LowRankWeights],
    ) -> None:
        """rows: (d,) each client's weights at the start."""
        n, like = len(rows), rows[0]
        self.layout, self.lr, self.config, self.thin = layout, lr, config, thin
        self.flat = like.new_empty(n, layout.size) if flat else None
        sizes = [0 if i in thin else s.stop - s.start for i, s in enumerate(layout.segments)]
        self.raw = [like.new_empty(n, size) for size in sizes] if self.flat is None else _cut(self.flat, layout)
        alike = all(row is like for row in rows)
        for i, (s, raw) in enumerate(zip(layout.segments, self.raw, strict=True)):
            if i in thin:
                continue
            if alike:
                raw.copy_(like[s.start : s.stop])
            else:
                torch.stack([row[s.start : s.stop] for row in rows], out=raw)
        self.v = [torch.zeros_like(raw) for raw in self.raw] if config.momentum else []

    def part(self, members: slice | Tensor) -> StackedWeights:
        """Some of the clients: the same memory for a slice, a copy (see `put`) for indices."""
        part = copy(self)
        part.thin = {i: thin.part(members) for i, thin in self.thin.items()}
        part.flat = None if self.flat is None else self.flat[members]
        part.raw = [raw[members] for raw in self.raw] if part.flat is None else _cut(part.flat, self.layout)
        part.v = [v[members] for v in self.v]
        return part

    def put(self, members: Tensor, part: StackedWeights) -> None:
        """What has become of a part that was copied."""
        for mine, new in zip((*self.raw, *self.v), (*part.raw, *part.v), strict=True):
            mine[members] = new
        for i, thin in self.thin.items():
            thin.put(members, part.thin[i])

    def seen(self, samples: int) -> None:
        """After a step with batches of so many samples."""
        for thin in self.thin.values():
            thin.used += samples

    def __len__(self) -> int:
        return len(self.raw[0])

    # ---- shapes ----
    def leaves(self, trained: Sequence[bool]) -> list[Tensor]:
        """The weights in the tensors' own shapes, (n, *shape); those that are trained ask for gradients."""
        tensors = [self.thin[i].w0 if i in self.thin else self.shaped(i, raw) for i, raw in enumerate(self.raw)]
        return [tensor.detach().requires_grad_(on) for tensor, on in zip(tensors, trained, strict=True)]

    def shaped(self, i: int, raw: Tensor) -> Tensor:
        """(n, size of tensor i) as (n, *shape), no copy."""
        s = self.layout.segments[i]
        if not s.channels_last:
            return raw.view(len(raw), *s.shape)
        o, c, h, w = s.shape
        return raw.view(len(raw), o, h, w, c).permute(0, 1, 4, 2, 3)

    def row(self, i: int) -> Tensor:
        """(d,) the weights of one client."""
        if self.flat is not None:
            return self.flat[i]
        out = torch.empty(self.layout.size, dtype=self.raw[0].dtype, device=self.raw[0].device)
        for j, (s, raw) in enumerate(zip(self.layout.segments, self.raw, strict=True)):
            if j in self.thin:
                s.view(out).copy_(self.thin[j].w0).add_(self.thin[j].difference(i, out.new_empty(s.shape)))
            else:
                out[s.start : s.stop] = raw[i]
        return out

    def subtract(self, i: int, part: Selection, w0: Tensor, out: Tensor) -> None:
        """out <- the part of w_i - w0."""
        if self.flat is not None or not part.whole:
            torch.sub(part.take(self.row(i)), part.take(w0), out=out)
            return
        for j, (s, raw) in enumerate(zip(self.layout.segments, self.raw, strict=True)):
            if j in self.thin:
                self.thin[j].difference(i, s.view(out))
            else:
                torch.sub(raw[i], w0[s.start : s.stop], out=out[s.start : s.stop])

    def differences(self, w0: Tensor, rows: Tensor, places: Sequence[int]) -> None:
        """rows (m, d): number places[i] <- w_i - w0, for all of them."""
        in_order = list(places) == list(range(len(rows)))
        for j, (s, raw) in enumerate(zip(self.layout.segments, self.raw, strict=True)):
            if j in self.thin and in_order:
                self.thin[j].differences(rows[:, s.start : s.stop].view(len(rows), *s.shape))
            elif j in self.thin:
                for i, place in enumerate(places):
                    self.thin[j].difference(i, s.view(rows[place]))
            elif in_order:
                torch.sub(raw, w0[s.start : s.stop], out=rows[:, s.start : s.stop])
            else:
                rows[places, s.start : s.stop] = raw - w0[s.start : s.stop]

    # ---- steps ----
    def move(self, i: int, g: Tensor) -> None:
        """One step of tensor i along its gradients (n, *shape)."""
        how, w = self.config, self.shaped(i, self.raw[i])
        if how.weight_decay:
            g = g.add(w, alpha=how.weight_decay)
        if how.momentum:
            g = self.shaped(i, self.v[i]).mul_(how.momentum).add_(g)
        w.add_(g, alpha=-self.lr)

    def move_by_product(self, i: int, a: Tensor, b: Tensor) -> None:
        """The same along a @ b, (n, rows, k) and (n, k, columns), which is not written down anywhere."""
        how = self.config
        if i in self.thin:
            self.thin[i].add(a.mT, b, self.lr)
            return
        w = self.shaped(i, self.raw[i])
        if not how.momentum:
            w.baddbmm_(a, b, beta=1 - self.lr * how.weight_decay, alpha=-self.lr)
            return
        v = self.shaped(i, self.v[i]).baddbmm_(a, b, beta=how.momentum)
        if how.weight_decay:
            v.add_(w, alpha=how.weight_decay)
        w.add_(v, alpha=-self.lr)


def _cut(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Return the columns of each tensor of flat (n, d)."""
    return [flat[:, s.start : s.stop] for s in layout.segments]
