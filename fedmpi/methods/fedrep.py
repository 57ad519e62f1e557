"""FedRep: clients share a body and keep personal heads; each round trains first the head, then the body.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078

The server averages the body phi; each client keeps its own head h_k. In each round a client starts from the received
phi and its h_k, and trains them in two phases:
    (1) head_epochs of SGD on h_k with phi fixed;      (2) body_epochs of SGD on phi with h_k fixed.
Each phase has its own optimiser, so that momentum from one phase does not change weights that the other keeps fixed.
train.epochs and train.steps are not used.
"""

from dataclasses import dataclass

from fedmpi.flat.layout import BODY, HEAD, NORM
from fedmpi.method import LAST_LAYER, Client, Method, SharedParts, State, option


@dataclass(frozen=True)
class FedRep(Method):
    """FedRep: a shared body and personal heads, trained in two phases."""

    head_epochs: int = option(10, "epochs of the head phase", ge=0)
    body_epochs: int = option(1, "epochs of the body phase", ge=0)

    needs = frozenset({LAST_LAYER})
    sets_training_length = True

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(HEAD,))

    def train(self, client: Client) -> State:
        client.fit(self.head_epochs, groups=(HEAD,))  # (1)
        client.fit(self.body_epochs, groups=(BODY, NORM))  # (2)
        return State()
