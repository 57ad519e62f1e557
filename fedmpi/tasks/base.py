"""The base class of tasks, and helpers that several tasks share.

A user's task derives from `Task`, or is a class with the functions `loss` and `metrics`; all other members have
defaults.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest

Ignored = float | Literal["nan"]  # the option `ignore` of tasks with real-valued targets


class Task(ABC):
    """The loss that clients minimise and the metrics of a model, for a data set of `classes` classes.

    `classes` is 1 for a real-valued target. Outputs (B, ...) and targets y (B, ...) have any shape, and targets any
    type. Only `loss` and `metrics` are required; all other members have defaults.
    """

    names: tuple[str, ...]  # keys of `metrics`, the headline first; default: the keys for two samples of zeros
    classification = False
    """True if outputs (B, c) are logits over classes and targets (B,) are class numbers. All methods accept such a
    task; methods with `needs = {CLASSES}` accept no other. A task with one class per position is not one of them."""
    lower_is_better: tuple[str, ...] = ()  # metrics for which smaller values are better
    capturable = True  # the loss launches the same kernels for all values, so that it can be captured as a CUDA graph
    ignore: float | None = None  # targets of this value are left out of loss and metrics; math.nan for NaN

    def __init__(self, classes: int) -> None:
        self.classes = classes

    @abstractmethod
    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, ().

        Must call `model(x)` exactly once: evaluations pass a function that returns outputs computed before.
        """

    def judged(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the loss that evaluations report, (). It may differ from the loss that clients minimise."""
        return self.loss(model, x, y)

    def weigh(self, counts: Tensor) -> None:
        """Set the loss's class weights, if it has any, from the number of training samples by class, (classes,).

        The engine calls this before training, with the counts of all clients. If sites do not share their label counts,
        it is called before each client trains, with the counts of that client.
        """
        return None

    @abstractmethod
    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the metrics of a whole split by name: exactly the names in `names`, NaN if undefined.

        Args:
            outputs: what `hold` returned for the batches of the split, (n, ...).
            y: the targets of the split, (n, ...).
        """

    def hold(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return what is kept of the outputs of a batch until `metrics` is called, (B, ...).

        The default keeps all outputs. Override it if the outputs of a whole split do not fit into memory.
        """
        return outputs

    def whole_loss(self, outputs: Tensor, y: Tensor) -> Tensor | None:
        """Return the loss of a whole split, (), or None if it is the mean over samples of `loss`.

        Args:
            outputs: what `hold` returned for the batches of the split, (n, ...).
            y: the targets of the split, (n, ...).
        """
        return None

    def batch_weight(self, y: Tensor) -> int | Tensor:
        """Return the weight of a batch in a mean over batches or clients: its number of samples B.

        With `ignore` it is B times the share of targets y (B, ...) that count, as a () float64 tensor on the device of
        y, so that the CPU need not wait for the device.
        """
        if self.ignore is None:
            return len(y)
        return is_counted(y, self.ignore).sum(dtype=torch.float64) / y.shape[1:].numel()

    def split_weight(self, y: Tensor) -> int | Tensor:
        """Return the weight of a client's split in a mean over clients: 0 if the split has no loss.

        Args:
            y: the targets of the split, (n, ...).
        """
        return self.batch_weight(y)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return the columns that `fedmpi predict` writes, by name, each (n,) or (n, ...).

        The default is the outputs themselves.

        Args:
            outputs: the outputs of the model, (n, ...).
            names: the names of the classes or labels in the order of the outputs; () if they are not known.
        """
        return plain_predictions(outputs, names)

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        """Return what is wrong with the targets of the data, and the remedy; "" if nothing is wrong.

        Args:
            y: targets, (n, ...).
            outputs: the shape of the model's outputs for one sample.
        """
        return ""


def plain_predictions(outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return the outputs (n, ...) unchanged: one column per output if each sample has a vector of outputs."""
    if outputs[:1].numel() <= 1:
        return {"output": outputs.flatten()}
    if outputs.ndim > 2:
        return {"output": outputs}
    return {f"output_{name}": column for name, column in zip(all_names(names, outputs), outputs.unbind(1), strict=True)}


def all_names(names: Sequence[str], outputs: Tensor) -> Sequence[str]:
    """Return a name for each of the c outputs in (n, c, ...): the given names, or numbers if there are not c names."""
    many = outputs.shape[1]
    return names if len(names) == many else [str(number) for number in range(many)]


def choose(task: str, known: Sequence[str], given: Sequence[str] | None, usual: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics given in task.metrics, or the usual ones if none are given.

    Raises:
        UserError: a given metric is not in `known`.
    """
    for name in given or ():
        if name not in known:
            raise UserError(f"task.metrics: task {task} has no metric {name!r}; {nearest(name, known)}")
    return tuple(given or usual)


def is_counted(y: Tensor, ignore: float | str | None) -> Tensor:
    """Return a mask of the shape of the targets y (B, ...), False if a target equals `ignore`."""
    if ignore is None:
        return torch.ones_like(y, dtype=torch.bool)
    value = float(ignore)
    return ~y.isnan() if math.isnan(value) else y != value


def mean_counted(losses: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of the losses that count, (); 0 if none does.

    The losses that do not count may be NaN; their gradient is 0.
    """
    return losses.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def allowed(values: str, ignore: float | None) -> str:
    """Return the end of an error message about targets, such as `0 and 1 are allowed`, with a note on task.ignore."""
    more = "; task.ignore names a number that does not count"
    return f"{values} are allowed{more if ignore is None else f' (and {ignore:g}, which does not count)'}"


def look(y: Tensor) -> str:
    """Return the type and shape of targets for error messages, such as `int64 (n, 3)`."""
    sizes = "".join(f", {size}" for size in y.shape[1:])
    return f"{str(y.dtype).removeprefix('torch.')} (n{sizes or ','})"
