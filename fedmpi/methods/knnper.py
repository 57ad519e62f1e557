"""kNN-Per: each client mixes the predictions of FedAvg's model with a vote of its nearest training samples.

Marfoq, Neglia, Vidal, Kameni. Personalized Federated Learning through Local Memorization. ICML 2022.
https://arxiv.org/abs/2111.09360

In the evaluation of client i, the k nearest of its training samples (z_j, y_j) vote on the class of a test sample; the
features z come from the evaluated model:
    d_j = ||z(x) - z_j||,   s_j = exp(-d_j^2 / (dim z scale))         over the k nearest j                        (1)
    p_knn[c] = sum_{j: y_j = c} s_j / sum_j s_j                                                                   (2)
    p = lam p_knn + (1 - lam) softmax f(x)                                                                        (3)
With evaluate.protocol ft(e) the evaluated model is the fine-tuned one. mix: logits replaces softmax f in (3) by f, as
the code of FedSOL's authors does. (1) follows the code of kNN-Per's authors (similarity: code). With
similarity: paper, s_j = exp(-d_j / scale), which for scale 1 is the formula of the paper. All clients use the same lam,
whereas in the paper each client chooses its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedmpi.method import CLASSES, FEATURES, Client, Method, option


@dataclass(frozen=True)
class KNNPer(Method):
    """kNN-Per: FedAvg with local memorisation; predictions are mixed with a vote of the nearest neighbours."""

    k: int = option(5, "number of neighbours", ge=1)
    lam: float = option(0.5, "weight of the neighbours in the prediction; 0: use the model only", ge=0, le=1)
    scale: float = option(1.0, "value of d^2 / dim z (code) or of d (paper) at which the similarity is 1/e", gt=0)
    capacity: int = option(500, "maximum number of samples that a client remembers, a uniform subset of its own", ge=1)
    similarity: str = option(
        "code",
        "s_j: exponential of the negative squared distance, or of the negative distance",
        choices=("code", "paper"),
    )
    mix: str = option(
        "softmax", "outputs of the model that are mixed with the vote of the neighbours", choices=("softmax", "logits")
    )

    needs = frozenset({FEATURES, CLASSES})
    equals_fedavg_at = {"lam": 0.0}

    def predict(self, client: Client) -> Callable[[Tensor], Tensor] | None:
        if not self.lam:
            return None
        z_k, y_k = (torch.cat(parts) for parts in zip(*((z, y) for z, _, y in client.forward_batches()), strict=True))
        if len(y_k) > self.capacity:
            chosen = torch.randperm(len(y_k), generator=client.generator("memory"))[: self.capacity].to(y_k.device)
            z_k, y_k = z_k[chosen], y_k[chosen]

        def outputs(x: Tensor) -> Tensor:
            z, f = client.forward(x)
            d2 = torch.cdist(z, z_k, compute_mode="donot_use_mm_for_euclid_dist").square()  # (B, n)
            distances, width = d2, z.shape[1] * self.scale
            if self.similarity == "paper":
                distances, width = d2.sqrt(), self.scale
            p_knn = neighbour_probabilities(distances, y_k, self.k, f.shape[1], width)
            if self.mix == "logits":
                return self.lam * p_knn + (1 - self.lam) * f
            p = self.lam * p_knn + (1 - self.lam) * f.softmax(1)  # (3)
            return p.clamp(min=torch.finfo(p.dtype).tiny).log()  # the softmax of these logits is p

        return outputs


def neighbour_probabilities(distances: Tensor, y: Tensor, k: int, classes: int, width: float) -> Tensor:
    """Return the class probabilities p_knn (B, classes), Eq. (2), from the k nearest samples.

    The similarities are s_j = exp(-distance_j / width). The smallest distance is subtracted first, so that not all
    similarities underflow to 0; this changes all s_j by the same factor, which cancels in (2).

    Args:
        distances: (B, n) non-negative distances to the n samples.
        y: (n,) labels of the samples.
        k: number of neighbours.
        classes: number of classes.
        width: the distance at which a similarity is 1/e.
    """
    nearest, j = distances.topk(min(k, len(y)), largest=False)  # (B, k), ascending
    s = (-(nearest - nearest[:, :1]) / width).exp()  # (1)
    return (s[:, :, None] * one_hot(y[j], classes)).sum(1) / s.sum(1, keepdim=True)
