"""MOON: a contrastive term pulls features towards those of the global model, and away from the last local model's.

Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021. https://arxiv.org/abs/2103.16257

z, z0 and z' are features of the current model, the received model, and the model that the client uploaded last (before
its first upload, the initial model); z0 and z' have no gradient. s(a, b) = <a, b> / (||a|| ||b||).
    l_con = -log( exp(s(z, z0)/tau) / (exp(s(z, z0)/tau) + exp(s(z, z')/tau)) )          batch mean           (1)
          = log(1 + exp((s(z, z') - s(z, z0)) / tau))
    L     = CE + mu l_con                                                                                     (2)
z is the input of the head. The authors' projection layer is not added; a model may contain one.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize, softplus

from fedmpi.method import FEATURES, INITIAL, INITIAL_BUFFERS, Client, Method, Slots, SlotValues, State, option


@dataclass(frozen=True)
class MOON(Method):
    """MOON: FedAvg with a contrastive term between features of the local and the global model."""

    mu: float = option(1.0, "weight of the contrastive term; 0: FedAvg", ge=0)
    tau: float = option(0.5, "temperature", gt=0)

    client_state = Slots(last=INITIAL, last_b=INITIAL_BUFFERS)
    needs = frozenset({FEATURES})
    loss_is_sample_mean = True
    equals_fedavg_at = {"mu": 0.0}

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = client.forward(x)
        loss = client.task_loss(f, x, y)
        return loss + self.mu * self.contrastive_term(client, x, z) if self.mu else loss  # (2)

    def contrastive_term(self, client: Client, x: Tensor, z: Tensor) -> Tensor:
        z0, _ = client.reference_forward(x)
        last, _ = client.reference_forward(x, at=client.state.last, buffers=client.state.last_b)
        return contrastive_loss(z, z0, last, self.tau)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(), State(last=client.w, last_b=client.b)


def contrastive_loss(z: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """Return the contrastive loss () of (1), which is small if z is similar to `near` and dissimilar to `far`.

    All arguments are features (B, z). The difference of the unit vectors is computed first: if near equals far, it is
    exactly 0, and so is the gradient.
    """
    difference = normalize(far, eps=1e-8) - normalize(near, eps=1e-8)
    return softplus((normalize(z, eps=1e-8) * difference).sum(1) / tau).mean()  # (1)
