"""FedDecorr: the loss penalises correlations between features, so that they do not collapse to a few dimensions.

Shi, Liang, Zhang, Tan, Bai. Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning. ICLR 2023. https://arxiv.org/abs/2210.00226

K = correlation matrix of the d features z over the batch, (d, d)                                                (1)
L = CE + beta ||K||_F^2 / d^2                                                                                    (2)
With scale: code the penalty is that of the authors' code, for which their beta = 0.1 was chosen: the mean over i != j
of ((B - 1) K_ij)^2, divided by B. Its gradient is ((B - 1)^2 / B) (d / (d - 1)) times that of (2), which is 62 times
for B = 64 and large d.                                                                                          (3)
z is the input of the head. Variances are unbiased, and 1e-8 is added to them. The penalty is omitted for a batch of one
sample and for a single feature.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import FEATURES, Client, Method, declared_property, option


@dataclass(frozen=True)
class FedDecorr(Method):
    """FedDecorr: FedAvg with a penalty on correlated features."""

    beta: float = option(0.1, "weight of the penalty; 0: FedAvg", ge=0)
    scale: str = option("code", "form of the penalty: code is (3), paper is (2)", choices=("code", "paper"))

    needs = frozenset({FEATURES})
    equals_fedavg_at = {"beta": 0.0}

    @declared_property
    def loss_is_sample_mean(self) -> bool:
        return not self.beta  # otherwise the loss has statistics of the batch

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = client.forward(x)
        if not self.beta:
            return client.task_loss(f, x, y)
        return client.task_loss(f, x, y) + self.beta * correlation_penalty(z, self.scale)


def correlation_penalty(z: Tensor, scale: str = "code") -> Tensor:
    """Return the correlation penalty, a scalar, of features z (B, d).

    scale: which formula is used: "paper" is ||K||_F^2 / d^2, equation (2) of the module docstring; "code" is (3).
    """
    B, d = z.shape
    if B < 2 or d < 2:
        return z.new_zeros(())
    z = (z - z.mean(0)) / (z.var(0) + 1e-8).sqrt()
    G = z.T @ z  # (B - 1) K
    if scale == "paper":
        return G.square().sum() / ((B - 1) * d) ** 2  # (2)
    return (G.square().sum() - G.diagonal().square().sum()) / (d * (d - 1) * B)  # (3)
