"""Tasks with one class per position of a sample: `next_symbol` in texts, `segmentation` of images and volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.tasks import metrics
from fedmpi.tasks.base import Task, allowed, is_counted, look, mean_counted

SKIP = -100  # torch's default of ignore_index


def cross_entropy(f: Tensor, y: Tensor, skip: int = SKIP, row_by_row: bool = False) -> Tensor:
    """Return the cross-entropy at each position, (B, ...); 0 if the target is `skip`.

    Args:
        f: logits, (B, c, ...).
        y: targets, (B, ...).
        row_by_row: compute it on logits as rows (P, c). This is slower on a CPU; on a GPU it is always done, because
            other forms have no fixed order of sums.
    """
    if row_by_row or f.is_cuda:
        rows = f.movedim(1, -1).flatten(0, -2)
        return functional.cross_entropy(rows, y.flatten(), reduction="none", ignore_index=skip).view(y.shape)
    return functional.cross_entropy(f, y, reduction="none", ignore_index=skip)


def outside(y: Tensor, classes: int, ignore: int | None) -> str:
    """Return an error message about the first class number outside 0..classes-1; "" if there is none."""
    odd = ((y < 0) | (y >= classes)) & is_counted(y, ignore)
    if not bool(odd.any()):
        return ""
    place = odd.nonzero()[0].tolist()
    return f"row {place[0]} holds the class {int(y[tuple(place)])}; {allowed(f'0..{classes - 1}', ignore)}"


class NextSymbol(Task):
    """Prediction of the next symbol with cross-entropy, mean over symbols; reports accuracy (percent) and perplexity.

    Logits are (B, L, V) or (B, V, L), the former if L = V; targets are (B, L) int64 in 0..V-1, with V = classes.
    Metrics are computed over all symbols of a split.

    ignore: a target that is left out of loss and metrics, such as padding.
    """

    names = ("accuracy", "perplexity")
    lower_is_better = ("perplexity",)
    ignore: int

    def __init__(self, classes: int, ignore: int = SKIP) -> None:
        super().__init__(classes)
        self.ignore = ignore

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy(self._by_symbol(model(x), y), y, self.ignore)
        return losses.sum() / (y != self.ignore).sum().clamp(min=1)

    def _by_symbol(self, f: Tensor, y: Tensor) -> Tensor:
        """Return logits f as (B, V, L)."""
        return f.mT if tuple(f.shape[1:]) == (y.shape[1], self.classes) else f

    def hold(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return for each symbol its loss and whether its prediction is right, (B, L, 2).

        The logits of a whole split might not fit into memory.
        """
        f = self._by_symbol(outputs, y)
        return torch.stack([cross_entropy(f, y, self.ignore), (f.argmax(1) == y).to(f.dtype)], 2)

    def whole_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over the symbols of a split, so that batches with more padding count less."""
        return outputs[..., 0][y != self.ignore].double().mean()

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        right = outputs[..., 1][y != self.ignore] > 0
        return {"accuracy": metrics.percent(right), "perplexity": self.whole_loss(outputs, y).exp().item()}

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
        """Return the predicted symbols of texts.

        `next` is the symbol predicted after each row, and `symbols` has the predictions after each of its symbols.
        """
        f = outputs if outputs.shape[-1] == self.classes else outputs.mT  # (n, L, V), as in `_by_symbol`
        names = names if len(names) == self.classes else [str(k) for k in range(self.classes)]
        rows = [[names[k] for k in row] for row in f.argmax(2).tolist()]
        between = "" if all(len(name) == 1 for name in names) else " "
        return {"next": [row[-1] for row in rows], "symbols": [between.join(row) for row in rows]}


class Segmentation(Task):
    """Segmentation with cross-entropy, mean over pixels or voxels; reports Dice and IoU (0 to 1).

    Logits are (B, c, H, W) and targets (B, H, W) int64 in 0..c-1; for volumes (B, c, D, H, W) and (B, D, H, W). Dice
    and IoU count the pixels of a whole split. They are means over the classes from 1 on that occur or are predicted,
    since class 0 is the background.

    ignore: a target that is left out of loss and metrics, such as 255 on the borders of masks.
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
        dice, iou = metrics.overlap(outputs[counted], y[counted], self.classes, first=1)
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
        """Return `mask`, the class of each pixel, (n, H, W), or of each voxel, (n, D, H, W)."""
        return {"mask": outputs.argmax(1)}
