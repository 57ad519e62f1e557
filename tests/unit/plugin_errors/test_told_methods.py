"""What a hook returns or writes to is told: its line, what was expected, what came."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plugin_play import check_told, play, sections_of

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.method import FLAT, SCALAR, SHARED, Row, Slots, State, Travel


@dataclass(frozen=True)
class MethodWritesW(fedmpi.Method):
    def upload(self, k):
        k.w.zero_()
        return Row(), State()


@dataclass(frozen=True)
class MethodWritesWInGradient(fedmpi.Method):
    def gradient(self, k, g):
        k.w.mul_(0.9)
        return g


@dataclass(frozen=True)
class MethodWritesB(fedmpi.Method):
    def receive(self, k):
        k.w[0] = 1
        return k.received


@dataclass(frozen=True)
class MethodWritesCounts(fedmpi.Method):
    def loss(self, k, x, y):
        k.label_counts.add_(1)
        return k.task_loss(k.logits(x), x, y)


@dataclass(frozen=True)
class MethodWritesX(fedmpi.Method):
    def loss(self, k, x, y):
        return k.task_loss(k.logits(x.mul_(2)), x, y)


@dataclass(frozen=True)
class MethodWritesWeights(fedmpi.Method):
    def weights(self, k):
        return k.received.mul_(2)


@dataclass(frozen=True)
class MethodWritesP(fedmpi.Method):
    def aggregate(self, s, up):
        up.p.fill_(1)
        return up.mean("dw"), State()


@dataclass(frozen=True)
class MethodDetached(fedmpi.Method):
    def loss(self, k, x, y):
        return k.task_loss(k.logits(x).detach(), x, y)


@dataclass(frozen=True)
class MethodDetachedInFit(fedmpi.Method):
    def train(self, k):
        k.fit(loss=lambda k, x, y: k.logits(x).sum().detach())
        return State()


@dataclass(frozen=True)
class MethodInteger(fedmpi.Method):
    def gradient(self, k, g):
        return torch.ones_like(g, dtype=torch.int64)


@dataclass(frozen=True)
class MethodNumpy(fedmpi.Method):
    def gradient(self, k, g):
        return g.numpy()


@dataclass(frozen=True)
class MethodSparse(fedmpi.Method):
    def step(self, k, x, y):
        return k.grad(x, y).to_sparse()


@dataclass(frozen=True)
class MethodComplex(fedmpi.Method):
    def weights(self, k):
        return k.received + 0j


@dataclass(frozen=True)
class MethodMeta(fedmpi.Method):
    def receive(self, k):
        return k.received.to("meta")


@dataclass(frozen=True)
class MethodSlotNumpy(fedmpi.Method):
    sends = Slots(dw=SHARED, c=SCALAR)

    def upload(self, k):
        return Row(c=np.ones(())), State()


@dataclass(frozen=True)
class MethodSlotComplex(fedmpi.Method):
    sends = Slots(dw=SHARED, c=FLAT)

    def upload(self, k):
        return Row(c=k.w + 0j), State()


@dataclass(frozen=True)
class MethodSlotOverflow(fedmpi.Method):
    client_state = Slots(c=FLAT)

    def upload(self, k):
        return Row(), State(c=k.w.double() + 1e300)


@dataclass(frozen=True)
class MethodServerOverflow(fedmpi.Method):
    def aggregate(self, s, up):
        return up.mean("dw").double() * 1e300, State()


@dataclass(frozen=True)
class MethodDownloadNan(fedmpi.Method):
    per_client_download = Slots(c=SCALAR)

    def download(self, s, client):
        return Row(c=torch.tensor(torch.nan))


@dataclass(frozen=True)
class MethodPredict(fedmpi.Method):
    def predict(self, k):
        return k.w


@dataclass(frozen=True)
class MethodPredictNarrow(fedmpi.Method):
    def predict(self, k):
        return lambda x: k.logits(x)[:, :1]


@dataclass(frozen=True)
class MethodTravels(fedmpi.Method):
    def travels(self, t, rounds):
        return ("head",)


@dataclass(frozen=True)
class MethodTravelsText(fedmpi.Method):
    def travels(self, t, rounds):
        return Travel(groups="head")


@dataclass(frozen=True)
class MethodPrepare(fedmpi.Method):
    def prepare(self, module, classes):
        module.head = None


TOLD = [
    # plug-in, what the message says
    (MethodWritesW, "client 0: a hook of method MethodWritesW wrote to k.w, which.* It was upload"),
    (MethodWritesWInGradient, "wrote to k.w, which.* It was gradient"),
    (MethodWritesB, "wrote to k.w, which.* It was receive"),
    (MethodWritesCounts, "wrote to k.label_counts, which.* It was loss"),
    (MethodWritesX, "wrote to its batch, x or y"),
    (MethodWritesWeights, r"wrote to k.w0 \(k.received\) or k.down, which.* It was weights"),
    (MethodWritesP, "round 0: a hook of method MethodWritesP wrote to up.p, which.* It was aggregate"),
    (
        MethodDetached,
        "round 0, client 0: method MethodDetached, hook loss returned a loss that",
    ),
    (MethodDetachedInFit, "hook loss returned a loss that depends on no weight"),
    (MethodInteger, "hook gradient returned a tensor of torch.int64"),
    (MethodNumpy, "hook gradient returned ndarray"),
    (MethodSparse, "hook step returned a sparse_coo tensor"),
    (MethodComplex, "hook weights returned a tensor of torch.complex64"),
    (MethodMeta, "hook receive returned a tensor on meta"),
    (MethodSlotNumpy, r"hook upload: slot 'c' is \(\), but it returned ndarray"),
    (MethodSlotComplex, r"slot 'c' is \(26,\), but it returned a tensor of torch.complex64"),
    (MethodSlotOverflow, r"not finite \(nan or inf\) in torch.float32: slot 'c' is"),
    (MethodDownloadNan, r"hook download gave values that are not finite .*slot 'c'"),
    (MethodPredict, "hook predict returned Tensor; it must return None or a function"),
    (
        MethodPredictNarrow,
        r"the function that hook predict gave returned torch.float32 \(\d+, 1\) for \d+",
    ),
    (MethodTravels, r"hook travels, round 0 returned tuple; it must return Travel\(...\)"),
    (MethodPrepare, "hook prepare must return a torch.nn.Module.*it returned NoneType"),
]


@pytest.mark.parametrize(("thing", "message"), TOLD, ids=[case[0].__name__ for case in TOLD])
def test_told(thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    check_told("method", thing, message)


def test_values_that_nobody_made_are_told():
    with pytest.raises(UserError, match=r"round 0: the server's direction, .* values that are not finite"):
        play(**sections_of("method", MethodServerOverflow))


def test_a_text_for_a_tuple_of_groups_is_told():
    with pytest.raises(UserError, match="hook travels, round 0: 'head' is text"):
        play(**sections_of("method", MethodTravelsText))
