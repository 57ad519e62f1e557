"""Methods of fedmpi with fluke's equations, where these differ from fedmpi's; see readings.py."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedmpi.common.options import option
from fedmpi.method import (
    FLAT,
    INITIAL,
    SCALAR,
    Client,
    Method,
    Server,
    Slots,
    SlotValues,
    State,
    Uploads,
)


@final
@dataclass(frozen=True)
class FlukeFedNova(Method):
    """FedNova of fluke: w <- sum_k c_k w_k with c_k = p_k tau / a_k, whose sum is 1 only for equal numbers of steps.

    FedNova's (2) is this plus (1 - sum_k c_k) w.
    """

    sends = Slots(**Method.sends, a=SCALAR)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(a=client.w.new_tensor(client.gradient_weight)), client.state

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        c = updates.p * (updates.p @ updates.a) / updates.a
        return updates.combine(c) + (c.sum() - 1) * server.w, State()


@final
@dataclass(frozen=True)
class FlukeFedDyn(Method):
    """FedDyn of fluke: L_k, which is -g_k / alpha in FedDyn, has the opposite sign and a factor alpha.

    step     g + a_k (w - w0 + L_k),   a_k = alpha / (N n_k / sum n)        FedDyn: a_k = alpha
    client   L_k <- L_k + a_k (w0 - w)                                      FedDyn: L_k <- L_k + (w - w0)
    server   m = mean_k w_k;  w0 = m + mean of L_k over the cohort          FedDyn: over all clients
    A client that takes part for the first time starts from m.
    """

    alpha: float = option(0.1, "")
    mean_n: float = option(1.0, "sum of all n_k over N")

    client_state = Slots(L=FLAT, seen=SCALAR)
    server_state = Slots(L_mean=FLAT)
    receives = ("L_mean",)
    sends = Slots(**Method.sends, L=FLAT)

    def initial_weights(self, client: Client) -> Tensor:
        return client.received + client.downloads.L_mean if client.state.seen else client.received

    def share(self, client: Client) -> float:
        return self.alpha * self.mean_n / client.n

    def correct_gradient(self, client: Client, g: Tensor) -> Tensor:
        return g + self.share(client) * (client.w - client.w0 + client.state.L)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        L = client.state.L + self.share(client) * (client.w0 - client.w)
        return SlotValues(dw=client.w - client.received, L=L), State(L=L, seen=torch.ones_like(client.state.seen))

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        return updates.mean("dw"), State(L_mean=updates.mean("L", updates.uniform))


@final
@dataclass(frozen=True)
class FlukeSAM(Method):
    """SAM of fluke: the gradient of the first pass is added to that of the previous step's second pass.

    eps = rho T^2 (g + h) / ||T (g + h)||,   h: the last gradient that was descended along, 0 at first;   T = 1 or |w|
    """

    rho: float = option(0.05, "")
    adaptive: bool = option(False, "")

    client_state = Slots(h=FLAT)
    accumulators = Slots(h=FLAT)

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        h = client.accumulators.h
        if not client.steps:
            h.copy_(client.state.h)
        g, T = client.grad(x, y) + h, client.w.abs() if self.adaptive else torch.ones_like(client.w)
        return h.copy_(client.grad(x, y, at=client.w + self.rho * T**2 * g / (T * g).norm())).clone()

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(h=client.accumulators.h)


@final
@dataclass(frozen=True)
class FlukeMOON(Method):
    """MOON of fluke: in a client's first round its previous model is the received model, not the initial one."""

    mu: float = option(1.0, "")
    tau: float = option(0.5, "")

    client_state = Slots(last=INITIAL, seen=SCALAR)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        (z, f), near = client.forward(x), client.reference_forward(x)[0]
        far = client.reference_forward(x, at=client.state.last)[0] if client.state.seen else near
        to_near, to_far = (torch.cosine_similarity(z, other) / self.tau for other in (near, far))
        return client.task_loss(f, x, y) + self.mu * (1 + (to_far - to_near).exp()).log().mean()

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(last=client.w, seen=torch.ones_like(client.state.seen))


@final
@dataclass(frozen=True)
class FlukeFedAvgM(Method):
    """FedAvgM of fluke: m = 0 in round 0, whose D is lost; then m <- beta m + D, w <- w + m."""

    beta: float = option(0.9, "")

    server_state = Slots(m=FLAT)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        m = self.beta * server.state.m + updates.mean("dw") if server.round else server.state.m
        return m, State(m=m)


@final
@dataclass(frozen=True)
class FlukePFedMe(Method):
    """pFedMe of fluke, which is SGD with each batch K times.

    theta is pulled towards itself, so that the pull is 0, and theta is uploaded.
    """

    steps: int = option(3, "")

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        theta = client.w.clone()
        for _ in range(self.steps):
            theta -= client.lr * client.grad(x, y, at=theta)
        return (client.w - theta) / client.lr


@final
@dataclass(frozen=True)
class FlukePerFedAvg(Method):
    """Per-FedAvg of fluke, w <- w - alpha grad F(w; b1) - beta grad F(w'; b2): the outer step starts at w', not w."""

    alpha: float = option(0.05, "")

    batches_per_step = 2

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        (x1, x2), (y1, y2) = x.chunk(2), y.chunk(2)
        g = client.grad(x1, y1)
        return self.alpha / client.lr * g + client.grad(x2, y2, at=client.w - self.alpha * g)


@final
@dataclass(frozen=True)
class FlukeAPFL(Method):
    """APFL of fluke: the gradient at the mixture changes a copy, not v, so that v <- (1 - alpha) w_k + alpha v."""

    alpha: float = option(0.5, "")

    client_state = Slots(v=INITIAL)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(v=(1 - self.alpha) * client.w + self.alpha * client.state.v)
