"""The base class of tasks, and functions that several tasks share.

A user's task derives from `Task`, or is any other class with the functions `loss` and `metrics`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name

IgnoredTarget = float | Literal["nan"]  # the option `ignore` of tasks with real-valued targets


class Task(ABC):
    """A task defines the loss that clients minimise and the metrics by which a model is evaluated.

    Outputs (B, ...) and targets y (B, ...) may have any shape, and targets also any dtype. Only `loss` and `metrics`
    are required; all other members have defaults.

    Args:
        classes: the number of classes of the data set; 1 for a real-valued target.
    """

    names: tuple[str, ...]  # keys of `metrics`, the main metric first; default: the keys for two outputs of zeros
    classification = False
    """True if outputs (B, c) are logits over classes and targets (B,) are class numbers. All methods accept such a
    task; methods with `needs = {CLASSES}` accept no other. False for a task with one class per position."""
    lower_is_better: tuple[str, ...] = ()  # metrics for which smaller values are better
    capturable = True  # whether the loss launches the same kernels for any values, as capture in a CUDA graph requires
    ignore: float | None = None  # targets with this value do not count in loss and metrics; math.nan for NaN

    def __init__(self, classes: int) -> None:
        self.classes = classes

    @abstractmethod
    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, as a scalar.

        The function must call `model(x)` exactly once. In evaluations, `model` returns outputs that were computed
        earlier.

        Args:
            model: a function from samples (B, ...) to outputs (B, ...).
            x: the samples, (B, ...).
            y: the targets, (B, ...).
        """

    def eval_loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the loss (a scalar) that evaluations report for a batch; by default the loss that clients minimise.

        Args:
            model: a function that returns the outputs (B, ...) for the samples x.
            x: the samples, (B, ...).
            y: the targets, (B, ...).
        """
        return self.loss(model, x, y)

    def set_class_counts(self, counts: Tensor) -> None:
        """Receive the number of training samples per class, for losses with class weights.

        The engine calls this function once before training, with the counts over all clients. If sites do not share
        their label counts, the engine calls it before each client trains, with the counts of that client.

        Args:
            counts: training samples per class, (classes,).
        """
        return None

    @abstractmethod
    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the metrics of a data split by name: one for each of `names`, NaN if a metric is undefined.

        Args:
            outputs: the results of `reduce_outputs` for all batches of the split, (n, ...).
            y: the targets of the split, (n, ...).
        """

    def reduce_outputs(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Reduce the outputs of a batch to what `metrics` needs, (B, ...); by default, return them unchanged.

        Override this function if the outputs for a whole data split do not fit into memory.

        Args:
            outputs: the outputs of the model, (B, ...).
            y: the targets of the batch, (B, ...).
        """
        return outputs

    def split_loss(self, outputs: Tensor, y: Tensor) -> Tensor | None:
        """Return the loss of a data split as a scalar.

        None, the default, stands for the mean of the batch losses, weighted by `batch_weight`.

        Args:
            outputs: the results of `reduce_outputs` for all batches of the split, (n, ...).
            y: the targets of the split, (n, ...).
        """
        return None

    def batch_weight(self, y: Tensor) -> int | Tensor:
        """Return the weight of a batch in a mean over batches or clients: its number of samples B.

        If `ignore` is set, the weight is B times the fraction of targets that are not ignored. It is then a scalar
        float64 tensor on the device of y, so that the CPU need not wait for the device.

        Args:
            y: the targets of the batch, (B, ...).
        """
        if self.ignore is None:
            return len(y)
        return is_counted(y, self.ignore).sum(dtype=torch.float64) / y.shape[1:].numel()

    def loss_weight(self, y: Tensor) -> int | Tensor | None:
        """Return the weight of a part of a batch in the mean that gives the loss of the batch (train.accumulate).

        The default is `batch_weight(y)`. None means that the loss of a batch is no weighted mean of the losses of its
        parts, so that train.accumulate cannot be used; this is the default if the task overrides `split_loss`.

        Args:
            y: the targets of the part, (B, ...).
        """
        return self.batch_weight(y) if getattr(type(self), "split_loss", Task.split_loss) is Task.split_loss else None

    def split_weight(self, y: Tensor) -> int | Tensor:
        """Return the weight of a client's data split in a mean over clients; by default `batch_weight(y)`.

        It must be 0 if the loss of the split is undefined.

        Args:
            y: the targets of the split, (n, ...).
        """
        return self.batch_weight(y)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return the columns that `fedmpi predict` writes: a dict from name to values (n, ...); by default the outputs.

        Args:
            outputs: the outputs of the model, (n, ...).
            names: the names of the classes or labels in the order of the outputs; () if they are not known.
        """
        return name_output_columns(outputs, names)

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        """Return an error message if the task cannot use the targets of the data, otherwise "".

        Args:
            y: the targets of the training or test part, (n, ...).
            outputs: the shape of the model's outputs for one sample.

        Returns:
            What is wrong and how to correct it; it is printed after "task NAME: PART data: ".
        """
        return ""


def name_output_columns(outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return outputs (n, ...) as columns by name; a vector of outputs per sample gives one column per output."""
    if outputs[:1].numel() <= 1:
        return {"output": outputs.flatten()}
    if outputs.ndim > 2:
        return {"output": outputs}
    return {
        f"output_{name}": column
        for name, column in zip(list_output_names(names, outputs), outputs.unbind(1), strict=True)
    }


def list_output_names(names: Sequence[str], outputs: Tensor) -> Sequence[str]:
    """Return c names for the columns of outputs (n, c, ...): `names` if it has c items, otherwise "0" to c - 1."""
    c = outputs.shape[1]
    return names if len(names) == c else [str(number) for number in range(c)]


def select_metrics(
    task: str, known: Sequence[str], requested: Sequence[str] | None, default: Sequence[str]
) -> tuple[str, ...]:
    """Return the metrics named in task.metrics, or the default ones if it is not set.

    Args:
        task: the name of the task, for messages.
        known: all metrics of the task.
        requested: the value of task.metrics.
        default: the metrics that are reported if `requested` is empty.

    Raises:
        UserError: a requested metric is not known.
    """
    for name in requested or ():
        if name not in known:
            raise UserError(f"task.metrics: task {task} has no metric {name!r}; {suggest_name(name, known)}")
    return tuple(requested or default)


def is_counted(y: Tensor, ignore: float | str | None) -> Tensor:
    """Return a mask with the shape of the targets y (B, ...), False for targets that equal `ignore`."""
    if ignore is None:
        return torch.ones_like(y, dtype=torch.bool)
    value = float(ignore)
    return ~y.isnan() if math.isnan(value) else y != value


def mean_of_counted(losses: Tensor, counted: Tensor) -> Tensor:
    """Return the mean (a scalar) of the losses for which `counted` is True; 0 if there are none.

    All other losses may be NaN; their gradient is 0.
    """
    return losses.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def allowed_values_text(values: str, ignore: float | None) -> str:
    """Return the end of an error message about targets.

    It names the allowed values and the ignored value or, if no value is ignored, how to set one.
    """
    remedy = "; correct the target, or set task.ignore to the value that marks missing targets"
    return f"only {values} are allowed" + (remedy if ignore is None else f" (and {ignore:g}, which is ignored)")


def describe_targets(y: Tensor) -> str:
    """Return the type and shape of targets y (n, ...) for error messages, such as `int64 of shape (n, 3)`."""
    sizes = "".join(f", {size}" for size in y.shape[1:])
    return f"{str(y.dtype).removeprefix('torch.')} of shape (n{sizes or ','})"
