"""Convolutions whose kernels are linear combinations of a few small filters (atoms), and their insertion into a model.

Filter decomposition. Chen, Qiu. Extra Clients at No Extra Cost: Overcome Data Heterogeneity in Federated
Learning with Filter Decomposition. 2025. https://arxiv.org/abs/2503.08652; the layer is that of DCFNet. Qiu, Cheng,
Calderbank, Sapiro. ICML 2018. https://arxiv.org/abs/1802.04145

    W[o,i,u,v] = sum_a alpha[o,i,a] D[a,u,v]         coefficients alpha (o, i, m_a), atoms D (m_a, u, v)        (1)
Each layer has its own atoms, which all its channels share. The forward pass computes W, then applies one convolution.
"""

import math
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from fedmpi.flat.layout import ATOM, COEF

CONV_SETTINGS = [
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
]
Init = Literal["he", "dcf", "from_conv"]


class AtomConv2d(nn.Conv2d):
    """A convolution with kernels composed of atoms, equation (1), which replaces the convolution `dense`.

    Args:
        dense: the convolution that is replaced; its bias and its other settings are reused.
        atoms: the number of atoms m_a.
        init: the initial values.
            he: D ~ N(0, 1/k^2), alpha ~ N(0, 2/(i m_a)), so that Var W = 2/(i k^2), which suits ReLU networks.
            dcf: D ~ N(0, 1), alpha ~ N(0, 1/(i m_a)), for networks with batch normalisation; Var W is k^2/2 times as
            large.
            from_conv: the m_a leading right singular vectors of the kernels of `dense`, as a matrix (o i, k^2), and
            their coefficients: W equals these kernels if m_a >= k^2, and otherwise is their best approximation of rank
            m_a.
    """

    coef: nn.Parameter  # (o, i / groups, m_a)
    atoms: nn.Parameter  # (m_a, u, v)

    def __init__(self, dense: nn.Conv2d, atoms: int, init: Init) -> None:
        super().__init__(**{name: getattr(dense, name) for name in CONV_SETTINGS}, bias=False, device="meta")
        del self.weight
        (out, into, *kernel), like = dense.weight.shape, dense.weight
        self.coef = nn.Parameter(like.new_zeros(out, into, atoms), like.requires_grad)
        self.atoms = nn.Parameter(like.new_zeros(atoms, *kernel), like.requires_grad)
        self.bias = dense.bias
        area = math.prod(kernel)
        with torch.no_grad():
            nn.init.normal_(self.atoms, std=1 if init == "dcf" else math.sqrt(1 / area))
            if init == "from_conv":
                u, s, v = torch.linalg.svd(dense.weight.reshape(out * into, area).double(), full_matrices=False)
                rank = min(atoms, len(s))  # further atoms keep their random values, with coefficients 0
                self.atoms[:rank] = v[:rank].view(rank, *kernel)
                self.coef[..., :rank] = (u * s)[:, :rank].view(out, into, rank)
            else:
                nn.init.normal_(self.coef, std=math.sqrt((1 if init == "dcf" else 2) / (into * atoms)))
                if init == "dcf" and self.bias is not None:
                    nn.init.zeros_(self.bias)

    @property
    def kernels(self) -> Tensor:
        """The weight W of equation (1), (o, i / groups, u, v)."""
        return (self.coef @ self.atoms.flatten(1)).view(*self.coef.shape[:2], *self.atoms.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.kernels, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, atoms={len(self.atoms)}"


def decompose_convolutions(module: nn.Module, atoms: int = 9, init: Init = "he") -> nn.Module:
    """Replace each Conv2d of `module` whose kernel is larger than 1x1 with an AtomConv2d, in place; return the module.

    Atoms are in the layout group ATOM; coefficients and the biases of convolutions are in COEF. Convolutions that are
    not replaced are also in COEF: 1x1 convolutions, frozen ones, and subclasses of Conv2d, which may have their own
    forward function or weights. Linear layers keep their group.

    Args:
        atoms: number of atoms m_a of each layer.
        init: initial values, see AtomConv2d.
    """
    groups: dict[str, str] = getattr(module, "parameter_groups", dict)()
    decomposed: dict[nn.Module, nn.Module] = {}  # a layer that is used in two places remains one layer
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if not path or not isinstance(layer, nn.Conv2d) or isinstance(layer, AtomConv2d):
            continue
        if type(layer) is nn.Conv2d and math.prod(layer.kernel_size) > 1 and layer.weight.requires_grad:
            if layer not in decomposed:
                decomposed[layer] = AtomConv2d(layer, atoms, init)
            layer, (parent, _, name) = decomposed[layer], path.rpartition(".")
            setattr(module.get_submodule(parent), name, layer)
        groups |= {f"{path}.{leaf}": ATOM if leaf == "atoms" else COEF for leaf, _ in layer.named_parameters()}
    if ATOM not in groups.values():
        warnings.warn(
            "the model has no convolution with a kernel larger than 1x1, so it has neither atoms nor coefficients",
            stacklevel=3,
        )
    module.parameter_groups = lambda: groups  # type: ignore[assignment]
    return module
