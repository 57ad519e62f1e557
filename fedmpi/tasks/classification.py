"""The tasks `classification` (one class per sample) and `multi_label` (several labels per sample, each 0 or 1)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.tasks import metrics
from fedmpi.tasks.base import Ignored, Task, all_names, allowed, choose, is_counted, look, mean_counted

KNOWN = ("accuracy", "balanced_accuracy", "auroc", "f1", "ece", "top5")
LABEL_METRICS = ("accuracy", "exact", "f1", "auroc")
TOP = re.compile(r"top([1-9]\d{0,3})")


def balanced(counts: Tensor) -> Tensor:
    """Return class weights (C,) float64 from training samples by class (C,):  w_c = n / (C n_c),  1 if n_c = 0."""
    n = counts.double()
    return torch.where(n > 0, n.sum() / (len(n) * n.clamp(min=1)), 1.0)


class Classification(Task):
    """Classification with cross-entropy; reports accuracy in percent, and for two classes the AUROC (0 to 1).

    The loss is that of torch.nn.CrossEntropyLoss:
        L = sum_i [ (1 - e) w_{y_i} l_{i y_i} + e/C sum_c w_c l_ic ] / sum_i w_{y_i}       l_ic = -log softmax(f_i)_c
    Evaluations report it without weights and label smoothing.

    metrics: metrics that replace the default ones: accuracy, balanced_accuracy (mean recall) and topK (such as top5) in
    percent; auroc (above two classes the mean of one against the rest), f1 (mean over classes) and ece (expected
    calibration error, 15 bins) between 0 and 1.
    weights: class weights w of the loss that clients minimise, one per class, or balanced, which is n / (C n_c)
    computed from the training samples of all clients, or of the client alone if sites do not share their label counts.
    label_smoothing: share e of each target that is spread evenly over all classes.
    """

    classification = True
    lower_is_better = ("ece",)

    def __init__(
        self,
        classes: int,
        metrics: tuple[str, ...] | None = None,
        weights: Literal["balanced"] | tuple[Annotated[float, Field(gt=0)], ...] | None = None,
        label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        super().__init__(classes)
        if classes < 2:
            raise UserError(
                f"task classification: the data set has {classes} class, but it needs 2 or more; "
                "store class numbers as whole numbers, or choose task.name=regression for a real-valued target "
                "(survival for an event and a time)"
            )
        usual = ("accuracy", "auroc") if classes == 2 else ("accuracy",)
        known = (*KNOWN, *(name for name in metrics or () if TOP.fullmatch(name) and name not in KNOWN))
        self.names = choose("classification", known, metrics, usual)
        if weights is not None and weights != "balanced" and len(weights) != classes:
            raise UserError(f"task.weights: {len(weights)} weights, but the data have {classes} classes; one a class")
        self._balances, self._smoothing = weights == "balanced", label_smoothing
        given = (1.0,) * classes if weights == "balanced" else weights  # until `weigh` is called
        self._weights = None if given is None else torch.tensor(given, dtype=torch.float64)  # (C,)
        self.plain = given is None and not label_smoothing  # True if the loss is the mean cross-entropy

    def weigh(self, counts: Tensor) -> None:
        if self._balances:
            self._weights = balanced(counts)

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        if self._weights is not None and (self._weights.dtype, self._weights.device) != (f.dtype, f.device):
            self._weights = self._weights.to(f)  # in the first batch only
        return functional.cross_entropy(f, y, self._weights, label_smoothing=self._smoothing)

    def judged(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        if type(self).loss is not Classification.loss:  # a subclass that is a user's own task
            return self.loss(model, x, y)
        return functional.cross_entropy(model(x), y)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        guess = outputs.argmax(1)  # the lowest class if logits are equal
        known: dict[str, Callable[[], float]] = {
            "accuracy": lambda: metrics.percent(guess == y),
            "balanced_accuracy": lambda: metrics.balanced_accuracy(guess, y, self.classes),
            "auroc": lambda: metrics.class_auroc(outputs, y),
            "f1": lambda: metrics.overlap(guess, y, self.classes)[0],
            "ece": lambda: metrics.calibration_error(outputs, y),
        }
        known |= {name: partial(metrics.top, outputs, y, int(name[3:])) for name in self.names if name not in known}
        return {name: known[name]() for name in self.names}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype == torch.int64 and y.ndim == 1:
            return ""
        others = "next_symbol, segmentation" if y.dtype == torch.int64 else "multi_label, regression, survival"
        return f"its targets are {look(y)}; class numbers, int64 (n,), are needed; other tasks: {others}"

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `prediction`, the class of each sample, and `probability_NAME` for each class."""
        names, shares = all_names(names, outputs), outputs.softmax(1)
        columns = {"prediction": [names[k] for k in outputs.argmax(1).tolist()]}
        return columns | {f"probability_{name}": p for name, p in zip(names, shares.unbind(1), strict=True)}


class MultiLabel(Task):
    """Multi-label classification with binary cross-entropy, mean over labels; reports accuracy and mean F1.

    Targets are (n, classes), 0 or 1. A label is predicted if its logit is above 0.

    metrics: metrics that replace the default ones: accuracy (share of labels that are right) and exact (share of
    samples whose labels are all right) in percent; f1 (mean over labels that occur or are predicted) and auroc (mean
    over labels) between 0 and 1.
    ignore: a target that is left out of loss and metrics, such as -1 or nan for an unknown label; `exact` then uses the
    other labels of a sample.
    """

    def __init__(self, classes: int, metrics: tuple[str, ...] | None = None, ignore: Ignored | None = None) -> None:
        super().__init__(classes)
        self.ignore = None if ignore is None else float(ignore)
        self.names = choose("multi_label", LABEL_METRICS, metrics, ("accuracy", "f1"))

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
            "accuracy": lambda: metrics.percent((y == predicted)[counted]),
            "exact": lambda: metrics.percent((y == predicted).all(1)[counted.any(1)]),
            "f1": lambda: metrics.mean(2 * right / occurrences),  # nan: neither occurs nor is predicted
            "auroc": lambda: metrics.label_auroc(outputs, y, counted),
        }
        return {name: known[name]() for name in self.names}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.ndim != 2 or tuple(y.shape[1:]) != outputs:
            return f"its targets are {look(y)}; one number a label, (n, {outputs[0]}), is needed, as the model gives"
        odd = ((y != 0) & (y != 1) & is_counted(y, self.ignore)).nonzero()
        if len(odd):
            row, label = odd[0].tolist()
            has = f"row {row} has {y[row, label].item():g} for label {label}"
            return f"{has}; {allowed('0 (no) and 1 (yes)', self.ignore)}"
        return ""

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `prediction_NAME`, 0 or 1, and `probability_NAME` for each label."""
        names = all_names(names, outputs)
        given = {f"prediction_{name}": (f > 0).long() for name, f in zip(names, outputs.T, strict=True)}
        return given | {f"probability_{name}": f.sigmoid() for name, f in zip(names, outputs.T, strict=True)}
