"""Losses and metrics against closed forms and naive loops."""

import math

import pytest
import torch
from sklearn import metrics as sklearn

from fedmpi.common.errors import UserError
from fedmpi.common.text import is_lower_better
from fedmpi.tasks import metrics
from fedmpi.tasks.base import Task
from fedmpi.tasks.classification import Classification, MultiLabel
from fedmpi.tasks.per_position import NextSymbol, Segmentation, cross_entropy
from fedmpi.tasks.regression import Regression
from fedmpi.tasks.survival import Survival, negative_log_likelihood
from fedmpi.tasks.validation import check_targets


@pytest.mark.parametrize(
    ("task", "y", "shape"),
    [
        (Classification(3), torch.tensor([0, 2]), (3,)),
        (Regression(1), torch.zeros(2), (1,)),
        (Regression(3), torch.zeros(2, 3), (3,)),
        (MultiLabel(4), torch.tensor([[0, 1, 1, 0.0]] * 2), (4,)),
        (Survival(1), torch.tensor([[1.0, 3.0], [0.0, 2.0]]), (1,)),
        (NextSymbol(5), torch.tensor([[4, 0, 1], [2, -100, 3]]), (3, 5)),
        (NextSymbol(5), torch.tensor([[4, 0, 1], [2, -100, 3]]), (5, 3)),
        (Segmentation(3), torch.tensor([[[0, 2], [1, 1]]] * 2), (3, 2, 2)),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Task) else "",
)
def test_loss_asks_the_model_once_and_names_are_what_metrics_give(task, y, shape):
    outputs = torch.randn(2, *shape, requires_grad=True)
    assert task.check(y, shape) == ""
    assert tuple(task.metrics(task.hold(outputs.detach(), y), y)) == task.names
    asked = []
    loss = task.loss(lambda x: asked.append(x) or outputs, torch.zeros(2, 5), y)
    assert len(asked) == 1
    assert loss.shape == ()
    assert loss.requires_grad


