"""`fedmpi plan` predicts the bytes of a run, and the memory from shapes."""

import json
import os

import pytest
import torch
import yaml
from helpers import fedmpi, prepare, small_settings
from thread_ranks import run_in_threads

from fedmpi.common.host_memory import format_bytes
from fedmpi.doctor import plan
from fedmpi.engine.scheduler import RankSpeeds


def count_traffic(config, size):
    """Return the bytes that rank 0 sent and received in each round of a run."""
    results = run_in_threads(size, {}, lambda seat: prepare(config, comm=seat), lambda it: (it.fed.run(), it)[1])
    for it in results.values():
        if isinstance(it, Exception):
            raise it
    return [(row["sent_bytes"], row["received_bytes"]) for row in results[0].rows if row["round"] >= 0]


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
def test_planned_bytes_equal_those_of_a_run(method, changes, monkeypatch):
    monkeypatch.setattr(RankSpeeds, "relative_costs", lambda *_: {})  # states that move are not counted
    config = small_settings(method, "mlp", rounds=3, **changes)
    results = plan._estimate_traffic(prepare(config).experiment, 3)
    rounds = count_traffic(config, 3)
    assert (results["round"]["down"], results["round"]["up"]) == tuple(map(max, zip(*rounds, strict=True)))
    assert (results["run"]["down"], results["run"]["up"]) == tuple(map(sum, zip(*rounds, strict=True)))


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


def test_a_config_is_valid(config, tmp_path):
    """The memory is computed from shapes; nothing is written. tests/jobs/test_plan_jobs.py measures a real run."""
    result = fedmpi("plan", config, "-n", 3, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert os.listdir(tmp_path) == ["run.yaml"]
    results = json.loads(result.stdout)
    root, trainer = results["memory"]["rank 0"], results["memory"]["a training rank"]
    row = 4 * (2 * D + 3)  # dw and the control variate's change
    assert trainer["rows"] == 2 * row  # two of the four clients each
    assert trainer["state"] == 2 * 4 * D
    assert root["process"] == trainer["process"] > 50 * MIB
    assert all(parts["all"] == sum(v for k, v in parts.items() if k != "all") for parts in (root, trainer))
    assert results["bytes"]["round"] == {"up": 4 * row, "down": 2 * 4 * (2 * D + 1)}
    assert (results["bytes"]["way"], root["rows"]) == ("streamed", 2 * row)


class OnGpu(torch.Tensor):
    """A fake tensor that only has a device."""

    is_cuda = True


@pytest.mark.parametrize(
    ("backend", "size", "on_gpu"),
    [("nccl", 3, {"model", "rows"}), ("gloo", 3, set()), ("auto", 1, {"model", "rows", "state", "step"})],
)
def test_host_and_gpu_memory_are_separate_sums(backend, size, on_gpu, monkeypatch):
    """Each part counts as host or GPU memory by where it is stored; uploads on rank 0 depend on the backend."""
    made = prepare(small_settings("scaffold", "mlp", comm={"backend": backend})).experiment
    needed = {"rank 0": 100 * MIB, "a training rank": 90 * MIB, "of which client state": 10 * MIB}
    monkeypatch.setattr(plan.memory, "estimate_memory", lambda *_: needed)
    monkeypatch.setattr(plan, "_read_peak_bytes", lambda: 700 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 * MIB)
    on_cpu = plan._estimate_memory(made, size)
    assert set(on_cpu) == {"memory"}
    made.model.w = made.model.w.as_subclass(OnGpu)
    results = plan._estimate_memory(made, size)
    host, gpu = results["memory"]["rank 0"], results["gpu_memory"]["rank 0"]
    assert set(gpu) == on_gpu | {"data", "all"}
    assert (host["process"], gpu["data"]) == (700 * MIB, 5 * MIB)
    assert gpu["all"] == sum(gpu[name] for name in {"data", *on_gpu})
    assert {name: gpu[name] for name in on_gpu} == {name: on_cpu["memory"]["rank 0"][name] for name in on_gpu}
    if size > 1:
        trainer = results["gpu_memory"]["a training rank"]
        assert set(trainer) - {"all", "rows"} == {"data", "model", "state", "step"}
        assert ("rows" in trainer) == (backend == "nccl")
    assert f"gpu       rank 0: about {format_bytes(gpu['all'])}" in "\n".join(plan.format_estimate(facts(**results)))


def test_activation_memory_of_a_step():
    """A perceptron stores the inputs and hidden units of each layer: 64 + h floats, and h more for the ReLUs."""
    net = prepare(small_settings("fedavg", "mlp")).experiment.net
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
    ("words", "output"),
    [
        (["data.source=mnist", "data.root=/nowhere"], "/nowhere"),
        (["method.mu=1"], "method.mu"),
        (["grid={seed: [0, 1]}"], "grid"),
    ],
)
def test_mistakes(config, words, output):
    result = fedmpi("plan", config, *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert output in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_without_rounds_is_not_verified(config):
    result = fedmpi("plan", config, "rounds=0")
    assert result.returncode == 0, result.stderr
    assert "0 B up, 0 B down in 0 rounds" in result.stdout
