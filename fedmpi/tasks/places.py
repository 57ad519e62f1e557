"""A class at each place of a sample: the next symbol in a text, or what a pixel or voxel shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.tasks import measures
from fedmpi.tasks.base import Task, allowed, is_counted, look, mean_counted

SKIP = -100  # torch's


def cross_entropy(f: Tensor, y: Tensor, skip: int = SKIP, row_by_row: bool = False) -> Tensor:
    """(B, ...) losses of logits (B, c, ...) and targets (B, ...); 0 where a target is `skip`.

    row_by_row: of logits in rows, (P, c), which is slower on a CPU, and on a GPU the only form with one order of sums.
    """
    if row_by_row or f.is_cuda:
        rows = f.movedim(1, -1).flatten(0, -2)
        return functional.cross_entropy(rows, y.flatten(), reduction="none", ignore_index=skip).view(y.shape)
    return functional.cross_entropy(f, y, reduction="none", ignore_index=skip)


def outside(y: Tensor, classes: int, ignore: int | None) -> str:
    """The first class number beyond 0..classes-1, for messages; "" where there is none."""
    odd = ((y < 0) | (y >= classes)) & is_counted(y, ignore)
    if not bool(odd.any()):
        return ""
    place = odd.nonzero()[0].tolist()
    return f"row {place[0]} holds the class {int(y[tuple(place)])}; {allowed(f'0..{classes - 1}', ignore)}"


class NextSymbol(Task):
    """Cross-entropy, mean over a batch's symbols; accuracy in percent and perplexity, over all symbols of a split.

    Logits (B, L, V) or (B, V, L), where L = V the former; targets (B, L) int64 in 0..V-1, V = classes.
    ignore: a target that is left out of loss and metrics, such as padding.
    """

    names = ("accuracy", "perplexity")
    falling = ("perplexity",)
    ignore: int

    def __init__(self, classes: int, ignore: int = SKIP) -> None:
        super().__init__(classes)
        self.ignore = ignore

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy(self._by_symbol(model(x), y), y, self.ignore)
        return losses.sum() / (y != self.ignore).sum().clamp(min=1)

    def _by_symbol(self, f: Tensor, y: Tensor) -> Tensor:
        """(B, V, L)"""
        return f.mT if tuple(f.shape[1:]) == (y.shape[1], self.classes) else f

    def hold(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(B, L, 2): its loss, and whether it is the most probable; a split's logits may be more than fits memory."""
        f = self._by_symbol(outputs, y)
        return torch.stack([cross_entropy(f, y, self.ignore), (f.argmax(1) == y).to(f.dtype)], 2)

    def whole_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Batches with more padding count less."""
        return outputs[..., 0][y != self.ignore].double().mean()

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        right = outputs[..., 1][y != self.ignore] > 0
        return {"accuracy": measures.percent(right), "perplexity": self.whole_loss(outputs, y).exp().item()}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype != torch.int64 or y.ndim != 2:
            return f"its targets are {look(y)}; the number of the symbol at each place, int64 (n, L), is needed"
        length, symbols = y.shape[1], self.classes
        if outputs not in {(length, symbols), (symbols, length)}:
            return (
                f"the model gives {outputs} for a sample, but the data have {length} targets a sample and {symbols} "
                f"symbols (classes); ({length}, {symbols}) or ({symbols}, {length}) is needed"
            )
        return outside(y, symbols, self.ignore)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """`next`, the symbol that follows a row, and `symbols`, those predicted behind each of its places."""
        f = outputs if outputs.shape[-1] == self.classes else outputs.mT  # (n, L, V), as in `_by_symbol`
        names = names if len(names) == self.classes else [str(k) for k in range(self.classes)]
        rows = [[names[k] for k in row] for row in f.argmax(2).tolist()]
        between = "" if all(len(name) == 1 for name in names) else " "
        return {"next": [row[-1] for row in rows], "symbols": [between.join(row) for row in rows]}


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
        counted = is_counted(y, self.ignore)
        dice, iou = measures.overlap(outputs[counted], y[counted], self.classes, first=1)
        return {"dice": dice, "iou": iou}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype != torch.int64 or y.ndim not in (3, 4):
            return f"its targets are {look(y)}; the class of each pixel, int64 (n, H, W) or (n, D, H, W), is needed"
        wanted = (self.classes, *y.shape[1:])
        if self.classes < 2:
            return "the data set has 1 class; 2 or more are needed, of which class 0 is the background"
        if outputs != wanted:
            return f"the model gives {outputs} for a sample; {wanted} is needed"
        return outside(y, self.classes, self.ignore)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """`mask`, (n, H, W) or (n, D, H, W): the class of each pixel."""
        return {"mask": outputs.argmax(1)}