def test_cross_entropy_by_hand():
    """Logits (0, ln 3): p = (1/4, 3/4), so -ln p is ln 4 for class 0 and ln 4 - ln 3 for class 1; their mean."""
    outputs = torch.tensor([[0.0, math.log(3)]] * 2, dtype=torch.float64)
    loss = Classification(2).loss(lambda x: outputs, torch.zeros(2), torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(math.log(4) - math.log(3) / 2, abs=1e-12)
    with pytest.raises(UserError, match=r"1 class.*task\.name=regression"):
        Classification(1)


@pytest.mark.parametrize(
    ("outputs", "y", "figures"),
    [  # ties go to the lowest class
        ([[1.0, 1, 0], [0, 2, 2], [0, 0, 0], [0, 1, 2]], [0, 1, 0, 2], {"accuracy": 100.0}),
        ([[1.0, 1, 0], [0, 2, 2], [0, 0, 0], [0, 1, 2]], [1, 2, 2, 2], {"accuracy": 25.0}),
        # one class has no ranking, and its recall is the accuracy
        ([[0.0, 1, 0], [2, 1, 0]], [1, 1], {"accuracy": 50.0, "balanced_accuracy": 50.0, "auroc": math.nan}),
        # a model that diverged: as argmax, the lowest classes
        ([[math.nan] * 3] * 4, [0, 1, 2, 2], {"accuracy": 25.0, "top2": 50.0, "auroc": math.nan, "ece": math.nan}),
        ([], [], dict.fromkeys(("accuracy", "balanced_accuracy", "auroc", "f1", "ece", "top2"), math.nan)),
    ],
    ids=["ties", "ties, wrong", "one class", "diverged", "empty"],
)
def test_classification_metrics_by_hand(outputs, y, figures):
    f, y = torch.tensor(outputs).reshape(-1, 3), torch.tensor(y, dtype=torch.int64)
    assert Classification(3, tuple(figures)).metrics(f, y) == pytest.approx(figures, nan_ok=True)


def test_regression_loss_does_not_broadcast():
    """(1, 2) against (3, 2): (4 + 0) / 2; the (2, 2) differences of (2, 1) and (2,) would give (4 + 1 + 1 + 0) / 4."""
    loss = Regression(1).loss(lambda x: torch.tensor([[1.0], [2.0]]), torch.zeros(2), torch.tensor([3.0, 2.0]))
    assert loss.item() == 2.0


def test_r2_closed_forms():
    y = torch.tensor([1.0, 2.0, 3.0, 6.0])  # mean 3, sum of squares about it 4 + 1 + 0 + 9 = 14
    task, undefined = Regression(1), pytest.approx(math.nan, nan_ok=True)
    assert task.metrics(y[:, None], y) == {"mse": 0.0, "r2": 1.0}
    assert task.metrics(torch.full((4, 1), 3.0), y) == {"mse": 3.5, "r2": 0.0}
    figures = task.metrics(torch.tensor([[2.0], [2.0], [3.0], [4.0]]), y)  # squares 1 + 0 + 0 + 4
    assert figures == {"mse": 1.25, "r2": pytest.approx(1 - 5 / 14, abs=1e-12)}
    constant = task.metrics(torch.tensor([[1.0], [3.0]]), torch.full((2,), 2.0))
    assert constant == {"mse": 1.0, "r2": undefined}
    assert task.metrics(torch.zeros(0, 1), torch.zeros(0)) == {"mse": undefined, "r2": undefined}


WHOLE, HALVES = torch.tensor([0, 1, 1]), torch.rand(3)


@pytest.mark.parametrize(
    ("task", "y", "outputs", "words"),
    [
        (Regression(3), WHOLE, (3,), r"int64 \(n,\).*needs a real-valued target.*task\.name=classification"),
        (Regression(3), HALVES, (3,), r"float32 \(n,\), but the model gives \(3,\)"),
        (Classification(3), HALVES, (3,), r"float32 \(n,\); class numbers.*multi_label, regression, survival"),
        (Classification(3), WHOLE[:, None], (3,), r"int64 \(n, 1\); class numbers, int64 \(n,\).*next_symbol"),
        (MultiLabel(2), torch.tensor([[0.0, 1], [1, 2]]), (2,), r"row 1 has 2 for label 1; 0 \(no\) and 1"),
        (Survival(1), HALVES, (1,), r"float32 \(n,\); float32 \(n, 2\) is needed: event"),
        (Survival(1), torch.tensor([[1.0, -5]]), (1,), r"has the time -5; no time is below 0"),
        (Survival(1), torch.tensor([[1.0, 5], [30, 1]]), (1,), r"row 1 has the event 30"),
        (NextSymbol(5), WHOLE, (3, 5), r"int64 \(n,\); the number of the symbol"),
        (NextSymbol(5), torch.zeros(2, 3).long(), (5,), r"gives \(5,\).*\(3, 5\) or \(5, 3\)"),
        (NextSymbol(5), torch.tensor([[0, 5, 1]]), (3, 5), r"row 0 holds the class 5; 0\.\.4 .*-100"),
        (Segmentation(2), torch.zeros(2, 4, 4), (2, 4, 4), r"float32 \(n, 4, 4\)"),
        (Segmentation(2), torch.zeros(2, 4, 4).long(), (2, 4, 3), r"gives \(2, 4, 3\).*\(2, 4, 4\) is needed"),
    ],
)
def test_targets_that_do_not_fit_the_task_are_named(task, y, outputs, words):
    with pytest.raises(UserError, match=f"task mine: training data: .*{words}"):
        check_targets("mine", task, y, outputs, "training data")


# ---- metrics, against scikit-learn's ----
def draw(n=60, c=4, seed=0, absent=(), rows=0):
    """Logits of few values, or few different rows, so that many are equal; and classes, without some of them."""
    g = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, c, generator=g)[torch.randint(rows, (n,), generator=g)] if rows else None
    f = torch.randint(-2, 3, (n, c), generator=g).float() if few is None else few
    there = [k for k in range(c) if k not in absent]
    return f, torch.tensor(there)[torch.randint(len(there), (n,), generator=g)]


