"""Local training (3.13): each client alone from the common start; no weight and no buffer travels."""

import copy

import pytest
import torch
from helpers import fedmpi, play, prepare, settings
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds


def test_each_client_is_alone():
    """Against SGD written out, in the rounds in which a client is sampled."""
    config = settings("local", train={"epochs": 2, "weight_decay": 1e-3, "schedule": "exponential", "decay": 0.9})
    it = prepare(config)
    data, modules = it.made.data, {k: copy.deepcopy(it.made.net.module) for k in range(7)}
    it.fed.run()
    for row in it.rows:
        t = row["round"]
        for k in row["cohort"]:
            x, y = data.train[k].x[data.train[k].index], data.train[k].y[data.train[k].index]
            sgd = torch.optim.SGD(modules[k].parameters(), 0.05 * 0.9**t, 0.9, weight_decay=1e-3)
            generator = seeds.generator(config.seed, "batches", t, k, 0)
            for _ in range(2):
                for rows in torch.randperm(len(x), generator=generator).split(10):
                    sgd.zero_grad()
                    cross_entropy(modules[k](x[rows]), y[rows]).backward()
                    sgd.step()
    assert len({k for row in it.rows for k in row["cohort"]}) >= 5
    for k in it.fed.states.rows:
        w = torch.nn.utils.parameters_to_vector(modules[k].parameters())
        torch.testing.assert_close(it.kept(k)._w, w.detach(), rtol=0, atol=1e-6)


def test_nothing_travels():
    """The word down; loss, seconds and the stop flag up. The global model is the initial one, batch statistics too."""
    it = play(settings("local", "norm"))
    messages = it.made.messages
    assert (messages.announcement().packing.size, messages.upload(0).packing.size) == (1, 3)
    assert torch.equal(it.w, it.w0)
    assert torch.equal(it.b, it.b0)
    assert it.rows[-1]["personal_loss"] != it.rows[0]["personal_loss"]


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_whole_run_in_which_nothing_travels(tmp_path, rounds):
    done = fedmpi(
        "run",
        "configs/quickstart.yaml",
        "method.name=local",
        f"rounds={rounds}",
        f"output={tmp_path}",
        "model={name: mlp}",
    )
    assert done.returncode == 0, done.stderr
    assert "clients sent 0 and received 0 parameters\n" in done.stdout
