"""APFL: each client mixes a personal model with the global one, with a mixing weight that it learns.

Deng, Kamani, Mahdavi. Adaptive Personalized Federated Learning. 2020. https://arxiv.org/abs/2003.13461

w_k is trained and uploaded as in FedAvg. The client's own model v_k and its mixing weight alpha_k are client state. The
client is evaluated with
    u = alpha_k v_k + (1 - alpha_k) w                  with the aggregated w                                   (1)
In a local step all gradients are computed on the same batch, at the values before the step:
    w_k     <- w_k - lr grad f(w_k)                                                                            (2)
    v_k     <- v_k - lr alpha_k grad f(u_k),      u_k = alpha_k v_k + (1 - alpha_k) w_k                         (3)
    alpha_k <- alpha_k - lr <v_k - w_k, grad f(u_k)>, clipped to [0, 1]                                         (4)
(4) is applied in the first step of a round (adapt: round), in every step, or never. The authors' code differs: it mixes
the outputs of the two models instead of their weights (1), uses the new w_k in (3), adds 0.02 alpha_k to the gradient
in (4), and evaluates w_k. The metric `alpha` is the mean of alpha_k over the cohort. train.weight_decay applies to w_k
only. With dropout, the gradients at w_k and u_k use different masks. Batch statistics are mixed like the weights in
(1); those of v_k are updated by the forward passes at u_k.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import PLAIN_SGD, Client, Method, Server, SlotValues, State, Uploads, option
from fedmpi.method.slots import BUFFERS, FLAT, INITIAL, INITIAL_BUFFERS, SCALAR, SHARED, Slot, Slots


@dataclass(frozen=True)
class APFL(Method):
    """APFL: personal models, each mixed with the global model by a learned weight."""

    alpha: float = option(0.5, "initial weight of the client's own model", ge=0, le=1)
    adapt: str = option("round", "when (4) is applied", choices=("round", "step", "never"))

    client_state = Slots(v=INITIAL, v_b=INITIAL_BUFFERS, alpha=Slot(start="alpha"))
    sends = Slots(dw=SHARED, alpha=SCALAR)
    mean_only_slots = {"dw": ("p",)}
    accumulators = Slots(v=FLAT, v_b=BUFFERS, alpha=SCALAR)
    needs = frozenset({PLAIN_SGD})
    loss_is_sample_mean = True
    equals_fedavg_at = {"alpha": 0.0, "adapt": "never"}

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        v, alpha = client.accumulators.v, client.accumulators.alpha
        if not client.steps:
            v.copy_(client.state.v)
            client.accumulators.v_b.copy_(client.state.v_b)
            alpha.copy_(client.state.alpha)
        g = client.grad(x, y)  # (2)
        if self.adapt == "never" and not self.alpha:
            return g
        at_u = client.grad(x, y, at=alpha * v + (1 - alpha) * client.w, buffers=client.accumulators.v_b)
        slope = (v - client.w) @ at_u
        v.sub_(client.lr * alpha * at_u)  # (3)
        if self.adapt == "step" or (self.adapt == "round" and not client.steps):
            alpha.sub_(client.lr * slope).clamp_(0, 1)  # (4)
        return g

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        scratch = client.accumulators
        state = State(v=scratch.v, v_b=scratch.v_b, alpha=scratch.alpha) if client.steps else client.state
        return SlotValues(alpha=state.alpha), state

    def personal_weights(self, client: Client) -> Tensor:
        return client.state.alpha * client.state.v + (1 - client.state.alpha) * client.received  # (1)

    def personal_buffers(self, client: Client) -> Tensor:
        return client.state.alpha * client.state.v_b + (1 - client.state.alpha) * client.b0

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        server.log_metrics(alpha=updates.alpha.mean())
        return updates.mean("dw"), State()
