"""Fixtures for methods that are computed by hand: clients with quadratic losses, and single clients."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers import prepare
from quadratics import TWO

from fedmpi import config
from fedmpi.engine.round_control import TRAIN
from fedmpi.runtime import build_data

QUADRATICS = Path(__file__).parents[2] / "quadratics.py"


@pytest.fixture
def quadratic(tmp_path):
    """Return a function (method, ...) -> Settings of clients with quadratic losses, read back from a YAML file."""

    def make(method, bowls=TWO, start=(1.0,), **changes):
        tree = {
            "output": str(tmp_path / "runs"),
            "data": {
                "source": f"{QUADRATICS}:bowls",
                **bowls,
                "partition": {"scheme": "site", "clients": len(bowls["copies"])},
            },
            "model": {"name": f"{QUADRATICS}:point", "start": list(start)},
            "task": {"name": f"{QUADRATICS}:Bowl"},
            "method": {"name": method, **changes.pop("options", {})},
            "train": {"epochs": 10, "batch_size": "full", "lr": 0.05, "momentum": 0.0, **changes.pop("train", {})},
            "cohort": {"weighting": "uniform", **changes.pop("cohort", {})},
            **changes,
        }
        path = tmp_path / "quadratic.yaml"
        path.write_text(yaml.safe_dump(tree))
        return config.load(path)

    return make


@pytest.fixture
def play_quadratic(quadratic):
    """Return a function with the same arguments that runs the settings in this process: a `helpers.FinishedRun`."""

    def play(*arguments, **changes):
        settings = quadratic(*arguments, **changes)
        it = prepare(settings, build_data.build_partitioned_data(settings))
        it.reason = it.fed.run()
        return it

    return play


@pytest.fixture
def client_of():
    """Return a function (it, k) -> client k of a prepared experiment as hooks see it, with the initial model."""

    def make(it, k=0, round_=0):
        fed = it.fed
        fed.transport.broadcast(TRAIN, fed.server)
        it.experiment.model.load(it.w, it.b)
        it.experiment.net.module.train()
        downloads = fed.transport.send_downloads(round_, range(fed.trainer.data.clients), fed.states.owners, fed.server)
        client = fed.states.client_context(
            k, round_, fed.config.learning_rate(round_), fed.transport.broadcast_copy, downloads[k]
        )
        client.version_at_w0 = client.w._version
        return client

    return make


@pytest.fixture
def trained(client_of):
    """Return a function (it, k) -> (client, views of its upload) after one round of training."""

    def make(it, k=0, round_=0):
        packing, client = it.experiment.messages.upload_layout(round_).packing, client_of(it, k, round_)
        row = torch.zeros(packing.size, dtype=it.experiment.model.w.dtype)
        client.run_round(row)
        return client, packing.views(row)

    return make
