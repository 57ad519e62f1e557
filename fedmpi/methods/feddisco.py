"""FedDisco: the server gives less weight to clients whose label distribution is far from uniform.

Ye, Xu, Wang, Xu, Chen, Wang. Federated Learning with Discrepancy-Aware Collaboration. ICML 2023.
https://arxiv.org/abs/2305.19229

D_k[c] = n_kc / n_k,   d_k = sum_c D_k[c] log(C D_k[c])   distance of client k's labels from uniform            (1)
p_k'   = relu(p_k - a d_k + b) / sum_j relu(p_j - a d_j + b),    w <- sum_k p_k' w_k                             (2)
n_kc is the number of samples of class c at client k, and C the number of classes. p_k are the cohort's weights; in the
paper, they are proportional to the numbers of samples. With normalise: true, the d_k are first divided by their sum
over the cohort, as in the authors' code, for which a = 0.5 and b = 0.1 were chosen. With metric: l2, d_k is
||D_k - 1/C||. If p_k' is 0, the client's update is not used; if all p_k - a d_k + b are 0 or negative, p_k' = p_k. With
b > 0 the method differs from FedAvg even if a = 0. Batch statistics are averaged with p_k.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import CLASSES, LABEL_COUNTS, Method, Server, State, Uploads, option


@dataclass(frozen=True)
class FedDisco(Method):
    """FedDisco: aggregation weights that depend on the clients' label distributions."""

    a: float = option(0.5, "weight of the discrepancy", ge=0)
    b: float = option(0.1, "added to every client's score")
    metric: str = option("kl", "d_k: Kullback-Leibler divergence (1), or Euclidean distance", choices=("kl", "l2"))
    normalise: bool = option(True, "divide discrepancies by their sum over the cohort")

    needs = frozenset({CLASSES, LABEL_COUNTS})
    equals_fedavg_at = {"a": 0.0, "b": 0.0}

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        d = discrepancy(server.label_counts[list(updates.clients)], self.metric)
        if self.normalise and d.any():
            d = d / d.sum()
        return updates.combine(aggregation_weights(updates.p, d, self.a, self.b)), State()


def discrepancy(counts: Tensor, metric: str = "kl") -> Tensor:
    """Return the discrepancies d_k (m,) float64, Eq. (1), computed from the clients' label counts (m, c).

    >>> discrepancy(torch.tensor([[50, 50], [90, 10], [50, 0]]))
    tensor([0.0000, 0.3681, 0.6931], dtype=torch.float64)
    """
    n, classes = counts.sum(1, keepdim=True), counts.shape[1]
    relative = counts.double() * classes / n  # C D_k, exactly 1 if labels are uniform
    if metric == "l2":
        return (relative - 1).norm(dim=1) / classes
    return (relative / classes * relative.clamp(min=1e-300).log()).sum(1)  # 0 log 0 = 0


def aggregation_weights(p: Tensor, d: Tensor, a: float, b: float) -> Tensor:
    """Return the aggregation weights p' (m,) of (2) from the cohort's weights p (m,) and discrepancies d (m,)."""
    score = (p - a * d + b).clamp(min=0)
    return score / score.sum() if (a or b) and score.any() else p
