"""FedPara: layers are factorised, so that clients send fewer numbers.

Hyeon-Woo, Ye-Bin, Oh. Low-Rank Hadamard Product for Communication-Efficient Federated Learning. ICLR 2022.
https://arxiv.org/abs/2108.06098

W = (X_1 Y_1^T) . (X_2 Y_2^T), for convolutions a similar form with a core tensor (models/fedpara.py)              (1)
FedAvg trains, sends and averages the factors in place of W.                                                       (2)
A layer's factors have at least `ratio` times the entries of W, and at least as many as W needs to have full rank; the
rank r is rounded up, as in the authors' code. The paper's gamma is a different parameter, r = (1 - gamma) r_min + gamma
r_max. Layers that would not become smaller stay dense, and so does the head.

In method pfedpara each client has its own factors W_2,k, which stay with it; W_1 and dense layers are averaged:
W_k = W_1 . (W_2,k + 1) = W_1 + W_1 . W_2,k                                                                        (3)
"""

from dataclasses import dataclass

from torch import nn

from fedmpi.flat.layout import BODY, HEAD, NORM
from fedmpi.method import Method, SharedParts, option
from fedmpi.models.fedpara import factorise_layers


@dataclass(frozen=True)
class FedPara(Method):
    """FedPara: FedAvg on factorised layers."""

    ratio: float = option(0.5, "number of entries of a layer's factors, relative to its dense weight", gt=0, lt=1)
    init: str = option("factors", "what is initialised with variance 2 / fan_in", choices=("factors", "product"))

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        return factorise_layers(module, self.ratio, personal=False, init=self.init)  # (1)


@dataclass(frozen=True)
class PFedPara(Method):
    """pFedPara: factorised layers in which W_1 is shared and W_2 is personal (3)."""

    ratio: float = option(0.5, "number of entries of a layer's factors, relative to its dense weight", gt=0, lt=1)
    init: str = option("product", "what is initialised with variance 2 / fan_in", choices=("factors", "product"))

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(groups=(BODY, NORM, HEAD))

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        return factorise_layers(module, self.ratio, personal=True, init=self.init)  # (3)
