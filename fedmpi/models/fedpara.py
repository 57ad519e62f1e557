"""Layers whose weight is the Hadamard product of two low-rank weights, and a network made of them.

FedPara. Hyeon-Woo, Ye-Bin, Oh. Low-Rank Hadamard Product for Communication-Efficient Federated Learning. ICLR 2022.
https://arxiv.org/abs/2108.06098

    linear        W_s = X_s Y_s^T                                            X_s (m, r), Y_s (n, r)            (1)
    convolution   W_s[o,i,u,v] = sum_{x,y} T_s[x,y,u,v] O_s[x,o] I_s[y,i]    (r, r, k, k), (r, O), (r, I)      (2)
    W = W_1 . W_2,     or with a personal second factor     W = W_1 . (W_2 + 1)                                (3)
W has rank up to r^2, whereas W_s has rank r. Biases remain dense.
"""

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

OWN = "own"  # layout group of the factors of a personal W_2


class Factors(nn.Module):
    """The low-rank weight W_s of a linear layer (1) or of a convolution (2).

    variance: initial variance of the entries of W_s. None: each factor is drawn from N(0, 2 / fan_in), with the fan_in
    of the factor as it is stored, whatever the variance of W_s.
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
        each = [2 / factor[0].numel() for factor in factors]
        given = rank ** (len(factors) - 1) * math.prod(each)  # (1) is a sum over one index, (2) over two
        scale = 1.0 if variance is None else (variance / given) ** (1 / len(factors))
        for factor, own in zip(factors, each, strict=True):
            nn.init.normal_(factor, std=math.sqrt(own * scale))

    def forward(self) -> Tensor:
        if hasattr(self, "X"):
            return self.X @ self.Y.T  # (1)
        return torch.einsum("xyuv,xo,yi->oiuv", self.T, self.O, self.I)  # (2)


class Factorised(nn.Module):
    """A linear layer or a convolution whose weight is W of (3)."""

    def __init__(self, dense: nn.Linear | nn.Conv2d, rank: int, personal: bool, init: str) -> None:
        super().__init__()
        he = 2 / dense.weight[0].numel()  # the variance of W, which is to equal v v, or v (v + 1)
        v = None if init == "factors" else (math.sqrt(1 + 4 * he) - 1) / 2 if personal else math.sqrt(he)
        self.one, self.two = (Factors(dense.weight.shape, rank, v) for _ in range(2))
        self.bias, self.personal = dense.bias, personal
        self.window = {n: getattr(dense, n) for n in ("stride", "padding", "dilation") if hasattr(dense, n)}

    def weight(self) -> Tensor:
        one, two = self.one(), self.two()
        return one * (two + 1) if self.personal else one * two  # (3)

    def forward(self, x: Tensor) -> Tensor:
        return (conv2d if self.window else linear)(x, self.weight(), self.bias, **self.window)


def rank_for(shape: torch.Size | tuple[int, ...], ratio: float) -> int:
    """Return the rank r at which the two factors have `ratio` of the dense weight's entries, but at least a minimum.

    The minimum is ceil(sqrt(n_min)). For a linear layer n_min = min(m, n), since for smaller r a matrix W could not
    have full rank (the paper's Corollary 1). For a convolution n_min = max(O, I), as in the authors' code, and r solves
    2 r (O + I + r k^2) = ratio O I k^2.

    >>> [rank_for((256, 256, 3, 3), ratio) for ratio in (0.1, 0.3, 0.5)], rank_for((200, 100), 0.5)
    ([36, 75, 103], 17)
    """
    out, into, *kernel = shape
    target, area = ratio * math.prod(shape), math.prod(kernel)
    if kernel:
        half = (out + into) / (2 * area)
        r = math.sqrt(half**2 + target / (2 * area)) - half
    else:
        r = target / (2 * (out + into))
    least = max(out, into) if kernel else min(out, into)
    return max(math.ceil(r), math.isqrt(least - 1) + 1)


def factorise(module: nn.Module, ratio: float, personal: bool, init: str) -> nn.Module:
    """Replace, in place, each convolution and linear layer by a Factorised layer if that makes it smaller.

    The head, which is the last linear layer, remains dense, and so do frozen layers and convolutions with groups or
    with a padding other than zeros. The changed module is returned.

    Args:
        ratio: share of a dense weight's entries that its factors have (see rank_for).
        personal: use the second form of (3), and put the factors of W_2 into the layout group OWN.
        init: variance 2 / fan_in of each factor as it is stored (factors), or of W, as for a dense weight (product).
    """
    layers = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    head = [layer for _, layer in layers if isinstance(layer, nn.Linear)][-1:]
    groups: dict[str, str] = getattr(module, "parameter_groups", dict)()
    factorised = False
    for path, layer in layers:
        (out, into, *kernel), r = layer.weight.shape, rank_for(layer.weight.shape, ratio)
        smaller = 2 * r * (out + into + (r * math.prod(kernel) if kernel else 0)) < layer.weight.numel()
        is_plain = isinstance(layer, nn.Linear) or (layer.groups == 1 and layer.padding_mode == "zeros")
        if layer in head or not (smaller and is_plain and layer.weight.requires_grad):
            continue
        made, (parent, _, name) = Factorised(layer, r, personal, init), path.rpartition(".")
        setattr(module.get_submodule(parent), name, made)
        factorised = True
        if personal:
            groups |= {f"{path}.two.{leaf}": OWN for leaf, _ in made.two.named_parameters()}
    if not factorised:
        warnings.warn(
            f"no layer of the model below its head gets smaller at ratio {ratio}; all stay dense", stacklevel=3
        )
    module.parameter_groups = lambda: groups  # type: ignore[assignment]
    return module
