"""FedDyn: dynamic regularisation, so that the minima of the clients' objectives agree with that of the global one.

Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama. ICLR 2021. https://arxiv.org/abs/2111.04263

A linear term with the client's state g_k and a quadratic term are added to the objective F_k of client k:
w_k  = argmin F_k(v) - <g_k, v> + (alpha/2) ||v - w||^2                                               (1)
g_k <- g_k - alpha (w_k - w)                                                                          (2)
h   <- h - (alpha/N) sum_{k in cohort} (w_k - w)       N: all clients; by (2), h is the mean g_k      (3)
w   <- sum_k p_k w_k - h / alpha                                                                      (4)
In the paper the p_k are equal (cohort.weighting: uniform). With report: avg, the global model is m = sum_k p_k w_k,
which the authors' code reports; clients receive m and h, and still start from w = m - h / alpha. Weight decay is part
of F_k, and so of (w_k - w). If (1) is solved exactly, grad F_k(w_k) = g_k - alpha (w_k - w), which is the new g_k.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import Client, Method, Quadratic, Server, SlotValues, State, Uploads, declared_property, option
from fedmpi.method.base import PLAIN_SERVER, SGD_STEPS
from fedmpi.method.slots import FLAT, Slots


@dataclass(frozen=True)
class FedDyn(Method):
    """FedDyn: dynamic regularisation of the clients' objectives."""

    alpha: float = option(0.1, "weight of the quadratic term", gt=0)
    report: str = option(
        "w", "what the global model is: w of (4), or the mean of the clients' models", choices=("w", "avg")
    )

    client_state = Slots(g_k=FLAT)
    server_state = Slots(h=FLAT)
    mean_only_slots = {"dw": ("p", "uniform")}

    @declared_property
    def needs(self) -> frozenset[str]:
        server = frozenset({PLAIN_SERVER}) if self.report == "avg" else frozenset[str]()  # otherwise w != m - h / alpha
        return server | {SGD_STEPS}

    @declared_property
    def receives(self) -> tuple[str, ...]:
        return ("h",) if self.report == "avg" else ()

    def initial_weights(self, client: Client) -> Tensor:
        return client.received - client.downloads.h / self.alpha if self.report == "avg" else client.received

    def regularizer(self, client: Client) -> Quadratic:
        return Quadratic(self.alpha, client.w0, slope=client.state.g_k)  # of (1)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(g_k=client.state.g_k - self.alpha * (client.w - client.w0))  # (2)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        h = server.state.h - self.alpha * len(updates) / server.clients * updates.mean("dw", updates.uniform)  # (3)
        # With report: avg, dw is relative to w = m - h / alpha, so the old h is subtracted from m.
        correction = server.state.h if self.report == "avg" else h
        return updates.mean("dw") - correction / self.alpha, State(h=h)  # (4)
