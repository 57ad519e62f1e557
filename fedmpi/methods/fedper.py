"""FedPer: clients share the body of the model, and each keeps its own head, the last linear layer.

Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers. 2019.
https://arxiv.org/abs/1912.00818

(theta_b,k, theta_h,k) <- SGD on F_k from (body theta_b, head theta_h,k);  theta_b <- sum_k p_k theta_b,k        (1)
A client that was not sampled is evaluated with the new body and the head from the last round in which it trained.
"""

from dataclasses import dataclass

from fedmpi.flat.layout import HEAD
from fedmpi.method import LAST_LAYER, Method, SharedParts


@dataclass(frozen=True)
class FedPer(Method):
    """FedPer: FedAvg on the body, with personal heads."""

    needs = frozenset({LAST_LAYER})

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(HEAD,))  # (1)
