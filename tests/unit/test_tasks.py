"""Losses and metrics of tasks equal closed forms, naive loops and scikit-learn."""

import math

import pytest
import torch
from sklearn import metrics as sklearn

from fedmpi.common.errors import UserError
from fedmpi.common.text import is_lower_better
from fedmpi.tasks import metrics
from fedmpi.tasks.base import Task
from fedmpi.tasks.classification import Classification, MultiLabel
from fedmpi.tasks.per_position import NextSymbol, Segmentation, cross_entropy_per_position
from fedmpi.tasks.regression import Regression
from fedmpi.tasks.survival import Survival, cox_loss
from fedmpi.tasks.validation import RENAMED_MEMBERS, check_targets, check_task


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
def test_loss_calls_the_model_once_and_metrics_have_the_declared_names(task, y, shape):
    outputs = torch.randn(2, *shape, requires_grad=True)
    assert task.check(y, shape) == ""
    assert tuple(task.metrics(task.reduce_outputs(outputs.detach(), y), y)) == task.names
    calls = []
    loss = task.loss(lambda x: calls.append(x) or outputs, torch.zeros(2, 5), y)
    assert len(calls) == 1
    assert loss.shape == ()
    assert loss.requires_grad


def test_cross_entropy_by_hand():
    """For logits (0, ln 3) p = (1/4, 3/4), so -ln p is ln 4 for class 0 and ln 4 - ln 3 for class 1."""
    outputs = torch.tensor([[0.0, math.log(3)]] * 2, dtype=torch.float64)
    loss = Classification(2).loss(lambda x: outputs, torch.zeros(2), torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(math.log(4) - math.log(3) / 2, abs=1e-12)
    with pytest.raises(UserError, match=r"1 class.*task\.name: regression"):
        Classification(1)


@pytest.mark.parametrize(
    ("outputs", "y", "expected"),
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
def test_classification_metrics_by_hand(outputs, y, expected):
    f, y = torch.tensor(outputs).reshape(-1, 3), torch.tensor(y, dtype=torch.int64)
    assert Classification(3, tuple(expected)).metrics(f, y) == pytest.approx(expected, nan_ok=True)


def test_regression_loss_does_not_broadcast():
    """Outputs (1, 2) and targets (3, 2) give (4 + 0) / 2; broadcast to (2, 2) they would give (4 + 1 + 1 + 0) / 4."""
    loss = Regression(1).loss(lambda x: torch.tensor([[1.0], [2.0]]), torch.zeros(2), torch.tensor([3.0, 2.0]))
    assert loss.item() == 2.0


def test_r2_equals_closed_forms():
    y = torch.tensor([1.0, 2.0, 3.0, 6.0])  # mean 3, sum of squares about it 4 + 1 + 0 + 9 = 14
    task, undefined = Regression(1), pytest.approx(math.nan, nan_ok=True)
    assert task.metrics(y[:, None], y) == {"mse": 0.0, "r2": 1.0}
    assert task.metrics(torch.full((4, 1), 3.0), y) == {"mse": 3.5, "r2": 0.0}
    values = task.metrics(torch.tensor([[2.0], [2.0], [3.0], [4.0]]), y)  # squares 1 + 0 + 0 + 4
    assert values == {"mse": 1.25, "r2": pytest.approx(1 - 5 / 14, abs=1e-12)}
    constant = task.metrics(torch.tensor([[1.0], [3.0]]), torch.full((2,), 2.0))
    assert constant == {"mse": 1.0, "r2": undefined}
    assert task.metrics(torch.zeros(0, 1), torch.zeros(0)) == {"mse": undefined, "r2": undefined}


CLASS_NUMBERS, REAL_NUMBERS = torch.tensor([0, 1, 1]), torch.rand(3)


@pytest.mark.parametrize(
    ("task", "y", "outputs", "message"),
    [
        (
            Regression(3),
            CLASS_NUMBERS,
            (3,),
            r"int64 of shape \(n,\), but must be real numbers.*task\.name: classification",
        ),
        (Regression(3), REAL_NUMBERS, (3,), r"float32 of shape \(n,\), but the model returns outputs \(3,\)"),
        (
            Classification(3),
            REAL_NUMBERS,
            (3,),
            r"float32 of shape \(n,\), .* class numbers.*multi_label, regression, survival",
        ),
        (
            Classification(3),
            CLASS_NUMBERS[:, None],
            (3,),
            r"int64 of shape \(n, 1\), .* class numbers: int64 of shape \(n,\).*next_symbol",
        ),
        (MultiLabel(2), torch.tensor([[0.0, 1], [1, 2]]), (2,), r"label 1 in row 1 is 2; only 0 \(no\) and 1"),
        (
            Survival(1),
            REAL_NUMBERS,
            (1,),
            r"float32 of shape \(n,\); must be float32 of shape \(n, 2\) with the columns event",
        ),
        (Survival(1), torch.tensor([[1.0, -5]]), (1,), r"the time in row 0 is -5; must be at least 0"),
        (Survival(1), torch.tensor([[1.0, 5], [30, 1]]), (1,), r"the event in row 1 is 30; must be 1 \(observed\)"),
        (NextSymbol(5), CLASS_NUMBERS, (3, 5), r"int64 of shape \(n,\), but must be one symbol index per position"),
        (NextSymbol(5), torch.zeros(2, 3).long(), (5,), r"returns outputs \(5,\).*\(3, 5\) or \(5, 3\)"),
        (NextSymbol(5), torch.tensor([[0, 5, 1]]), (3, 5), r"row 0 contains the class 5; only 0\.\.4 .*-100"),
        (Segmentation(2), torch.zeros(2, 4, 4), (2, 4, 4), r"float32 of shape \(n, 4, 4\)"),
        (
            Segmentation(2),
            torch.zeros(2, 4, 4).long(),
            (2, 4, 3),
            r"outputs \(2, 4, 3\).*must return \(2, 4, 4\)",
        ),
    ],
)
def test_targets_that_do_not_fit_the_task_are_named(task, y, outputs, message):
    with pytest.raises(UserError, match=f"task mine: training data: .*{message}"):
        check_targets("mine", task, y, outputs, "training data")


# ---- metrics, against scikit-learn's ----
def draw(n=60, c=4, seed=0, absent=(), rows=0):
    """Return logits with many ties (few values, or `rows` distinct rows) and classes, none of which is in `absent`."""
    g = torch.Generator().manual_seed(seed)
    distinct = torch.randn(rows, c, generator=g)[torch.randint(rows, (n,), generator=g)] if rows else None
    f = torch.randint(-2, 3, (n, c), generator=g).float() if distinct is None else distinct
    present = [k for k in range(c) if k not in absent]
    return f, torch.tensor(present)[torch.randint(len(present), (n,), generator=g)]


@pytest.mark.parametrize(
    ("classes", "absent", "rows"), [(2, (), 0), (2, (), 9), (4, (), 0), (4, (), 9), (4, (2,), 9), (4, (0, 3), 0)]
)
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classification_metrics_equal_scikit_learn(classes, absent, rows):
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
    if rows or classes == 2:  # otherwise rounding of the softmax breaks ties between permuted logits
        areas = [sklearn.roc_auc_score(y == k, p[:, k]) for k in range(classes) if k not in absent]
        expected["auroc"] = sum(areas) / len(areas)
    names = ("accuracy", "balanced_accuracy", "auroc", "f1", "ece", "top1", "top2", "top5")
    values = Classification(classes, names).metrics(f, y)
    assert tuple(values) == names
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert [name for name in names if is_lower_better(name, Classification.lower_is_better)] == ["ece"]


def test_unknown_metrics_are_errors():
    with pytest.raises(UserError, match=r"task\.metrics.*no metric 'acuracy'; did you mean 'accuracy'"):
        Classification(3, ("acuracy",))


def test_calibration_error_by_hand():
    """One bin has confidences 3/4 (right) and 3/4 (wrong), one has 1/2 (right): |1 - 1.5| / 3 + |1 - .5| / 3."""
    f = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    assert metrics.calibration_error(f, torch.tensor([1, 0, 0])) == pytest.approx(1 / 3, abs=1e-9)


def test_multi_label_metrics_equal_scikit_learn():
    f, _ = draw(50, 3, seed=1)
    y = torch.randint(0, 2, (50, 3), generator=torch.Generator().manual_seed(2)).float()
    y[:, 2] = 0  # a label that no sample has
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
    """Return the fraction of pairs, in which a has its event first, in which a has the higher risk; ties count half."""
    rows = list(zip(risk.tolist(), event.tolist(), time.tolist(), strict=True))
    pairs = [(a, b) for a in rows for b in rows if a[1] and (a[2] < b[2] or (a[2] == b[2] and not b[1]))]
    return sum((a[0] > b[0]) + 0.5 * (a[0] == b[0]) for a, b in pairs) / len(pairs)


def survivors(n=40, seed=0, values=12):
    g = torch.Generator().manual_seed(seed)
    y = torch.stack([torch.randint(0, 2, (n,), generator=g), torch.randint(1, values, (n,), generator=g)], 1).float()
    return torch.randint(-4, 5, (n, 1), generator=g) / 2, y


@pytest.mark.parametrize("values", [3, 12, 100_000])  # most times are equal, some are, none are
def test_cox_loss_and_c_index_equal_naive_loops(values):
    f, y = survivors(values=values)
    task = Survival(1)
    assert task.loss(lambda x: f, None, y).item() == pytest.approx(naive_cox(f[:, 0], y), abs=1e-5)
    assert task.split_loss(f, y).item() == pytest.approx(naive_cox(f[:, 0], y), abs=1e-12)
    expected = naive_concordance(f[:, 0], y[:, 0], y[:, 1])
    assert task.metrics(f, y)["c_index"] == pytest.approx(expected, abs=1e-12)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert task.split_loss(f[order], y[order]).item() == pytest.approx(task.split_loss(f, y).item(), abs=1e-12)


# ---- one class per position ----
def test_next_symbol_by_hand():
    """For p = (1/4, 3/4) and targets 1, 0 | 1, none the losses are -ln of 3/4, 1/4, 3/4, and the accuracy is 2/3."""
    f = torch.tensor([0.0, math.log(3)]).expand(2, 2, 2)  # (B, L, V)
    y = torch.tensor([[1, 0], [1, -100]])
    expected = (3 * math.log(4) - 2 * math.log(3)) / 3
    task = NextSymbol(2)
    assert task.loss(lambda x: f, None, y).item() == pytest.approx(expected, abs=1e-6)
    reduced = task.reduce_outputs(f, y)
    assert reduced.shape == (2, 2, 2)
    assert task.split_loss(reduced, y).item() == pytest.approx(expected, abs=1e-6)
    values = task.metrics(reduced, y)
    assert values["accuracy"] == pytest.approx(200 / 3)
    assert values["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 5, 6)])
def test_cross_entropy_row_by_row_is_equal(shape):
    """The form for GPUs gives the losses and gradients of that for CPUs."""
    f = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 4, (shape[0], *shape[2:]))
    y[0, 0] = -100
    losses = [cross_entropy_per_position(f, y, row_by_row=rows) for rows in (False, True)]
    torch.testing.assert_close(*losses)
    assert not losses[0][0, 0].any()
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), f)[0] for each in losses))


