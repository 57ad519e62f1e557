"""`fedmpi plan`: its bytes are those of a run, whatever travels how; memory follows from shapes, seconds from steps."""

import json
import os

import pytest
import torch
import yaml
from helpers import CPU, fedmpi, play, prepare, small_settings
from thread_ranks import play_in_threads

from fedmpi.comm import Job
from fedmpi.common.host_memory import size_text
from fedmpi.doctor.planning import importing, measuring, plan, plan_text, rehearsal
from fedmpi.engine.scheduler import ClientScheduler
from fedmpi.engine.travel import cuts
from fedmpi.flat import linear
from fedmpi.methods import registry

THREADED = sorted(set(registry) - {"fedsr"})  # it draws from torch's generator, which ranks as threads share
RULES = ("geometric_median", "harmonize", "krum", "median", "principal", "trimmed_mean")


@pytest.fixture
def small_blocks(monkeypatch):
    """Slots of a tiny model are large, and travel in many pieces."""
    monkeypatch.setattr(linear, "CHUNK", 64)
    monkeypatch.setattr(linear, "BLOCK", 2)
    monkeypatch.setattr(cuts, "PIECE", 64)


def told(config, size):
    """(sent, received) of each round, as the rehearsal has them."""
    fed = prepare(config, comm=rehearsal.Nobody(size, CPU)).fed
    sent, received = rehearsal.moved(fed, fed.worker.model.w.element_size())
    found = rehearsal.kinds(fed)
    return {r.first: (r.sent, r.received) for r in found}, (
        sent + sum(r.sent * r.count for r in found),
        received + sum(r.received * r.count for r in found),
    )


def made(config, size):
    """The same of a run."""
    if size == 1:
        rows = play(config).rows
    else:
        found = play_in_threads(size, {}, lambda seat: prepare(config, comm=seat), lambda it: (it.fed.run(), it)[1])
        for it in found.values():
            if isinstance(it, Exception):
                raise it
        rows = found[0].rows
    each = [(row["sent_bytes"], row["received_bytes"]) for row in rows if row["round"] >= 0]
    return each, tuple(map(sum, zip(*each, strict=True)))


def agree(config, size):
    kinds, whole = told(config, size)
    each, all_ = made(config, size)
    assert whole == all_
    if not config.server.trains:  # there states that move are counted apart
        assert {t: each[t] for t in kinds} == kinds


@pytest.mark.parametrize("placement", ["root", "sharded"])
@pytest.mark.parametrize("method", THREADED)
def test_bytes_of_every_method(method, placement, small_blocks):
    agree(small_settings(method, "mlp", rounds=2, server={"placement": placement}), 3)


@pytest.mark.parametrize("rule", RULES)
def test_bytes_of_what_a_rule_asks_the_holders(rule, small_blocks):
    agree(small_settings("fedavg", "mlp", rounds=2, server={"placement": "sharded", "rule": rule}), 4)


@pytest.mark.parametrize("wire", [{"up": "int8", "down": "int8"}, {"up": "topk"}, "bf16", {"down": "fp16"}], ids=str)
def test_bytes_in_formats(wire):
    agree(small_settings("scaffold", "mlp", rounds=3, comm={"wire": wire}), 3)


@pytest.mark.parametrize("method", ["fedatom_personal", "fedfomo", "scaffold", "fedrep"])
@pytest.mark.parametrize(("size", "server"), [(1, {}), (3, {"trains": True}), (3, {})])
def test_bytes_of_rounds_that_differ(method, size, server, monkeypatch):
    """Of rounds in which parts of the model travel, downloads for single clients, and states that follow theirs; these
    where clients are placed by their samples, as they are before anything was measured."""
    monkeypatch.setattr(ClientScheduler, "consider_rebalancing", lambda self, t: None)
    agree(small_settings(method, "mlp", rounds=6, server=server, cohort={"fraction": 0.6}), size)
    agree(small_settings(method, "mlp", rounds=6, server=server, cohort={"fraction": 0.6, "draw": "cycles"}), size)


