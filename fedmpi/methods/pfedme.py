"""pFedMe: each client trains a personal model, which a quadratic term keeps close to its copy of the global model.

Dinh, Tran, Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.
https://arxiv.org/abs/2006.08848

theta is the personal model, w the client's copy of the global model.
F_k(w) = min_theta f_k(theta) + (lam/2) ||theta - w||^2,      grad F_k(w) = lam (w - theta(w))                    (1)
A local step, on one batch:   `steps` times  theta <- theta - personal_lr (grad f(theta) + lam (theta - w))       (2)
                              w <- w - lr lam (w - theta)                                                         (3)
Server:                       w <- (1 - beta) w + beta sum_k p_k w_k;   beta is server.lr, lr is train.lr          (4)
The client is evaluated with theta. In the first step of a round theta starts from w. In later steps it continues from
the previous step, as in the authors' code, or starts from w again (start: w). In the paper the p_k are equal. The
option `decay` adds decay * theta to grad f in (2), i.e. weight decay of theta; the authors' code uses 0.001. Weight
decay of w, in (3), is train.weight_decay. A client that is not sampled is evaluated with theta from its last training.
In each step, only the first of the passes with weights theta updates batch statistics.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import PLAIN_SGD, Client, Method, SlotValues, State, option
from fedmpi.method.slots import FLAT, INITIAL, INITIAL_BUFFERS, Slots


@dataclass(frozen=True)
class PFedMe(Method):
    """pFedMe: personal models, regularised by Moreau envelopes."""

    lam: float = option(15.0, "weight of the quadratic term", gt=0)
    personal_lr: float = option(0.09, "learning rate of (2)", gt=0)
    steps: int = option(5, "K, number of steps of (2) on each batch", ge=1)
    start: str = option("theta", "starting point of (2): the theta of the previous step, or w", choices=("theta", "w"))
    decay: float = option(0.0, "weight decay of (2)", ge=0)

    client_state = Slots(theta=INITIAL, theta_b=INITIAL_BUFFERS)
    accumulators = Slots(theta=FLAT)
    needs = frozenset({PLAIN_SGD})  # (3) is one step of plain SGD
    loss_is_sample_mean = True

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        theta = client.accumulators.theta
        if self.start == "w" or not client.steps:
            theta.copy_(client.w)
        for _ in range(self.steps):
            g = client.grad(x, y, at=theta).add_(theta - client.w, alpha=self.lam).add_(theta, alpha=self.decay)
            theta.sub_(g, alpha=self.personal_lr)  # (2)
        return self.lam * (client.w - theta)  # (3)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(theta=client.accumulators.theta, theta_b=client.b) if client.steps else client.state

    def personal_weights(self, client: Client) -> Tensor:
        return client.state.theta

    def personal_buffers(self, client: Client) -> Tensor:
        return client.state.theta_b