@pytest.mark.parametrize(
    ("classes", "absent", "rows"), [(2, (), 0), (2, (), 9), (4, (), 0), (4, (), 9), (4, (2,), 9), (4, (0, 3), 0)]
)
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classification_metrics(classes, absent, rows):
    f, y = draw(c=classes, absent=absent, seed=classes, rows=rows)
    guess, p = f.argmax(1), f.double().softmax(1)
    ranks = [sorted(range(classes), key=lambda k, i=i: (-f[i, k].item(), k)).index(int(y[i])) for i in range(len(y))]
    error = 0.0
    for b in range(15):
        own = (p.max(1).values > b / 15) & (p.max(1).values <= (b + 1) / 15)
        error += abs(float((guess == y)[own].sum()) - p.max(1).values[own].sum().item()) / len(y)
    expected = {
        "accuracy": 100 * sklearn.accuracy_score(y, guess),
        "balanced_accuracy": 100 * sklearn.balanced_accuracy_score(y, guess),
        "f1": sklearn.f1_score(y, guess, average="macro"),
        "ece": error,
        **{f"top{k}": 100 * sum(rank < k for rank in ranks) / len(y) for k in (1, 2, 5)},
    }
    if rows or classes == 2:  # of permuted logits the softmax is equal but for rounding
        areas = [sklearn.roc_auc_score(y == k, p[:, k]) for k in range(classes) if k not in absent]
        expected["auroc"] = sum(areas) / len(areas)
    names = ("accuracy", "balanced_accuracy", "auroc", "f1", "ece", "top1", "top2", "top5")
    figures = Classification(classes, names).metrics(f, y)
    assert tuple(figures) == names
    assert {name: figures[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert [name for name in names if is_lower_better(name, Classification.lower_is_better)] == ["ece"]


def test_unknown_metrics():
    with pytest.raises(UserError, match=r"task\.metrics.*no metric 'acuracy'; did you mean 'accuracy'"):
        Classification(3, ("acuracy",))


def test_calibration_by_hand():
    """Confidences 3/4 (right) and 3/4 (wrong) in one bin, 1/2 (right) in another: |1 - 1.5| / 3 + |1 - .5| / 3."""
    f = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    assert metrics.calibration_error(f, torch.tensor([1, 0, 0])) == pytest.approx(1 / 3, abs=1e-9)


def test_multi_label_metrics():
    f, _ = draw(50, 3, seed=1)
    y = torch.randint(0, 2, (50, 3), generator=torch.Generator().manual_seed(2)).float()
    y[:, 2] = 0  # a label that nobody has
    guess, truth = (f > 0).numpy(), (y > 0).numpy()
    assert MultiLabel(3, ("accuracy", "exact", "f1", "auroc")).metrics(f, y) == pytest.approx(
        {
            "accuracy": 100 * (guess == truth).mean(),
            "exact": 100 * sklearn.accuracy_score(truth, guess),
            "f1": sklearn.f1_score(truth, guess, average="macro"),
            "auroc": sklearn.roc_auc_score(truth[:, :2], f[:, :2]),
        }
    )
    loss = MultiLabel(3).loss(lambda x: torch.zeros(50, 3), None, y)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert all(map(math.isnan, MultiLabel(3, ("f1", "exact", "auroc")).metrics(f[:0], y[:0]).values()))


# ---- survival ----
def naive_cox(f, y):
    total = 0.0
    for i, (event, time) in enumerate(y.tolist()):
        at_risk = [f[j].item() for j in range(len(y)) if y[j, 1].item() >= time]
        total += event * (math.log(sum(map(math.exp, at_risk))) - f[i].item())
    return total / len(y)


def naive_concordance(risk, event, time):
    """Of all pairs in which a's event comes first, the share in which a has the higher risk, ties counting one half."""
    rows = list(zip(risk.tolist(), event.tolist(), time.tolist(), strict=True))
    pairs = [(a, b) for a in rows for b in rows if a[1] and (a[2] < b[2] or (a[2] == b[2] and not b[1]))]
    return sum((a[0] > b[0]) + 0.5 * (a[0] == b[0]) for a, b in pairs) / len(pairs)


def survivors(n=40, seed=0, values=12):
    g = torch.Generator().manual_seed(seed)
    y = torch.stack([torch.randint(0, 2, (n,), generator=g), torch.randint(1, values, (n,), generator=g)], 1).float()
    return torch.randint(-4, 5, (n, 1), generator=g) / 2, y


@pytest.mark.parametrize("values", [3, 12, 100_000])  # nearly all times equal, many, none
def test_cox_loss_and_c_index(values):
    f, y = survivors(values=values)
    task = Survival(1)
    assert task.loss(lambda x: f, None, y).item() == pytest.approx(naive_cox(f[:, 0], y), abs=1e-5)
    assert task.whole_loss(f, y).item() == pytest.approx(naive_cox(f[:, 0], y), abs=1e-12)
    expected = naive_concordance(f[:, 0], y[:, 0], y[:, 1])
    assert task.metrics(f, y)["c_index"] == pytest.approx(expected, abs=1e-12)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert task.whole_loss(f[order], y[order]).item() == pytest.approx(task.whole_loss(f, y).item(), abs=1e-12)


# ---- a class at each place ----
def test_next_symbol_by_hand():
    """Probabilities (1/4, 3/4) at each place; targets 1, 0 | 1, none: -ln of 3/4, 1/4, 3/4; accuracy 2/3."""
    f = torch.tensor([0.0, math.log(3)]).expand(2, 2, 2)  # (B, L, V)
    y = torch.tensor([[1, 0], [1, -100]])
    expected = (3 * math.log(4) - 2 * math.log(3)) / 3
    task = NextSymbol(2)
    assert task.loss(lambda x: f, None, y).item() == pytest.approx(expected, abs=1e-6)
    held = task.hold(f, y)
    assert held.shape == (2, 2, 2)
    assert task.whole_loss(held, y).item() == pytest.approx(expected, abs=1e-6)
    figures = task.metrics(held, y)
    assert figures["accuracy"] == pytest.approx(200 / 3)
    assert figures["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 5, 6)])
def test_cross_entropy_row_by_row_is_the_same(shape):
    """The form for GPUs, with its gradient, against that for CPUs."""
    f = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 4, (shape[0], *shape[2:]))
    y[0, 0] = -100
    losses = [cross_entropy(f, y, row_by_row=on) for on in (False, True)]
    torch.testing.assert_close(*losses)
    assert not losses[0][0, 0].any()
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), f)[0] for each in losses))


