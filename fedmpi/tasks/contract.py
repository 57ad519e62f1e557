"""What is asked of a task, which may be the user's own, and how it is said what is wrong with it."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import RESERVED
from fedmpi.common.user_code_errors import in_user_code, located_error
from fedmpi.tasks.base import Task


def check_task(task: Any) -> None:
    """Check that a user's task, which need not derive from `Task`, has a loss and metrics, and give it the defaults of
    `Task` for all else that it lacks."""
    for needed in ("loss", "metrics"):
        if not callable(getattr(task, needed, None)):
            have = f"task.name stands for {type(task).__name__}, which has no function {needed}"
            raise located_error(f"{have}; a task has loss and metrics (fedmpi.Task)", task)
    for name, default in vars(Task).items():
        if not name.startswith("_") and not hasattr(task, name):
            setattr(task, name, partial(default, task) if callable(default) else default)


def check_targets(name: str, task: Any, y: Tensor, outputs: tuple[int, ...], part: str) -> None:
    """UserError if the targets of a part of the data, (n, ...), are not what the task is for."""
    nan = y.isnan().flatten(1).any(1) if y.ndim > 1 else y.isnan()
    ignores_nan = isinstance(task.ignore, float) and math.isnan(task.ignore)
    if not ignores_nan and bool(nan.any()):
        option = ", or say task.ignore: nan" if "ignore" in inspect.signature(type(task)).parameters else ""
        raise UserError(f"task {name}: {part}: row {int(nan.nonzero()[0])} holds NaN; fill it or leave it out{option}")
    wrong = task.check(y, outputs)
    if wrong:
        raise located_error(f"task {name}: {part}: {wrong}", type(task))


def metric_names(task: Any, outputs: tuple[int, ...], y: Tensor) -> tuple[str, ...]:
    """`task.names`; if a user's task has none, the keys of its metrics for two samples with targets y, (2, ...), and
    zero outputs, (2, *outputs)."""
    said = f"task {type(task).__name__}"
    names: Any = getattr(task, "names", ())
    if isinstance(names, str):
        raise located_error(f"{said}: names is the text {names!r}; it must be a tuple of names: ({names!r},)", task)
    if not names:
        try:
            names = figures(task, hold(task, torch.zeros(2, *outputs), y), y)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            found = f" ({place})" if (place := in_user_code(error)) else ""
            raise UserError(
                f"{said}: its metrics fail on two samples with zero outputs: {type(error).__name__}: {error}; mend "
                f"them, or say what they are called: names = ('accuracy',){found}"
            ) from error
    names = tuple(names)
    if not names:
        raise located_error(f"{said}: metrics gives no figure; at least one is needed", task)
    spread = {f"{name}{end}" for name in names for end in ("_std", "_worst_decile")}  # made of each by the engine
    for i, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise located_error(f"{said}: a metric is called {name!r}; a name is a text", task)
        if name in RESERVED | spread or name in names[:i]:
            raise located_error(
                f"{said}: a metric is called {name!r}, which is the name of something else; choose another", task
            )
    return names


def hold(task: Any, outputs: Tensor, y: Tensor) -> Tensor:
    """What of a batch's outputs is kept until `figures`."""
    held = task.hold(outputs, y)
    if not isinstance(held, Tensor) or held.shape[:1] != y.shape[:1]:
        found = f"shape {tuple(held.shape)}" if isinstance(held, Tensor) else type(held).__name__
        said = f"task {type(task).__name__}: hold returned {found} for {len(y)} samples"
        raise located_error(f"{said}; it must return a tensor ({len(y)}, ...)", task.hold)
    return held


def mean_loss(task: Any, f: Tensor, x: Any, y: Tensor) -> Tensor:
    """The loss () that evaluations report, of outputs f that there are already."""
    return _scalar(task.judged(lambda _: f, x, y), "loss", task)


def whole_loss(task: Any, held: Tensor, y: Tensor) -> Tensor | None:
    """The loss () of a split, of what was held of it; None: the mean over its samples."""
    loss = task.whole_loss(held, y)
    return None if loss is None else _scalar(loss, "whole_loss", task)


def _scalar(loss: Any, name: str, task: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape != () or loss.is_complex():
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        text = f"task {type(task).__name__}: {name} returned {found}; it must return a tensor ()"
        raise located_error(text, getattr(task, name))
    return loss


def figures(task: Any, held: Tensor, y: Tensor) -> dict[str, float]:
    """The task's metrics, checked: numbers under the names that it declares."""
    found = task.metrics(held, y)
    said = f"task {type(task).__name__}: metrics"
    if not isinstance(found, Mapping):
        raise located_error(f"{said} returned {type(found).__name__}; it must return {{name: number}}", task.metrics)
    names = getattr(task, "names", ()) or tuple(found)
    odd = [name for name in found if name not in names] + [name for name in names if name not in found]
    if odd:
        have = f"{said} returned {', '.join(map(repr, found)) or 'nothing'}"
        raise located_error(f"{have}, but names is {tuple(names)}: they must agree in {odd[0]!r}", task.metrics)
    checked = {}
    for name, value in found.items():
        one = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, np.generic)
        plain = value.item() if one else value
        if not isinstance(plain, (int, float)):
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            text = f"{said} returned {type(value).__name__}{shape} for {name!r}; a number is needed"
            raise located_error(text, task.metrics)
        checked[name] = float(plain)
    return checked
