"""Parts of several architectures: a check of the shape of a sample, and the projection of FedUV.

Son, Kim, Chung, Huang, Liu: FedUV, CVPR 2024, https://arxiv.org/abs/2402.18372, supplement, Table 1.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from fedmpi.common.errors import UserError


def image(model: str, input_shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """Return `input_shape` as (channels, height, width), after checking that it is that of a large enough image.

    Raises UserError, which names `model`, if a sample is not an image or a side has less than `least` pixels.

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


WIDTH = 256  # units of each layer of the projection
NORMS: dict[str, Callable[[int], nn.Module]] = {  # layers that normalise vectors, by the values of the option norm
    "bn": nn.BatchNorm1d,
    "bn_nostats": partial(nn.BatchNorm1d, track_running_stats=False),
    "gn": partial(nn.GroupNorm, 32),
}


def projection(inputs: int, norm: str = "bn") -> nn.Sequential:
    """Return a projection (B, inputs) -> (B, 256): twice (linear, normalisation, ReLU). The paper uses norm bn."""
    layers: list[nn.Module] = []
    for width in (inputs, WIDTH):
        layers += [nn.Linear(width, WIDTH), NORMS[norm](WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)
