"""FedSR: simple representations, i.e. Gaussian features that are kept small and close to class references.

Nguyen, Torr, Lim. A Simple and Effective Domain Generalization Method for Federated Learning. NeurIPS 2022.
https://openreview.net/forum?id=mrt90D00aQX

An additional linear layer before the head, with twice as many outputs as the head has inputs, makes the features
Gaussian, z ~ N(mu(x), sigma(x)^2). The loss keeps them small, and close to a learned reference distribution r(z|y) of
each class (models/probabilistic_features.py):
    L = CE + l2r mean_b ||z_b|| + cmi mean_b KL( N(C mu_b, (C sigma_b)^2) || r(.|y_b) )          norm not squared    (1)
C is a learned number. As in the authors' code, r and C stay with the client. A model is evaluated at z = mu; the
authors' code averages over 20 draws of z instead. probabilistic: false leaves the model unchanged, which is the paper's
FedL2R.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.method import CLASSES, FEATURES, Client, Method, SharedParts, declared_property, option
from fedmpi.models.probabilistic_features import REFERENCE_GROUP, GaussianFeatures


@dataclass(frozen=True)
class FedSR(Method):
    """FedSR: FedAvg with probabilistic features and two regularisers."""

    l2r: float = option(0.01, "weight of the features' norm", ge=0)
    cmi: float = option(0.001, "weight of the divergence from the class's reference", ge=0)
    probabilistic: bool = option(True, "use Gaussian features; false: use those of the model")

    loss_is_sample_mean = True
    equals_fedavg_at = {"l2r": 0.0, "cmi": 0.0, "probabilistic": False}

    def __post_init__(self) -> None:
        if self.cmi and not self.probabilistic:
            raise UserError(
                f"method.cmi: {self.cmi} needs Gaussian features; set method.probabilistic: true, or method.cmi: 0"
            )

    @declared_property
    def needs(self) -> frozenset[str]:
        return frozenset({FEATURES, CLASSES} if self.probabilistic else {FEATURES})  # references are per class

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(REFERENCE_GROUP,)) if self.probabilistic else SharedParts()

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        if not self.probabilistic:
            return module
        if not any(isinstance(layer, nn.Linear) for layer in module.modules()):
            raise UserError(
                "method fedsr needs a model with a linear layer, but this model has none; choose another model"
            )
        return GaussianFeatures(module, classes)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        if not self.l2r and not self.cmi:
            return client.task_loss(client.logits(x), x, y)
        z, f = client.forward(x)
        loss = client.task_loss(f, x, y)
        if self.probabilistic:
            z, divergences = z.split([z.shape[1] - client.classes, client.classes], 1)
            loss = loss + self.cmi * divergences.gather(1, y[:, None]).mean()
        return loss + self.l2r * z.norm(dim=1).mean()  # (1)
