"""Targets with the value `task.ignore` are left out of the loss, of metrics, and of means over batches and clients."""

import math

import numpy as np
import pytest
import torch
from helpers import prepare, run_experiment, settings
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.data.silos import build_silo_federation, count_local_labels, describe_silos
from fedmpi.engine.evaluate import evaluate_model
from fedmpi.tasks.classification import MultiLabel
from fedmpi.tasks.per_position import NextSymbol, Segmentation
from fedmpi.tasks.regression import Regression
from fedmpi.tasks.validation import check_targets

HERE, NAN = __file__, math.nan
MASKS = torch.tensor([[[0, 255], [2, 1]], [[255, 255], [1, 0]], [[255, 255], [255, 255]]])
LABELS = torch.tensor([[0.0, -1], [1, 1], [-1, -1]])
AMOUNTS = torch.tensor([[0.5, NAN], [1.0, -2.0], [NAN, NAN]])
WORDS = torch.tensor([[3, 1, 0], [2, 0, 0], [0, 0, 0]])
CASES = {  # task, targets, shape of a sample's outputs; the last sample has no counted targets
    "masks": (Segmentation(3, ignore=255), MASKS, (3, 2, 2)),
    "volumes": (Segmentation(3, ignore=255), MASKS[:, None], (3, 1, 2, 2)),
    "labels": (MultiLabel(2, ignore=-1), LABELS, (2,)),
    "unknown labels": (MultiLabel(2, ignore="nan"), torch.where(LABELS < 0, NAN, LABELS), (2,)),
    "amounts": (Regression(2, ignore="nan"), AMOUNTS, (2,)),
    "words": (NextSymbol(4, ignore=0), WORDS, (3, 4)),
}
every_task = pytest.mark.parametrize(("task", "y", "shape"), CASES.values(), ids=CASES.keys())


def make_outputs(y, shape, seed=0):
    f = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return f.requires_grad_()


def naive_losses(task, f, y):
    """Return the losses of the targets that count, one by one."""
    actual = []
    for place in np.ndindex(*y.shape):
        target = y[place]
        if bool(target.isnan()) or target == task.ignore:
            continue
        if isinstance(task, (Segmentation, NextSymbol)):
            i, *at = place
            logits = f[(i, slice(None), *at)] if isinstance(task, Segmentation) else f[i, at[0]]
            actual.append(cross_entropy(logits[None], target[None]))
        elif isinstance(task, MultiLabel):
            actual.append(binary_cross_entropy_with_logits(f[place], target.double()))
        else:
            actual.append((f[place] - target) ** 2)
    return actual


@every_task
def test_the_loss_is_the_mean_over_counted_targets(task, y, shape):
    f = make_outputs(y, shape)
    loss, expected = task.loss(lambda _: f, None, y), torch.stack(naive_losses(task, f, y)).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    g, expected_g = (torch.autograd.grad(value, f, retain_graph=True)[0] for value in (loss, expected))
    torch.testing.assert_close(g, expected_g, rtol=1e-6, atol=1e-9)
    assert task.check(y, shape) == ""


@every_task
def test_a_batch_without_counted_targets_has_no_loss_and_no_gradient(task, y, shape):
    f = make_outputs(y[2:], shape)
    loss = task.loss(lambda _: f, None, y[2:])
    loss.backward()
    assert loss.item() == 0
    assert not f.grad.any()  # NaN would count as true
    assert float(task.batch_weight(y[2:])) == 0


@every_task
def test_the_loss_is_the_same_under_vmap(task, y, shape):
    """torch.vmap over three clients, the last of which has no targets that count."""
    f, rows = make_outputs(y, shape)[:, None], y[:, None]
    at_once = torch.vmap(lambda f, y: task.loss(lambda _: f, None, y))(f, rows)
    one_by_one = torch.stack([task.loss(lambda _, k=k: f[k], None, rows[k]) for k in range(3)])
    torch.testing.assert_close(at_once, one_by_one)
    pairs = zip(*(torch.autograd.grad(x.sum(), f, retain_graph=True) for x in (at_once, one_by_one)), strict=True)
    torch.testing.assert_close(*next(pairs))


@every_task
def test_metrics_use_only_counted_targets(task, y, shape):
    """They do not depend on the outputs for ignored targets, and are nan if no targets count."""
    f = make_outputs(y, shape).detach()
    other = f.clone()
    counted = ~(y.isnan() | (y == task.ignore))
    if isinstance(task, Segmentation):
        other += torch.randn_like(f) * 9 * ~counted[:, None]
    elif isinstance(task, NextSymbol):
        other += torch.randn_like(f) * 9 * ~counted[..., None]
    else:
        other += torch.randn_like(f) * 9 * ~counted
    actual, changed = (task.metrics(task.reduce_outputs(x, y), y) for x in (f, other))
    without_the_last = task.metrics(task.reduce_outputs(f[:2], y[:2]), y[:2])
    assert actual == pytest.approx(changed, nan_ok=True)
    assert actual == pytest.approx(without_the_last, nan_ok=True)
    assert all(map(math.isnan, task.metrics(task.reduce_outputs(f[2:], y[2:]), y[2:]).values()))


