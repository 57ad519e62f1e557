"""Tensors that are not part of any message must not change: results would depend on the assignment of clients."""

import pytest
import torch
from helpers import run_experiment, settings
from test_transport import run_on_ranks
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.engine import hook_checks


def assert_rejected(config, size):
    """Check that the run ends with an error; ranks are threads."""
    with pytest.MonkeyPatch.context() as patch:
        if size > 1:
            patch.setattr(hook_checks, "make_located_error", lambda text, *_: UserError(text))
        run_on_ranks(config, size)


class LeakyModel(nn.Module):
    """(1, 8, 8) -> linear layer; `how` names the tensor to which a pass writes."""

    def __init__(self, classes, how, evaluating):
        super().__init__()
        self.how, self.evaluating = how, evaluating
        self.f = nn.Linear(64, classes)
        self.target = nn.Linear(64, classes).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(64), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("kept", torch.zeros(64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(64.0), persistent=False)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x):
        x = x.flatten(1)
        if self.training != self.evaluating:
            with torch.no_grad():
                getattr(self, self.how)(x.detach().mean(0))
        return self.f(x - self.mean - self.kept) + self.target(x)

    def buffer(self, m):
        self.mean.mul_(0.9).add_(0.1 * m)

    def buffer_anew(self, m):
        self.mean = 0.9 * self.mean + 0.1 * m

    def integer(self, m):
        self.seen += 1

    def frozen(self, m):
        for a, b in zip(self.target.parameters(), self.f.parameters(), strict=True):
            a.mul_(0.9).add_(b, alpha=0.1)

    def frozen_data(self, m):
        self.target.weight.data = 0.9 * self.target.weight.data + 0.1 * self.f.weight.data

    def buffer_data(self, m):
        self.mean.data.add_(m)

    def frozen_anew(self, m):
        self.target.weight = nn.Parameter(0.9 * self.target.weight + 0.1 * self.f.weight, requires_grad=False)

    def travelling_anew(self, m):
        self.kept = 0.9 * self.kept + 0.1 * m

    def counter_anew(self, m):
        self.count = self.count + 1

    def caches(self, m):
        """Write to tensors that do not leak: they keep their values, are sent, or are created by the first pass."""
        self.table = torch.arange(64.0)
        self.seen.zero_()
        self.target.bias.copy_(self.target.bias.clone())
        self.kept.mul_(0.9).add_(0.1 * m)
        self.count += 1
        self.mask = torch.ones(64)


def leaky(input_shape, classes, how: str = "caches", evaluating: bool = False):
    return LeakyModel(classes, how, evaluating)


def config(how, *, evaluating=False, **changes):
    model = {"name": f"{__name__}:leaky", "how": how, "evaluating": evaluating}
    return settings(rounds=2, model=model, **changes)


LEAKS = {
    "buffer": "mean",
    "buffer_anew": "mean",
    "integer": "seen",
    "frozen": "target.weight",
    "frozen_anew": "target.weight",
    "frozen_data": "target.weight",
    "buffer_data": "mean",
    "travelling_anew": "kept",
    "counter_anew": "count",
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("how", "name"), LEAKS.items())
def test_tensors_that_leak_between_clients_are_rejected(how, name, size):
    said = rf"round 0, client \d: '{name}' of model LeakyModel has changed since .*persistent=False"
    with pytest.raises(UserError, match=said):
        assert_rejected(config(how), size)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("protocol", ["global", "personal"])
def test_writes_during_evaluation_are_rejected(protocol, size):
    """Otherwise rank 0, which trains no clients, would compute other metrics than a rank that trains."""
    with pytest.raises(UserError, match=r"evaluation after round 0.*: 'mean' of model"):
        assert_rejected(config("buffer", evaluating=True, evaluate={"protocol": [protocol]}), size)


def test_writes_that_do_not_change_values_are_accepted():
    run_on_ranks(config("caches"), 1)
    expected = run_experiment(config("caches")).hashes
    assert run_on_ranks(config("caches"), 3)[0].hashes == expected
    run_on_ranks(config("caches", evaluating=True), 3)
