"""What a task is.

A user's task derives from `Task`, or has a `loss` and `metrics` like it; everything else may be left out.
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
    """A loss and its metrics, for a data set of `classes` classes (1 for a real-valued target).

    Outputs (B, ...) and targets y (B, ...) are of any shape, targets of any type. What more a task may say has a
    default: nothing of it is asked of a user's own.
    """

    names: tuple[str, ...]  # keys of `metrics`, the headline first; where there are none, those of two samples of zeros
    classification = False
    """Whether outputs (B, c) are logits over classes and targets (B,) class numbers. All methods take such a task;
    those with `needs = {CLASSES}` take no other. A class at each place (text, segmentation) is none in this sense."""
    falling: tuple[str, ...] = ()  # metrics of which less is better
    capturable = True  # as a CUDA graph: the loss launches the same kernels whatever the values are
    ignore: float | None = None  # the value of targets that are left out of loss and metrics; math.nan for NaN

    def __init__(self, classes: int) -> None:
        self.classes = classes

    @abstractmethod
    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch, (). Calls `model(x)` exactly once: evaluation passes outputs made before as `model`."""

    def judged(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The loss that evaluations report, where that is not what clients descend."""
        return self.loss(model, x, y)

    def weigh(self, counts: Tensor) -> None:
        """Told the training samples (classes,) of each class before any client trains: of all clients, or where sites
        do not share their label counts, of the client at hand, before it trains."""
        return None

    @abstractmethod
    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """The figures in `names`, and no others, of a split's outputs as `hold` gave them, (n, ...), and targets,
        (n, ...); nan where undefined."""

    def hold(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What of a batch's outputs is kept until `metrics`, (B, ...): all, where the outputs of a split fit memory."""
        return outputs

    def whole_loss(self, outputs: Tensor, y: Tensor) -> Tensor | None:
        """Loss of a whole split, () of what was held, where it is not the mean over samples of `loss`; None: it is."""
        return None

    def batch_weight(self, y: Tensor) -> int | Tensor:
        """The weight of a batch with targets y (B, ...) in a mean over batches or clients: B, and with `ignore` B times
        the share of targets that count, () float64. The device is not asked for it."""
        if self.ignore is None:
            return len(y)
        return is_counted(y, self.ignore).sum(dtype=torch.float64) / y.shape[1:].numel()

    def split_weight(self, y: Tensor) -> int | Tensor:
        """The weight of a client's split with targets y (n, ...) in a mean over clients: 0 where it has no loss."""
        return self.batch_weight(y)

    def predictions(self, outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Columns, (n,) or (n, ...), of what outputs (n, ...) predict. names: what the outputs stand for, such as the
        classes in order; () where that is not known. Default: the outputs themselves."""
        return plain_predictions(outputs, names)

    def check(self, y: Tensor, outputs: tuple[int, ...]) -> str:
        """What is wrong with targets y (n, ...) for outputs (B, *outputs), and the remedy; "": nothing."""
        return ""


def plain_predictions(outputs: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """The outputs (n, ...) as they are: a column for each where a row has one row of numbers."""
    if outputs[:1].numel() <= 1:
        return {"output": outputs.flatten()}
    if outputs.ndim > 2:
        return {"output": outputs}
    return {f"output_{name}": column for name, column in zip(all_names(names, outputs), outputs.unbind(1), strict=True)}


def all_names(names: Sequence[str], outputs: Tensor) -> Sequence[str]:
    """A name for each of the outputs (n, c, ...): those that are given, else their numbers."""
    many = outputs.shape[1]
    return names if len(names) == many else [str(number) for number in range(many)]


def choose(task: str, known: Sequence[str], given: Sequence[str] | None, usual: Sequence[str]) -> tuple[str, ...]:
    """The metrics that task.metrics asks for, else the usual ones. Raises UserError for one that is none of `known`."""
    for name in given or ():
        if name not in known:
            raise UserError(f"task.metrics: task {task} has no metric {name!r}; {nearest(name, known)}")
    return tuple(given or usual)


def is_counted(y: Tensor, ignore: float | str | None) -> Tensor:
    """Which targets y (B, ...) count: a mask of bool of the same shape, False where a target is `ignore`."""
    if ignore is None:
        return torch.ones_like(y, dtype=torch.bool)
    value = float(ignore)
    return ~y.isnan() if math.isnan(value) else y != value


def mean_counted(losses: Tensor, counted: Tensor) -> Tensor:
    """The mean () of the losses that count, 0 without one. The others, which may be NaN, have a gradient of 0."""
    return losses.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def allowed(values: str, ignore: float | None) -> str:
    """`0 and 1 are allowed`, for messages, with what task.ignore adds."""
    more = "; task.ignore names a number that does not count"
    return f"{values} are allowed{more if ignore is None else f' (and {ignore:g}, which does not count)'}"


def look(y: Tensor) -> str:
    """`int64 (n, 3)`, for messages."""
    sizes = "".join(f", {size}" for size in y.shape[1:])
    return f"{str(y.dtype).removeprefix('torch.')} (n{sizes or ','})"
