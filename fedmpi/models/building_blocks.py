"""Parts that several architectures share: a check of the input shape, and the projection head of FedUV.

Son, Kim, Chung, Huang, Liu: FedUV, CVPR 2024, https://arxiv.org/abs/2402.18372, supplement, Table 1.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from fedmpi.common.errors import UserError


def check_image_shape(model: str, input_shape: tuple[int, ...], min_side: int = 1) -> tuple[int, int, int]:
    """Check that a sample is a large enough image; return its channels, height and width.

    Args:
        model: the name of the architecture, for error messages.
        input_shape: the shape of a sample.
        min_side: the smallest height and width that the model accepts, in pixels.

    Raises:
        UserError: a sample is not an image, or is too small.

    >>> check_image_shape("mcmahan_cnn", (1, 8, 8), min_side=4)
    (1, 8, 8)
    """
    if len(input_shape) != 3:
        raise UserError(
            f"model {model}: a sample has the shape {tuple(input_shape)}, but the model needs images (channels, "
            "height, "
            "width); choose logistic or mlp, which accept any shape"
        )
    channels, height, width = input_shape
    if min(height, width) < min_side:
        raise UserError(
            f"model {model}: images have {height} x {width} pixels, but the model needs at least {min_side} x "
            f"{min_side}; "
            "choose logistic or mlp, which accept any shape"
        )
    return channels, height, width


PROJECTION_WIDTH = 256  # units of each layer of the projection head
NORM_LAYERS: dict[
    str, Callable[[int], nn.Module]
] = {  # layers that normalise vectors, by the values of the option norm
    "bn": nn.BatchNorm1d,
    "bn_nostats": partial(nn.BatchNorm1d, track_running_stats=False),
    "gn": partial(nn.GroupNorm, 32),
}


def projection_head(inputs: int, norm: str = "bn") -> nn.Sequential:
    """Return the projection head (B, inputs) -> (B, 256): linear layer, normalisation and ReLU, twice.

    Args:
        inputs: width of the input.
        norm: the normalisation, a key of NORM_LAYERS; the paper uses bn.
    """
    layers: list[nn.Module] = []
    for width in (inputs, PROJECTION_WIDTH):
        layers += [nn.Linear(width, PROJECTION_WIDTH), NORM_LAYERS[norm](PROJECTION_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)
