"""What comes next, at each place of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmpi.tasks import measures
from fedmpi.tasks.base import Task, cross_entropy, look, outside

SKIP = -100  # torch's


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
        count = (y != self.ignore).sum().clamp(min=1)
        return self._losses(model(x), y).sum() / count

    def _losses(self, f: Tensor, y: Tensor) -> Tensor:
        """(B, L) cross-entropies, 0 where a target does not count."""
        return cross_entropy(self._by_symbol(f, y), y, self.ignore)

    def _by_symbol(self, f: Tensor, y: Tensor) -> Tensor:
        """(B, V, L)"""
        return f.mT if tuple(f.shape[1:]) == (y.shape[1], self.classes) else f

    def hold(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(B, L, 2): its loss, and whether it is the most probable; a split's logits may be more than fits memory."""
        right = self._by_symbol(outputs, y).argmax(1) == y
        return torch.stack([self._losses(outputs, y), right.to(outputs.dtype)], 2)

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
