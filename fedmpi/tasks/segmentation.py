"""A class at each pixel, or at each voxel of a volume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmpi.tasks import measures
from fedmpi.tasks.base import Task, cross_entropy, is_counted, look, mean_counted, outside


class Segmentation(Task):
    """Cross-entropy, mean over pixels or voxels; Dice and IoU, 0 to 1.

    Logits (B, c, H, W) and targets (B, H, W) in 0..c-1; of volumes (B, c, D, H, W) and (B, D, H, W). Dice and IoU count
    the pixels of a whole split, and are means over the classes from 1 on that are there or are given: class 0 is the
    background.
    ignore: a target that is left out of loss and metrics, such as 255 on borders that nobody has drawn.
    """

    names = ("dice", "iou")
    ignore: int | None

    def __init__(self, classes: int, ignore: int | None = None) -> None:
        super().__init__(classes)
        self.ignore = ignore

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        if self.ignore is None:
            return cross_entropy(model(x), y).mean()
        return mean_counted(cross_entropy(model(x), y, self.ignore), is_counted(y, self.ignore))

    def hold(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.argmax(1)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        if self.ignore is not None:
            counted = is_counted(y, self.ignore)
            outputs, y = outputs[counted], y[counted]
        dice, iou = measures.overlap(outputs, y, self.classes, first=1)
        return {"dice": dice, "iou": iou}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype != torch.int64 or y.ndim not in (3, 4):
            return f"its targets are {look(y)}; the class of each pixel, int64 (n, H, W) or (n, D, H, W), is needed"
        wanted = (self.classes, *y.shape[1:])
        if self.classes < 2:
            return "the data set has 1 class; 2 or more are needed, of which class 0 is the background"
        if outputs != wanted:
            return f"the model gives {outputs} for a sample; {wanted} is needed"
        wrong = outside(y, self.classes, self.ignore)
        advice = "; task.ignore names a number that does not count"
        return f"{wrong}{advice}" if wrong and self.ignore is None else wrong

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """`mask`, (n, H, W) or (n, D, H, W): the class of each pixel."""
        return {"mask": outputs.argmax(1)}
