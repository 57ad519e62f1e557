"""A sweep as an array of a real Slurm gives the same bits if tasks are requeued or cancelled, or lose their node."""

import json
import re
import time

import pytest
import yaml
from helpers import fedmpi, warm_env
from real_job import succeed
from test_slurm_requeue import CONFIG, PENDING_COPIES, Cluster

pytestmark = pytest.mark.xdist_group("slurm")
NAMES = [f"{method}_seed-{seed}" for method in ("fedavg", "scaffold") for seed in (0, 1)]


def hashes(folder):
    return {
        name: [json.loads(line)["sha256"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in NAMES
    }


@pytest.fixture
def sweep(slurm_env, tmp_path):
    cluster = Cluster(warm_env(slurm_env), tmp_path)
    yield Sweep(cluster)
    for job in cluster.jobs:
        cluster.say("scancel", job, check=False)


class Sweep:
    def __init__(self, cluster):
        self.cluster, self.place, self.file = cluster, cluster.folder / "many", cluster.folder / "sweep.yaml"
        model = {"name": f"{cluster.folder / 'gated.py'}:gated"}
        grid = {"method": {"FedAvg": {"method": {"name": "fedavg"}}, "SCAFFOLD": {}}, "seed": [0, 1]}
        told = {**CONFIG, "model": model, "output": str(cluster.folder), "name": "many", "grid": grid}
        self.file.write_text(yaml.safe_dump(told))

    def submit(self, *words):
        """Submit the sweep.

        Return the array's job, the final job, and the number of runs, which wait at their gates.
        """
        env = self.cluster.env | {"GATE": str(self.cluster.gate)}
        done = succeed("sweep", self.file, "--sbatch", *words, env=env)
        found = re.search(r"(\d+) runs? in job (\d+); job (\d+) fails", done.stdout)
        self.cluster.jobs += found.groups()[1:]
        return found[2], found[3], int(found[1])

    def tasks(self, job):
        """Return {name: the task that runs it}."""
        for line in (self.place / "slurm" / "submitted.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if entry["job"] == job:
                return {name: f"{job}_{at}" for at, name in enumerate(entry["names"])}

    def rounds(self, name):
        path = self.place / name / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def reason(self, name):
        path = self.place / name / "summary.json"
        return json.loads(path.read_text())["exit_reason"] if path.exists() else None

    def after_rounds(self, n, names, job):
        self.cluster.until(lambda: all(self.rounds(name) >= n for name in names), job)

    def log(self, task):
        path = self.place / "slurm" / f"{task}.log"
        return path.read_text() if path.exists() else ""

    def ended(self, job):
        """Return how the job at the end of an array has ended; requeued tasks do not wait for two minutes.

        Slurm kills tasks that restart within the second in which they ended: "job credential revoked".
        """

        def over():
            waiting = self.cluster.say("squeue", "--noheader", "--array", "--me", "--format=%i %r")
            for task, why in (line.split(maxsplit=1) for line in waiting.splitlines()):
                if why == "BeginTime":
                    time.sleep(2)
                    self.cluster.say("scontrol", "update", f"job={task}", "StartTime=now", check=False)
            return self.cluster.fact(job, "JobState") not in PENDING_COPIES

        self.cluster.until(over, job)
        return self.cluster.fact(job, "JobState"), self.cluster.fact(job, "ExitCode")


def test_a_sweep_killed_and_resumed_twice_has_the_same_bits(sweep):
    cluster = sweep.cluster
    succeed("sweep", sweep.file, "name=whole")
    expected = hashes(cluster.folder / "whole")

    job, end, runs = sweep.submit("--max-running", "4", "--option=--time=10")
    assert runs == 4
    task = sweep.tasks(job)
    sweep.after_rounds(2, NAMES, job)
    again = fedmpi("sweep", sweep.file, "--sbatch", env=cluster.env)
    assert again.stdout == "nothing to submit: 4 runs in the queue, all others are finished\n"
    status = fedmpi("sweep", sweep.file, "--status", env=cluster.env).stdout
    assert f"rounds, job {task[NAMES[0]]} RUNNING" in status
    assert "0 of 4 runs done" in status
    cluster.say("scontrol", "requeue", task[NAMES[0]])  # as preemption does
    cluster.say("scancel", task[NAMES[1]])
    cluster.say("scancel", "--signal=USR1", task[NAMES[2]])  # as a time limit does
    for name in NAMES[:3]:
        cluster.open(task[name].rpartition("_")[2])
    cluster.until(lambda: "was requeued and will continue" in sweep.log(task[NAMES[2]]), job)
    cluster.until(lambda: sweep.reason(NAMES[1]) == "signal 15", job)  # its log may have ended before, with srun
    cluster.lose_the_node([task[NAMES[3]]])
    cluster.open("3")
    state, code = sweep.ended(end)
    said = sweep.log(f"end-{end}")
    assert (state, code) == ("FAILED", "2:0"), said
    assert re.search(rf"{NAMES[1]}: stopped, \d+ of 20 rounds: signal 15", said)
    assert "1 run missing; to train them: fedmpi sweep" in said
    for name in (NAMES[0], NAMES[2], NAMES[3]):
        assert cluster.fact(task[name], "JobState") == "COMPLETED", sweep.log(task[name])
        assert int(cluster.fact(task[name], "Restarts")) == 1, name
        assert sweep.log(task[name]).count("resuming after round") == 1, sweep.log(task[name])
    assert "was requeued and will continue" in sweep.log(task[NAMES[2]])

    for path in cluster.gate.iterdir():
        path.unlink()
    job, end, runs = sweep.submit("--resume")  # once more: only what is missing; its node is lost, too
    assert runs == 1
    ((name, own),) = sweep.tasks(job).items()
    assert name == NAMES[1]
    begun = sweep.rounds(name)
    sweep.after_rounds(begun + 1, [name], job)
    cluster.lose_the_node([own])
    cluster.open()
    assert sweep.ended(end) == ("COMPLETED", "0:0"), sweep.log(f"end-{end}")
    assert hashes(sweep.place) == expected
    table = fedmpi("table", sweep.file)
    assert "missing" not in table.stdout
    assert "SCAFFOLD" in table.stdout
    assert fedmpi("sweep", sweep.file, "--sbatch", env=cluster.env).stdout.startswith("nothing to submit")


def test_tuning_runs_end_before_the_final_runs_start(sweep):
    """The tuning runs form one array, and the final runs another array that starts after it."""
    cluster = sweep.cluster
    words = ["rounds=2", "data.validation=0.2", "tune={grid: {train.lr: [0.001, 0.1]}, by: accuracy, using: {seed: 0}}"]
    done = fedmpi("sweep", sweep.file, "--sbatch", *words, env=cluster.env)
    first, second, end = re.search(r"6 runs in job (\d+), (\d+); job (\d+) fails", done.stdout).groups()
    cluster.jobs += [first, second, end]
    assert sweep.ended(end) == ("COMPLETED", "0:0"), sweep.log(f"end-{end}")
    found = fedmpi("sweep", sweep.file, *words)
    assert "4 tuning runs in" in found.stdout
    assert "2 final runs" in found.stdout
    assert found.stdout.count("of them done") == 2
    assert len(json.loads((sweep.place / "tuning.json").read_text())["cells"]) == 2


def test_an_error_of_sbatch_is_one_message(sweep):
    cluster = sweep.cluster
    done = fedmpi("sweep", sweep.file, "--sbatch", "--option=--partition=none", env=cluster.env)
    assert (done.returncode, done.stderr.count("\n")) == (2, done.stderr.count("sbatch: error"))
    assert "--sbatch: sbatch failed: sbatch: error: invalid partition specified: none" in done.stderr
