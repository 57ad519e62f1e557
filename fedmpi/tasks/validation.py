"""Checks of a task, which may be a user's own: its members, its targets, and what its functions return."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import RESERVED
from fedmpi.common.text import shorten
from fedmpi.common.user_code_errors import attribute_errors, located_error
from fedmpi.tasks.base import Task


def check_task(task: Any) -> None:
    """Check that a task has the functions `loss` and `metrics`, and add the defaults of `Task` for all missing members.

    A user's task need not derive from `Task`.
    """
    for needed in ("loss", "metrics"):
        if not callable(getattr(task, needed, None)):
            have = f"task.name stands for {type(task).__name__}, which has no function {needed}"
            raise located_error(f"{have}; a task has loss and metrics (fedmpi.Task)", task)
    for name, default in vars(Task).items():
        if not name.startswith("_") and not hasattr(task, name):
            setattr(task, name, partial(default, task) if callable(default) else default)


def check_targets(name: str, task: Any, y: Tensor, outputs: tuple[int, ...], part: str) -> None:
    """Raise UserError if the targets (n, ...) of a part of the data (training, test) do not suit the task."""
    nan = y.isnan().flatten(1).any(1) if y.ndim > 1 else y.isnan()
    ignores_nan = isinstance(task.ignore, float) and math.isnan(task.ignore)
    if not ignores_nan and bool(nan.any()):
        option = ", or say task.ignore: nan" if "ignore" in inspect.signature(type(task)).parameters else ""
        raise UserError(f"task {name}: {part}: row {int(nan.nonzero()[0])} holds NaN; fill it or leave it out{option}")
    wrong = task.check(y, outputs)
    if wrong:
        raise located_error(f"task {name}: {part}: {wrong}", type(task))


def metric_names(task: Any, outputs: tuple[int, ...], y: Tensor) -> tuple[str, ...]:
    """Return the names of the task's metrics, the headline first.

    If a user's task does not declare `names`, they are the keys of its metrics for two samples with zero outputs.

    Args:
        outputs: the shape of the model's outputs for one sample.
        y: targets of two samples, (2, ...).
    """
    names: Any = getattr(task, "names", ())
    if not names:
        with attribute_errors(f"task {type(task).__name__}, which has no names = ('accuracy',), asked for two samples"):
            names = figures(task, hold(task, torch.zeros(2, *outputs), y), y)
    names = (names,) if isinstance(names, str) else tuple(names)
    taken = RESERVED | {f"{name}{end}" for name in names for end in ("_std", "_worst_decile")}  # columns of the engine
    wrong = [name for name in names if not isinstance(name, str) or name in taken or names.count(name) > 1]
    if wrong or not names:
        problem = f"a metric is called {wrong[0]!r}" if wrong else "metrics gives no figure"
        allowed = "names are texts, one at least, each once, and none of the other columns of metrics.jsonl"
        raise located_error(f"task {type(task).__name__}: {problem}; {allowed}", task)
    return names


def hold(task: Any, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the part of a batch's outputs that the task keeps for its metrics, after checking its shape."""
    summary = task.hold(outputs, y)
    if not isinstance(summary, Tensor) or summary.shape[:1] != y.shape[:1]:
        raise _return_error(task, "hold", summary, f"a tensor ({len(y)}, ...)")
    return summary


def mean_loss(task: Any, f: Tensor, x: Any, y: Tensor) -> Tensor:
    """Return the loss that evaluations report, (), for outputs f that were computed before."""
    return _scalar(task, "loss", task.judged(lambda _: f, x, y))


def whole_loss(task: Any, outputs: Tensor, y: Tensor) -> Tensor | None:
    """Return the loss of a split, (), from the kept outputs; None if it is the mean over samples."""
    loss = task.whole_loss(outputs, y)
    return None if loss is None else _scalar(task, "whole_loss", loss)


def figures(task: Any, outputs: Tensor, y: Tensor) -> dict[str, float]:
    """Return the metrics of a split, after checking that they are numbers under the names that the task declares."""
    values = task.metrics(outputs, y)
    names = tuple(getattr(task, "names", ()) or (values if isinstance(values, Mapping) else ()))
    if isinstance(values, Mapping) and {*values} == {*names}:
        try:
            return {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError):
            pass
    raise _return_error(task, "metrics", values, f"a number for each of its names, {names or '{name: number}'}")


def _scalar(task: Any, function: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape != () or loss.is_complex():
        raise _return_error(task, function, loss, "a tensor ()")
    return loss


def _return_error(task: Any, function: str, value: Any, needed: str) -> UserError:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    result = shorten(str(value)) if isinstance(value, Mapping) else f"{type(value).__name__}{shape}"
    text = f"task {type(task).__name__}: {function} returned {result}; it must return {needed}"
    return located_error(text, getattr(task, function))