def test_segmentation_metrics_equal_scikit_learn():
    g = torch.Generator().manual_seed(0)
    f, y = torch.randn(3, 4, 5, 6, generator=g), torch.randint(0, 3, (3, 5, 6), generator=g)  # class 3 does not occur
    task = Segmentation(4)
    values = task.metrics(task.reduce_outputs(f, y), y)
    labels = {"labels": [1, 2, 3], "average": "macro"}
    guess, truth = f.argmax(1).flatten(), y.flatten()
    assert values["dice"] == pytest.approx(sklearn.f1_score(truth, guess, **labels), abs=1e-12)
    assert values["iou"] == pytest.approx(sklearn.jaccard_score(truth, guess, **labels), abs=1e-12)
    same = torch.nn.functional.one_hot(y, 4).permute(0, 3, 1, 2).float()
    assert task.metrics(task.reduce_outputs(same, y), y) == {"dice": 1.0, "iou": 1.0}
    empty = torch.zeros(2, 5, 6).long()  # only background
    assert all(map(math.isnan, task.metrics(empty, empty).values()))


def test_cox_gradient_equals_finite_differences():
    """For a sample that outlives all it is exactly 0, since Adam would amplify rounding errors."""
    f, y = survivors(12, values=4)
    f = f[:, 0].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: cox_loss(f, y.double()), f)
    last_to_survive = torch.tensor([[1.0, 9.0], [0.0, 2.0], [0.0, 3.0]])
    no_event = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    for y, scale in ((last_to_survive, 1.0), (last_to_survive, 30.0), (no_event, 1.0)):
        f = (scale * torch.tensor([0.1234, -0.77, 0.31])).requires_grad_()
        loss = Survival(1).loss(lambda x, f=f: f, None, y)
        loss.backward()
        assert f.grad.abs().max() < 1e-12
    assert loss.item() == 0
    assert math.isnan(Survival(1).metrics(f.detach()[:, None], no_event)["c_index"])


@pytest.mark.parametrize(("old", "new"), RENAMED_MEMBERS.items())
def test_a_task_with_a_renamed_member_is_an_error_that_gives_the_new_name(old, new):
    task = type("OldTask", (Classification,), {old: ("accuracy",)})(2)
    with pytest.raises(UserError, match=f"OldTask: {old} was renamed to {new}"):
        check_task(task)
