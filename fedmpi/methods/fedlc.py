"""FedLC: logits calibration, which gives wide margins to classes that are rare at a client.

Zhang, Li, Li, Xu, Wu, Ding, Wu. Federated Learning with Label Distribution Skew via Logits Calibration. ICML 2022.
https://arxiv.org/abs/2209.00189

The loss lowers each logit by an amount that depends on n_c, the client's number of samples of class c:
L = -log( exp(f_y - tau n_y^(-1/4)) / sum_c exp(f_c - tau n_c^(-1/4)) )                                            (1)
  = log( 1 + sum_{c != y} exp(f_c - f_y + D_yc) ),   D_yc = tau (n_y^(-1/4) - n_c^(-1/4))                         (2)
The sum printed in the paper leaves out c = y; then the loss has no lower bound and training collapses. Four public
implementations use (1), which is the loss with the margins of (2). A class without samples at the client counts as 1e-8
samples: its logit is lowered by 100 tau, so that its probability is zero unless tau is tiny. task.label_smoothing is
rejected, because it would use the logarithm of this probability. Models are evaluated as in FedAvg.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import CLASSES, ONE_CLASS, Client, Method, option

ABSENT_COUNT = 1e-8  # replaces the count of a class without samples


@dataclass(frozen=True)
class FedLC(Method):
    """FedLC: FedAvg with calibrated logits in the loss."""

    tau: float = option(1.0, "width of the margins; 0: FedAvg", ge=0)

    needs = frozenset({CLASSES, ONE_CLASS})
    loss_is_sample_mean = True
    equals_fedavg_at = {"tau": 0.0}

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        f = client.logits(x)
        if self.tau:
            f = f - self.tau * client.label_counts.to(f.dtype).clamp(min=ABSENT_COUNT) ** -0.25
        return client.task_loss(f, x, y)  # (1)
