"""FedCM: clients mix each gradient with the mean direction of the cohort's steps in the previous round.

Xu, Wang, Wang, Yao. Federated Learning with Client-level Momentum. 2021. https://arxiv.org/abs/2106.10874

v      = alpha g + (1 - alpha) Delta,   w_k <- w_k - lr v          local step                            (1)
Delta <- sum_k p_k (w - w_k) / (lr a_k)                            the mean direction of the round's steps (2)
w     <- sum_k p_k w_k                                                                                   (3)
In the paper all clients take K steps of plain SGD, so that a_k = K and (3) is w - lr K Delta. With momentum, a_k is
chosen such that w - w_k would be lr a_k v if all steps had the same direction v. In the paper the p_k are equal
(cohort.weighting: uniform). Weight decay is part of (w - w_k).
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import (
    FLAT,
    SCALAR,
    SGD_STEPS,
    SHARED,
    Client,
    Method,
    Server,
    Slots,
    SlotValues,
    State,
    Uploads,
    option,
)


@dataclass(frozen=True)
class FedCM(Method):
    """FedCM: FedAvg with gradients that are mixed with the cohort's previous direction."""

    alpha: float = option(0.1, "weight of the batch's gradient in (1); 1: FedAvg", gt=0, le=1)

    needs = frozenset({SGD_STEPS})
    server_state = Slots(delta=FLAT)
    receives = ("delta",)
    sends = Slots(dw=SHARED, a=SCALAR)
    equals_fedavg_at = {"alpha": 1.0}

    def correct_gradient(self, client: Client, g: Tensor) -> Tensor:
        return g if self.alpha == 1 else g.mul_(self.alpha).add_(client.downloads.delta, alpha=1 - self.alpha)  # (1)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(a=client.w.new_full((), client.gradient_weight)), State()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        if not server.train_lr:
            return updates.mean("dw"), server.state
        # A client that took no step has a = 0 and dw = 0; the clamp avoids 0 / 0.
        delta = updates.combine(-updates.p / (updates.a.double().cpu().clamp(min=1) * server.train_lr))  # (2)
        return updates.mean("dw"), State(delta=delta)  # (3)
