"""Freeze. The fixed classifier that FedUV is compared with. Son, Kim, Chung, Huang, Liu. CVPR 2024.
https://arxiv.org/abs/2402.18372

theta_h = theta_h^0 everywhere, the initial random head;   theta_b <- sum_k p_k theta_b,k            (1)
The head gets no gradient and no weight decay, and does not travel. (Their code trains it in every round and throws the
result away, because "Freeze" and "freeze" differ.)
"""

from dataclasses import dataclass

from fedmpi.flat.layout import BODY, HEAD, NORM
from fedmpi.method import LAST_LAYER, Method, Travel


@dataclass(frozen=True)
class Freeze(Method):
    trains = (BODY, NORM)
    needs = frozenset({LAST_LAYER})

    def travels(self, t: int, rounds: int) -> Travel:
        return Travel(but=(HEAD,))  # (1)
