"""What would run and mean nothing is an error, or a warning that names the place."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import federated, images, prepare, run_experiment, settings, small_settings
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.methods import registry
from fedmpi.runtime import rank_agreement


def wide_net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes + 2))


def tall_buffers(input_shape, classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    net.register_buffer("far", torch.full((2,), 1e300, dtype=torch.float64))
    return net


def relabelling(labels, clients, rng):
    labels[:] = 0
    return np.array_split(np.arange(len(labels)), clients)


def test_a_partition_cannot_write_to_the_labels():
    data = images()
    before = data.train_y.clone()
    with pytest.raises(ValueError, match="read-only"):
        split(data, f"{__file__}:relabelling", 4, 0)
    assert torch.equal(data.train_y, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": f"{__file__}:wide_net"}}, "has 6 outputs, but the data have 4 classes"),
        ({"model": {"name": f"{__file__}:tall_buffers"}}, "initial weights are not finite"),
        ({"train": {"drop_last": True, "batch_size": 500}}, "drop_last: true drops every batch.*500"),
        (
            {"method": "fedlc", "task": {"name": "classification", "label_smoothing": 0.1}},
            "fedlc needs targets of one class each, but task.label_smoothing is 0.1; set task.label_smoothing: 0",
        ),
    ],
)
def test_a_meaningless_config_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        prepare(settings(**changes))


def test_validate_counts_clients_that_will_not_train():
    with pytest.warns(UserWarning, match=r"drop_last: \d of 7 clients have fewer than train.batch_size = 20 samples"):
        prepare(settings(train={"drop_last": True, "batch_size": 20}))


def test_an_empty_test_set_causes_a_warning():
    dataset = images()
    empty = Dataset(dataset.train_x, dataset.train_y, dataset.test_x[:0], dataset.test_y[:0], 4)
    data = split(empty, "iid", 3, 0, "global")
    with pytest.warns(UserWarning, match="the test set is empty"):
        prepare(settings(evaluate={"protocol": ["global"]}), data)


OWN = "apfl ditto fedala fedatom_personal fedfomo fedpac fedper fedproto fedrep knnper lg_fedavg"
OWN = {*OWN.split(), "local", "pfedme", "pfedpara"}  # fedbn keeps what the test's model has none of


@pytest.mark.filterwarnings("ignore:method fedbn keeps parts")
@pytest.mark.parametrize("name", sorted(registry))
def test_personal_models_that_are_never_evaluated_cause_a_warning(name):
    """A warning under `global` alone for methods whose clients have models of their own, for no other, and no more."""
    for protocol, expected in ((["global"], name in OWN), (["global", "personal"], False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepare(small_settings(name, evaluate={"protocol": protocol}))
        assert sum("does not evaluate them" in str(each.message) for each in caught) == expected


class Weighing:
    """A task of a user's own that is a classification, and weighs by the counts that it is told."""

    names = ("accuracy",)
    classification = True

    def __init__(self, classes):
        pass

    def set_class_counts(self, counts):
        self.w = 1.0 / counts.clamp(min=1).double()

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x), y, weight=self.w.to(torch.float32))

    def metrics(self, outputs, y):
        return {"accuracy": 100 * (outputs.argmax(1) == y).double().mean().item()}


@pytest.mark.parametrize("task", [{"name": f"{__file__}:Weighing"}, {"class_weights": "balanced"}])
def test_private_class_weights_disable_packed_training(task):
    """Together they would all have the counts of the client that was told last."""
    more = {"task": task, "cohort": {"fraction": 1.0}}
    data = federated()
    data = replace(data, label_counts_shared=False)
    share = small_settings("fedavg", **more).data.model_copy(update={"share_label_counts": False})

    def run(pack):
        config = small_settings("fedavg", **more, compute={"clients_per_pass": pack})
        return run_experiment(config.model_copy(update={"data": share}), data)

    with pytest.raises(UserError, match=r"compute\.clients_per_pass: 3.*the label counts of each client"):
        run(3)
    with pytest.warns(UserWarning, match=r"compute\.clients_per_pass: auto.*the label counts of each client"):
        auto = run("auto")
    assert auto.hashes == run(1).hashes


def test_torch_compile_without_a_compiler_is_refused_at_start(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"compute.compile: true needs a compiler, .* has no no-such-compiler; "):
        prepare(settings(compute={"compile": True}))


def test_a_single_differing_row_is_detected():
    """All of the data are digested, not a sample of them: a rank would quietly train something else."""
    dataset = images(n=9000)  # more than two pieces of the stream
    same = rank_agreement.compute_data_digests(split(images(n=9000), "iid", 3, 0))
    for part, row in (("train_x", 5000), ("train_y", 8999), ("test_x", 30), ("test_y", 59)):
        values = getattr(dataset, part).clone()
        values[row] = 1 - values[row].clamp(max=1)
        other = rank_agreement.compute_data_digests(split(replace(dataset, **{part: values}), "iid", 3, 0))
        name = "(training data)" if part.startswith("train") else "(test data)"
        assert {key for key in same if same[key] != other[key]} == {name}, part
