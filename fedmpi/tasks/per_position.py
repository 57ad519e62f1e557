"""Tasks with one class per position of a sample: `next_symbol` for texts, `segmentation` for images and volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.tasks import metrics
from fedmpi.tasks.base import Task, allowed_values_text, describe_targets, is_counted, mean_of_counted

IGNORE_INDEX = -100  # torch's default of ignore_index


def cross_entropy_per_position(f: Tensor, y: Tensor, ignore: int = IGNORE_INDEX, row_by_row: bool = False) -> Tensor:
    """Return the cross-entropy at each position, (B, ...); 0 at positions whose target is `ignore`.

    Args:
        f: logits, (B, c, ...).
        y: targets, (B, ...).
        ignore: the target value to ignore.
        row_by_row: whether the logits are first reshaped to one row (c,) per position. This is slower on a CPU. On a
            GPU it is always done, because the kernels for other shapes are not deterministic.
    """
    if row_by_row or f.is_cuda:
        rows = f.movedim(1, -1).flatten(0, -2)
        return functional.cross_entropy(rows, y.flatten(), reduction="none", ignore_index=ignore).view(y.shape)
    return functional.cross_entropy(f, y, reduction="none", ignore_index=ignore)


def invalid_class_message(y: Tensor, classes: int, ignore: int | None) -> str:
    """Return an error message about the first target class that is not in 0..classes-1, or "" if there is none."""
    invalid = ((y < 0) | (y >= classes)) & is_counted(y, ignore)
    if not bool(invalid.any()):
        return ""
    position = invalid.nonzero()[0].tolist()
    problem = f"row {position[0]} contains the class {int(y[tuple(position)])}"
    return f"{problem}; {allowed_values_text(f'0..{classes - 1}', ignore)}"


class NextSymbol(Task):
    """Prediction of the next token or character, with the mean cross-entropy; reports accuracy and perplexity.

    Targets are (B, L) int64 in 0..V-1, with V = classes. Logits are (B, L, V) or (B, V, L); if L = V, the shape is
    taken to be (B, L, V). Metrics are computed over all symbols of a data split.

    ignore: a target that is left out of loss and metrics, such as padding.
    """

    names = ("accuracy", "perplexity")
    lower_is_better = ("perplexity",)
    ignore: int

    def __init__(self, classes: int, ignore: int = IGNORE_INDEX) -> None:
        super().__init__(classes)
        self.ignore = ignore

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy_per_position(self._with_vocabulary_first(model(x), y), y, self.ignore)
        return losses.sum() / (y != self.ignore).sum().clamp(min=1)

    def _with_vocabulary_first(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the logits f, (B, L, V) or (B, V, L), as (B, V, L)."""
        return f.mT if tuple(f.shape[1:]) == (y.shape[1], self.classes) else f

    def loss_weight(self, y: Tensor) -> Tensor:
        return (y != self.ignore).sum()

    def reduce_outputs(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return two numbers per symbol, (B, L, 2): its loss, and 1 if it is predicted correctly, otherwise 0.

        These need less memory than the logits for a whole data split.
        """
        f = self._with_vocabulary_first(outputs, y)
        return torch.stack([cross_entropy_per_position(f, y, self.ignore), (f.argmax(1) == y).to(f.dtype)], 2)

    def split_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over all symbols of a data split; batches with more padding thus count less."""
        return outputs[..., 0][y != self.ignore].double().mean()

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        right = outputs[..., 1][y != self.ignore] > 0
        return {"accuracy": metrics.percent_true(right), "perplexity": self.split_loss(outputs, y).exp().item()}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype != torch.int64 or y.ndim != 2:
            return (
                f"the targets are {describe_targets(y)}, but must be one symbol index per position: int64 of "
                "shape (n, L); for other targets, choose another task (`fedmpi list tasks`)"
            )
        length, symbols = y.shape[1], self.classes
        if outputs not in {(length, symbols), (symbols, length)}:
            return (
                f"the model returns outputs {outputs} per sample, but the data have {length} targets per sample and "
                f"{symbols} symbols (classes); outputs must be ({length}, {symbols}) or ({symbols}, {length})"
            )
        return invalid_class_message(y, symbols, self.ignore)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `symbols`, the symbol predicted after each position of a text, and `next`, the last of them."""
        f = outputs if outputs.shape[-1] == self.classes else outputs.mT  # (n, L, V), as in `_with_vocabulary_first`
        names = names if len(names) == self.classes else [str(k) for k in range(self.classes)]
        rows = [[names[k] for k in row] for row in f.argmax(2).tolist()]
        separator = "" if all(len(name) == 1 for name in names) else " "
        return {"next": [row[-1] for row in rows], "symbols": [separator.join(row) for row in rows]}


class Segmentation(Task):
    """Segmentation with cross-entropy, averaged over pixels or voxels; reports Dice and IoU (0 to 1).

    Logits are (B, c, H, W) and targets (B, H, W) int64 in 0..c-1; for volumes (B, c, D, H, W) and (B, D, H, W). Dice
    and IoU are computed over all pixels of a data split and averaged over the classes that occur or are predicted,
    except class 0, the background.

    ignore: a target that is left out of loss and metrics, such as 255 on the borders of masks.
    """

    names = ("dice", "iou")
    ignore: int | None

    def __init__(self, classes: int, ignore: int | None = None) -> None:
        super().__init__(classes)
        self.ignore = ignore

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        if self.ignore is None:
            return cross_entropy_per_position(model(x), y).mean()
        return mean_of_counted(cross_entropy_per_position(model(x), y, self.ignore), is_counted(y, self.ignore))

    def reduce_outputs(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.argmax(1)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        counted = is_counted(y, self.ignore)
        dice, iou = metrics.f1_and_iou(outputs[counted], y[counted], self.classes, first=1)
        return {"dice": dice, "iou": iou}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype != torch.int64 or y.ndim not in (3, 4):
            return (
                f"the targets are {describe_targets(y)}, but must be the class of each pixel: int64 of shape (n, H, W) "
                "or (n, D, H, W); for other targets, choose another task (`fedmpi list tasks`)"
            )
        expected = (self.classes, *y.shape[1:])
        if self.classes < 2:
            return "the data set has only 1 class; at least 2 are needed, and class 0 must be the background"
        if outputs != expected:
            return f"the model returns outputs {outputs} per sample, but must return {expected}"
        return invalid_class_message(y, self.classes, self.ignore)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `mask`, the class of each pixel, (n, H, W), or of each voxel, (n, D, H, W)."""
        return {"mask": outputs.argmax(1)}
