"""FedLC. Zhang, Li, Li, Xu, Wu, Ding, Wu. Federated Learning with Label Distribution Skew via Logits Calibration.
ICML 2022. https://arxiv.org/abs/2209.00189

The loss lowers each logit by an amount that depends on how many samples of its class the client has, so that rare
classes get wide margins. n_c is the client's number of samples of class c.
L = -log( exp(f_y - tau n_y^(-1/4)) / sum_c exp(f_c - tau n_c^(-1/4)) )                                            (1)
  = log( 1 + sum_{c != y} exp(f_c - f_y + D_yc) ),   D_yc = tau (n_y^(-1/4) - n_c^(-1/4))                         (2)
The sum printed in the paper leaves out c = y; then the loss has no lower bound and training collapses. Four public
implementations use (1), which is the loss with the margins of (2). A class without samples at the client counts as 1e-8
samples: its logit is lowered by 100 tau, so that the class has no share of the softmax unless tau is tiny.
task.label_smoothing, which needs such a share, is therefore rejected. Models are evaluated as in FedAvg.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import CLASSES, ONE_CLASS, Client, Method, option

ABSENT = 1e-8  # number of samples that a class without samples counts as


@dataclass(frozen=True)
class FedLC(Method):
    tau: float = option(1.0, "width of the margins; 0: FedAvg", ge=0)

    needs = frozenset({CLASSES, ONE_CLASS})
    equals_fedavg_at = {"tau": 0.0}

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        f = client.logits(x)
        if self.tau:
            f = f - self.tau * client.label_counts.to(f.dtype).clamp(min=ABSENT) ** -0.25
        return client.task_loss(f, x, y)  # (1)
