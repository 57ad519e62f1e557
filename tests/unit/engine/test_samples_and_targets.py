"""Samples of any type, of one tensor or several; targets of any shape; user-defined tasks with every method."""

import dataclasses

import pytest
import torch
from helpers import NETS, NETS_OF, federated, images, prepare, run_experiment, settings, small_settings
from torch import nn

from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.engine.evaluate import evaluate_model
from fedmpi.methods import registry as methods
from fedmpi.models import KIND

HERE = __file__


# ---- user-defined tasks ----
class UserClassification:
    """A user-defined classification, which declares only that it is one."""

    classification = True

    def __init__(self, classes):
        pass

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x), y)

    def metrics(self, outputs, y):
        return {"right": (outputs.argmax(1) == y).double().mean().item()}


@pytest.mark.parametrize("method", sorted(methods))
def test_every_method_accepts_a_user_defined_classification(method):
    its = {
        task: run_experiment(small_settings(method, rounds=2, task={"name": task}))
        for task in ("classification", f"{HERE}:UserClassification")
    }
    mine, theirs = its[f"{HERE}:UserClassification"], its["classification"]
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.w, theirs.w)
    name = "personal_right" if "right" not in mine.rows[-1] else "right"
    assert 100 * mine.rows[-1][name] == pytest.approx(theirs.rows[-1][name.replace("right", "accuracy")])


# ---- samples of several tensors ----
class JoinHalves(nn.Module):
    """Joins the two halves of an image, stored like whole images.

    On some CPUs, convolutions of one channel have other last bits in another memory layout.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, top, bottom):
        return self.inner(torch.cat([top, bottom], 2).clone(memory_format=torch.channels_last))


def halves_model(input_shape, classes, inner):
    (c, h, w), (_, more, _) = input_shape["top"], input_shape["bottom"]
    options = {k: v for k, v in inner.items() if k != "name"}
    make_inner = registry.make_component(KIND, registry.Selection(inner["name"], options))
    return JoinHalves(make_inner((c, h + more, w), classes))


def split_images(data):
    x = [{"top": x[:, :, :3], "bottom": x[:, :, 3:]} for x in (data.train_x, data.test_x)]
    return dataclasses.replace(data, train_x=x[0], test_x=x[1])


def make_split_federation():
    return split(split_images(images()), "dirichlet", 7, 0, "aligned", alpha=0.5, min_size=7)


def run_model(method, net="mlp", **more):
    return {"name": f"{HERE}:halves_model", "inner": NETS_OF.get(method, NETS)[net], **more}


@pytest.mark.parametrize("method", sorted(methods))
def test_every_method_trains_on_several_tensors_as_on_one(method):
    """Training on the halves of images has the same bits as training on the images."""
    undivided = run_experiment(small_settings(method, rounds=2), federated())
    parts = run_experiment(small_settings(method, rounds=2, model=run_model(method)), make_split_federation())
    assert parts.hashes == undivided.hashes
    assert torch.equal(parts.w, undivided.w)
    metric_names = [name for name in undivided.rows[-1] if name.endswith(("loss", "accuracy", "decile"))]
    assert metric_names
    assert all(parts.rows[-1][name] == undivided.rows[-1][name] for name in metric_names)


def test_samples_of_several_tensors_are_not_trained_at_once():
    with pytest.raises(
        UserError, match=r"compute\.clients_per_pass: 2 is not possible: .*because a sample consists of several tensors"
    ):
        prepare(settings(model=run_model("fedavg"), compute={"clients_per_pass": 2}), make_split_federation())


# ---- sequences with a class at each position ----
class SequenceModel(nn.Module):
    """Maps symbols (B, L) to logits (B, L, V), each from the two preceding symbols."""

    def __init__(self, symbols):
        super().__init__()
        self.embedding = nn.Embedding(symbols, 8)
        self.memory = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, symbols)

    def forward(self, x):
        assert x.dtype == torch.int64
        return self.head(self.memory(self.embedding(x))[0])


def sequence_model(input_shape, classes):
    return SequenceModel(classes)


def make_texts(n=60, length=9, symbols=6):
    """Return texts in which each symbol is the sum of the two preceding ones, modulo their number."""
    s = torch.randint(0, symbols, (n, 2), generator=torch.Generator().manual_seed(0))
    for _ in range(length - 1):
        s = torch.cat([s, s[:, -2:].sum(1, keepdim=True) % symbols], 1)
    x, y = s[:, :-1], s[:, 1:]
    return Dataset(x[10:], y[10:], x[:10], y[:10], symbols)


TEXT = {
    "task": {"name": "next_symbol"},
    "model": {"name": f"{HERE}:sequence_model"},
    "train": {"lr": 0.3, "batch_size": 5},
}


def test_a_sequence_model_learns_texts():
    it = run_experiment(settings(rounds=12, cohort={"fraction": 1.0}, **TEXT), split(make_texts(), "iid", 3, 0))
    first, last = it.rows[0], it.rows[-1]
    assert last["accuracy"] > first["accuracy"] + 10, (first, last)
    assert last["perplexity"] == pytest.approx(torch.tensor(last["loss"]).exp().item(), rel=1e-5)
    spread = [last[f"personal_perplexity{end}"] for end in ("", "_worst_decile")]
    assert spread[1] >= spread[0]  # lower is better, so the worst tenth has higher values


# ---- losses of a whole split ----
def make_survival_data(n=60):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=g)
    time = (2 * x[:, 0] - x[:, 1]).neg().exp() * torch.empty(n).exponential_(generator=g)
    y = torch.stack([(torch.rand(n, generator=g) < 0.7).float(), time], 1)
    return Dataset(x[:40], y[:40], x[40:], y[40:], 1)


SURVIVAL = {"task": {"name": "survival"}, "model": {"name": "logistic"}, "train": {"lr": 0.3}}


def test_survival_loss_is_computed_on_the_whole_split():
    it = run_experiment(
        settings(rounds=8, cohort={"fraction": 1.0}, **SURVIVAL), split(make_survival_data(), "iid", 3, 0)
    )
    assert it.rows[-1]["c_index"] > 0.6
    data = make_survival_data()
    f = it.experiment.net.module(data.test_x)
    expected = it.experiment.task.loss(lambda x: f, None, data.test_y).item()
    for size in (1, 7, 20):  # for any batch size
        actual = evaluate_model(it.fed.trainer, it.fed.trainer.data.global_test, size).metrics
        assert actual["loss"] == pytest.approx(expected, abs=1e-6)
        assert actual["c_index"] == it.rows[-1]["c_index"]
