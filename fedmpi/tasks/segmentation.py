"""A class at each pixel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmpi.tasks import measures
from fedmpi.tasks.base import Task, cross_entropy, look, outside


class Segmentation(Task):
    """Cross-entropy, mean over pixels; Dice and IoU, 0 to 1. Logits (B, c, H, W), targets (B, H, W) in 0..c-1.

    Both count the pixels of a whole split, and are means over the classes from 1 on that are there or are given:
    class 0 is the background.
    """

    names = ("dice", "iou")

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y).mean()

    def hold(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.argmax(1)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        dice, iou = measures.overlap(outputs, y, self.classes, first=1)
        return {"dice": dice, "iou": iou}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype != torch.int64 or y.ndim != 3:
            return f"its targets are {look(y)}; the class of each pixel, int64 (n, H, W), is needed"
        wanted = (self.classes, *y.shape[1:])
        if self.classes < 2:
            return "the data set has 1 class; 2 or more are needed, of which class 0 is the background"
        if outputs != wanted:
            return f"the model gives {outputs} for a sample; {wanted} is needed"
        return outside(y, self.classes)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """`mask`, (n, H, W): the class of each pixel."""
        return {"mask": outputs.argmax(1)}
