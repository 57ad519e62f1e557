"""Which passes `compute.graphs: auto` captures, and what becomes of a capture that fails."""

import pytest
import torch
from torch import nn

from fedmpi.common.errors import RankWarning, UserError
from fedmpi.engine.local import graphs
from fedmpi.models.resnet import resnet18
from fedmpi.tasks.classification import Classification
from fedmpi.tasks.survival import Survival


class Own(nn.Linear):
    pass


class OwnTask(Classification):
    pass


def with_a_hook():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


CLASSES = Classification(3)


@pytest.mark.parametrize(
    ("module", "task", "captured"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), CLASSES, True),
        (resnet18((3, 32, 32), 10, "small"), CLASSES, True),
        (nn.Sequential(nn.Linear(2, 2), Own(2, 2)), CLASSES, False),
        (nn.Linear(2, 2), OwnTask(3), False),
        (nn.Linear(2, 1), Survival(1), False),
        (nn.BatchNorm1d(2, momentum=None), CLASSES, False),
        (with_a_hook(), CLASSES, False),
    ],
)
def test_auto_captures_code_that_depends_on_tensors_alone(module, task, captured):
    assert graphs.consists_of_known_parts(module, task) == captured


class Refusing:
    """In place of torch.cuda.graph: a capture that fails."""

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *args):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def passes(monkeypatch):
    """(function that makes one pass more of the given graphs, how many were made by Python)"""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    made, x = [], torch.zeros(2, 3)

    def make(x, y):
        made.append(len(x))
        return x.sum()

    def run(these):
        these.run("kind", make, [], x, x)

    return run, made


def start(these, run):
    """Make the passes that come before a capture."""
    for _ in range(graphs.PASSES_BEFORE_CAPTURE):
        run(these)


def test_passes_that_cannot_be_captured_are_made_one_by_one(passes):
    (run, made), these = passes, graphs.PassGraphs(strict=False)
    start(these, run)
    with pytest.warns(
        RankWarning, match=r"auto: the passes of this model cannot be captured .*operation not permitted"
    ):
        run(these)
    count = len(made)
    run(these)
    assert len(made) == count + 1


def test_true_refuses_passes_that_cannot_be_captured(passes):
    (run, _), these = passes, graphs.PassGraphs()
    start(these, run)
    with pytest.raises(UserError, match=r"Set compute\.graphs: false"):
        run(these)
