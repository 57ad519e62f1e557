"""SCAFFOLD: control variates of the clients and of the server correct the drift of local steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. https://arxiv.org/abs/1910.06378

c_i is the control variate of client i, c that of the server.
    y   <- y - lr (g - c_i + c)                              local step                (1)
    c_i' = c_i - c + (x - y) / (a lr)                        option II                 (2)
    x'   = x + sum_i p_i (y_i - x)                                                     (3)
    c'   = c + (m/N) mean_i (c_i' - c_i)                     N all clients, m cohort   (4)
x is client.w0 and y is client.w. `mean_c: weighted` also uses p_i in (4), as FLamby's code does; if all clients take
part, the corrections then cancel in (3). With plain SGD, as in the paper, a = K, the number of steps. With momentum, a
is chosen such that x - y = a lr v if the corrected gradient g - c_i + c is the same vector v in every step; with a = K,
c would be too large by a factor of about 1/(1 - momentum). In the paper the p_i are equal (cohort.weighting: uniform).
Weight decay is part of the steps, and so of (x - y).
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import SGD_STEPS, Client, Method, Server, SlotValues, State, Uploads, declared_property, option
from fedmpi.method.slots import FLAT, SHARED, UPDATE, Slots


@dataclass(frozen=True)
class Scaffold(Method):
    """SCAFFOLD: local steps that are corrected by control variates."""

    mean_c: str = option(
        "uniform", "mean over clients in (4): uniform, or weighted by p", choices=("uniform", "weighted")
    )

    needs = frozenset({SGD_STEPS})
    client_state = Slots(c_i=FLAT)
    server_state = Slots(c=FLAT)
    receives = ("c",)
    sends = Slots(dw=SHARED, dc=UPDATE)

    @declared_property
    def mean_only_slots(self) -> dict[str, tuple[str, ...]]:
        return {"dw": ("p",), "dc": ("uniform" if self.mean_c == "uniform" else "p",)}

    def correct_gradient(self, client: Client, g: Tensor) -> Tensor:
        return g.sub_(client.state.c_i).add_(client.downloads.c)  # (1)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        if not client.steps or not client.lr:
            return SlotValues(dc=client.state.c_i * 0), client.state
        dc = (client.w0 - client.w) / (client.gradient_weight * client.lr) - client.downloads.c  # (2)
        return SlotValues(dc=dc), State(c_i=client.state.c_i + dc)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        dc = updates.mean("dc", updates.uniform if self.mean_c == "uniform" else updates.p)
        return updates.mean("dw"), State(c=server.state.c + len(updates) / server.clients * dc)  # (3), (4)