def test_segmentation_metrics():
    g = torch.Generator().manual_seed(0)
    f, y = torch.randn(3, 4, 5, 6, generator=g), torch.randint(0, 3, (3, 5, 6), generator=g)  # class 3 is never there
    task = Segmentation(4)
    figures = task.metrics(task.hold(f, y), y)
    labels = {"labels": [1, 2, 3], "average": "macro"}
    guess, truth = f.argmax(1).flatten(), y.flatten()
    assert figures["dice"] == pytest.approx(sklearn.f1_score(truth, guess, **labels), abs=1e-12)
    assert figures["iou"] == pytest.approx(sklearn.jaccard_score(truth, guess, **labels), abs=1e-12)
    same = torch.nn.functional.one_hot(y, 4).permute(0, 3, 1, 2).float()
    assert task.metrics(task.hold(same, y), y) == {"dice": 1.0, "iou": 1.0}
    empty = torch.zeros(2, 5, 6).long()  # background alone, and nothing else is given
    assert all(map(math.isnan, task.metrics(empty, empty).values()))


def test_cox_gradient():
    """By finite differences. The one who outlives all has none: what rounding leaves of 0 would be a step of Adam's."""
    f, y = survivors(12, values=4)
    f = f[:, 0].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: negative_log_likelihood(f, y.double()), f)
    alone = torch.tensor([[1.0, 9.0], [0.0, 2.0], [0.0, 3.0]])
    nobody = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])  # has an event
    for y, scale in ((alone, 1.0), (alone, 30.0), (nobody, 1.0)):
        f = (scale * torch.tensor([0.1234, -0.77, 0.31])).requires_grad_()
        loss = Survival(1).loss(lambda x, f=f: f, None, y)
        loss.backward()
        assert f.grad.abs().max() < 1e-12
    assert loss.item() == 0
    assert math.isnan(Survival(1).metrics(f.detach()[:, None], nobody)["c_index"])
