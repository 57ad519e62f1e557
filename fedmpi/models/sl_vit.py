"""The vision transformer for small data sets that the FedSOL paper uses.

Lee, Lee, Song: Vision Transformer for Small-Size Datasets, 2021, https://arxiv.org/abs/2112.13492 (shifted patches,
locality self-attention), with the sizes of FedSOL's authors (Lee et al., CVPR 2024, supplement).
"""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from fedmpi.models.building_blocks import check_image_shape

Shift = Literal["pixel", "original"]
Size = Annotated[int, Field(gt=0)]
AXIS_SHIFTS = ((1, 0), (-1, 0), (0, 1), (0, -1))
DIAGONAL_SHIFTS = ((1, 1), (1, -1), (-1, 1), (-1, -1))


def append_shifted_copies(x: Tensor, steps: tuple[tuple[int, int], ...], pixels: int) -> Tensor:
    """Append four shifted copies to the channels of each image, (B, C, H, W) -> (B, 5 C, H, W).

    Args:
        steps: the direction of each shift, as (down, right).
        pixels: the length of each shift; pixels that are shifted in are zero.
    """
    height, width = x.shape[-2:]
    padded = pad(x, (pixels,) * 4)
    copies = [
        padded[..., pixels - down * pixels :, pixels - right * pixels :][..., :height, :width] for down, right in steps
    ]
    return torch.cat([x, *copies], dim=1)


class Attention(nn.Module):
    """Locality self-attention: softmax(e^tau q k') v, in which no token attends to itself.

    The temperature tau is a learned scalar, initially log(d^-1/2) for the width d of a head.

    Args:
        width: width of a token.
        head: width d of each head.
    """

    def __init__(self, width: int, heads: int, head: int) -> None:
        super().__init__()
        self.heads, self.head = heads, head
        self.norm = nn.LayerNorm(width)
        self.temperature = nn.Parameter(torch.tensor(head**-0.5).log())
        self.qkv = nn.Linear(width, 3 * heads * head, bias=False)
        self.out = nn.Linear(heads * head, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, self.head).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * self.temperature.exp()
        own = torch.eye(tokens, dtype=torch.bool, device=x.device)
        weights = scores.masked_fill(own, -torch.finfo(scores.dtype).max).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))


class SLViT(nn.Module):
    """A vision transformer on shifted patches, with a class token and learned position embeddings.

    Each layer consists of an attention block and two linear layers; LayerNorm and the head follow the last layer.

    Args:
        channels: channels of the images.
        side: height and width to which images are resized, in pixels.
        resize: whether images have a different size and must be resized.
        sizes: width of a token, number of layers, heads per layer, width of a head, hidden units of each layer.
        shift: how the four copies of an image are shifted: "pixel" or "original" (see `sl_vit`).
    """

    def __init__(
        self, channels: int, side: int, resize: bool, classes: int, sizes: tuple[int, int, int, int, int], shift: Shift
    ) -> None:
        super().__init__()
        width, depth, heads, head, hidden = sizes
        self.side, self.resize, self.patch = side, resize, min(side // 4, 16)
        self.steps, self.pixels = (AXIS_SHIFTS, 1) if shift == "pixel" else (DIAGONAL_SHIFTS, self.patch // 2)
        inputs = 5 * channels * self.patch**2
        self.patches = nn.Sequential(nn.LayerNorm(inputs), nn.Linear(inputs, width))
        self.token = nn.Parameter(torch.randn(width))
        self.positions = nn.Parameter(torch.randn(1 + (side // self.patch) ** 2, width))
        self.attention = nn.ModuleList(Attention(width, heads, head) for _ in range(depth))
        self.forward_part = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        side, patch = self.side, self.patch
        x = interpolate(x, (side, side), mode="bilinear", align_corners=False) if self.resize else x
        x = append_shifted_copies(x, self.steps, self.pixels)
        tokens = nn.functional.unfold(x, patch, stride=patch).transpose(1, 2)  # (B, patches, 5 C patch^2)
        x = torch.cat([self.token.expand(len(x), 1, -1), self.patches(tokens)], dim=1) + self.positions
        for attention, forward in zip(self.attention, self.forward_part, strict=True):
            x = x + attention(x)
            x = x + forward(x)
        return self.norm(x[:, 0])  # (B, width), the output of the class token

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, C)


def sl_vit(
    input_shape: tuple[int, ...],
    classes: int,
    dim: Size = 192,
    depth: Size = 9,
    heads: Size = 12,
    dim_head: Size = 64,
    mlp: Size = 192,
    shift: Shift = "pixel",
) -> SLViT:
    """Vision transformer for small data sets, with the sizes of FedSOL (2024).

    Images are resized to a square. Its side is the next multiple of 32 pixels (28 x 28 becomes 32 x 32), or of 16
    pixels for images with a side above 64 pixels. The side of a patch is a quarter of the side of the image, but at
    most 16 pixels. For 3 x 32 x 32 images of 10 classes it has 6,176,275 parameters.

    dim: width of a token.
    depth: number of layers.
    heads: number of attention heads of each layer.
    dim_head: width of each head.
    mlp: number of hidden units between the two linear layers of each layer.
    shift: how the four copies of an image are shifted: pixel (by one pixel along the axes, as in the code of FedSOL's
    authors) or original (by half a patch along the diagonals, as in the original paper).
    """
    channels, height, width = check_image_shape("sl_vit", input_shape, min_side=8)
    step = 32 if max(height, width) <= 64 else 16
    side = math.ceil(max(height, width) / step) * step
    return SLViT(channels, side, (height, width) != (side, side), classes, (dim, depth, heads, dim_head, mlp), shift)
