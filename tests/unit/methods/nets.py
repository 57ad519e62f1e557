"""A net with batch statistics and without dropout, in float64: two ways of computing one thing agree to 1e-12."""

import torch
from torch import nn


class Norm64(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double())


def norm64(input_shape: tuple[int, ...], classes: int, momentum: float | None = 0.1) -> Norm64:
    """(C, 8, 8) -> convolution, batch normalisation, pool -> linear `classes`."""
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
