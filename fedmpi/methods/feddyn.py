"""FedDyn. Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama. ICLR 2021. https://arxiv.org/abs/2111.04263

w_k  = argmin F_k(v) - <g_k, v> + (alpha/2) ||v - w||^2                                               (1)
g_k <- g_k - alpha (w_k - w)                                                                          (2)
h   <- h - (alpha/N) sum_{k in cohort} (w_k - w)       N all clients; with (2) the mean of all g_k    (3)
w   <- sum_k p_k w_k - h / alpha                                                                      (4)
The paper's (4) has equal p_k: cohort.weighting: uniform. report: avg makes m = sum_k p_k w_k the global model, as the
authors' code does in its reports; clients get m and h and start from w = m - h / alpha all the same. Weight decay is
part of F_k, and so of (w_k - w).

Where (1) holds, grad F_k(w_k) = g_k - alpha (w_k - w), which is why (2) makes g_k the gradient at the client's end and
stays bounded. FedSOL's steps know neither g_k nor alpha: w - w_k = a lr times their mean gradient, whatever g_k is, and
(2) would add up alpha times all drifts, without end as long as clients differ. There
    g_k <- (w - w_k) / (a lr)             the mean gradient of the steps, a: their number, or weight with momentum (2')
"""

from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from fedmpi.method import (
    FLAT,
    PLAIN_SERVER,
    SGD_STEPS,
    Client,
    Method,
    Row,
    Server,
    Slots,
    State,
    Uploads,
    declared,
    option,
)


@final
@dataclass(frozen=True)
class FedDyn(Method):
    alpha: float = option(0.1, "weight of the quadratic term", gt=0)
    report: str = option("w", "the global model: w of (4), or the mean of the clients'", choices=("w", "avg"))
    corrected: bool = field(default=True, init=False)  # FedSOL, whose own steps do not follow (1), makes it False

    paper = "Acar et al., ICLR 2021"
    client_state = Slots(g_k=FLAT)
    server_state = Slots(h=FLAT)
    means = {"dw": ("p", "uniform")}

    @declared
    def needs(self) -> frozenset[str]:
        one = frozenset({PLAIN_SERVER}) if self.report == "avg" else frozenset[str]()  # else m and w part ways
        return one | {SGD_STEPS}

    @declared
    def receives(self) -> tuple[str, ...]:
        return ("h",) if self.report == "avg" else ()

    def receive(self, k: Client) -> Tensor:
        return k.received - k.down.h / self.alpha if self.report == "avg" else k.received

    def gradient(self, k: Client, g: Tensor) -> Tensor:
        return g.sub_(k.state.g_k).add_(k.w - k.w0, alpha=self.alpha)  # (1)

    def proximal(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        return self.alpha * (k.w - k.w0) - k.state.g_k

    def upload(self, k: Client) -> tuple[Row, State]:
        if self.corrected:
            return Row(), State(g_k=k.state.g_k - self.alpha * (k.w - k.w0))  # (2)
        if not k.steps or not k.lr:
            return Row(), k.state
        return Row(), State(g_k=(k.w0 - k.w) / (k.a * k.lr))  # (2')

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        h = s.state.h - self.alpha * len(up) / s.clients * up.mean("dw", up.uniform)  # (3)
        off = s.state.h if self.report == "avg" else h  # from m, the h that led to the w of this round comes off
        return up.mean("dw") - off / self.alpha, State(h=h)  # (4)
