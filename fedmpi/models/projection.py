"""The classifier of FedUV's authors behind any convolutional network: two hidden layers with batch normalisation.

Son, Kim, Chung, Huang, Liu: FedUV, CVPR 2024, https://arxiv.org/abs/2402.18372, supplement, Table 1.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

WIDTH = 256  # units
NORMS: dict[str, Callable[[int], nn.Module]] = {  # of vectors, by the names of those of maps
    "bn": nn.BatchNorm1d,
    "bn_nostats": partial(nn.BatchNorm1d, track_running_stats=False),
    "gn": partial(nn.GroupNorm, 32),
    "ln": partial(nn.GroupNorm, 1),
}


def projection(inputs: int, norm: str = "bn") -> nn.Sequential:
    """(linear 256, normalisation, ReLU) twice: (B, inputs) -> (B, 256). The paper's normalisation is bn."""
    layers: list[nn.Module] = []
    for width in (inputs, WIDTH):
        layers += [nn.Linear(width, WIDTH), NORMS[norm](WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)
