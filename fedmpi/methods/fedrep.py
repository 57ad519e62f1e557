"""FedRep. Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078

A shared body phi, a head h_k of the client's own. Each round, from the phi received and its own h_k:
    (1) head_epochs of SGD on h_k with phi fixed;      (2) body_epochs of SGD on phi with h_k fixed.
The body is averaged; the head stays. Each phase has its own optimiser, so that no momentum leaks into what is fixed.
train.epochs and train.steps play no part.
"""

from dataclasses import dataclass

from fedmpi.flat.layout import BODY, HEAD, NORM
from fedmpi.method import LAST_LAYER, Client, Method, State, Travel, option


@dataclass(frozen=True)
class FedRep(Method):
    head_epochs: int = option(10, "epochs of the head phase", ge=0)
    body_epochs: int = option(1, "epochs of the body phase", ge=0)

    needs = frozenset({LAST_LAYER})
    own_length = True

    def travels(self, t: int, rounds: int) -> Travel:
        return Travel(but=(HEAD,))

    def train(self, client: Client) -> State:
        client.fit(self.head_epochs, groups=(HEAD,))  # (1)
        client.fit(self.body_epochs, groups=(BODY, NORM))  # (2)
        return State()
