"""CCVR: classifier calibration with virtual representations, in the last round of FedAvg.

Luo, Chen, Hu, Zhang, Liang, Feng. No Fear of Heterogeneity. NeurIPS 2021. https://arxiv.org/abs/2106.05001

Rounds 0 .. T-2 are FedAvg. In the last round no client trains. Clients send class-wise statistics of the features z of
their samples under the received model, and the server retrains the head on features drawn from these statistics:
    N_ck, mu_ck, Sigma_ck (unbiased)                          N_c = sum_k N_ck,   mu_c = sum_k N_ck mu_ck / N_c     (1)
    Sigma_c = sum_k ((N_ck - 1) Sigma_ck + N_ck (mu_ck - mu_c)(mu_ck - mu_c)') / (N_c - 1)                         (2)
    `samples` draws z ~ N(mu_c, Sigma_c) for each class c;    head <- SGD on CE(head(z), c), from the global head    (3)
(2) is the covariance over all clients' samples of the class, in a numerically stable form. No features are drawn for a
class with fewer than two samples. Only the cohort of the last round sends statistics; with cohort.fraction: 1, all
clients do. A run thus has T - 1 rounds of training; the last round has no train_loss. The paper does not say how the
head is trained; the defaults are those of a public reproduction, without its weight decay of 1e-5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedmpi.common.errors import UserError
from fedmpi.flat.layout import HEAD
from fedmpi.method import Client, Method, Server, SlotValues, State, Uploads, option
from fedmpi.method.base import CLASSES, FEATURES, LABEL_COUNTS, PLAIN_SERVER
from fedmpi.method.slots import PER_CLASS, PROTOTYPES, SHARED, SharedParts, Slot, Slots


@dataclass(frozen=True)
class CCVR(Method):
    """CCVR: FedAvg; in the last round the server retrains the head on features drawn from class statistics."""

    samples: int = option(2000, "M_c, number of features drawn per class", ge=0)
    epochs: int = option(10, "passes over the drawn features in (3)", ge=0)
    lr: float = option(0.001, "learning rate of (3)", ge=0)
    momentum: float = option(0.9, "momentum of (3)", ge=0, lt=1)
    batch_size: int = option(64, "number of features per step of (3)", ge=1)

    sends = Slots(dw=SHARED, counts=PER_CLASS, means=PROTOTYPES, covariances=Slot(("c", "z", "z")))
    mean_only_slots = {"dw": ("p",)}
    needs = frozenset({FEATURES, CLASSES, PLAIN_SERVER, LABEL_COUNTS})

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        if t < rounds - 1:
            return SharedParts(slots=("dw",))
        # The server changes the head; clients upload statistics.
        return SharedParts(groups=(HEAD,), slots=("counts", "means", "covariances"))

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        head = getattr(module, "head", None)
        if isinstance(head, nn.Module) and not isinstance(head, nn.Linear):
            raise UserError(
                f"method ccvr needs a model whose head is one linear layer, but this head is a {type(head).__name__}; "
                "choose another model"
            )
        return module

    def train(self, client: Client) -> State:
        if client.round < client.rounds - 1:
            client.fit()
        return State()

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        if client.round < client.rounds - 1:
            return SlotValues(), State()
        z, y = (torch.cat(parts) for parts in zip(*((z, y) for z, _, y in client.forward_batches()), strict=True))
        by_class = map(feature_statistics, z[y.argsort(stable=True)].split(client.label_counts.tolist()))
        means, covariances = (torch.stack(parts) for parts in zip(*by_class, strict=True))
        return SlotValues(counts=client.label_counts, means=means, covariances=covariances), State()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        if server.round < server.rounds - 1:
            return updates.mean("dw"), State()
        g, features = server.generator("virtual features"), []
        for c in range(server.classes):
            N, mu, sigma = pool_statistics(updates.counts[:, c], updates.means[:, c], updates.covariances[:, c])
            if N > 1 and self.samples:
                features.append((draw_features(mu, sigma, self.samples, g), torch.full((self.samples,), c)))
        if not features:
            return torch.zeros_like(server.shared), State()
        z, y = (torch.cat(parts) for parts in zip(*features, strict=True))
        return self._calibrate_head(server, z.to(server.shared), y.to(server.shared.device), g) - server.shared, State()

    def _calibrate_head(self, server: Server, z: Tensor, y: Tensor, g: torch.Generator) -> Tensor:
        """Return the weights (h,) of the global head after training it by (3) on features z (n, k) of classes y (n,).

        g: the generator that shuffles the features.
        """
        out = server.shared.clone()
        head = [s.view(out).requires_grad_() for s in server.segments]  # weight (c, z), and bias (c,) if there is one
        sgd = torch.optim.SGD(head, self.lr, self.momentum)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(y), generator=g).to(y.device).split(self.batch_size):
                f = z[rows] @ head[0].T + (head[1] if len(head) > 1 else 0)
                sgd.zero_grad()
                cross_entropy(f, y[rows]).backward()
                sgd.step()
        return out.detach()


def feature_statistics(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (k,) and the unbiased covariance (k, k) of n feature vectors z (n, k).

    The mean is 0 for n = 0, and the covariance is 0 for n < 2.
    """
    mu = z.double().sum(0) / max(len(z), 1)
    centred = z.double() - mu
    return mu.to(z.dtype), (centred.T @ centred / max(len(z) - 1, 1)).to(z.dtype)


def pool_statistics(n: Tensor, mu: Tensor, sigma: Tensor) -> tuple[float, Tensor, Tensor]:
    """Combine the clients' statistics of one class into N_c, mu_c and Sigma_c of (1) and (2), in float64.

    Args:
        n: (m,) number of samples of each of m clients.
        mu: (m, k) means of k features.
        sigma: (m, k, k) covariances.

    Returns:
        N_c (), mu_c (k,), Sigma_c (k, k).
    """
    n, mu, sigma = n.double().cpu(), mu.double().cpu(), sigma.double().cpu()
    N = float(n.sum())
    mean = n @ mu / max(N, 1)
    offsets = mu - mean
    within = ((n - 1).clamp(min=0)[:, None, None] * sigma).sum(0)
    return N, mean, (within + (n[:, None] * offsets).T @ offsets) / max(N - 1, 1)  # (2)


def draw_features(mu: Tensor, sigma: Tensor, n: int, g: torch.Generator) -> Tensor:
    """Draw n vectors (n, k) float64 from N(mu, sigma), with mu (k,) and a possibly singular covariance sigma (k, k).

    The symmetric square root of sigma is used because it is unique, so that the vectors are the same on all processors.
    """
    lam, E = torch.linalg.eigh(sigma)
    root = (E * lam.clamp(min=0).sqrt()) @ E.T
    return mu + torch.randn(n, len(mu), generator=g, dtype=torch.float64) @ root
