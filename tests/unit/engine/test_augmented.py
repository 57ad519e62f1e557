"""Augmented training: the numbers drawn belong to seed, round and client, whoever trains them and beside whom."""

import pytest
import torch
from helpers import images, play, record, small_settings
from test_packed import TOLERANCE, apart
from test_transport import on_ranks

from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import add_augmentation, split
from fedmpi.data.lazy_images import make_lazy_images
from fedmpi.data.transforms.pipeline import make_transform
from fedmpi.engine.packed.packed_fit import PackedFit

CHAIN = (("random_crop", 2), ("horizontal_flip", None), ("random_rotation", 15), ("cutout", 3))


def shot(x):
    """Numbers around 0 as bytes."""
    return make_lazy_images((x * 40 + 128).clamp(0, 255).to(torch.uint8), (0.5,), (0.25,), 1)


def federation(chain=CHAIN):
    data = images()
    data = Dataset(shot(data.train_x), data.train_y, shot(data.test_x), data.test_y, data.classes)
    parts = split(data, "dirichlet", 7, 0, "aligned", alpha=0.5, min_size=7)
    return add_augmentation(parts, [make_transform(name, given, "data.augment.0", {}) for name, given in chain])


def config(method="fedavg", net="mlp", **changes):
    return small_settings(method, net, **{"rounds": 2, "train": {"epochs": 2, "lr": 0.05}, **changes})


def test_it_changes_what_is_trained_and_not_what_is_tested():
    plain, changed = play(config(), federation(())), play(config(), federation())
    assert torch.equal(plain.w0, changed.w0)
    assert not torch.equal(plain.w, changed.w)
    before = [play(config(rounds=0), federation(chain)).rows[-1]["loss"] for chain in ((), CHAIN)]
    assert before[0] == before[1], "the initial model, on test pictures as they are"
    assert play(config(), federation()).hashes == changed.hashes
    nothing = (("random_crop", {"padding": 0}), ("horizontal_flip", 0))
    assert play(config(), federation(nothing)).hashes == plain.hashes, "neither moves the order of batches"


@pytest.mark.parametrize("method", ["fedavg", "perfedavg", "ditto"])
def test_the_bits_are_those_of_one_rank_on_any_number(method):
    alone = record(play(config(method, "cnn"), federation()))
    assert record(on_ranks(config(method, "cnn"), 3, federation())[0]) == alone


@pytest.mark.parametrize("train", [{}, {"batch_size": "full"}, {"drop_last": True}, {"batch_size": 7}])
def test_clients_trained_at_once_see_what_they_see_alone(train, monkeypatch):
    sizes, call = [], PackedFit.__call__
    monkeypatch.setattr(PackedFit, "__call__", lambda self: (sizes.append(len(self.clients)), call(self))[1])
    one = config(train={"epochs": 2, "lr": 0.05, **train}, cohort={"fraction": 1.0})
    several = one.model_copy(update={"compute": one.compute.model_copy(update={"clients_per_pass": 7})})
    assert apart(play(one, federation()), play(several, federation())) < 2 * TOLERANCE
    assert sizes == [7, 7]
