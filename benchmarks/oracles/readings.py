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
    Slot,
    Slots,
    State,
    Travel,
    Uploads,
)
from fedmpi.methods._prototypes import class_means


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
class OtherFedProto(Method):
    """L = CE + lam MSE(z, P_y) as in FedProto, but

    to_zero: P_y = 0 where there is none, and L = CE in a client's first round, whenever that is;
    forgets: a prototype that no client of the round has sent is gone.
    """

    lam: float = option(1.0, "")
    to_zero: bool = option(False, "")
    forgets: bool = option(False, "")

    client_state = Slots(seen=SCALAR)
    server_state = Slots(protos=PROTOTYPES, known=PER_CLASS)
    receives = ("protos", "known")
    sends = Slots(**Method.sends, protos=PROTOTYPES, held=PER_CLASS)
    scratch = Slots(sums=PROTOTYPES, counts=PER_CLASS)

    def travels(self, t: int, rounds: int) -> Travel:
        return Travel(groups=())

    def loss(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = k.forward(x)
        k.scratch.sums.index_add_(0, y, z.detach())
        k.scratch.counts.index_add_(0, y, z.new_ones(len(y)))
        if self.to_zero and not k.state.seen:
            return k.task_loss(f, x, y)
        counts = torch.ones_like(y) if self.to_zero else k.down.known[y]
        return k.task_loss(f, x, y) + self.lam * ((z - k.down.protos[y]).square() * counts[:, None]).mean()

    def upload(self, k: Client) -> tuple[Row, State]:
        protos, held = class_means(k.scratch.sums, k.scratch.counts)
        return Row(protos=protos, held=held), State(seen=torch.ones_like(k.state.seen))

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        protos, known = class_means(up.protos.sum(0), up.held.sum(0))
        if self.forgets:
            return up.mean("dw"), State(protos=protos, known=known)
        protos = protos + (1 - known)[:, None] * s.state.protos
        return up.mean("dw"), State(protos=protos, known=known.maximum(s.state.known))


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


@final
@dataclass(frozen=True)
class PfllibFedDyn(Method):
    """The term is (alpha/2) ||w - w0||, not its square: FedDyn's step with (alpha/2) (w - w0) / ||w - w0||."""

    alpha: float = option(0.1, "")

    client_state = Slots(g_k=FLAT)
    server_state = Slots(h=FLAT)

    def gradient(self, k: Client, g: Tensor) -> Tensor:
        away = k.w - k.w0
        return g - k.state.g_k + self.alpha / 2 * away / away.norm().clamp(min=1e-300)

    def upload(self, k: Client) -> tuple[Row, State]:
        return Row(), State(g_k=k.state.g_k - self.alpha * (k.w - k.w0))

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        h = s.state.h - self.alpha * len(up) / s.clients * up.mean("dw")
        return up.mean("dw") - h / self.alpha, State(h=h)


@final
@dataclass(frozen=True)
class PfllibAPFL(Method):
    """v trains by itself, and becomes the mixture at the end of the round:

    v <- v - lr g(v),   a <- a - lr (<v - w, a g(v) + (1 - a) g(w)> + 0.02 a)       each batch
    v <- (1 - a) w + a v                                                            at the end
    """

    alpha: float = option(0.5, "")

    client_state = Slots(v=INITIAL, alpha=Slot(start="alpha"))
    scratch = Slots(v=FLAT, alpha=SCALAR)

    def step(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        v, a = k.scratch.v, k.scratch.alpha
        if not k.steps:
            v.copy_(k.state.v)
            a.copy_(k.state.alpha)
        g, at_v = k.grad(x, y), k.grad(x, y, at=v)
        v.sub_(k.lr * at_v)
        slope = (v - (k.w - k.lr * g)) @ (a * at_v + (1 - a) * g) + 0.02 * a
        a.sub_(k.lr * slope).clamp_(0, 1)
        return g

    def upload(self, k: Client) -> tuple[Row, State]:
        v, a = k.scratch.v, k.scratch.alpha
        return Row(), State(v=(1 - a) * k.w + a * v, alpha=a)
