"""train.accumulate: the gradient of a batch that is processed in parts is that of the whole batch."""

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, images, prepare, settings, small_settings

from fedmpi import Task
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs
from fedmpi.data.federated import split
from fedmpi.engine.local.losses import count_parts, split_batch
from fedmpi.method import Method, State
from fedmpi.methods import registry
from fedmpi.models import probabilistic_features
from fedmpi.tasks.classification import Classification, MultiLabel
from fedmpi.tasks.per_position import NextSymbol, Segmentation
from fedmpi.tasks.regression import Regression, StandardisedRegression
from fedmpi.tasks.survival import Survival

NAN = math.nan
REFUSED = {"feddecorr", "feduv"}  # their losses have statistics of the batch
CASES = {
    **{name: (name, {}) for name in sorted({*registry} - REFUSED)},
    "feddecorr without penalty": ("feddecorr", {"beta": 0.0}),
    "fedld without margin": ("fedld", {"variant": "code", "margin": 0.0}),
    "fedsol, all layers": ("fedsol", {"layers": "all"}),
    "fedsol along fedprox": ("fedsol", {"prox": "fedprox"}),
    "fedsol along moon": (f"{ROOT}/configs/papers/fedsol_table4.py:AlongMOON", {}),
    "gradproj, l2": ("gradproj", {"distance": "l2"}),
    "perfedavg, hessian free": ("perfedavg", {"variant": "hessian_free", "delta": 0.1}),
    "perfedavg, exact": ("perfedavg", {"variant": "exact"}),
    "fedatom with moon": ("fedatom", {"client": "moon"}),
}


def run(method, accumulate, options=None, net="mlp", data=None, **changes):
    """Run two rounds; the learning rate is small, so that rounding errors do not grow.

    Returns:
        The finished run; its attribute `sizes` contains the sizes of all batches of which activations were stored.
    """
    train = {"batch_size": 10, "lr": 0.01, "accumulate": accumulate, **changes.pop("train", {})}
    changes = {"rounds": 2, "cohort": {"fraction": 1.0}, **changes} | ({"options": options} if options else {})
    it = prepare(small_settings(method, net, train=train, **changes), data)
    it.sizes = set()
    it.experiment.net.module.register_forward_hook(
        lambda module, inputs, output: it.sizes.add(len(output)) if output.requires_grad else None
    )
    it.fed.run()
    return it


def assert_same(one, other):
    """Require equal models, client states and training losses up to rounding."""
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(one.w, other.w)
    close(*([row.get("train_loss", 0.0) for row in it.rows] for it in (one, other)))
    for k, row in one.fed.states.rows.items():
        close(row, other.fed.states.rows[k])
    assert not torch.equal(one.w, one.w0) or any(len(row) for row in one.fed.states.rows.values())


# ---- methods ----
@pytest.mark.parametrize("case", CASES)
def test_parts_give_the_results_of_whole_batches_for_every_method(case, monkeypatch):
    method, options = CASES[case]
    monkeypatch.setattr(probabilistic_features.torch, "randn_like", torch.zeros_like)  # FedSR draws noise
    whole, parts = run(method, 1, options), run(method, 3, options)
    assert_same(whole, parts)
    assert max(parts.sizes, default=0) <= 4, "a batch of 10 samples has parts of 3, 3 and 4 samples"


