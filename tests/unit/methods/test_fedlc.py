"""FedLC: logits less margins by how often the client has each class."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import play, settings
from naive import FULL, NET, rows_of
from torch.nn.functional import cross_entropy

from fedmpi.methods.fedlc import FedLC

Z = [2.0, 1.0, 0.0]


def loss_and_gradient(rows, y, counts, tau):
    """What the method's loss gives for logits `rows`, and its gradient there, in float64."""
    f = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    task = {"logits": lambda x: f, "task_loss": lambda f, x, y: cross_entropy(f, y)}
    loss = FedLC(tau=tau).loss(SimpleNamespace(label_counts=torch.tensor(counts), **task), None, torch.tensor(y))
    return loss.item(), torch.autograd.grad(loss, f)[0].tolist()


@pytest.mark.parametrize(
    ("y", "loss", "slope"),
    [
        (0, 0.41652585003592574, [-0.34066653121870921, 0.28654514434110656, 0.054121386877602672]),
        (1, 1.2498591833692592, [0.65933346878129073, -0.71345485565889344, 0.054121386877602672]),
        (2, 2.9165258500359257, [0.65933346878129073, 0.28654514434110656, -0.94587861312239729]),
    ],
)
def test_by_hand(y, loss, slope):
    """Counts 16, 81, 1 take 1/2, 1/3, 1 off: (3/2, 2/3, -1), whose log-sum-exp is 1.9165258500359258.

    The slopes are softmax - onehot. By pairs: log(1 + sum over c != y of exp(f_c - f_y + n_y^(-1/4) - n_c^(-1/4))). A
    batch has the mean: the loss of (0, .5, -1) of class 2 is 2.6540041694115288.
    """
    margin = [1 / 2, 1 / 3, 1]
    pairs = math.log1p(sum(math.exp(Z[c] - Z[y] + margin[y] - margin[c]) for c in range(3) if c != y))
    assert pairs == pytest.approx(loss, abs=1e-14)
    value, g = loss_and_gradient([Z], [y], [16, 81, 1], 1.0)
    assert value == pytest.approx(loss, abs=1e-13)
    assert g[0] == pytest.approx(slope, abs=1e-13)
    value, _ = loss_and_gradient([Z, [0, 0.5, -1]], [y, 2], [16, 81, 1], 1.0)
    assert value == pytest.approx((loss + 2.6540041694115288) / 2, abs=1e-13)


@pytest.mark.parametrize(("counts", "tau"), [([16, 81, 1], 0.0), ([0, 0, 5], 0.0), ([7, 7, 7], 3.0)])
def test_where_it_is_cross_entropy(counts, tau):
    """Without margins, and with one margin for all classes, which cancels."""
    for y, plain in enumerate([0.4076059644443803, 1.4076059644443804, 2.4076059644443801]):
        assert loss_and_gradient([Z], [y], counts, tau)[0] == pytest.approx(plain, abs=1e-13)


def test_a_class_that_the_client_lacks():
    """Class 1 has 100 tau taken off and leaves: log(1 + exp(-2 + 1/2 - 1/3)). With one class nothing is learned."""
    loss, ((_, gone, _),) = loss_and_gradient([Z], [0], [16, 0, 81], 1.0)
    assert loss == pytest.approx(0.14831633257178287, abs=1e-13)
    assert gone == pytest.approx(1.9453224729057437e-44, rel=1e-6)
    loss, (slope,) = loss_and_gradient([Z], [0], [5, 0, 0], 1.0)
    assert [loss, *slope] == pytest.approx([0, 0, 0, 0], abs=1e-40)
    # with a small tau it stays: .01 * 100 is no more than 1. (2 - .005, 1 - 1, 0 - .01 / 3) at class 0
    loss, _ = loss_and_gradient([Z], [0], [16, 0, 81], 0.01)
    assert loss == pytest.approx(math.log(math.exp(1.995) + 1 + math.exp(-0.01 / 3)) - 1.995, abs=1e-13)


def calibrated(tau):
    """-log(exp(f_y - m_y) / sum_c exp(f_c - m_c)), m_c = tau n_c^(-1/4), the mean of a batch."""

    def loss(f, y, labels):
        e = [(f[:, c] - tau * ((labels == c).sum().item() or 1e-8) ** -0.25).exp() for c in range(4)]
        return sum((sum(e) / e[c])[i].log() for i, c in enumerate(y.tolist())) / len(y)

    return loss


def test_evaluation_is_without_margins():
    """Figures are of the logits as they are, while the training loss is the calibrated one."""
    it = play(settings("fedlc", "norm", model=NET, options={"tau": 2.0}, rounds=1, train={**FULL, "lr": 0.0}))
    test, module = it.made.data.global_test, it.made.net.module.eval()
    assert it.rows[0]["loss"] == pytest.approx(cross_entropy(module(test.x), test.y).item(), abs=1e-12)
    module.train()
    shards = [rows_of(it, k) for k in it.rows[0]["cohort"]]
    losses = [len(x) * calibrated(2.0)(module(x), y, y).item() for x, y in shards]
    assert it.rows[0]["train_loss"] == pytest.approx(sum(losses) / sum(len(x) for x, _ in shards), abs=1e-12)
