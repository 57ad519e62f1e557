"""Ditto: each client also trains a personal model, which a proximal term keeps close to the global model.

Li, Hu, Beirami, Smith. ICML 2021. https://arxiv.org/abs/2012.04221

    w_k: trained and uploaded as in FedAvg
    v_k <- v_k - lr (grad F_k(v_k) + lam (v_k - w0))      (2)
w0 is the global model that the client received. The personal model v_k starts as the initial model, stays with its
client between rounds, and is evaluated as the client's model. In each round a client trains first w_k, then v_k, for
the same number of epochs. The proximal term is part of the gradient to which momentum is applied. v_k has its own batch
statistics, too.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import INITIAL, INITIAL_BUFFERS, Client, Method, Quadratic, Slots, State, option


@dataclass(frozen=True)
class Ditto(Method):
    """Ditto: FedAvg, plus a personal model for each client, kept close to the global one by a proximal term."""

    lam: float = option(0.75, "weight of the proximal term", ge=0)

    client_state = Slots(v=INITIAL, v_b=INITIAL_BUFFERS)
    equals_fedavg_at = {}  # its global model is FedAvg's for every lam

    def train(self, client: Client) -> State:
        client.fit()
        own = client.fit(start=client.state.v, buffers=client.state.v_b, regularizer=self._proximal_term)
        return State(v=own.w, v_b=own.b)

    def _proximal_term(self, client: Client) -> Quadratic:
        return Quadratic(self.lam, client.w0)  # of (2)

    def personal_weights(self, client: Client) -> Tensor:
        return client.state.v

    def personal_buffers(self, client: Client) -> Tensor:
        return client.state.v_b
