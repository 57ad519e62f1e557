"""A network with batch statistics and without dropout, in float64, so that two computations agree to 1e-12."""

import torch
from torch import nn


class Norm64(nn.Sequential):
    """A small network with batch normalisation, in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double())


def norm64(input_shape: tuple[int, ...], classes: int, momentum: float | None = 0.1) -> Norm64:
    """Build (C, 8, 8) -> convolution, batch normalisation, pooling -> linear layer with `classes` outputs."""
    channels, height, width = input_shape
    layers = [
        nn.Conv2d(channels, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(4 * (height // 4) * (width // 4), classes),
    ]
    return Norm64(*layers).double()
