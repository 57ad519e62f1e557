"""What a hook asks for wrongly, or raises, is told: its line, what was expected, what came."""

from dataclasses import dataclass

import pytest
from plugin_play import check_told

import fedmpi
from fedmpi.method import SCALAR, Row, Slots, State


@dataclass(frozen=True)
class MethodFitText(fedmpi.Method):
    def train(self, k):
        k.fit(groups="hea")
        return State()


@dataclass(frozen=True)
class MethodFitGroup(fedmpi.Method):
    def train(self, k):
        k.fit(groups=("haed",))
        return State()


@dataclass(frozen=True)
class MethodFitEpochs(fedmpi.Method):
    def train(self, k):
        k.fit(epochs=-1)
        return State()


@dataclass(frozen=True)
class MethodFitStart(fedmpi.Method):
    def train(self, k):
        k.fit(start=k.w[:1])
        return State()


@dataclass(frozen=True)
class MethodGradAt(fedmpi.Method):
    def step(self, k, x, y):
        return k.grad(x, y, at=k.w[:1])


@dataclass(frozen=True)
class MethodLift(fedmpi.Method):
    def weights(self, k):
        return k.lift("head", k.w[:1], into=k.received)


@dataclass(frozen=True)
class MethodTake(fedmpi.Method):
    def weights(self, k):
        return k.take("haed", k.received)


@dataclass(frozen=True)
class MethodKeepsItself(fedmpi.Method):
    def upload(self, k):
        self.last = k.w
        return Row(), State()


@dataclass(frozen=True)
class MethodStops(fedmpi.Method):
    def loss(self, k, x, y):
        raise StopIteration


@dataclass(frozen=True)
class MethodOutOfMemory(fedmpi.Method):
    def aggregate(self, s, up):
        raise MemoryError


@dataclass(frozen=True)
class MethodState(fedmpi.Method):
    client_state = Slots(c=SCALAR)

    def upload(self, k):
        return Row(), State(c=k.state.d)


TOLD = [
    # plug-in, what the message says
    (MethodFitText, "k.fit, groups: 'hea' is text"),
    (MethodFitGroup, "there is no layout group 'haed'; this model has body, head"),
    (MethodFitEpochs, "k.fit: epochs is -1; a number >= 0"),
    (MethodFitStart, r"ValueError: weights of shape \(1,\) for a model of \(26,\)"),
    (MethodGradAt, r"ValueError: weights of shape \(1,\) for a model of \(26,\)"),
    (MethodLift, r"ValueError: a tensor of shape \(1,\) where \d+ entries are needed"),
    (MethodTake, "there is no layout group 'haed'"),
    (MethodKeepsItself, "FrozenInstanceError"),
    (MethodStops, "round 0, client 0: MethodStops.loss at .*StopIteration"),
    (MethodOutOfMemory, "round 0: MethodOutOfMemory.aggregate at .*MemoryError"),
    (MethodState, r"no state 'd' is declared here \(declared: c\)"),
]


@pytest.mark.parametrize(("thing", "message"), TOLD, ids=[case[0].__name__ for case in TOLD])
def test_told(thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    check_told("method", thing, message)
