"""What several architectures need: checks of the shape of a sample, and the projection of FedUV.

Son, Kim, Chung, Huang, Liu: FedUV, CVPR 2024, https://arxiv.org/abs/2402.18372, supplement, Table 1.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from fedmpi.common.errors import UserError


def image(model: str, input_shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """`input_shape` as (channels, height, width), height and width at least `least` pixels.

    Raises UserError, naming `model`, if the sample is not an image or is too small.

    >>> image("mcmahan_cnn", (1, 8, 8), least=4)
    (1, 8, 8)
    """
    if len(input_shape) != 3:
        raise UserError(
            f"model {model}: a sample has shape {tuple(input_shape)}, but it needs images (channels, height, width); "
            "choose logistic or mlp, which take any shape"
        )
    channels, height, width = input_shape
    if min(height, width) < least:
        raise UserError(
            f"model {model}: the images are {height} x {width} pixels, but it needs at least {least} x {least}; "
            "choose logistic or mlp, which take any shape"
        )
    return channels, height, width


WIDTH = 256  # units
NORMS: dict[str, Callable[[int], nn.Module]] = {  # of vectors, by the names of those of maps
    "bn": nn.BatchNorm1d,
    "bn_nostats": partial(nn.BatchNorm1d, track_running_stats=False),
    "gn": partial(nn.GroupNorm, 32),
}


def projection(inputs: int, norm: str = "bn") -> nn.Sequential:
    """(linear 256, normalisation, ReLU) twice: (B, inputs) -> (B, 256). The paper's normalisation is bn."""
    layers: list[nn.Module] = []
    for width in (inputs, WIDTH):
        layers += [nn.Linear(width, WIDTH), NORMS[norm](WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)
