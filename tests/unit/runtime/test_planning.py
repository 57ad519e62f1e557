"""`fedmpi plan`: its bytes are those of a run where uploads travel whole; memory follows from shapes."""

import json
import os

import pytest
import torch
import yaml
from helpers import fedmpi, prepare, small_settings
from thread_ranks import play_in_threads

from fedmpi.common.host_memory import format_bytes
from fedmpi.doctor import plan
from fedmpi.engine.scheduler import RankSpeeds


def made(config, size):
    """(bytes sent, received) by rank 0 in each round of a run."""
    found = play_in_threads(size, {}, lambda seat: prepare(config, comm=seat), lambda it: (it.fed.run(), it)[1])
    for it in found.values():
        if isinstance(it, Exception):
            raise it
    return [(row["sent_bytes"], row["received_bytes"]) for row in found[0].rows if row["round"] >= 0]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("scaffold", {}),
        ("fedfomo", {}),  # downloads of single clients
        ("fedbabu", {}),  # parts of the model
        ("fedavg", {"server": {"rule": "median"}}),
        ("scaffold", {"comm": {"compression": "int8"}}),
        ("scaffold", {"cohort": {"fraction": 0.6}}),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_run(method, changes, monkeypatch):
    monkeypatch.setattr(RankSpeeds, "relative_costs", lambda *_: {})  # states that move are not counted
    config = small_settings(method, "mlp", rounds=3, **changes)
    found = plan._estimate_traffic(prepare(config).made, 3)
    rounds = made(config, 3)
    assert (found["round"]["down"], found["round"]["up"]) == tuple(map(max, zip(*rounds, strict=True)))
    assert (found["run"]["down"], found["run"]["up"]) == tuple(map(sum, zip(*rounds, strict=True)))


CONFIG = {
    "name": "run",
    "rounds": 3,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
    "model": {"name": "mlp", "hidden": [512, 1024]},
    "method": {"name": "scaffold"},
    "report": False,
}
D = 64 * 512 + 512 + 512 * 1024 + 1024 + 1024 * 10 + 10


MIB = 1 << 20


@pytest.fixture
def config(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(tmp_path / "runs")}))
    return tmp_path / "run.yaml"


def test_of_a_config(config, tmp_path):
    """Arithmetic of shapes; nothing is written. The memory of a real run: tests/jobs/test_plan_jobs.py."""
    done = fedmpi("plan", config, "-n", 3, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["run.yaml"]
    found = json.loads(done.stdout)
    root, trainer = found["memory"]["rank 0"], found["memory"]["a training rank"]
    row = 4 * (2 * D + 3)  # dw and the control variate's change
    assert trainer["rows"] == 2 * row  # two of the four clients each
    assert trainer["state"] == 2 * 4 * D
    assert root["process"] == trainer["process"] > 50 * MIB
    assert all(parts["all"] == sum(v for k, v in parts.items() if k != "all") for parts in (root, trainer))
    assert found["bytes"]["round"] == {"up": 4 * row, "down": 2 * 4 * (2 * D + 1)}
    assert (found["bytes"]["way"], root["rows"]) == ("streamed", 2 * row)


class OnGpu(torch.Tensor):
    """A tensor of which its place alone is asked."""

    is_cuda = True


@pytest.mark.parametrize(
    ("backend", "size", "on_gpu"),
    [("nccl", 3, {"model", "rows"}), ("gloo", 3, set()), ("auto", 1, {"model", "rows", "state", "step"})],
)
def test_memory_of_host_and_gpu_are_two_sums(backend, size, on_gpu, monkeypatch):
    """The parts are those of a CPU, each in the sum of where it lies; what rank 0 gathers does with its back end."""
    made = prepare(small_settings("scaffold", "mlp", comm={"backend": backend})).made
    needed = {"rank 0": 100 * MIB, "a training rank": 90 * MIB, "of which client state": 10 * MIB}
    monkeypatch.setattr(plan.memory, "estimate_memory", lambda *_: needed)
    monkeypatch.setattr(plan, "_read_peak_bytes", lambda: 700 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 * MIB)
    on_cpu = plan._estimate_memory(made, size)
    assert set(on_cpu) == {"memory"}
    made.model.w = made.model.w.as_subclass(OnGpu)
    found = plan._estimate_memory(made, size)
    host, gpu = found["memory"]["rank 0"], found["gpu_memory"]["rank 0"]
    assert set(gpu) == on_gpu | {"data", "all"}
    assert (host["process"], gpu["data"]) == (700 * MIB, 5 * MIB)
    assert gpu["all"] == sum(gpu[name] for name in {"data", *on_gpu})
    assert {name: gpu[name] for name in on_gpu} == {name: on_cpu["memory"]["rank 0"][name] for name in on_gpu}
    if size > 1:
        trainer = found["gpu_memory"]["a training rank"]
        assert set(trainer) - {"all", "rows"} == {"data", "model", "state", "step"}
        assert ("rows" in trainer) == (backend == "nccl")
    assert f"gpu       rank 0: about {format_bytes(gpu['all'])}" in "\n".join(plan.format_estimate(facts(**found)))


def test_a_step_keeps_what_the_backward_pass_needs():
    """Of a perceptron the inputs and the hidden units of each layer: 64 + h floats, and for the ReLUs h more."""
    net = prepare(small_settings("fedavg", "mlp")).made.net
    hidden = sum(layer.out_features for layer in net.module.modules() if isinstance(layer, torch.nn.Linear))
    assert 4 * 64 <= net.activation_bytes() <= 4 * (64 + 3 * hidden)


def facts(**more):
    memory = {"rank 0": {"process": 200 << 20, "rows": 1 << 30, "all": 1200 << 20}}
    kind = {"up": 2048, "down": 1024}
    traffic = {"way": "whole", "round": kind, "run": {"up": 4096 + 999 * 2048, "down": 1_024_000}}
    first = {"config": "x", "ranks": 4, "device": "cpu", "cuda": False}
    return {**first, "memory": memory, "bytes": traffic, "rounds": 1000, **more}


def test_the_text():
    text = "\n".join(plan.format_estimate(facts()))
    assert "rank 0: about 1.2 GiB" in text
    assert "2.0 KiB up, 1.0 KiB down per round" in text
    assert "2.0 MiB up, 1000.0 KiB down in 1000 rounds" in text
    assert "with a GPU" in "\n".join(plan.format_estimate(facts(cuda=True)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.source=mnist", "data.root=/nowhere"], "/nowhere"),
        (["method.mu=1"], "method.mu"),
        (["grid={seed: [0, 1]}"], "grid"),
    ],
)
def test_mistakes(config, words, said):
    done = fedmpi("plan", config, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_no_rounds(config):
    done = fedmpi("plan", config, "rounds=0")
    assert done.returncode == 0, done.stderr
    assert "0 B up, 0 B down in 0 rounds" in done.stdout
