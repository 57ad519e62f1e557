"""Jobs in a real Slurm that run out of time, are preempted or cancelled, or lose their node, give the same bits."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, warm_env
from real_job import assert_same, rows, succeed

pytestmark = pytest.mark.xdist_group("slurm")
SCRIPTS = {
    "srun": ["--ntasks=3", "slurm/srun.sbatch"],
    "mpirun": ["--ntasks=3", "slurm/mpirun.sbatch"],
    "torchrun": ["--cpus-per-task=3", "slurm/torchrun.sbatch"],
}
GATED = """
import os, time
from pathlib import Path
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(64, 10), 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            time.sleep(float(os.environ.get("PACE_S", 0)))
            if "GATE" in os.environ and self.calls > 100:
                names = ("all", os.environ.get("SLURM_ARRAY_TASK_ID", "none"))
                while not any(Path(os.environ["GATE"], name).exists() for name in names):
                    time.sleep(0.01)
        return self.head(x.flatten(1))

def gated(input_shape, classes):
    return Gated()
"""  # trains for a few rounds and then waits, until its gate is opened: a job cannot end before a test has struck it
CONFIG = {
    "rounds": 20,
    "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 6, "alpha": 0.3}},
    "method": {"name": "scaffold"},
    "evaluate": {"protocol": ["global", "personal"]},
}


class Cluster:
    def __init__(self, env, folder):
        self.env, self.folder, self.config = env, folder, folder / "run.yaml"
        self.gate = folder / "gate"
        self.gate.mkdir()
        (folder / "gated.py").write_text(GATED)
        told = {**CONFIG, "model": {"name": f"{folder / 'gated.py'}:gated"}, "output": str(folder)}
        self.config.write_text(yaml.safe_dump(told))
        self.jobs = []

    def open(self, name="all"):
        """Let the jobs that wait at their gate continue, or one task of an array."""
        (self.gate / name).touch()

    def say(self, *words, check=True, **variables):
        return subprocess.run(
            words, env=self.env | variables, cwd=ROOT, check=check, capture_output=True, text=True
        ).stdout.strip()

    def whole(self, name, *words):
        succeed("run", self.config, f"name={name}", *words)
        return self.folder / name

    def submit(self, *words, pace=None):
        """Submit a job. It waits at its gate, or, if `pace` is set, takes that many seconds for each batch.

        words: the arguments of sbatch up to the settings.
        """
        *options, script = [word for word in words if "=" not in word or word.startswith("-")]
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        log = f"--output={self.folder}/%A-%a.log" if any("--array" in o for o in options) else None
        log = log or f"--output={self.folder}/%j.log"
        variables = {"PACE_S": pace} if pace else {"GATE": str(self.gate)}
        command = ["sbatch", "--parsable", log, *options, script, str(self.config), *settings]
        self.jobs.append(self.say(*command, **variables))
        return self.jobs[-1]

    def run(self, job):
        return self.folder / f"fedmpi-{job}"

    def log(self, job):
        path = self.folder / f"{job.replace('_', '-')}.log"
        return path.read_text() if path.exists() else ""

    def fact(self, job, name):
        return re.search(rf"\b{name}=(\S+)", self.say("scontrol", "show", "job", job))[1]

    def until(self, what, job, limit_s=600):
        began = time.monotonic()
        while not what():
            assert time.monotonic() < began + limit_s, f"{self.say('scontrol', 'show', 'job', job)}\n{self.log(job)}"
            time.sleep(0.2)

    def after_rounds(self, n, jobs, act):
        """Call act(job) for each of the jobs as soon as it has completed n rounds."""
        waiting = list(jobs)

        def all_done():
            for job in [job for job in waiting if len(rows(self.run(job))) >= n]:
                waiting.remove(job)
                act(job)
            return not waiting

        self.until(all_done, jobs[-1])

    def lose_the_node(self, jobs):
        """Kill the processes of the node, and make Slurm believe that it is down.

        Waits for their end; otherwise a restarted job would run next to itself.
        """
        self.until(lambda: not self.say("squeue", "--noheader", "--states=COMPLETING", "--format=%i"), jobs[0])
        ids = {self.fact(job, "JobId") for job in jobs}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words, told = (path / "cmdline").read_text(), (path / "environ").read_text()
            except OSError:
                continue
            if any(f"slurmstepd: [{each}." in words or f"SLURM_JOB_ID={each}\0" in told for each in ids):
                os.kill(int(path.name), signal.SIGKILL)
        node = self.say("sinfo", "--noheader", "--format=%n")
        self.say("scontrol", "update", f"node={node}", "state=down", "reason=test")
        while self.say("sinfo", "--noheader", "--format=%T") not in ("idle", "mixed", "allocated"):
            self.say("scontrol", "update", f"node={node}", "state=resume", check=False)  # unless it is back by itself
            time.sleep(0.2)

    def ended(self, job, limit_s=900):
        """Wait for the end of a job; return its state and the number of its restarts."""
        self.until(lambda: self.fact(job, "JobState") not in PENDING_COPIES, job, limit_s)
        return self.fact(job, "JobState"), int(self.fact(job, "Restarts"))


PENDING_COPIES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


@pytest.fixture
def cluster(slurm_env, tmp_path):
    it = Cluster(warm_env(slurm_env), tmp_path)
    yield it
    for job in it.jobs:
        it.say("scancel", job, check=False)


@pytest.mark.smoke
def test_a_warned_job_requeues_itself(cluster):
    """The signal that --signal would send is sent by hand to the batch shell.

    Each script asks Slurm to requeue its job.
    """
    whole = cluster.whole("whole")
    jobs = {kind: cluster.submit(*words) for kind, words in SCRIPTS.items()}
    cluster.after_rounds(2, [*jobs.values()], lambda job: cluster.say("scancel", "--signal=USR1", "--batch", job))
    cluster.open()
    for kind, job in jobs.items():
        assert cluster.ended(job) == ("COMPLETED", 1), cluster.log(job)
        assert cluster.log(job).count("is requeued and will resume") == 1, kind
        assert cluster.log(job).count("resuming after round") == 1
        assert "Traceback" not in cluster.log(job)
        assert_same(cluster.run(job), whole)
    assert not list(ROOT.glob(".fedmpi-*"))


def test_a_cancelled_job_stays_cancelled(cluster):
    jobs = [cluster.submit(*words) for words in SCRIPTS.values()]
    cluster.after_rounds(2, jobs, lambda job: cluster.say("scancel", job))
    cluster.open()
    for job in jobs:
        assert cluster.ended(job) == ("CANCELLED", 0), cluster.log(job)
        assert "is requeued" not in cluster.log(job)
    assert "submit it again to resume the run" in cluster.log(jobs[0])


@pytest.mark.soak
def test_a_job_that_is_requeued_within_a_round_resumes(cluster):
    """Like preemption: SIGTERM, later SIGKILL, and a restart that the job has not requested."""
    whole = cluster.whole("whole")
    jobs = [cluster.submit(*words) for words in SCRIPTS.values()]
    cluster.after_rounds(2, jobs, lambda job: cluster.say("scontrol", "requeue", job))
    cluster.open()
    for job in jobs:
        assert cluster.ended(job) == ("COMPLETED", 1), cluster.log(job)
        assert_same(cluster.run(job), whole)


def test_a_job_whose_node_fails_resumes(cluster):
    whole = cluster.whole("whole")
    job = cluster.submit(*SCRIPTS["srun"])
    cluster.after_rounds(2, [job], lambda job: None)
    cluster.open()
    cluster.lose_the_node([job])
    assert cluster.ended(job) == ("COMPLETED", 1), cluster.log(job)
    assert_same(cluster.run(job), whole)


@pytest.mark.soak
def test_a_job_that_completes_no_round_is_not_requeued_again(cluster):
    """The job's time is too short for a round: it is restarted once, not for ever."""
    job = cluster.submit(*SCRIPTS["srun"], pace="0.5")
    for restarts in (0, 1):
        cluster.until(lambda n=restarts: cluster.log(job).count("a client sends") > n, job)  # the round has begun
        cluster.say("scancel", "--signal=USR1", "--batch", job)
    assert cluster.ended(job) == ("FAILED", 1), cluster.log(job)
    assert cluster.fact(job, "ExitCode") == "75:0"
    assert "not requeued: no round was completed since job" in cluster.log(job)


@pytest.mark.soak
def test_jobs_resume_after_time_limits(cluster):
    """Two minutes are not enough for these rounds, nor for those of an array, whose tasks have different seeds."""
    limit = ["--time=2", "--signal=B:USR1@5"]
    jobs = {cluster.submit(*limit, *words, pace="0.5"): "seed=0" for words in SCRIPTS.values()}
    array = cluster.submit(*limit, "--array=0-2", *SCRIPTS["srun"], "seed=${env:SLURM_ARRAY_TASK_ID}", pace="0.5")
    jobs |= {f"{array}_{task}": f"seed={task}" for task in range(3)}
    wholes = {seed: cluster.whole(seed.replace("=", ""), seed) for seed in set(jobs.values())}
    for job, seed in jobs.items():
        state, restarts = cluster.ended(job, limit_s=900)
        assert state == "COMPLETED", cluster.log(job)
        assert restarts >= 1
        # Slurm may end the shell before it has said so.
        assert 1 <= cluster.log(job).count("is requeued and will resume") <= restarts
        assert_same(cluster.run(job), wholes[seed])
        assert yaml.safe_load((cluster.run(job) / "config.yaml").read_text())["seed"] == int(seed[5:])