@pytest.mark.parametrize("method", ["fedavg", "fedld", "fedprox", "perfedavg"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_class_weights_clipping_and_momentum_with_parts(method, momentum):
    """Only the task's loss has class weights; the other terms of the loss are plain means over samples."""
    task = {"class_weights": [0.5, 1.0, 2.0, 4.0], "label_smoothing": 0.1}
    options = {"variant": "exact"} if method == "perfedavg" else {"margin": 1.0} if method == "fedld" else None
    train = {"momentum": momentum, "clip_norm": 0.5, "weight_decay": 0.01}
    assert_same(*(run(method, parts, options, task=task, train=train) for parts in (1, 4)))


def test_more_parts_than_samples_and_full_batches():
    data = split(images(), "iid", 20, 0)
    assert_same(*(run("fedavg", parts, data=data) for parts in (1, 10)))  # clients have 8 or 9 samples
    parts = run("fedavg", 5, train={"batch_size": "full"})
    assert_same(run("fedavg", 1, train={"batch_size": "full"}), parts)
    assert max(parts.sizes) == -(-int(parts.experiment.data.train_sizes.max()) // 5)


def test_a_smaller_batch_has_fewer_parts_of_the_same_size():
    for batch_size, accumulate, n, parts in ((50, 3, 50, 3), (50, 3, 17, 1), (50, 3, 18, 2), (None, 3, 8, 3)):
        assert count_parts(SimpleNamespace(batch_size=batch_size, accumulate=accumulate), n) == parts


def test_batch_statistics_are_those_of_the_parts():
    """With momentum=None the running mean is the mean over all parts, also for the second model of APFL."""
    data = split(images(), "iid", 1, 0)
    changes = {"model": {"name": "helpers:cumulative_net"}, "rounds": 1}
    it = run("apfl", 5, data=data, train={"lr": 0.0}, **changes)
    conv, x = it.experiment.net.module[0], data.train[0].x[data.train[0].index]
    with torch.no_grad():
        mean = conv(x).mean((0, 2, 3))  # 17 batches of 10 samples, in parts of 2
    torch.testing.assert_close(it.b[:6], mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(it.client_state(0).v_b, it.b, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class OwnLoss(Method):
    def loss(self, client, x, y):
        return client.task_loss(client.logits(x), x, y)


@dataclass(frozen=True)
class DeclaredLoss(Method):
    loss_is_sample_mean = True

    def loss(self, client, x, y):
        return client.task_loss(client.logits(x), x, y)


@dataclass(frozen=True)
class UndeclaredGrad(Method):
    """A method whose hook `train` passes a loss to client.grad; it is not split, because it may not be a mean."""

    def train(self, client):
        x, y = next(client.batches())
        client.grad(x, y, loss=lambda client, x, _: client.logits(x).square().sum())
        client.fit()
        return State()


def test_a_declared_method_of_a_user_equals_fedavg():
    assert_same(run("fedavg", 1), run(f"{__file__}:DeclaredLoss", 3))


def test_a_loss_that_is_passed_to_grad_is_divided_only_if_declared():
    assert max(run(f"{__file__}:UndeclaredGrad", 3).sizes) == 10


# ---- tasks ----
g = torch.Generator().manual_seed(0)
CLASSES, MASKS = torch.tensor([0, 2, 1, 1, 0, 2, 2]), torch.randint(3, (7, 2, 2), generator=g)
MASKS[3:] = 255
MASKS[4, 0, 0] = 1
AMOUNTS = torch.tensor([[0.5, NAN], [1.0, -2.0], [NAN, NAN], [NAN, NAN], [1.0, NAN], [0.0, 0.0], [NAN, 3.0]])
TASKS = {
    "classification": (Classification(3), CLASSES, (3,)),
    "class weights": (Classification(3, class_weights=(0.1, 1.0, 7.0), label_smoothing=0.2), CLASSES, (3,)),
    "labels": (MultiLabel(2), AMOUNTS.nan_to_num().sign().abs(), (2,)),
    "unknown labels": (MultiLabel(2, ignore="nan"), AMOUNTS.sign().abs(), (2,)),
    "amounts": (Regression(2, ignore="nan"), AMOUNTS, (2,)),
    "standardised": (StandardisedRegression(1, ignore="nan"), AMOUNTS[:, :1].repeat(1, 3).abs() + 1, (1,)),
    "masks": (Segmentation(3, ignore=255), MASKS, (3, 2, 2)),
    "all masks ignored": (Segmentation(3, ignore=255), torch.full_like(MASKS, 255), (3, 2, 2)),
    "words": (NextSymbol(4, ignore=0), torch.randint(4, (7, 5), generator=g).tril(1), (5, 4)),
}


@pytest.mark.parametrize("parts", [1, 3, 7, 9])
@pytest.mark.parametrize("case", TASKS)
def test_the_loss_of_a_batch_is_the_weighted_sum_of_those_of_its_parts(case, parts):
    task, y, shape = TASKS[case]
    f = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    client, total = SimpleNamespace(trainer=SimpleNamespace(task=task)), torch.zeros((), dtype=torch.float64)
    if isinstance(task, StandardisedRegression):
        y = torch.stack([y[:, 0], torch.ones(7), torch.full((7,), 2.0)], 1)[..., None]
    sizes = []
    for part, part_y, share, scale in split_batch(client, f, y, parts):
        loss = task.loss(lambda _, part=part: part, part, part_y)
        total += share * loss * (1 if scale is None else scale)
        sizes.append(len(part))
    assert len(sizes) == min(parts, 7)
    assert sum(sizes) == 7
    assert max(sizes) - min(sizes) <= 1
    torch.testing.assert_close(total, task.loss(lambda _: f, f, y), rtol=1e-12, atol=1e-12)


def test_the_loss_of_survival_is_no_mean_over_parts():
    assert Survival(1).loss_weight(torch.ones(4, 2)) is None


def test_named_tensors_are_divided():
    x = Inputs({"ids": torch.arange(10).view(5, 2), "mask": torch.ones(5, 2)})
    client = SimpleNamespace(trainer=SimpleNamespace(task=Regression(1)))
    parts = [part for part, *_ in split_batch(client, x, torch.zeros(5), 2)]
    assert [len(part) for part in parts] == [2, 3]
    assert torch.equal(torch.cat([part["ids"] for part in parts]), x["ids"])


# ---- messages ----
class PairwiseTask(Task):
    """A task of a user whose loss compares samples, which its `split_loss` shows."""

    names = ("spread",)
    classification = True

    def loss(self, model, x, y):
        return model(x).var()

    def split_loss(self, outputs, y):
        return outputs.var()

    def metrics(self, outputs, y):
        return {"spread": outputs.var().item()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "feduv"},
            r"with its options the loss of method feduv uses statistics of the whole batch; set train",
        ),
        ({"method": "feddecorr"}, r"the loss of method feddecorr uses statistics"),
        ({"method": "fedld", "options": {"variant": "code"}}, r"the loss of method fedld uses statistics"),
        ({"method": "fedatom", "options": {"client": "feduv"}, "net": "cnn"}, r"the loss of method fedatom uses stat"),
        (
            {"method": f"{__file__}:OwnLoss"},
            r"OwnLoss overrides the hook loss\. If .* declare loss_is_sample_mean = True in its class; otherwise set "
            r"train\.accumulate: 1.*\(OwnLoss at .*test_accumulate\.py:\d+\)",
        ),
        ({"task": {"name": f"{__file__}:PairwiseTask"}}, r"the loss of task .*PairwiseTask for a batch is no mean"),
        (
            {"compute": {"clients_per_pass": 3}},
            r"clients_per_pass: 3 is not possible: .* because train\.accumulate is 3",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        prepare(settings(**changes, train={"accumulate": 3}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"accumulate": 11}}, r"accumulate: 11 is not allowed; must be at most train\.batch_size \(10\)"),
        ({"train": {"accumulate": 0}}, r"greater than or equal to 1"),
        ({"train": {"accumulate": 2}, "compute": {"graphs": True}}, r"graphs: true is not allowed with train\.acc"),
    ],
)
def test_contradictory_keys_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_automatic_packing_trains_clients_one_by_one():
    with pytest.warns(UserWarning, match=r"clients are trained one at a time, because train\.accumulate is 3"):
        it = prepare(settings(train={"accumulate": 3}, compute={"clients_per_pass": "auto"}))
    assert it.experiment.clients_per_pass == 1
