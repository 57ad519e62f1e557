"""Methods of fedmpi with the equations of other programs, where these differ from fedmpi's; for cases.py.

With these methods fedmpi must give the other programs' numbers, which shows that the equations are the only difference.
A class is named after the program and its name of the method. Explanations are in docs/oracles.md; symbols are those of
fedmpi/methods.
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
    Server,
    SharedParts,
    Slot,
    Slots,
    SlotValues,
    State,
    Uploads,
)
from fedmpi.methods._prototypes import class_means


@final
@dataclass(frozen=True)
class AdaptiveServer(Method):
    """Adam, Yogi and Adagrad as in aggregation/server_optimizers.py, with the variations of other programs.

    scale: a factor of D; v: initial value of v; correct: multiply the step by sqrt(1 - beta2^n) / (1 - beta1^n) for
    n = round + correct, round from 0, or 0 for no correction; eps_too: multiply eps by that root, as torch.optim.Adam.
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

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        D, old = (
            self.scale * updates.mean("dw"),
            server.state.v if server.round else torch.full_like(server.state.v, self.v),
        )
        m = self.beta1 * server.state.m + (1 - self.beta1) * D
        v = {
            "adam": self.beta2 * old + (1 - self.beta2) * D**2,
            "yogi": old - (1 - self.beta2) * D**2 * (old - D**2).sign(),
            "adagrad": old + D**2,
        }[self.rule]
        n = server.round + self.correct
        root = (1 - self.beta2**n) ** 0.5 if self.correct else 1.0
        rate = self.lr * root / (1 - self.beta1**n) if self.correct else self.lr
        return rate * m / (v.sqrt() + self.eps * (root if self.eps_too else 1)), State(m=m, v=v)


@final
@dataclass(frozen=True)
class OtherFedProto(Method):
    """FedProto's loss L = CE + lam MSE(z, P_y), with the variations of other programs.

    to_zero: P_y = 0 if there is no prototype of y, and L = CE in the first round in which a client takes part;
    forgets: a prototype that no client of the round has uploaded is deleted.
    """

    lam: float = option(1.0, "")
    to_zero: bool = option(False, "")
    forgets: bool = option(False, "")

    client_state = Slots(seen=SCALAR)
    server_state = Slots(protos=PROTOTYPES, known=PER_CLASS)
    receives = ("protos", "known")
    sends = Slots(**Method.sends, protos=PROTOTYPES, held=PER_CLASS)
    accumulators = Slots(sums=PROTOTYPES, counts=PER_CLASS)

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(groups=())

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = client.forward(x)
        client.accumulators.sums.index_add_(0, y, z.detach())
        client.accumulators.counts.index_add_(0, y, z.new_ones(len(y)))
        if self.to_zero and not client.state.seen:
            return client.task_loss(f, x, y)
        counts = torch.ones_like(y) if self.to_zero else client.downloads.known[y]
        return (
            client.task_loss(f, x, y) + self.lam * ((z - client.downloads.protos[y]).square() * counts[:, None]).mean()
        )

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        protos, held = class_means(client.accumulators.sums, client.accumulators.counts)
        return SlotValues(protos=protos, held=held), State(seen=torch.ones_like(client.state.seen))

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        protos, known = class_means(updates.protos.sum(0), updates.held.sum(0))
        if self.forgets:
            return updates.mean("dw"), State(protos=protos, known=known)
        protos = protos + (1 - known)[:, None] * server.state.protos
        return updates.mean("dw"), State(protos=protos, known=known.maximum(server.state.known))


@final
@dataclass(frozen=True)
class PflScaffold(Method):
    """SCAFFOLD of pfl-research, c_i' = c_i - c + (y - x) / (K lr).

    The sign of (x - y) in SCAFFOLD's (2) is reversed, so that (1) adds the correction instead of subtracting it.
    """

    client_state = Slots(c_i=FLAT)
    server_state = Slots(c=FLAT)
    receives = ("c",)
    sends = Slots(**Method.sends, dc=FLAT)

    def correct_gradient(self, client: Client, g: Tensor) -> Tensor:
        return g - client.state.c_i + client.downloads.c

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        dc = (client.w - client.w0) / (client.gradient_weight * client.lr) - client.downloads.c
        return SlotValues(dc=dc), State(c_i=client.state.c_i + dc)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        return updates.mean("dw"), State(
            c=server.state.c + len(updates) / server.clients * updates.mean("dc", updates.uniform)
        )


@final
@dataclass(frozen=True)
class FedLabFedDyn(Method):
    """FedDyn of FedLab: its regularisers have no gradient, so that clients make plain SGD, and h changes by more.

    h <- h - (alpha/N) (sum_k w_k - w)         FedDyn's (3): sum_k (w_k - w);           w <- mean_k w_k - h / alpha
    """

    alpha: float = option(0.1, "")

    server_state = Slots(h=FLAT)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        D, m = updates.mean("dw"), len(updates)
        h = server.state.h - self.alpha / server.clients * (m * D + (m - 1) * server.w)
        return D - h / self.alpha, State(h=h)


@final
@dataclass(frozen=True)
class PfllibFedDyn(Method):
    """FedDyn of PFLlib: the penalty is (alpha/2) ||w - w0||, not its square.

    The gradient of this penalty is (alpha/2) (w - w0) / ||w - w0||.
    """

    alpha: float = option(0.1, "")

    client_state = Slots(g_k=FLAT)
    server_state = Slots(h=FLAT)

    def correct_gradient(self, client: Client, g: Tensor) -> Tensor:
        away = client.w - client.w0
        return g - client.state.g_k + self.alpha / 2 * away / away.norm().clamp(min=1e-300)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(g_k=client.state.g_k - self.alpha * (client.w - client.w0))

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        h = server.state.h - self.alpha * len(updates) / server.clients * updates.mean("dw")
        return updates.mean("dw") - h / self.alpha, State(h=h)


@final
@dataclass(frozen=True)
class PfllibAPFL(Method):
    """APFL of PFLlib: v is trained separately, and is replaced by the mixture at the end of the round.

    v <- v - lr g(v),   a <- a - lr (<v - w, a g(v) + (1 - a) g(w)> + 0.02 a)       each batch
    v <- (1 - a) w + a v                                                            at the end
    """

    alpha: float = option(0.5, "")

    client_state = Slots(v=INITIAL, alpha=Slot(start="alpha"))
    accumulators = Slots(v=FLAT, alpha=SCALAR)

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        v, a = client.accumulators.v, client.accumulators.alpha
        if not client.steps:
            v.copy_(client.state.v)
            a.copy_(client.state.alpha)
        g, at_v = client.grad(x, y), client.grad(x, y, at=v)
        v.sub_(client.lr * at_v)
        slope = (v - (client.w - client.lr * g)) @ (a * at_v + (1 - a) * g) + 0.02 * a
        a.sub_(client.lr * slope).clamp_(0, 1)
        return g

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        v, a = client.accumulators.v, client.accumulators.alpha
        return SlotValues(), State(v=(1 - a) * client.w + a * v, alpha=a)
