"""pFedPara. Hyeon-Woo, Ye-Bin, Oh. Low-Rank Hadamard Product for Communication-Efficient Federated Learning. ICLR 2022.
https://arxiv.org/abs/2108.06098

W_k = W_1 . (W_2,k + 1) = W_1 + W_1 . W_2,k,    W_s = X_s Y_s^T or its like for convolutions          (1)
The factors of W_1 are averaged like everything else; those of W_2,k are the client's own.            (2)
Layers that would not shrink stay dense, and so does the head: they are shared.
"""

from dataclasses import dataclass

from torch import nn

from fedmpi.flat.layout import BODY, HEAD, NORM
from fedmpi.method import Method, Travel, option
from fedmpi.models.fedpara import factorise


@dataclass(frozen=True)
class PFedPara(Method):
    ratio: float = option(0.5, "factors' entries over the dense weight's, per layer", gt=0, lt=1)
    init: str = option("product", "what starts with variance 2 / fan_in", choices=("factors", "product"))

    paper = "Hyeon-Woo et al., ICLR 2022"

    def travels(self, t: int, rounds: int) -> Travel:
        return Travel(groups=(BODY, NORM, HEAD))  # (2)

    def prepare(self, module: nn.Module, classes: int) -> nn.Module:
        return factorise(module, self.ratio, personal=True, init=self.init)  # (1)
