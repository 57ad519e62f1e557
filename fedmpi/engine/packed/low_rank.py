"""Low-rank form of the weights of a wide linear layer for n clients that have seen few samples.

    w_j = w0 + a_j' b_j        w0 (o, i), shared; a_j (K, o), b_j (K, i): a row for each sample seen, -lr g and x
This is what plain SGD without momentum and weight decay computes. It is faster while K (o + i) is less than o i: w0 is
one product for all clients, and no client's weights are formed before the differences are written to the uploads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_worthwhile(w0: Tensor, samples: int) -> bool:
    """Return whether the low-rank form takes at most half of the operations of full weights."""
    return w0.dim() == 2 and 2 * samples * sum(w0.shape) <= w0.numel()


class LowRankWeights:
    """The factors a, b of n clients; `used` rows of them so far, zero for clients that were not in a step."""

    def __init__(self, w0: Tensor, a: Tensor, b: Tensor, used: int = 0) -> None:
        self.w0, self.a, self.b, self.used = w0, a, b, used

    @staticmethod
    def of(w0: Tensor, clients: int, samples: int) -> LowRankWeights:
        """Make the factors of clients that all start at w0, and see so many samples."""
        o, i = w0.shape
        return LowRankWeights(w0, w0.new_zeros(clients, samples, o), w0.new_zeros(clients, samples, i))

    def part(self, members: slice | Tensor) -> LowRankWeights:
        return LowRankWeights(self.w0, self.a[members], self.b[members], self.used)

    def put(self, members: Tensor, part: LowRankWeights) -> None:
        self.a[members], self.b[members] = part.a, part.b

    def forward(self, x: Tensor) -> Tensor:
        """Return x w', (n, B, o), of x (n, B, i)."""
        y = (x.flatten(0, 1) @ self.w0.T).unflatten(0, x.shape[:2])
        a, b = self.a[:, : self.used], self.b[:, : self.used]
        return torch.baddbmm(y, torch.bmm(x, b.mT), a) if self.used else y

    def backward(self, g: Tensor) -> Tensor:
        """Return g w, (n, B, i), of g (n, B, o)."""
        y = (g.flatten(0, 1) @ self.w0).unflatten(0, g.shape[:2])
        a, b = self.a[:, : self.used], self.b[:, : self.used]
        return torch.baddbmm(y, torch.bmm(g, a.mT), b) if self.used else y

    def add(self, g: Tensor, x: Tensor, lr: float) -> None:
        """Step: w <- w - lr g' x; the caller then advances `used`."""
        rows = slice(self.used, self.used + g.shape[1])
        torch.mul(g, -lr, out=self.a[:, rows])
        self.b[:, rows] = x

    def difference(self, j: int, out: Tensor) -> Tensor:
        """Write w_j - w0 to `out` (o, i)."""
        return torch.mm(self.a[j, : self.used].T, self.b[j, : self.used], out=out)

    def differences(self, out: Tensor) -> None:
        """Write w_j - w0 of all clients to `out` (n, o, i)."""
        torch.bmm(self.a[:, : self.used].mT, self.b[:, : self.used], out=out)
