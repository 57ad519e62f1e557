"""Ditto. Li, Hu, Beirami, Smith. ICML 2021. https://arxiv.org/abs/2012.04221

w_k: FedAvg's, uploaded.      v_k <- v_k - lr (grad F_k(v_k) + lam (v_k - w0))      (2)
v_k is the client's own, starts as the initial model, and is what the client uses; w0 is the global model RECEIVED. The
global pass comes first, the personal pass after it, the same number of epochs; the prox term enters before momentum.
Batch statistics of v_k are its own, too.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import INITIAL, INITIAL_BUFFERS, Client, Method, Quadratic, Slots, State, option


@dataclass(frozen=True)
class Ditto(Method):
    lam: float = option(0.75, "pull of the personal model towards the global one", ge=0)

    client_state = Slots(v=INITIAL, v_b=INITIAL_BUFFERS)
    neutral = {}  # its global model is FedAvg's for every lam

    def train(self, client: Client) -> State:
        client.fit()
        own = client.fit(start=client.state.v, buffers=client.state.v_b, regularizer=self.pull)
        return State(v=own.w, v_b=own.b)

    def pull(self, client: Client) -> Quadratic:
        return Quadratic(self.lam, client.w0)  # of (2)

    def weights(self, client: Client) -> Tensor:
        return client.state.v

    def buffers(self, client: Client) -> Tensor:
        return client.state.v_b
