"""Training with augmentation: random numbers depend on seed, round and client, and not on ranks or other clients."""

import pytest
import torch
from helpers import images, record, run_experiment, small_settings
from test_packed import TOLERANCE, relative_difference
from test_transport import run_on_ranks

from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import add_augmentation, split
from fedmpi.data.lazy_images import make_lazy_images
from fedmpi.data.transforms.pipeline import make_transform
from fedmpi.engine.packed.packed_fit import PackedFit

CHAIN = (("random_crop", 2), ("horizontal_flip", None), ("random_rotation", 15), ("cutout", 3))


def to_bytes(x):
    """Convert numbers around 0 to bytes."""
    return make_lazy_images((x * 40 + 128).clamp(0, 255).to(torch.uint8), (0.5,), (0.25,), 1)


def make_federation(chain=CHAIN):
    data = images()
    data = Dataset(to_bytes(data.train_x), data.train_y, to_bytes(data.test_x), data.test_y, data.classes)
    parts = split(data, "dirichlet", 7, 0, "aligned", alpha=0.5, min_size=7)
    return add_augmentation(parts, [make_transform(name, given, "data.augment.0", {}) for name, given in chain])


def make_config(method="fedavg", net="mlp", **changes):
    return small_settings(method, net, **{"rounds": 2, "train": {"epochs": 2, "lr": 0.05}, **changes})


def test_augmentation_changes_training_and_not_evaluation():
    plain, changed = (
        run_experiment(make_config(), make_federation(())),
        run_experiment(make_config(), make_federation()),
    )
    assert torch.equal(plain.w0, changed.w0)
    assert not torch.equal(plain.w, changed.w)
    before = [run_experiment(make_config(rounds=0), make_federation(chain)).rows[-1]["loss"] for chain in ((), CHAIN)]
    assert before[0] == before[1], "the initial model, on test pictures as they are"
    assert run_experiment(make_config(), make_federation()).hashes == changed.hashes
    nothing = (("random_crop", {"padding": 0}), ("horizontal_flip", 0))
    assert run_experiment(make_config(), make_federation(nothing)).hashes == plain.hashes, (
        "neither moves the order of batches"
    )


@pytest.mark.parametrize("method", ["fedavg", "perfedavg", "ditto"])
def test_bits_do_not_depend_on_the_number_of_ranks(method):
    alone = record(run_experiment(make_config(method, "cnn"), make_federation()))
    assert record(run_on_ranks(make_config(method, "cnn"), 3, make_federation())[0]) == alone


@pytest.mark.parametrize("train", [{}, {"batch_size": "full"}, {"drop_last": True}, {"batch_size": 7}])
def test_clients_trained_at_once_get_the_same_samples(train, monkeypatch):
    sizes, call = [], PackedFit.__call__
    monkeypatch.setattr(PackedFit, "__call__", lambda self: (sizes.append(len(self.clients)), call(self))[1])
    one = make_config(train={"epochs": 2, "lr": 0.05, **train}, cohort={"fraction": 1.0})
    several = one.model_copy(update={"compute": one.compute.model_copy(update={"clients_per_pass": 7})})
    assert (
        relative_difference(run_experiment(one, make_federation()), run_experiment(several, make_federation()))
        < 2 * TOLERANCE
    )
    assert sizes == [7, 7]
