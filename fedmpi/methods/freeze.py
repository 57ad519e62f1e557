"""Freeze: the head keeps its random initial weights, and FedAvg trains the body; a baseline in the FedUV paper.

Son, Kim, Chung, Huang, Liu. CVPR 2024. https://arxiv.org/abs/2402.18372

head theta_h = theta_h^0 on all clients and the server;   body theta_b <- sum_k p_k theta_b,k  (1)
The head gets no gradient and no weight decay, and is not sent. (The authors' code trains the head in every round and
discards the result: it compares "Freeze" with "freeze", which are never equal.)
"""

from dataclasses import dataclass

from fedmpi.flat.layout import BODY, HEAD, NORM
from fedmpi.method import LAST_LAYER, Method, SharedParts


@dataclass(frozen=True)
class Freeze(Method):
    """Freeze: FedAvg on the body with a fixed random head."""

    trains = (BODY, NORM)
    needs = frozenset({LAST_LAYER})

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(HEAD,))  # (1)
