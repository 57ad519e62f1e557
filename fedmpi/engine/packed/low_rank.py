"""The weights of a linear layer of n clients that have seen few samples, as factors.

    w_j = w0 + a_j' b_j        w0 (o, i), of all; a_j (K, o), b_j (K, i): a row for each sample seen, -lr g and x
Plain SGD without momentum and weight decay makes just this. While K (o + i) is less than o i, steps are faster so: w0
is one product for all clients, and no client's weights are read or written until the differences go to the uploads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_worthwhile(w0: Tensor, samples: int) -> bool:
    return w0.dim() == 2 and 2 * samples * sum(w0.shape) <= w0.numel()


class LowRankWeights:
    """used: rows of a and b so far; those of clients that were not in a step are zero."""

    def __init__(self, w0: Tensor, a: Tensor, b: Tensor, used: int = 0) -> None:
        self.w0, self.a, self.b, self.used = w0, a, b, used

    @staticmethod
    def of(w0: Tensor, clients: int, samples: int) -> LowRankWeights:
        o, i = w0.shape
        return LowRankWeights(w0, w0.new_zeros(clients, samples, o), w0.new_zeros(clients, samples, i))

    def part(self, members: slice | Tensor) -> LowRankWeights:
        return LowRankWeights(self.w0, self.a[members], self.b[members], self.used)

    def put(self, members: Tensor, part: LowRankWeights) -> None:
        self.a[members], self.b[members] = part.a, part.b

    def forward(self, x: Tensor) -> Tensor:
        """x w'.   (n, B, i) -> (n, B, o)"""
        y = (x.flatten(0, 1) @ self.w0.T).unflatten(0, x.shape[:2])
        a, b = self.a[:, : self.used], self.b[:, : self.used]
        return torch.baddbmm(y, torch.bmm(x, b.mT), a) if self.used else y

    def backward(self, g: Tensor) -> Tensor:
        """g w.   (n, B, o) -> (n, B, i)"""
        y = (g.flatten(0, 1) @ self.w0).unflatten(0, g.shape[:2])
        a, b = self.a[:, : self.used], self.b[:, : self.used]
        return torch.baddbmm(y, torch.bmm(g, a.mT), b) if self.used else y

    def add(self, g: Tensor, x: Tensor, lr: float) -> None:
        """w <- w - lr g' x, but for `used`."""
        rows = slice(self.used, self.used + g.shape[1])
        torch.mul(g, -lr, out=self.a[:, rows])
        self.b[:, rows] = x

    def difference(self, j: int, out: Tensor) -> Tensor:
        """out <- w_j - w0, (o, i)."""
        return torch.mm(self.a[j, : self.used].T, self.b[j, : self.used], out=out)

    def differences(self, out: Tensor) -> None:
        """out <- w_j - w0 of all of them, (n, o, i)."""
        torch.bmm(self.a[:, : self.used].mT, self.b[:, : self.used], out=out)
