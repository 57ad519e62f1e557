"""FedSOL, Table 4: FedSOL along the terms by which SCAFFOLD, FedNova, FedDyn and MOON change a client's steps.

FedSOL perturbs along a term and does not add it to its steps. So what these methods keep of a client is not what their
own formulas make of corrected steps; it is the mean gradient of the steps,

    (w0 - w) / (a lr)        a: the number of steps, with momentum the total weight of a constant gradient

SCAFFOLD's c_i' = c_i - c + that, and FedDyn's g_k' = g_k - alpha (w - w0), would grow by a drift in each round. Servers
are those of the methods. FedNova has no term of its own: that of `ccvr` is taken, as in the authors' code.

The first three are for FedSOL's option `prox`; MOON's term is one of the batch, so `AlongMOON` is a method itself.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import FEATURES, SGD_STEPS, Client, Method, Quadratic, Row, State, borrows, option
from fedmpi.methods.feddyn import FedDyn
from fedmpi.methods.fednova import FedNova
from fedmpi.methods.fedsol import FedSOL
from fedmpi.methods.moon import MOON
from fedmpi.methods.scaffold import Scaffold


def mean_gradient(client: Client) -> Tensor:
    return (client.w0 - client.w) / (client.a * client.lr)


@borrows("scaffold")
@dataclass(frozen=True)
class ScaffoldTerm(Method):
    """<c - c_i, w>"""

    scaffold = Scaffold()
    needs = frozenset({SGD_STEPS})

    def regularizer(self, client: Client) -> Tensor:
        return (client.down.c - client.state.c_i) @ client.w

    def upload(self, client: Client) -> tuple[Row, State]:
        if not client.steps or not client.lr:
            return Row(dc=client.state.c_i * 0), client.state
        c_i = mean_gradient(client)
        return Row(dc=c_i - client.state.c_i), State(c_i=c_i)


@borrows("fednova")
@dataclass(frozen=True)
class FedNovaTerm(Method):
    """<d - d_k, w>, whose d_k is the mean gradient already."""

    fednova = FedNova(ccvr=True)
    needs = frozenset({SGD_STEPS})

    def regularizer(self, client: Client) -> Tensor:
        return (client.down.d - client.state.d_k) @ client.w


@borrows("feddyn")
@dataclass(frozen=True)
class FedDynTerm(Method):
    """alpha / 2 ||w - w0||^2 - <g_k, w>"""

    alpha: float = option(0.1, "weight of the quadratic term", gt=0)

    needs = frozenset({SGD_STEPS})

    @property
    def feddyn(self) -> FedDyn:
        return FedDyn(self.alpha)

    def regularizer(self, client: Client) -> Quadratic:
        return self.feddyn.regularizer(client)

    def upload(self, client: Client) -> tuple[Row, State]:
        return Row(), State(g_k=mean_gradient(client)) if client.steps and client.lr else client.state


@borrows("moon")
@dataclass(frozen=True)
class AlongMOON(Method):
    """FedSOL along mu times MOON's contrastive term."""

    mu: float = option(1.0, "weight of the contrastive term", ge=0)
    tau: float = option(0.5, "its temperature", gt=0)
    rho: float = option(2.0, "FedSOL's", ge=0)
    layers: str = option("head", "FedSOL's", choices=("head", "body", "all"))

    needs = frozenset({SGD_STEPS, FEATURES})

    @property
    def moon(self) -> MOON:
        return MOON(self.mu, self.tau)

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        g_p = client.grad(x, y, loss=lambda client, x, _: self.mu * self.moon.contrast(client, x, client.forward(x)[0]))
        return client.grad(x, y, at=client.w + FedSOL(self.rho, layers=self.layers).perturbation(client, g_p))