@pytest.mark.parametrize("steps", [None, 40])
def test_a_client_takes_a_fixed_time_and_one_for_each_sample_or_step(steps, monkeypatch):
    asked = []

    def takes(fed, clients, x):
        asked.append(x)
        return 0.3 + 0.02 * x

    monkeypatch.setattr(measuring, "_round", takes)
    train = {"steps": steps, "epochs": None} if steps else {"batch_size": 10}
    fed = prepare(small_settings("fedavg", train=train), comm=rehearsal.Nobody(3, CPU)).fed
    found = measuring.client(fed)
    assert (found.a, found.b, found.error) == (pytest.approx(0.3), pytest.approx(0.02), 0)
    assert found.seconds(50, steps) == pytest.approx(0.3 + 0.02 * (steps or 50))
    most = steps or max(fed.worker.sizes)
    assert 1 <= min(asked) < max(asked) <= most


CONFIG = {
    "name": "run",
    "rounds": 3,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
    "model": {"name": "mlp", "hidden": [512, 1024]},
    "method": {"name": "scaffold"},
    "report": False,
}
PARTS = ("data", "model", "rows", "state", "step")
D = 64 * 512 + 512 + 512 * 1024 + 1024 + 1024 * 10 + 10


MIB = 1 << 20


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "measure_import", lambda: (200 * MIB, 200 * MIB))
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
    assert found["uploads"] == "whole" or root["rows"] <= 2 * row
    assert trainer["rows"] == 2 * row  # two of the four clients each
    assert trainer["state"] == 2 * 4 * D
    assert root["data"] == trainer["data"] >= 1797 * (64 * 4 + 8)
    assert all(parts["all"] >= sum(v for k, v in parts.items() if k != "all") for parts in (root, trainer))
    assert found["bytes"]["round"] == {"up": 4 * row, "down": 2 * 4 * (2 * D + 1)}
    assert found["seconds"]["run"] == pytest.approx(3 * found["seconds"]["round"])
    assert 0 < found["seconds"]["error"] < 2
    assert found["sbatch"].endswith(f"slurm/srun.sbatch {config}")


def test_libraries_take_what_importing_them_takes_on_this_machine(config, monkeypatch):
    """An import that is larger than this process, as where it was forked; one that takes more as the process ends."""

    monkeypatch.setattr(plan, "_held", lambda: 500 * MIB)

    def planned(imported, ended):
        monkeypatch.setattr(importing, "measure_import", lambda: (imported, ended))
        return json.loads(fedmpi("plan", config, "--json").stdout)["memory"]["rank 0"]

    large = planned(400 * MIB, 70_000 * MIB)
    assert large["libraries"] == 500 * MIB + 69_600 * MIB - large["data"] - 4 * D
    assert large["all"] == sum(size for name, size in large.items() if name != "all")
    assert planned(100 * MIB, 100 * MIB)["libraries"] == 500 * MIB - large["data"] - 4 * D
    assert planned(900 * MIB, 900 * MIB)["libraries"] == 900 * MIB


class OnGpu(torch.Tensor):
    """A tensor of which its place alone is asked."""

    is_cuda = True


