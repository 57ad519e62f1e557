"""FedExP: the server extrapolates the mean update by a factor that grows if the clients' updates disagree.

Jhunjhunwala, Wang, Joshi. Speeding Up Federated Averaging via Extrapolation. ICLR 2023.
https://arxiv.org/abs/2301.09604

eta_g = max(1, sum_i p_i ||D_i||^2 / (2 (||D||^2 + eps))),   D_i = w_i - w,  D = sum_i p_i D_i                   (1)
w    <- w + eta_g D                                                                                            (2)
v     = the mean of the last two w                                                                             (3)
In the paper the p_i are equal (cohort.weighting: uniform). The authors' code has m eps in place of eps in (1), for m
clients in the cohort, and multiplies eps by 0.998^2 in each round. With a cohort of one client, or with equal updates,
the method is FedAvg. From the second round on, the paper evaluates v, while clients continue from w. With report:
average, v is the global model, and clients also receive w - v. Buffers are not averaged over rounds.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import FLAT, PLAIN_SERVER, Client, Method, Server, Slots, State, Uploads, declared_property, option


@dataclass(frozen=True)
class FedExP(Method):
    """FedExP: FedAvg with an extrapolated server step."""

    eps: float = option(1e-3, "eps of (1), in squared units of the weights", gt=0)
    report: str = option(
        "last", "what the global model is: the last w, or the mean of the last two", choices=("last", "average")
    )

    @declared_property
    def needs(self) -> frozenset[str]:
        return frozenset({PLAIN_SERVER}) if self.report == "average" else frozenset()

    @declared_property
    def server_state(self) -> Slots:
        return Slots(ahead=FLAT) if self.report == "average" else Slots()

    @declared_property
    def receives(self) -> tuple[str, ...]:
        return tuple(self.server_state)

    def initial_weights(self, client: Client) -> Tensor:
        return client.received + client.downloads.ahead if self.report == "average" else client.received

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        K, p = updates.gram("dw"), updates.p
        eta_g = (p @ K.diagonal() / (2 * (p @ K @ p + self.eps))).clamp(min=1)  # (1)
        server.log_metrics(server_step=eta_g)
        step = updates.combine(eta_g * p)  # (2)
        if self.report == "last" or server.round == 0:
            return step, server.state
        return server.state.ahead + step / 2, State(ahead=step / 2)  # (3)
