"""FedBABU: FedAvg trains the body with a fixed random head, and clients fine-tune before the evaluation.

Oh, Kim, Yun. Federated Averaging with Body Aggregation and Body Update. ICLR 2022. https://arxiv.org/abs/2106.06042

Rounds:        head theta_h = theta_h^0 on all clients and the server;   body theta_b <- sum_k p_k theta_b,k   (1)
Evaluation:    with the protocol ft(e), each client first fine-tunes the full network, the head or the body for e
               epochs                                                                                          (2)
"""

from dataclasses import dataclass

from fedmpi.flat.layout import ALL_GROUPS, BODY, HEAD, NORM
from fedmpi.method import LAST_LAYER, Client, Method, SharedParts, option

TUNED = {"full": (ALL_GROUPS,), "head": (HEAD,), "body": (BODY, NORM)}


@dataclass(frozen=True)
class FedBABU(Method):
    """FedBABU: FedAvg on the body with a fixed random head, and fine-tuning before evaluation."""

    tuned: str = option("full", "what ft(e) changes", choices=tuple(TUNED))

    trains = (BODY, NORM)
    needs = frozenset({LAST_LAYER})

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(HEAD,))  # (1)

    def finetune(self, client: Client, epochs: int) -> None:
        client.fit(epochs, groups=TUNED[self.tuned], fedavg_steps=True)  # (2)
