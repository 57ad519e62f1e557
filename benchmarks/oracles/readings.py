"""What other programs compute where it is not what we do: their equations as methods of fedmpi, for cases.py.

With these fedmpi must give their numbers, which shows that the equation is the whole of the difference. Names: the
program, and what it calls the method. Explained in docs/oracles.md. Symbols as in fedmpi/methods.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedmpi.common.options import option
from fedmpi.method import (
    FLAT,
    INITIAL,
    PER_CLASS,
    PROTOTYPES,
    SCALAR,
    Client,
    Method,
    Row,
    Server,
    Slots,
    State,
    Travel,
    Uploads,
)
from fedmpi.methods._prototypes import class_means


@final
@dataclass(frozen=True)
class FlukeFedNova(Method):
    """w <- sum_k c_k w_k,  c_k = p_k tau / a_k, whose sum is 1 only if all clients make as many steps.

    FedNova's (2) is this plus (1 - sum_k c_k) w.
    """

    sends = Slots(**Method.sends, a=SCALAR)

    def upload(self, k: Client) -> tuple[Row, State]:
        return Row(a=k.w.new_tensor(k.a)), k.state

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        c = up.p * (up.p @ up.a) / up.a
        return up.combine(c) + (c.sum() - 1) * s.w, State()


@final
@dataclass(frozen=True)
class FlukeFedDyn(Method):
    """Its L_k has the other sign and another factor than the authors', and N the cohort's size.

    step     g + a_k (w - w0 + L_k),   a_k = alpha / (N n_k / sum n)        authors: L_k as below
    client   L_k <- L_k + a_k (w0 - w)                                      authors: L_k <- L_k + (w - w0)
    server   m = mean_k w_k;  w0 = m + mean of L_k over the cohort          authors: over all clients
    A client that takes part for the first time starts from m.
    """

    alpha: float = option(0.1, "")
    mean_n: float = option(1.0, "sum of all n_k over N")

    client_state = Slots(L=FLAT, seen=SCALAR)
    server_state = Slots(L_mean=FLAT)
    receives = ("L_mean",)
    sends = Slots(**Method.sends, L=FLAT)

    def receive(self, k: Client) -> Tensor:
        return k.received + k.down.L_mean if k.state.seen else k.received

    def share(self, k: Client) -> float:
        return self.alpha * self.mean_n / k.n

    def gradient(self, k: Client, g: Tensor) -> Tensor:
        return g + self.share(k) * (k.w - k.w0 + k.state.L)

    def upload(self, k: Client) -> tuple[Row, State]:
        L = k.state.L + self.share(k) * (k.w0 - k.w)
        return Row(dw=k.w - k.received, L=L), State(L=L, seen=torch.ones_like(k.state.seen))

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        return up.mean("dw"), State(L_mean=up.mean("L", up.uniform))


@final
@dataclass(frozen=True)
class FlukeSAM(Method):
    """The first pass's gradient is added to what the second pass of the step before has left in `grad`:

    eps = rho T^2 (g + h) / ||T (g + h)||,   h: the last gradient that was descended along, 0 at first;   T = 1 or |w|
    """

    rho: float = option(0.05, "")
    adaptive: bool = option(False, "")

    client_state = Slots(h=FLAT)
    scratch = Slots(h=FLAT)

    def step(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        h = k.scratch.h
        if not k.steps:
            h.copy_(k.state.h)
        g, T = k.grad(x, y) + h, k.w.abs() if self.adaptive else torch.ones_like(k.w)
        return h.copy_(k.grad(x, y, at=k.w + self.rho * T**2 * g / (T * g).norm())).clone()

    def upload(self, k: Client) -> tuple[Row, State]:
        return Row(), State(h=k.scratch.h)


@final
@dataclass(frozen=True)
class FlukeMOON(Method):
    """A client that takes part for the first time has the model received, not the initial one, in place of its last."""

    mu: float = option(1.0, "")
    tau: float = option(0.5, "")

    client_state = Slots(last=INITIAL, seen=SCALAR)

    def loss(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        (z, f), near = k.forward(x), k.frozen(x)[0]
        far = k.frozen(x, at=k.state.last)[0] if k.state.seen else near
        to_near, to_far = (torch.cosine_similarity(z, other) / self.tau for other in (near, far))
        return k.task_loss(f, x, y) + self.mu * (1 + (to_far - to_near).exp()).log().mean()

    def upload(self, k: Client) -> tuple[Row, State]:
        return Row(), State(last=k.w, seen=torch.ones_like(k.state.seen))


@final
@dataclass(frozen=True)
class FlukeFedAvgM(Method):
    """m = 0 in round 0, so that its D is lost;  m <- beta m + D  from then on;  w <- w + m."""

    beta: float = option(0.9, "")

    server_state = Slots(m=FLAT)

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        m = self.beta * s.state.m + up.mean("dw") if s.round else s.state.m
        return m, State(m=m)


@final
@dataclass(frozen=True)
class AdaptiveServer(Method):
    """Adam, Yogi and Adagrad as in aggregation/optimizers.py, but for what programs have otherwise.

    scale: of D before anything else; v: its start; correct: the step times sqrt(1 - beta2^n) / (1 - beta1^n) with
    n = round + correct, round from 0; 0: not; eps_too: eps times that root, as in torch.optim.Adam.
    """

    rule: str = option("adam", "", choices=("adam", "yogi", "adagrad"))
    lr: float = option(0.03, "")
    beta1: float = option(0.9, "")
    beta2: float = option(0.99, "")
    eps: float = option(1e-3, "")
    scale: float = option(1.0, "")
    v: float = option(0.0, "")
    correct: int = option(0, "")
    eps_too: bool = option(False, "")

    server_state = Slots(m=FLAT, v=FLAT)

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        D, old = self.scale * up.mean("dw"), s.state.v if s.round else torch.full_like(s.state.v, self.v)
        m = self.beta1 * s.state.m + (1 - self.beta1) * D
        v = {
            "adam": self.beta2 * old + (1 - self.beta2) * D**2,
            "yogi": old - (1 - self.beta2) * D**2 * (old - D**2).sign(),
            "adagrad": old + D**2,
        }[self.rule]
        n = s.round + self.correct
        root = (1 - self.beta2**n) ** 0.5 if self.correct else 1.0
        rate = self.lr * root / (1 - self.beta1**n) if self.correct else self.lr
        return rate * m / (v.sqrt() + self.eps * (root if self.eps_too else 1)), State(m=m, v=v)


@final
@dataclass(frozen=True)
class FlukePFedMe(Method):
    """theta is pulled towards itself, so that the pull is 0, and is what is sent: SGD with each batch K times."""

    steps: int = option(3, "")

    def step(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        theta = k.w.clone()
        for _ in range(self.steps):
            theta -= k.lr * k.grad(x, y, at=theta)
        return (k.w - theta) / k.lr


@final
@dataclass(frozen=True)
class FlukePerFedAvg(Method):
    """The outer step starts at w', not at w:   w <- w - alpha grad F(w; b1) - beta grad F(w'; b2)."""

    alpha: float = option(0.05, "")

    batches_a_step = 2

    def step(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        (x1, x2), (y1, y2) = x.chunk(2), y.chunk(2)
        g = k.grad(x1, y1)
        return self.alpha / k.lr * g + k.grad(x2, y2, at=k.w - self.alpha * g)


@final
@dataclass(frozen=True)
class FlukeFedProto(Method):
    """A sample whose class has no prototype is pulled to 0; a client's first round is without prototypes.

    L = CE + lam MSE(z, P_y),  P_y = 0 where there is none;  L = CE in the client's first round
    """

    lam: float = option(1.0, "")

    client_state = Slots(seen=SCALAR)
    server_state = Slots(protos=PROTOTYPES)
    receives = ("protos",)
    sends = Slots(**Method.sends, protos=PROTOTYPES, held=PER_CLASS)
    scratch = Slots(sums=PROTOTYPES, counts=PER_CLASS)

    def travels(self, t: int, rounds: int) -> Travel:
        return Travel(groups=())

    def loss(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = k.forward(x)
        k.scratch.sums.index_add_(0, y, z.detach())
        k.scratch.counts.index_add_(0, y, z.new_ones(len(y)))
        pulled = self.lam * (z - k.down.protos[y]).square().mean() if k.state.seen else 0
        return k.task_loss(f, x, y) + pulled

    def upload(self, k: Client) -> tuple[Row, State]:
        protos, held = class_means(k.scratch.sums, k.scratch.counts)
        return Row(protos=protos, held=held), State(seen=torch.ones_like(k.state.seen))

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        protos, known = class_means(up.protos.sum(0), up.held.sum(0))
        return up.mean("dw"), State(protos=protos + (1 - known)[:, None] * s.state.protos)


@final
@dataclass(frozen=True)
class FlukeAPFL(Method):
    """The gradient at the mixture reaches a copy, not v; what is left is  v <- (1 - alpha) w_k + alpha v."""

    alpha: float = option(0.5, "")

    client_state = Slots(v=INITIAL)

    def upload(self, k: Client) -> tuple[Row, State]:
        return Row(), State(v=(1 - self.alpha) * k.w + self.alpha * k.state.v)


@final
@dataclass(frozen=True)
class PflScaffold(Method):
    """c_i' = c_i - c + (y - x) / (K lr): SCAFFOLD's (2) with the other sign of (x - y), so that (1) adds what it should
    take away."""

    client_state = Slots(c_i=FLAT)
    server_state = Slots(c=FLAT)
    receives = ("c",)
    sends = Slots(**Method.sends, dc=FLAT)

    def gradient(self, k: Client, g: Tensor) -> Tensor:
        return g - k.state.c_i + k.down.c

    def upload(self, k: Client) -> tuple[Row, State]:
        dc = (k.w - k.w0) / (k.a * k.lr) - k.down.c
        return Row(dc=dc), State(c_i=k.state.c_i + dc)

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        return up.mean("dw"), State(c=s.state.c + len(up) / s.clients * up.mean("dc", up.uniform))


@final
@dataclass(frozen=True)
class FedLabFedDyn(Method):
    """Its regularisers are formed of detached parameters, so that clients make plain SGD; and h loses more:

    h <- h - (alpha/N) (sum_k w_k - w)         FedDyn's (3): sum_k (w_k - w);           w <- mean_k w_k - h / alpha
    """

    alpha: float = option(0.1, "")

    server_state = Slots(h=FLAT)

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        D, m = up.mean("dw"), len(up)
        h = s.state.h - self.alpha / s.clients * (m * D + (m - 1) * s.w)
        return D - h / self.alpha, State(h=h)
