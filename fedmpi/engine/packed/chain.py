"""Training of chains of linear layers and ReLUs by plain SGD, for n clients at once and without autograd.

    z_{i+1} = z_i W_i' + b_i        g_L = dL/dz_L,  W_i -= lr g_{i+1}' z_i,  b_i -= lr sum_b g_{i+1},  g_i = g_{i+1} W_i
z_i is the input of layer i, and g_i is the gradient of the loss L with respect to z_i. All clients start with the same
weights W0. If each client sees few samples, the weights (o, i) of a wide layer are stored in low-rank form,
    W = W0 + A' B        A (K, o) stores -lr g, and B (K, i) stores z, one row for each of the K samples seen so far
For plain SGD this form is exact. It is faster if K (o + i) is less than o i: the product with W0 is computed once for
all clients, and no client's W is ever formed; W - W0 is formed only when it is written to the upload.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from fedmpi.flat.layout import Segment
from fedmpi.flat.model import FlatModel

ClientIndex = slice | Tensor  # selects clients by their positions


def uses_low_rank(shape: Sequence[int], samples: int) -> bool:
    """Return whether low-rank weights need at most half of the operations of dense weights.

    Args:
        shape: the shape of the weights, (o, i); for tensors of other dimensions the result is False.
        samples: the number of samples that a client sees.
    """
    return len(shape) == 2 and 2 * samples * sum(shape) <= shape[0] * shape[1]


class DenseTensor:
    """One parameter tensor of n clients in dense form: weights (n, o, i) or biases (n, o)."""

    def __init__(self, segment: Segment, w0: Tensor, clients: int) -> None:
        self.segment, self.w0 = segment, segment.view(w0)
        self.w = self.w0.expand(clients, *segment.shape).clone()

    def forward(self, members: ClientIndex, x: Tensor) -> Tensor:
        return torch.bmm(x, self.w[members].mT)

    def backward(self, members: ClientIndex, g: Tensor) -> Tensor:
        return torch.bmm(g, self.w[members])

    def step(self, members: ClientIndex, g: Tensor, x: Tensor, lr: float) -> None:
        w = self.w[members]  # a view if `members` is a slice, else a copy
        w.baddbmm_(g.mT, x, alpha=-lr)
        if isinstance(members, Tensor):
            self.w[members] = w

    def write_differences(self, rows: Tensor) -> None:
        """Write w - w0 into those columns of `rows` (n, d) that belong to this tensor."""
        torch.sub(self.w.flatten(1), self.w0.flatten(), out=rows[:, self.segment.start : self.segment.stop])


class LowRankTensor:
    """The weights of one layer for n clients in low-rank form: factors a (n, K, o) and b (n, K, i).

    The first `used` rows of the factors are filled. A step fills the next rows; they remain zero for clients that do
    not take this step.
    """

    def __init__(self, segment: Segment, w0: Tensor, clients: int, samples: int) -> None:
        self.segment, self.w0, self.used = segment, segment.view(w0), 0
        self.a, self.b = (w0.new_zeros(clients, samples, width) for width in segment.shape)

    def forward(self, members: ClientIndex, x: Tensor) -> Tensor:
        a, b = self.a[members, : self.used], self.b[members, : self.used]
        y = (x.flatten(0, 1) @ self.w0.T).unflatten(0, x.shape[:2])
        return torch.baddbmm(y, torch.bmm(x, b.mT), a) if self.used else y

    def backward(self, members: ClientIndex, g: Tensor) -> Tensor:
        a, b = self.a[members, : self.used], self.b[members, : self.used]
        y = (g.flatten(0, 1) @ self.w0).unflatten(0, g.shape[:2])
        return torch.baddbmm(y, torch.bmm(g, a.mT), b) if self.used else y

    def step(self, members: ClientIndex, g: Tensor, x: Tensor, lr: float) -> None:
        rows = slice(self.used, self.used + g.shape[1])
        self.a[members, rows], self.b[members, rows] = g * -lr, x
        self.used = rows.stop

    def write_differences(self, rows: Tensor) -> None:
        out = rows[:, self.segment.start : self.segment.stop].view(len(rows), *self.segment.shape)
        torch.bmm(self.a[:, : self.used].mT, self.b[:, : self.used], out=out)


class PackedChain:
    """Trains a chain of layers for n clients by plain SGD on the mean cross-entropy, and holds their weights."""

    def __init__(self, layers: Sequence[nn.Module], model: FlatModel, w0: Tensor, clients: int, samples: int) -> None:
        """Create the weights of all clients.

        Args:
            layers: the linear layers and ReLUs of `model`.
            model: the flat model, which defines the positions of the parameter tensors.
            w0: (d,) weights from which all clients start.
            clients: the number n of clients.
            samples: the number K of rows that low-rank factors have after all steps.
        """
        segment = {id(p): s for s, p in model.segment_parameters}
        self.layers: list[
            tuple[DenseTensor | LowRankTensor, DenseTensor | None] | None
        ] = []  # weight and bias of each layer; None for a ReLU
        for layer in layers:
            if not isinstance(layer, nn.Linear):
                self.layers.append(None)
                continue
            s, bias = segment[id(layer.weight)], None
            low_rank = uses_low_rank(s.shape, samples)
            weight = LowRankTensor(s, w0, clients, samples) if low_rank else DenseTensor(s, w0, clients)
            if layer.bias is not None:
                bias = DenseTensor(segment[id(layer.bias)], w0, clients)
            self.layers.append((weight, bias))

    def step(self, members: ClientIndex, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """Take one training step for some of the clients; return their losses.

        Args:
            members: the positions of these clients among all clients.
            x, y: a batch for each of them, (members, B, ...) and (members, B).
        """
        z = [x.flatten(2)]
        for layer in self.layers:
            if layer is None:
                z.append(z[-1].relu())
            else:
                weight, bias = layer
                out = weight.forward(members, z[-1])
                z.append(out if bias is None else out.add_(bias.w[members, None]))
        p, true = log_softmax(z[-1], 2), y[..., None]
        losses = -p.gather(2, true).mean((1, 2))
        g = p.exp_().scatter_add_(2, true, p.new_full((), -1.0).expand(true.shape)).div_(y.shape[1])
        for i in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[i]
            if layer is None:
                g = torch.ops.aten.threshold_backward(g, z[i + 1], 0)
                continue
            weight, bias = layer
            before = weight.backward(members, g) if i else g  # computed before the weights change
            weight.step(members, g, z[i], lr)
            if bias is not None:
                bias.w[members] -= lr * g.sum(1)
            g = before
        return losses

    def write_differences(self, w0: Tensor, rows: Tensor) -> None:
        """Write w - w0 of all clients into rows (n, d)."""
        for tensor in (each for layer in self.layers if layer for each in layer if each):
            tensor.write_differences(rows)
