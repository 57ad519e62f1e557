"""FedLC. Zhang, Li, Li, Xu, Wu, Ding, Wu. Federated Learning with Label Distribution Skew via Logits Calibration.
ICML 2022. https://arxiv.org/abs/2209.00189

L = -log( exp(f_y - tau n_y^(-1/4)) / sum_c exp(f_c - tau n_c^(-1/4)) ),   n_c: the client's samples of class c     (1)
  = log( 1 + sum_{c != y} exp(f_c - f_y + D_yc) ),   D_yc = tau (n_y^(-1/4) - n_c^(-1/4))                         (2)
so a rare class gets a wide margin. As the sum is printed in the paper it leaves c = y out; then the loss has no lower
bound and training collapses. Four public implementations take (1), which is the loss with the margins of (2). A class
that the client lacks counts as 1e-8 samples: its logit loses 100 tau, and unless tau is tiny it is out of the softmax
(so that task.label_smoothing, which asks for a share of it, is refused).
Evaluation is FedAvg's.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import CLASSES, ONE_CLASS, Client, Method, option

ABSENT = 1e-8  # samples of a class that the client does not have


@dataclass(frozen=True)
class FedLC(Method):
    tau: float = option(1.0, "width of the margins; 0: FedAvg", ge=0)

    needs = frozenset({CLASSES, ONE_CLASS})
    neutral = {"tau": 0.0}

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        f = client.logits(x)
        if self.tau:
            f = f - self.tau * client.label_counts.to(f.dtype).clamp(min=ABSENT) ** -0.25
        return client.task_loss(f, x, y)  # (1)
