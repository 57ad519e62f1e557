"""Checks of a task, which may be a user's own: its members, its targets, and the results of its functions."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import RESERVED_NAMES
from fedmpi.common.text import shorten
from fedmpi.common.user_code_errors import add_error_context, make_located_error
from fedmpi.tasks.base import Task

RENAMED_MEMBERS = {
    "falling": "lower_is_better",
    "hold": "reduce_outputs",
    "judged": "eval_loss",
    "weigh": "set_class_counts",
    "whole_loss": "split_loss",
}


def check_task(task: Any) -> None:
    """Check that a task has the functions `loss` and `metrics`, and add defaults for all other members of `Task`.

    A user's task need not derive from `Task`.
    """
    for needed in ("loss", "metrics"):
        if not callable(getattr(task, needed, None)):
            problem = f"task.name: {type(task).__name__} has no function `{needed}`"
            raise make_located_error(f"{problem}; a task needs `loss` and `metrics` (see fedmpi.Task)", task)
    for old, new in RENAMED_MEMBERS.items():  # without this error they would be ignored silently
        if hasattr(task, old):
            raise make_located_error(f"task.name: {type(task).__name__}: {old} was renamed to {new}", task)
    for name, default in vars(Task).items():
        if not name.startswith("_") and not hasattr(task, name):
            setattr(task, name, partial(default, task) if callable(default) else default)


def check_targets(name: str, task: Any, y: Tensor, outputs: tuple[int, ...], part: str) -> None:
    """Raise UserError if the task cannot use the targets of a part of the data.

    Args:
        name: the name of the task in the config.
        y: the targets, (n, ...).
        outputs: the shape of the model's outputs for one sample.
        part: the name of the part for messages, such as `test data`.
    """
    nan = y.isnan().flatten(1).any(1) if y.ndim > 1 else y.isnan()
    ignores_nan = isinstance(task.ignore, float) and math.isnan(task.ignore)
    if not ignores_nan and bool(nan.any()):
        option = ", or set task.ignore: nan" if "ignore" in inspect.signature(type(task)).parameters else ""
        problem = f"task {name}: {part}: the target in row {int(nan.nonzero()[0])} is NaN"
        raise UserError(f"{problem}; fill it in or drop the row{option}")
    problem = task.check(y, outputs)
    if problem:
        raise make_located_error(f"task {name}: {part}: {problem}", type(task))


def metric_names(task: Any, outputs: tuple[int, ...], y: Tensor) -> tuple[str, ...]:
    """Return the names of the task's metrics, the main metric first.

    If a task does not define `names`, the names are the keys of what its `metrics` returns for two outputs of zeros.

    Args:
        outputs: the shape of the model's outputs for one sample.
        y: targets of two samples, (2, ...).
    """
    names: Any = getattr(task, "names", ())
    if not names:
        what = f"task {type(task).__name__}: its metrics for two outputs of zeros (it does not define `names`)"
        with add_error_context(what):
            names = compute_metrics(task, reduce_outputs(task, torch.zeros(2, *outputs), y), y)
    names = (names,) if isinstance(names, str) else tuple(names)
    reserved = RESERVED_NAMES | {
        f"{name}{end}" for name in names for end in ("_std", "_worst_decile")
    }  # columns of the engine
    invalid = [name for name in names if not isinstance(name, str) or name in reserved or names.count(name) > 1]
    if invalid or not names:
        problem = f"{invalid[0]!r} cannot be the name of a metric" if invalid else "it has no metrics"
        needed = (
            "at least one name is needed; names must be distinct strings that are not columns of metrics.jsonl already"
        )
        raise make_located_error(f"task {type(task).__name__}: {problem}; {needed}", task)
    return names


def reduce_outputs(task: Any, outputs: Tensor, y: Tensor) -> Tensor:
    """Call the task's `reduce_outputs`; raise UserError unless it returns a tensor with one row per target."""
    reduced = task.reduce_outputs(outputs, y)
    if not isinstance(reduced, Tensor) or reduced.shape[:1] != y.shape[:1]:
        raise _return_error(task, "reduce_outputs", reduced, f"a tensor of shape ({len(y)}, ...)")
    return reduced


def eval_loss(task: Any, f: Tensor, x: Any, y: Tensor) -> Tensor:
    """Return the loss that evaluations report, given outputs f; raise UserError if it is not a scalar.

    Args:
        f: the outputs of the model, (B, ...).
        x: the samples, (B, ...).
        y: the targets, (B, ...).
    """
    return _check_scalar(task, "loss", task.eval_loss(lambda _: f, x, y))


def split_loss(task: Any, outputs: Tensor, y: Tensor) -> Tensor | None:
    """Return the loss of a data split, a scalar, given its reduced outputs and targets.

    None stands for the mean of the batch losses.
    """
    loss = task.split_loss(outputs, y)
    return None if loss is None else _check_scalar(task, "split_loss", loss)


def compute_metrics(task: Any, outputs: Tensor, y: Tensor) -> dict[str, float]:
    """Return the metrics of a data split; raise UserError unless they are numbers, one for each of the task's names."""
    values = task.metrics(outputs, y)
    names = tuple(getattr(task, "names", ()) or (values if isinstance(values, Mapping) else ()))
    if isinstance(values, Mapping) and {*values} == {*names}:
        try:
            return {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError):
            pass
    raise _return_error(
        task, "metrics", values, f"a dictionary with one number for each name, {names or '{name: number}'}"
    )


def _check_scalar(task: Any, function: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape != () or loss.is_complex():
        raise _return_error(task, function, loss, "a scalar tensor, of shape ()")
    return loss


def _return_error(task: Any, function: str, value: Any, needed: str) -> UserError:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    result = shorten(str(value)) if isinstance(value, Mapping) else f"{type(value).__name__}{shape}"
    text = f"task {type(task).__name__}: {function} returned {result}; it must return {needed}"
    return make_located_error(text, getattr(task, function))
