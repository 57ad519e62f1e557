"""Combine FedSOL with the correction terms of SCAFFOLD, FedNova, FedDyn and MOON (FedSOL, Table 4).

FedSOL perturbs the weights along such a term instead of adding it to its steps. The state that these methods store for
a client is therefore not computed with their own formulas, which assume corrected steps. It is the mean gradient

    (w0 - w) / (a lr)        a: the number of steps; with momentum, the total weight of a constant gradient

since SCAFFOLD's c_i' = c_i - c + (w0 - w) / (a lr) and FedDyn's g_k' = g_k - alpha (w - w0) would drift further in each
round. The server steps are those of the methods. FedNova has no correction term; that of `ccvr` is used, as in the
authors' code.

The first three classes are values of FedSOL's option `prox`. MOON's term depends on the batch, so it is combined with
FedSOL in a method of its own, `AlongMOON`.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import FEATURES, SGD_STEPS, Client, Method, Quadratic, SlotValues, State, delegates_to, option
from fedmpi.methods.feddyn import FedDyn
from fedmpi.methods.fednova import FedNova
from fedmpi.methods.fedsol import FedSOL
from fedmpi.methods.moon import MOON
from fedmpi.methods.scaffold import Scaffold


def mean_gradient(client: Client) -> Tensor:
    """Return the mean gradient of a client's local steps, (d,)."""
    return (client.w0 - client.w) / (client.gradient_weight * client.lr)


@delegates_to("scaffold")
@dataclass(frozen=True)
class ScaffoldTerm(Method):
    """SCAFFOLD's term <c - c_i, w>, for FedSOL's option `prox`."""

    scaffold = Scaffold()
    needs = frozenset({SGD_STEPS})

    def regularizer(self, client: Client) -> Tensor:
        return (client.downloads.c - client.state.c_i) @ client.w

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        if not client.steps or not client.lr:
            return SlotValues(dc=client.state.c_i * 0), client.state
        c_i = mean_gradient(client)
        return SlotValues(dc=c_i - client.state.c_i), State(c_i=c_i)


@delegates_to("fednova")
@dataclass(frozen=True)
class FedNovaTerm(Method):
    """FedNova's term <d - d_k, w>, for FedSOL's option `prox`; in FedNova, too, d_k is the mean gradient."""

    fednova = FedNova(ccvr=True)
    needs = frozenset({SGD_STEPS})

    def regularizer(self, client: Client) -> Tensor:
        return (client.downloads.d - client.state.d_k) @ client.w


@delegates_to("feddyn")
@dataclass(frozen=True)
class FedDynTerm(Method):
    """FedDyn's term alpha / 2 ||w - w0||^2 - <g_k, w>, for FedSOL's option `prox`."""

    alpha: float = option(0.1, "weight of the quadratic term", gt=0)

    needs = frozenset({SGD_STEPS})

    @property
    def feddyn(self) -> FedDyn:
        return FedDyn(self.alpha)

    def regularizer(self, client: Client) -> Quadratic:
        return self.feddyn.regularizer(client)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(g_k=mean_gradient(client)) if client.steps and client.lr else client.state


@delegates_to("moon")
@dataclass(frozen=True)
class AlongMOON(Method):
    """FedSOL with a perturbation along mu times MOON's contrastive term."""

    mu: float = option(1.0, "weight of the contrastive term", ge=0)
    tau: float = option(0.5, "its temperature", gt=0)
    rho: float = option(2.0, "FedSOL's", ge=0)
    layers: str = option("head", "FedSOL's", choices=("head", "body", "all"))

    needs = frozenset({SGD_STEPS, FEATURES})
    loss_is_sample_mean = True

    @property
    def moon(self) -> MOON:
        return MOON(self.mu, self.tau)

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        g_p = client.grad(
            x, y, loss=lambda client, x, _: self.mu * self.moon.contrastive_term(client, x, client.forward(x)[0])
        )
        return client.grad(x, y, at=client.w + FedSOL(self.rho, layers=self.layers).perturbation(client, g_p))
