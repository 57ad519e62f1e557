"""FedPara's layers, whose weights are Hadamard products of two low-rank weights, and their insertion into a model.

FedPara. Hyeon-Woo, Ye-Bin, Oh. Low-Rank Hadamard Product for Communication-Efficient Federated Learning. ICLR 2022.
https://arxiv.org/abs/2108.06098

    linear        W_s = X_s Y_s^T                                            X_s (m, r), Y_s (n, r)            (1)
    convolution   W_s[o,i,u,v] = sum_{x,y} T_s[x,y,u,v] O_s[x,o] I_s[y,i]    (r, r, k, k), (r, O), (r, I)      (2)
    W = W_1 . W_2,     or if W_2 is personal                W = W_1 . (W_2 + 1)                                (3)
Here s is 1 or 2, and W_1 . W_2 is the Hadamard product. W has rank up to r^2, whereas W_s has rank r. Biases remain
dense.
"""

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

PERSONAL_GROUP = "own"  # layout group of the factors of W_2 if it is personal


class LowRankWeight(nn.Module):
    """A low-rank weight W_s of a linear layer or a convolution, computed from its factors: equations (1) and (2).

    Args:
        shape: the shape of W_s.
        rank: the rank r.
        variance: the initial variance of the entries of W_s. None: each factor is drawn from N(0, 2 / fan_in), with the
            fan_in of the factor as it is stored; the variance of W_s follows from this.
    """

    def __init__(self, shape: torch.Size, rank: int, variance: float | None) -> None:
        super().__init__()
        out, into, *kernel = shape
        if kernel:
            self.T = nn.Parameter(torch.empty(rank, rank, *kernel))
            self.O = nn.Parameter(torch.empty(rank, out))
            self.I = nn.Parameter(torch.empty(rank, into))
        else:
            self.X = nn.Parameter(torch.empty(out, rank))
            self.Y = nn.Parameter(torch.empty(into, rank))
        factors = list(self.parameters())
        variances = [2 / factor[0].numel() for factor in factors]
        product_variance = rank ** (len(factors) - 1) * math.prod(
            variances
        )  # (1) is a sum over one index, (2) over two
        scale = 1.0 if variance is None else (variance / product_variance) ** (1 / len(factors))
        for factor, own in zip(factors, variances, strict=True):
            nn.init.normal_(factor, std=math.sqrt(own * scale))

    def forward(self) -> Tensor:
        if hasattr(self, "X"):
            return self.X @ self.Y.T  # (1)
        return torch.einsum("xyuv,xo,yi->oiuv", self.T, self.O, self.I)  # (2)


class FactorisedLayer(nn.Module):
    """A linear layer or a convolution whose weight is the Hadamard product of two low-rank weights, equation (3).

    Args:
        dense: the layer that is replaced, whose bias is reused.
        rank: the rank r of W_1 and W_2.
        personal: whether W_2 is a personal parameter of each client, so that W = W_1 . (W_2 + 1).
        init: the initial values, see `factorise_layers`.
    """

    def __init__(self, dense: nn.Linear | nn.Conv2d, rank: int, personal: bool, init: str) -> None:
        super().__init__()
        he = 2 / dense.weight[0].numel()  # variance of a dense weight (He), which W has for v v, or v (v + 1)
        v = None if init == "factors" else (math.sqrt(1 + 4 * he) - 1) / 2 if personal else math.sqrt(he)
        self.one, self.two = (LowRankWeight(dense.weight.shape, rank, v) for _ in range(2))
        self.bias, self.personal = dense.bias, personal
        self.conv_options = {n: getattr(dense, n) for n in ("stride", "padding", "dilation") if hasattr(dense, n)}

    def weight(self) -> Tensor:
        one, two = self.one(), self.two()
        return one * (two + 1) if self.personal else one * two  # (3)

    def forward(self, x: Tensor) -> Tensor:
        return (conv2d if self.conv_options else linear)(x, self.weight(), self.bias, **self.conv_options)


def factor_rank(shape: torch.Size | tuple[int, ...], ratio: float) -> int:
    """Return the rank r for which the factors of W_1 and W_2 have `ratio` times the parameters of the dense weight.

    The rank is at least ceil(sqrt(n_min)). For a linear layer n_min = min(m, n), because for smaller r a matrix W could
    not have full rank (the paper's Corollary 1). For a convolution n_min = max(O, I), as in the authors' code, and r
    solves 2 r (O + I + r k^2) = ratio O I k^2.

    >>> [factor_rank((256, 256, 3, 3), ratio) for ratio in (0.1, 0.3, 0.5)], factor_rank((200, 100), 0.5)
    ([36, 75, 103], 17)
    """
    out, into, *kernel = shape
    target, area = ratio * math.prod(shape), math.prod(kernel)
    if kernel:
        half = (out + into) / (2 * area)
        r = math.sqrt(half**2 + target / (2 * area)) - half
    else:
        r = target / (2 * (out + into))
    min_rank_squared = max(out, into) if kernel else min(out, into)
    return max(math.ceil(r), math.isqrt(min_rank_squared - 1) + 1)


def factorise_layers(module: nn.Module, ratio: float, personal: bool, init: str) -> nn.Module:
    """Replace each convolution and linear layer with a FactorisedLayer, in place, if that reduces its parameters.

    The head, which is the last linear layer, remains dense, and so do frozen layers and convolutions with groups or
    with a padding other than zeros.

    Args:
        module: the model, which is also returned.
        ratio: the number of parameters of the factors, relative to that of the dense weight (see factor_rank).
        personal: whether W_2 is a personal parameter of each client: W = W_1 . (W_2 + 1), and the factors of W_2 are in
            the layout group PERSONAL_GROUP.
        init: which tensors are initialised with variance 2 / fan_in. factors: each factor, with the fan_in of the
            factor as it is stored; product: W, with the fan_in of the dense layer.
    """
    layers = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    head = [layer for _, layer in layers if isinstance(layer, nn.Linear)][-1:]
    groups: dict[str, str] = getattr(module, "parameter_groups", dict)()
    factorised = False
    for path, layer in layers:
        (out, into, *kernel), r = layer.weight.shape, factor_rank(layer.weight.shape, ratio)
        smaller = 2 * r * (out + into + (r * math.prod(kernel) if kernel else 0)) < layer.weight.numel()
        is_plain = isinstance(layer, nn.Linear) or (layer.groups == 1 and layer.padding_mode == "zeros")
        if layer in head or not (smaller and is_plain and layer.weight.requires_grad):
            continue
        factorised_layer, (parent, _, name) = FactorisedLayer(layer, r, personal, init), path.rpartition(".")
        setattr(module.get_submodule(parent), name, factorised_layer)
        factorised = True
        if personal:
            groups |= {f"{path}.two.{leaf}": PERSONAL_GROUP for leaf, _ in factorised_layer.two.named_parameters()}
    if not factorised:
        warnings.warn(
            f"no layer of the model except the head becomes smaller with ratio {ratio}; all layers remain dense",
            stacklevel=3,
        )
    module.parameter_groups = lambda: groups  # type: ignore[assignment]
    return module
