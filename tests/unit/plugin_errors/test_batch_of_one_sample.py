"""Normalisation needs two samples in a batch: told before round 0 where it can be known, else as no defect."""

from dataclasses import dataclass

import pytest
from plugin_play import play, sections_of
from torch import nn

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.method import State


def normed(input_shape, classes):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


def test_a_batch_of_one_sample_is_found_before_round_0():
    model = {"model": {"name": f"{__file__}:normed"}}
    said = r"train.batch_size: 13 leaves client 0 with 14 samples a batch of one sample.*drop_last: true, or another"
    with pytest.raises(UserError, match=said):
        prepare_only(**model, train={"batch_size": 13})
    assert play(**model, train={"batch_size": 13, "drop_last": True}).reason == "finished"
    assert play(**model, train={"batch_size": 5}).reason == "finished"


def prepare_only(**sections):
    play(rounds=0, **sections)


@dataclass(frozen=True)
class OneSample(fedmpi.Method):
    def train(self, k):
        for x, y in k.batches():
            k.task_loss(k.logits(x[:1]), x[:1], y[:1])
        return State()


def test_a_batch_of_one_sample_later_is_no_defect():
    with pytest.raises(UserError, match=r"round 0, client 0: .*OneSample.train at .*a batch of one sample"):
        play(model={"name": f"{__file__}:normed"}, **sections_of("method", OneSample))
