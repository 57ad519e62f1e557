"""FedNTD: not-true distillation, which preserves the received model's predictions for all classes but the true one.

Lee, Jeong, Shin, Bae, Yun. Preservation of the Global Knowledge by Not-True Distillation. NeurIPS 2022.
https://arxiv.org/abs/2106.03097

L = CE(f, y) + beta tau^2 KL(softmax(f0~ / tau) || softmax(f~ / tau))                       (1)
f are the logits of the current model, f0 those of the received model. ~ removes the logit of the true class, which
leaves C - 1 logits.                                                                        (2)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.method import CLASSES, Client, Method, option
from fedmpi.methods._terms import distillation_loss


@dataclass(frozen=True)
class FedNTD(Method):
    """FedNTD: FedAvg with not-true distillation from the received model."""

    beta: float = option(1.0, "weight of the distillation", ge=0)
    tau: float = option(1.0, "temperature of teacher and student", gt=0)

    needs = frozenset({CLASSES})
    loss_is_sample_mean = True
    equals_fedavg_at = {"beta": 0.0}

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        f = client.logits(x)
        if not self.beta:
            return client.task_loss(f, x, y)
        _, f0 = client.reference_forward(x)
        distilled = distillation_loss(not_true_logits(f, y), not_true_logits(f0, y), self.tau)
        return client.task_loss(f, x, y) + self.beta * self.tau**2 * distilled  # (1)


def not_true_logits(f: Tensor, y: Tensor) -> Tensor:
    """Return the logits f (B, c) without the logits of the true classes y (B,), in the same order, (B, c - 1).

    >>> not_true_logits(torch.tensor([[2.0, 0, 1], [0, 1, 3]]), torch.tensor([0, 1]))
    tensor([[0., 1.],
            [0., 3.]])
    """
    others = torch.arange(f.shape[1] - 1, device=f.device)
    return f.gather(1, others + (others >= y[:, None]))  # (2)
