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
from fedmpi.tasks.base import (
    IgnoredTarget,
    Task,
    allowed_values_text,
    describe_targets,
    is_counted,
    list_output_names,
    mean_of_counted,
    select_metrics,
)

METRICS = ("accuracy", "balanced_accuracy", "auroc", "f1", "ece", "top5")
MULTI_LABEL_METRICS = ("accuracy", "exact", "f1", "auroc")
TOP_K = re.compile(r"top([1-9]\d{0,3})")


def balanced_class_weights(counts: Tensor) -> Tensor:
    """Return balanced weights of C classes, (C,) float64: w_c = n / (C n_c), or 1 if n_c = 0.

    n_c = counts[c] is the number of samples in class c, and n is the number of all samples.
    """
    n = counts.double()
    return torch.where(n > 0, n.sum() / (len(n) * n.clamp(min=1)), 1.0)


class Classification(Task):
    """Classification with cross-entropy; reports accuracy in percent, and for two classes also AUROC (0 to 1).

    The loss is that of torch.nn.CrossEntropyLoss:
        L = sum_i [ (1 - e) w_{y_i} l_{i y_i} + e/C sum_c w_c l_ic ] / sum_i w_{y_i}       l_ic = -log softmax(f_i)_c
    Here f_i are the logits of sample i, and C is the number of classes. Evaluations report L with w_c = 1 and e = 0.

    metrics: metrics that replace the default ones: accuracy, balanced_accuracy (mean recall) and topK (such as top5) in
    percent; auroc (for more than two classes one-versus-rest, averaged over classes), f1 (mean over classes) and
    ece (expected calibration error, 15 bins) between 0 and 1.
    class_weights: weights w of the classes in the loss that clients minimise, one per class, or balanced: n / (C n_c)
    if n_c of the n training samples are in class c, counted over all clients, or for each client alone if sites do not
    share their label counts.
    label_smoothing: the fraction e of each target's probability that is distributed evenly over all classes.
    """

    classification = True
    lower_is_better = ("ece",)

    def __init__(
        self,
        classes: int,
        metrics: tuple[str, ...] | None = None,
        class_weights: Literal["balanced"] | tuple[Annotated[float, Field(gt=0)], ...] | None = None,
        label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    ) -> None:
        super().__init__(classes)
        if classes < 2:
            raise UserError(
                f"task classification: the data set has {classes} class, but at least 2 are needed "
                "(real-valued targets count as 1 class); store class numbers as integers, or set task.name: "
                "regression for real-valued targets, or task.name: survival for an event and a time"
            )
        default = ("accuracy", "auroc") if classes == 2 else ("accuracy",)
        known = (*METRICS, *(name for name in metrics or () if TOP_K.fullmatch(name) and name not in METRICS))
        self.names = select_metrics("classification", known, metrics, default)
        if class_weights is not None and class_weights != "balanced" and len(class_weights) != classes:
            raise UserError(
                f"task.class_weights has {len(class_weights)} weights, but the data have {classes} classes; give one "
                "weight per class"
            )
        self._uses_balanced_weights, self._smoothing = class_weights == "balanced", label_smoothing
        # Balanced weights are 1 until `set_class_counts` is called.
        initial = (1.0,) * classes if class_weights == "balanced" else class_weights
        self._weights = None if initial is None else torch.tensor(initial, dtype=torch.float64)  # (C,)
        self.is_plain_cross_entropy = class_weights is None and not label_smoothing

    def set_class_counts(self, counts: Tensor) -> None:
        if self._uses_balanced_weights:
            self._weights = balanced_class_weights(counts)

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        if self._weights is not None and (self._weights.dtype, self._weights.device) != (f.dtype, f.device):
            self._weights = self._weights.to(f)  # in the first batch only
        return functional.cross_entropy(f, y, self._weights, label_smoothing=self._smoothing)

    def loss_weight(self, y: Tensor) -> int | Tensor:
        """Return the sum of the class weights of the targets, which is the denominator of the loss."""
        if self._weights is None or type(self).loss is not Classification.loss:
            return len(y)
        return self._weights.to(y.device)[y].sum()

    def eval_loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        if type(self).loss is not Classification.loss:  # a user's subclass with its own loss
            return self.loss(model, x, y)
        return functional.cross_entropy(model(x), y)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        guess = outputs.argmax(1)  # the lowest class if logits are equal
        compute: dict[str, Callable[[], float]] = {
            "accuracy": lambda: metrics.percent_true(guess == y),
            "balanced_accuracy": lambda: metrics.balanced_accuracy(guess, y, self.classes),
            "auroc": lambda: metrics.multiclass_auroc(outputs, y),
            "f1": lambda: metrics.f1_and_iou(guess, y, self.classes)[0],
            "ece": lambda: metrics.calibration_error(outputs, y),
        }
        for name in self.names:
            if name not in compute:
                compute[name] = partial(metrics.top_k_accuracy, outputs, y, int(name.removeprefix("top")))
        return {name: compute[name]() for name in self.names}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.dtype == torch.int64 and y.ndim == 1:
            return ""
        remedy = "choose another task (multi_label, regression, survival)"
        if y.dtype == torch.int64:
            remedy = (
                "choose another task (language_model, next_symbol, segmentation); to predict classes of texts, set "
                "data.label_column"
            )
        return (
            f"the targets are {describe_targets(y)}, but must be class numbers: int64 of shape (n,); for other "
            f"targets, {remedy}"
        )

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `prediction`, the class of each sample, and `probability_NAME` for each class."""
        names, probabilities = list_output_names(names, outputs), outputs.softmax(1)
        columns = {"prediction": [names[k] for k in outputs.argmax(1).tolist()]}
        return columns | {f"probability_{name}": p for name, p in zip(names, probabilities.unbind(1), strict=True)}


class MultiLabel(Task):
    """Multi-label classification with binary cross-entropy, averaged over labels; reports accuracy and mean F1.

    Targets are (n, classes), each 0 or 1. A label is predicted if its logit is positive.

    metrics: metrics that replace the default ones: accuracy (fraction of labels that are predicted correctly) and exact
    (fraction of samples with all labels correct) in percent; f1 (mean over labels that occur or are predicted) and
    auroc (mean over labels) between 0 and 1.
    ignore: a target value that is left out of loss and metrics, such as -1 or nan for an unknown label; `exact` then
    compares the other labels of a sample.
    """

    def __init__(
        self, classes: int, metrics: tuple[str, ...] | None = None, ignore: IgnoredTarget | None = None
    ) -> None:
        super().__init__(classes)
        self.ignore = None if ignore is None else float(ignore)
        self.names = select_metrics("multi_label", MULTI_LABEL_METRICS, metrics, ("accuracy", "f1"))

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        f = model(x)
        if self.ignore is None:
            return functional.binary_cross_entropy_with_logits(f, y.to(f.dtype))
        counted = is_counted(y, self.ignore)
        y = y.to(f.dtype).masked_fill(~counted, 0)
        return mean_of_counted(functional.binary_cross_entropy_with_logits(f, y, reduction="none"), counted)

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        counted = is_counted(y, self.ignore)
        y, predicted = (y > 0) & counted, (outputs > 0) & counted
        right, occurrences = (y & predicted).sum(0).double(), y.sum(0) + predicted.sum(0)
        compute: dict[str, Callable[[], float]] = {
            "accuracy": lambda: metrics.percent_true((y == predicted)[counted]),
            "exact": lambda: metrics.percent_true((y == predicted).all(1)[counted.any(1)]),
            "f1": lambda: metrics.nan_mean(
                2 * right / occurrences
            ),  # nan for labels that neither occur nor are predicted
            "auroc": lambda: metrics.multilabel_auroc(outputs, y, counted),
        }
        return {name: compute[name]() for name in self.names}

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        if y.ndim != 2 or tuple(y.shape[1:]) != outputs:
            return (
                f"the targets are {describe_targets(y)}, but must have one number per label: shape (n, {outputs[0]}), "
                "like the outputs of the model; for other targets, choose another task (`fedmpi list tasks`)"
            )
        invalid = ((y != 0) & (y != 1) & is_counted(y, self.ignore)).nonzero()
        if len(invalid):
            row, label = invalid[0].tolist()
            problem = f"label {label} in row {row} is {y[row, label].item():g}"
            return f"{problem}; {allowed_values_text('0 (no) and 1 (yes)', self.ignore)}"
        return ""

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return `prediction_NAME`, 0 or 1, and `probability_NAME` for each label."""
        names = list_output_names(names, outputs)
        predictions = {f"prediction_{name}": (f > 0).long() for name, f in zip(names, outputs.T, strict=True)}
        return predictions | {f"probability_{name}": f.sigmoid() for name, f in zip(names, outputs.T, strict=True)}
