"""What a task raises or returns is told: its line, what was expected, what came."""

import pytest
import torch
from plugin_play import TaskBase, check_told
from torch.nn import functional


def task_none(classes):
    return None


class TaskNoLoss:
    def __init__(self, classes):
        pass

    def metrics(self, outputs, y):
        return {"hits": 1.0}


class TaskLossNone(TaskBase):
    def loss(self, model, x, y):
        model(x)


class TaskLossRows(TaskBase):
    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y, reduction="none")


class TaskLossItem(TaskBase):
    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y).item()


class TaskLossRowsLater(TaskBase):
    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y, reduction="mean" if torch.is_grad_enabled() else "none")


class TaskRound(TaskBase):
    names = ("round",)


class TaskLossName(TaskBase):
    names = ("loss",)


class TaskSeconds(TaskBase):
    names = ("hits", "wall_s")


class TaskTwice(TaskBase):
    names = ("hits", "hits")


class TaskStd(TaskBase):
    names = ("hits", "hits_std")


class TaskText(TaskBase):
    names = "hits"


class TaskNumberName(TaskBase):
    names = (1,)


class TaskMetricsNone(TaskBase):
    def metrics(self, outputs, y):
        pass


class TaskMetricsGenerator(TaskBase):
    def metrics(self, outputs, y):
        yield "hits", 1.0


class TaskMetricsOther(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": 1.0, "round": 7}


class TaskMetricsMissing(TaskBase):
    def metrics(self, outputs, y):
        return {}


class TaskMetricsVector(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": torch.ones(2)}


class TaskMetricsObject(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": object()}


class TaskMetricsComplex(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": 1j}


class TaskMetricsExit(TaskBase):
    names = ()

    def metrics(self, outputs, y):
        raise SystemExit(0)


# The loss that these give is that of FedAvg's own hook; their own line says nothing about it.
PLACELESS = [task_none, TaskLossNone, TaskLossRows, TaskLossItem]

TOLD = [
    # plug-in, what the message says
    (task_none, "NoneType, which has no function loss"),
    (TaskNoLoss, "TaskNoLoss, which has no function loss"),
    (TaskLossNone, r"hook loss returned NoneType; it must return a tensor \(\)"),
    (TaskLossRows, r"hook loss returned shape \(5,\)"),
    (TaskLossItem, "hook loss returned float"),
    (TaskLossRowsLater, r"evaluation after round 0: task TaskLossRowsLater: loss returned shape \(20,\)"),
    (TaskRound, "a metric is called 'round', which is the name of something else"),
    (TaskLossName, "a metric is called 'loss'"),
    (TaskSeconds, "a metric is called 'wall_s'"),
    (TaskTwice, "a metric is called 'hits'"),
    (TaskStd, "a metric is called 'hits_std'"),
    (TaskText, r"names is the text 'hits'; it must be a tuple of names: \('hits',\)"),
    (TaskNumberName, "a metric is called 1; a name is a text"),
    (TaskMetricsNone, r"metrics returned NoneType; it must return \{name: number\}"),
    (TaskMetricsGenerator, "metrics returned generator"),
    (
        TaskMetricsOther,
        r"metrics returned 'hits', 'round', but names is .*: they must agree in 'round'",
    ),
    (TaskMetricsMissing, "metrics returned nothing, but names is"),
    (TaskMetricsVector, r"returned Tensor of shape \(2,\) for 'hits'; a number is needed"),
    (TaskMetricsObject, "returned object for 'hits'"),
    (TaskMetricsComplex, "returned complex for 'hits'"),
    (TaskMetricsExit, "SystemExit: 0"),
]


@pytest.mark.parametrize(("thing", "message"), TOLD, ids=[case[0].__name__ for case in TOLD])
def test_told(thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    check_told("task", thing, message, PLACELESS)
