"""FedALA: before local training, each client mixes the received model elementwise with its own last model.

Zhang, Hua, Wang, Song, Xue, Ma, Guan. Adaptive Local Aggregation for Personalized Federated Learning. AAAI 2023.
https://arxiv.org/abs/2212.01197

Client i mixes the received model w with w_i, its model after its last local training:
    u = w_i + (w - w_i) . W        W is learned in the head, or in all layers (layers: all); it is 1 elsewhere      (1)
    W <- clip(W - rate grad L(u) . (w - w_i), 0, 1)      on batches of a fraction `share` of its training rows     (2)
It then trains by SGD for E epochs from u, and the server averages the trained models, w <- sum_i p_i w_i. The client is
evaluated with (1), computed from the newest w and its W.

Each client keeps its own W, which starts at 1. When a client learns W for the first time, it repeats passes of (2) over
the rows until the losses of the last ten passes (the loss of a pass is that of its last batch) have a standard
deviation below `threshold`, with at least 11 and at most 100 passes. (The authors' code has no upper limit; the paper's
threshold is 0.01.) Later it makes one pass in each round. The rows for (2) are redrawn in each round. At least two rows
are drawn, and no batch has a single row, because batch normalisation cannot be trained on one. If w = w_i, as in round
0, nothing is mixed. A client that is not sampled does not learn W in that round; in the authors' code all clients mix
in every round.
"""

from dataclasses import dataclass
from statistics import pstdev

import torch
from torch import Tensor

from fedmpi.flat.layout import HEAD
from fedmpi.method import (
    INITIAL,
    LAST_LAYER,
    SCALAR,
    Client,
    Method,
    Slot,
    Slots,
    SlotValues,
    State,
    declared_property,
    option,
)
from fedmpi.methods._terms import differ_beyond_rounding

MIN_PASSES, MAX_PASSES = 11, 100  # over the rows, when W is learned for the first time
WINDOW = 10  # number of losses whose standard deviation is compared with `threshold`


@dataclass(frozen=True)
class FedALA(Method):
    """FedALA: FedAvg, but clients start from a learned elementwise mixture of the global model and their own model."""

    rate: float = option(1.0, "learning rate of W", ge=0)
    share: float = option(
        0.8, "fraction of the client's training rows that (2) uses, drawn anew in each round", gt=0, le=1
    )
    layers: str = option("head", "layers in which W is learned", choices=("head", "all"))
    threshold: float = option(0.1, "standard deviation of the losses below which the first learning of W ends", ge=0)

    needs = frozenset({LAST_LAYER})
    loss_is_sample_mean = True
    equals_fedavg_at = {"rate": 0.0}

    @declared_property
    def client_state(self) -> Slots:
        return Slots(last=INITIAL, W=Slot(("h" if self.layers == "head" else "d",), start=1.0), learned=SCALAR)

    @declared_property
    def accumulators(self) -> Slots:
        return Slots(W=Slot(("h" if self.layers == "head" else "d",)), learned=SCALAR)

    def initial_weights(self, client: Client) -> Tensor:
        W = client.accumulators.W.copy_(client.state.W)
        client.accumulators.learned.copy_(client.state.learned)
        learned, differs = torch.stack(
            [client.state.learned > 0, differ_beyond_rounding(client.received, client.state.last)]
        ).tolist()
        if not self.rate or not differs:
            return client.received
        losses: list[Tensor] = []
        while len(losses) < (1 if learned else MAX_PASSES):
            losses.append(self._update_mixing_weights(client, W))
            # Reading losses waits for the device, so they are read only if the loop may end.
            if len(losses) >= MIN_PASSES and pstdev(torch.stack(losses[-WINDOW:]).tolist()) < self.threshold:
                break
        client.accumulators.learned.fill_(1)
        return self._mixture(client, W)

    def _update_mixing_weights(self, client: Client, W: Tensor) -> Tensor:
        """Update W in place by one pass of (2) over a random part of the rows; return the loss of the last batch."""
        losses, mean_loss = list[Tensor](), client.w.new_zeros(())
        rows_left, size = max(int(self.share * client.n + 1e-9), min(2, client.n)), client.batch_size or client.n
        if rows_left > 1 and rows_left % size == 1:
            rows_left -= 1

        def loss(client: Client, x: Tensor, y: Tensor) -> Tensor:
            value = self.loss(client, x, y)
            losses.append(value.detach() * len(y))
            return value

        for x, y in client.batches(generator=client.generator("share", client.round)):
            losses.clear()
            used = x[:rows_left], y[:rows_left]
            g = client.grad(*used, at=self._mixture(client, W), loss=loss)
            difference = client.received - client.state.last
            W.sub_(
                self._learned_entries(client, g) * self._learned_entries(client, difference), alpha=self.rate
            ).clamp_(0, 1)  # (2)
            mean_loss = torch.stack(losses).sum() / len(used[1])
            rows_left -= len(y)
            if rows_left <= 0:
                break
        return mean_loss

    def _learned_entries(self, client: Client, flat: Tensor) -> Tensor:
        """Return the entries of `flat` (d,) for which W is learned."""
        return client.extract_group(HEAD, flat) if self.layers == "head" else flat

    def _mixture(self, client: Client, W: Tensor) -> Tensor:
        """Return u (d,) of (1), the mixture of the received model and the client's last model with mixing weights W."""
        mixed = self._learned_entries(client, client.state.last) + W * self._learned_entries(
            client, client.received - client.state.last
        )
        return client.replace_group(HEAD, mixed, into=client.received) if self.layers == "head" else mixed

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        # The server averages trained models, so dw is relative to the received model, not to u.
        learned = State(W=client.accumulators.W, learned=client.accumulators.learned)
        return SlotValues(dw=client.w - client.received), State(last=client.w, **learned)

    def personal_weights(self, client: Client) -> Tensor:
        return self._mixture(client, client.state.W) if self.rate else client.received
