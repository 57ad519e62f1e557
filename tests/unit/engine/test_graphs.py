"""`compute.graphs: auto` captures only suitable passes, and a capture that fails is handled."""

import pytest
import torch
from torch import nn

from fedmpi.common.errors import RankWarning, UserError
from fedmpi.engine.local import graphs
from fedmpi.models.resnet import resnet18
from fedmpi.tasks.classification import Classification
from fedmpi.tasks.survival import Survival


class UserModule(nn.Linear):
    """A module that is not fedmpi's or torch's."""

    pass


class UserTask(Classification):
    """A task that is not fedmpi's."""

    pass


def module_with_hook():
    """Return a module with a forward hook."""
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


CLASSES = Classification(3)


@pytest.mark.parametrize(
    ("module", "task", "captured"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), CLASSES, True),
        (resnet18((3, 32, 32), 10, "small"), CLASSES, True),
        (nn.Sequential(nn.Linear(2, 2), UserModule(2, 2)), CLASSES, False),
        (nn.Linear(2, 2), UserTask(3), False),
        (nn.Linear(2, 1), Survival(1), False),
        (nn.BatchNorm1d(2, momentum=None), CLASSES, False),
        (module_with_hook(), CLASSES, False),
    ],
)
def test_auto_captures_only_code_that_depends_on_tensors_only(module, task, captured):
    assert graphs.consists_of_known_parts(module, task) == captured


class FailingCapture:
    """A replacement of torch.cuda.graph whose capture fails."""

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
    monkeypatch.setattr(torch.cuda, "graph", FailingCapture)
    made, x = [], torch.zeros(2, 3)

    def make(x, y):
        made.append(len(x))
        return x.sum()

    def run(these):
        these.run("kind", make, [], x, x)

    return run, made


def run_passes_before_capture(these, run):
    """Run the passes that precede a capture."""
    for _ in range(graphs.PASSES_BEFORE_CAPTURE):
        run(these)


def test_auto_runs_passes_without_graphs_if_the_capture_fails(passes):
    (run, made), these = passes, graphs.PassGraphs(strict=False)
    run_passes_before_capture(these, run)
    with pytest.warns(
        RankWarning, match=r"auto: the passes of this model cannot be captured .*operation not permitted"
    ):
        run(these)
    count = len(made)
    run(these)
    assert len(made) == count + 1


def test_true_is_an_error_if_the_capture_fails(passes):
    (run, _), these = passes, graphs.PassGraphs()
    run_passes_before_capture(these, run)
    with pytest.raises(UserError, match=r"set compute\.graphs: false"):
        run(these)
