"""Several labels a sample, each there or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from fedmpi.tasks import measures
from fedmpi.tasks.base import (
    Ignored,
    Task,
    all_names,
    but_ignored,
    choose,
    ignored_value,
    is_counted,
    look,
    mean_counted,
)

KNOWN = ("accuracy", "exact", "f1", "auroc")


class MultiLabel(Task):
    """Binary cross-entropy, mean over labels; accuracy in percent, and mean F1. Targets (n, classes), 0 or 1.

    metrics: accuracy (share of right labels) and exact (of samples with all labels right), in percent; f1 (a label with
    logit > 0 is given; over labels that are given or there) and auroc, means over labels, 0 to 1.
    ignore: a target that is left out of loss and metrics, such as -1, or nan: a label that nobody has looked for; then
    `exact` asks for those labels of a sample that count.
    """

    def __init__(self, classes: int, metrics: tuple[str, ...] | None = None, ignore: Ignored | None = None) -> None:
        super().__init__(classes)
        self.ignore = ignored_value(ignore)
        self.names = choose("multi_label", KNOWN, metrics, ("accuracy", "f1"))

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        if self.ignore is None:
            return functional.binary_cross_entropy_with_logits(f, y.to(f.dtype))
        counted = is_counted(y, self.ignore)
        y = y.to(f.dtype).masked_fill(~counted, 0)
        return mean_counted(functional.binary_cross_entropy_with_logits(f, y, reduction="none"), counted)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        counted = is_counted(y, self.ignore)
        y, predicted = (y > 0) & counted, (outputs > 0) & counted
        right, occurrences = (y & predicted).sum(0).double(), y.sum(0) + predicted.sum(0)
        known: dict[str, Callable[[], float]] = {
            "accuracy": lambda: measures.percent((y == predicted)[counted]),
            "exact": lambda: measures.percent((y == predicted).all(1)[counted.any(1)]),
            "f1": lambda: measures.mean(2 * right / occurrences),  # 0 / 0: nobody has or is given it
            "auroc": lambda: measures.label_auroc(outputs, y, counted),
        }
        return {name: known[name]() for name in self.names}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.ndim != 2 or tuple(y.shape[1:]) != outputs:
            return f"its targets are {look(y)}; one number a label, (n, {outputs[0]}), is needed, as the model gives"
        odd = ((y != 0) & (y != 1) & is_counted(y, self.ignore)).nonzero()
        if len(odd):
            row, label = odd[0].tolist()
            allowed = f"0 (no) and 1 (yes) are allowed{but_ignored(self.ignore)}"
            advice = "" if self.ignore is not None else "; task.ignore names a number that does not count"
            return f"row {row} has {y[row, label].item():g} for label {label}; {allowed}{advice}"
        return ""

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """`prediction` 0 or 1 of each label, and its `probability`."""
        names = all_names(names, outputs)
        given = {f"prediction_{name}": (f > 0).long() for name, f in zip(names, outputs.T, strict=True)}
        return given | {f"probability_{name}": f.sigmoid() for name, f in zip(names, outputs.T, strict=True)}