def test_metrics_have_the_values_computed_by_hand():
    y = torch.tensor([[0.0, NAN], [1, 1], [NAN, NAN], [1, 0]])
    f = torch.tensor([[-1.0, 5], [2, -1], [3, 3], [-3, -4]])
    names = ("accuracy", "exact", "f1", "auroc")
    actual = MultiLabel(2, names, ignore="nan").metrics(f, y)
    # right: 0, 1 of label 0 without the last; 0 of (1, 0) of label 1 without the first. Of three samples one is exact.
    # label 0: TP 1, FN 1; label 1: FN 1. Label 0: positives 2, -3 against -1; label 1: -1 against -4.
    assert actual == pytest.approx({"accuracy": 60.0, "exact": 100 / 3, "f1": (2 / 3 + 0) / 2, "auroc": (0.5 + 1) / 2})
    y, f = torch.tensor([1.0, NAN, 3.0, 5.0]), torch.tensor([[1.0], [9.0], [5.0], [5.0]])
    actual = Regression(1, ("mse", "mae", "r2"), ignore="nan").metrics(f, y)
    assert actual == pytest.approx({"mse": 4 / 3, "mae": 2 / 3, "r2": 1 - 4 / 8})  # mean 3, squares 4 + 0 + 4


@pytest.mark.parametrize(
    ("task", "y", "shape", "words"),
    [
        (
            MultiLabel(2),
            LABELS,
            (2,),
            r"label 1 in row 0 is -1; only 0 \(no\) and 1 \(yes\) are .*task\.ignore",
        ),
        (MultiLabel(2, ignore=-1), LABELS - 1, (2,), r"label 1 in row 0 is -2.*\(and -1, which is ignored\)"),
        (
            MultiLabel(2, ignore=-1),
            AMOUNTS,
            (2,),
            r"the target in row 0 is NaN; fill it in or drop the row, or set task\.ignore: nan",
        ),
        (Regression(2), AMOUNTS, (2,), r"the target in row 0 is NaN; .* task\.ignore: nan"),
        (Segmentation(3), MASKS, (3, 2, 2), r"row 0 contains the class 255; only 0\.\.2 are allowed; .*task\.ignore"),
        (
            Segmentation(3, ignore=254),
            MASKS,
            (3, 2, 2),
            r"row 0 contains the class 255; only 0\.\.2 are allowed \(and 254, which",
        ),
        (NextSymbol(3, ignore=0), WORDS, (3, 3), r"row 0 contains the class 3; .*\(and 0, which is ignored\)"),
    ],
)
def test_invalid_targets_that_are_not_ignored_are_an_error(task, y, shape, words):
    with pytest.raises(UserError, match=f"task mine: training data: {words}"):
        check_targets("mine", task, y, shape, "training data")


# ---- runs ----
def make_labels(ignored=NAN, share=0.4):
    """Return data with three labels, of which about `share` are unknown, but none in the last eight training rows."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=g)
    y = (x @ torch.randn(6, 3, generator=g) > 0).float()
    y[torch.rand(80, 3, generator=g) < share] = ignored
    y[52:60] = ignored
    return Dataset(x[:60], y[:60], x[60:], y[60:], 3)


def make_config(ignored=NAN, **more):
    ignore = "nan" if math.isnan(ignored) else ignored
    task = {"name": "multi_label", "ignore": ignore}
    return {"task": task, "model": {"name": "logistic"}, "cohort": {"fraction": 1.0}, **more}


def test_bits_do_not_depend_on_the_value_of_unknown_labels():
    """NaN and -1 give the same bits, and known labels are learned."""
    runs = [
        run_experiment(settings(rounds=8, **make_config(v, train={"lr": 0.5})), split(make_labels(v), "iid", 3, 0))
        for v in (NAN, -1.0)
    ]
    assert runs[0].hashes == runs[1].hashes
    assert runs[0].rows[-1]["loss"] == runs[1].rows[-1]["loss"]
    assert runs[0].rows[-1]["accuracy"] > 80


@pytest.mark.parametrize("size", [1, 7, 20])
def test_the_loss_of_a_split_does_not_depend_on_its_batches(size):
    it = prepare(settings(rounds=1, **make_config()), split(make_labels(), "iid", 3, 0))
    data, task = make_labels(), it.experiment.task
    f = it.experiment.net.module(data.test_x).detach().double()
    expected = torch.stack(naive_losses(task, f, data.test_y)).mean().item()
    assert evaluate_model(it.fed.trainer, it.fed.trainer.data.global_test, size).metrics["loss"] == pytest.approx(
        expected, rel=1e-5
    )


def silo_data(sites, names):
    datasets = dict(enumerate(sites))
    table = describe_silos(datasets)
    return build_silo_federation(datasets, table, count_local_labels(datasets, table, names), names)


def test_sites_are_weighted_by_their_counted_targets():
    """South knows one of three labels, and west none: metrics over all sites are those of the known labels."""
    sites = [make_labels(share=0.0), make_labels(share=0.0), make_labels(share=0.0)]
    sites[1].test_y[:, :2] = NAN
    sites[2].test_y[:] = NAN
    names = ("north", "south", "west")
    it = run_experiment(settings(rounds=1, evaluate={"protocol": ["global"]}, **make_config()), silo_data(sites, names))
    rows = {line["site"]: line for line in it.lines}
    north, south = (rows[name]["accuracy"] for name in names[:2])
    assert math.isnan(rows["west"]["accuracy"])
    assert it.rows[-1]["accuracy"] == pytest.approx((3 * north + south) / 4)
    assert it.rows[-1]["loss"] == pytest.approx((3 * rows["north"]["loss"] + rows["south"]["loss"]) / 4)
    assert rows["west"]["samples"] == 20
