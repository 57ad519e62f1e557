"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. https://arxiv.org/abs/1910.06378

    y   <- y - lr (g - c_i + c)                              local step                (1)
    c_i' = c_i - c + (x - y) / (a lr)                        option II                 (2)
    x'   = x + sum_i p_i (y_i - x)                                                     (3)
    c'   = c + (m/N) mean_i (c_i' - c_i)                     N all clients, m cohort   (4)
`mean_c: weighted` takes p_i in (4), too, as FLamby's program does: with all clients corrections then cancel in (3).
Symbols: x = client.w0, y = client.w. The paper has plain SGD, where a = K, the steps made; with momentum a is the total
weight of a constant gradient (else c is over-estimated by about 1/(1 - momentum)). The paper's (3) is uniform, here
cohort.weighting: uniform. Weight decay is part of the steps, and so of (x - y).
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import SGD_STEPS, Client, Method, Row, Server, State, Uploads, declared, option
from fedmpi.method.slots import CHANGE, FLAT, SHARED, Slots


@dataclass(frozen=True)
class Scaffold(Method):
    mean_c: str = option("uniform", "mean over clients in (4); weighted: by p", choices=("uniform", "weighted"))

    needs = frozenset({SGD_STEPS})
    client_state = Slots(c_i=FLAT)
    server_state = Slots(c=FLAT)
    receives = ("c",)
    sends = Slots(dw=SHARED, dc=CHANGE)

    @declared
    def means(self) -> dict[str, tuple[str, ...]]:
        return {"dw": ("p",), "dc": ("uniform" if self.mean_c == "uniform" else "p",)}

    def gradient(self, client: Client, g: Tensor) -> Tensor:
        return g.sub_(client.state.c_i).add_(client.down.c)  # (1)

    def upload(self, client: Client) -> tuple[Row, State]:
        if not client.steps or not client.lr:
            return Row(dc=client.state.c_i * 0), client.state
        dc = (client.w0 - client.w) / (client.a * client.lr) - client.down.c  # (2)
        return Row(dc=dc), State(c_i=client.state.c_i + dc)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        dc = updates.mean("dc", updates.uniform if self.mean_c == "uniform" else updates.p)
        return updates.mean("dw"), State(c=server.state.c + len(updates) / server.clients * dc)  # (3), (4)