@pytest.mark.parametrize(
    ("backend", "size", "on_gpu"),
    [("nccl", 3, {"data", "model", "rows", "step"}), ("gloo", 3, {"data", "step"}), ("auto", 1, set(PARTS))],
)
def test_memory_of_host_and_gpu_are_two_sums(backend, size, on_gpu):
    """The parts are those of a CPU, each in the sum of where it lies; what rank 0 gathers does with its back end."""
    made = prepare(small_settings("scaffold", "mlp", comm={"backend": backend})).made
    job, mib = Job("mpi", 0, size, 0, size, "here"), 1 << 20
    needed = {"rank 0": 100 * mib, "a training rank": 90 * mib, "of which client state": 10 * mib}
    needed["of which on the host"] = 30 * mib * (backend == "gloo")
    asked = (made, job, needed, 500 * mib, (7 * mib, 40 * mib), 700 * mib)
    on_cpu = plan._memory(*asked)
    assert set(on_cpu) == {"memory"}
    made.model.w = made.model.w.as_subclass(OnGpu)
    found = plan._memory(*asked)
    host, gpu = found["memory"]["rank 0"], found["gpu_memory"]["rank 0"]
    assert set(gpu) == on_gpu | {"all"}
    assert host["libraries"] == 500 * mib
    assert host["step"] == 7 * mib
    assert host["all"] == 700 * mib  # reading the data
    assert gpu["all"] == sum(gpu[name] for name in on_gpu)
    for name in on_gpu - {"step"}:
        assert gpu[name] == on_cpu["memory"]["rank 0"][name]
    if size > 1:
        trainer = found["gpu_memory"]["a training rank"]
        assert set(trainer) - {"all", "rows"} == {"data", "model", "state", "step"}
        assert ("rows" in trainer) == (backend == "nccl")
    text = "\n".join(plan_text.lines(facts(**found), ["run.yaml"]))
    assert f"gpu       rank 0: about {size_text(gpu['all'])}" in text
    assert "--mem-per-cpu=448M" in plan_text.sbatch(facts(**found), ["run.yaml"])  # 1.25 x 700 MiB for two cores


def test_ranks_on_gpus_do_not_wait_for_each_others_cores(config, monkeypatch):
    monkeypatch.setattr(plan.machine, "cores", lambda: 1)

    def planned(*words):
        done = fedmpi("plan", config, "-n", 5, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "ranks share the cores of this machine: training takes 4 x as long" in planned()
    said = planned("compute.device=cuda")
    assert "share the cores" not in said
    assert "for seconds and memory" in said


def facts(**more):
    memory = {"rank 0": {"libraries": 200 << 20, "rows": 1 << 30, "all": 1200 << 20}}
    seconds = {"round": 2.0, "error": 0.3, "run": 2000.0, "start": 10.0, "training": 1.5, "evaluation": 0.0}
    seconds |= {"server": 0.4, "transfer": 0.1, "client_fixed": 0.1, "client_more": 0.002, "in_steps": False}
    kind = {"up": 2048, "down": 1024}
    kinds = [{"first": 0, "rounds": 1, "up": 4096, "down": 1024}, {"first": 1, "rounds": 999, **kind}]
    traffic = {"round": kind, "run": {"up": 4096 + 999 * 2048, "down": 1_024_000}, "kinds": kinds}
    first = {"config": "x", "ranks": 4, "hosts": 1, "device": "cpu", "threads": 2, "cuda": False, "uploads": "whole"}
    return {**first, "memory": memory, "bytes": traffic, "seconds": seconds | {"crowded": 1.0}, "rounds": 1000, **more}


def test_the_text():
    text = "\n".join(plan_text.lines(facts(), ["run.yaml"]))
    for said in (
        "rank 0: about 1.2 GiB", "2.0 KiB up, 1.0 KiB down a round", "4.0 KiB up, 1.0 KiB down in 1 round such as 1",
        "2 s a round (1.4 s to 2.6 s): training 1.5 s, server 0.4 s, transfer 0.1 s", "0.1 s and 2 ms a sample",
    ):  # fmt: skip
        assert said in text, text
    assert "assumed" not in text
    assert "10 Gbit/s" in "\n".join(plan_text.lines(facts(hosts=2), ["run.yaml"]))
    assert "with a GPU" in "\n".join(plan_text.lines(facts(cuda=True), ["run.yaml"]))


def test_gpus_are_asked_for_by_node():
    """By task each would be hidden from the others: tests/jobs/test_slurm_gpus.py."""
    said = plan_text.sbatch(facts(ranks=5, hosts=2, cuda=True), ["run.yaml"])
    assert "--ntasks=5 " in said
    assert "--nodes=2 --ntasks-per-node=3 --gpus-per-node=3 " in said
    assert "gpu" not in plan_text.sbatch(facts(), ["run.yaml"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "2", "--hosts", "3"], "--hosts: 3 hosts for 2 rank(s)"),
        (["data.source=mnist", "data.root=/nowhere"], "/nowhere"),
        (["method.mu=1"], "method.mu"),
        (["over={seed: [0, 1]}"], "over"),
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
