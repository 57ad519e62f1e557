"""Adapters (model.lora) have the same bits on any ranks, with a sharded server, resumed, and after a rank failure."""

import importlib.util
import subprocess

import pytest
from helpers import digest, launcher, warm_env
from real_job import rows, succeed
from safetensors.torch import load_file

from fedmpi.aggregation.lora import RULES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install 'fedmpi[lora]'")
LIMIT_S = 600  # every rank imports PEFT and transformers, which takes long on a busy machine
CONFIG = """
name: adapted
rounds: 3
data: {source: digits, partition: {scheme: dirichlet, clients: 4, alpha: 0.3}}
model: {name: mlp, hidden: [30, 20], lora: {r: 3, alpha: 6}}
method: {name: fedavg}
train: {batch_size: 100, lr: 0.1}
cohort: {size: 3}
"""


@pytest.fixture
def train(tmp_path):
    """Return a function that runs or resumes the job, and returns the hashes of all rounds and of the final model."""
    (tmp_path / "run.yaml").write_text(CONFIG)

    def train(name, *overrides, command=(), **start):
        words = "run", str(tmp_path / "run.yaml"), f"output={tmp_path}", f"name={name}", *overrides
        if command:
            subprocess.run([*command, "fedmpi", *words], env=warm_env(), capture_output=True, timeout=LIMIT_S)
        else:
            succeed(*words, limit_s=LIMIT_S, **start)
        folder = tmp_path / name
        model = {key: digest(x) for key, x in load_file(folder / "model.safetensors").items()}
        return [(row["sha256"], row["lora_distance"]) for row in rows(folder)], model

    return train


@pytest.mark.parametrize("rule", RULES)
def test_the_bits_are_those_of_one_process(train, rule):
    alone = train("alone", f"server.lora={rule}")
    assert train("three", f"server.lora={rule}", kind="mpirun", size=3) == alone
    sharded = train("five", f"server.lora={rule}", "server.placement=sharded", kind="torchrun", size=5)
    assert sharded == alone
    train("resumed", f"server.lora={rule}", "rounds=2")
    again = "rounds=3", "checkpoint.resume=must"
    assert train("resumed", f"server.lora={rule}", *again, kind="mpirun", size=3) == alone


DYING = """
import os
from torch import nn

class Dying(nn.Sequential):
    passes = 0
    def forward(self, x):
        Dying.passes += self.training
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "2" and Dying.passes == 10:
            os._exit(9)  # in the third round
        return super().forward(x)

def dying(input_shape, classes):
    return Dying(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, classes))
"""


@pytest.mark.parametrize("rule", ["exact", "stack"])
def test_a_round_that_is_repeated_adds_a_change_of_the_base_once(train, tmp_path, rule):
    (tmp_path / "dying.py").write_text(DYING)
    given = f"server.lora={rule}", f"model={{name: '{tmp_path}/dying.py:dying', lora: {{r: 3}}}}", "rounds=5"
    # Rank 2 trains one client in every round, in four steps, however fast the ranks are.
    given += "cohort.placement=pinned", "cohort.size=4", "data.partition={scheme: iid, clients: 4}"
    alone, (mpirun, *options) = train("alone", *given), launcher("mpirun", 4)
    lossy = train("lossy", *given, "faults.on_lost_rank=redo", command=[mpirun, "--with-ft", "ulfm", *options])
    assert [row["round"] for row in rows(tmp_path / "lossy", "faults.jsonl")] == [2]
    assert lossy == alone
