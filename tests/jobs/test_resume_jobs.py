"""Real jobs that are killed, stopped or preempted, and resumed elsewhere, give the bits of an uninterrupted run.

Also: what a resume rejects, and that no other job changes a run directory that is in use.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import clean_env, fedmpi
from real_job import (
    LIMIT_S,
    PARTIAL,
    RESUMABLE,
    Job,
    assert_same,
    processes,
    rows,
    run_undisturbed,
    succeed,
    wait_until,
)
from safetensors.torch import save_file

ULFM = bool(shutil.which("ompi_info", path=clean_env()["PATH"]))  # Open MPI's


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.yaml").write_text(yaml.safe_dump({**PARTIAL, "rounds": 24, "output": str(folder)}))
    succeed("run", folder / "run.yaml", "name=whole")
    return folder


def test_a_run_killed_twice_and_resumed_on_other_ranks_has_the_same_bits(start):
    job = start("mpirun", 3, checkpoint={"resume": "auto"}, **PARTIAL)
    job.wait_for_rounds(5)
    job.kill()
    before = len(job.rows())
    job = start("torchrun", 2, folder=job.folder, checkpoint={"resume": "auto"}, **PARTIAL)
    job.wait_for_rounds(before + 4)
    job.kill()
    rounds = len(job.rows()) + 3
    done = succeed("resume", job.run, "comm.backend=mpi", f"rounds={rounds}", kind="mpirun", size=4)
    assert "resuming after round" in done.stdout
    assert_same(job.run, run_undisturbed(job, rounds))


@pytest.mark.smoke
@pytest.mark.skipif(not ULFM, reason="no Open MPI 5")
def test_a_job_continues_without_a_killed_rank(start):
    """Uses the command in docs/reliability.md; the exit code is rank 0's, and the replay has the same bits."""
    job = start("script mpirun", 4, env={"FEDMPI_ULFM": "1"}, faults={"on_lost_rank": "drop"}, **PARTIAL)
    job.wait_for_rounds(3)
    os.kill(job.rank(2), signal.SIGKILL)
    job.wait_for(lambda: re.search("without rank 2|rank 2 .* lost", job.text()))
    job.wait_for_rounds(len(job.rows()) + 3)
    job.process.terminate()
    assert job.wait() == RESUMABLE, job.text()
    assert re.search(r"lost ranks: 2 \(round \d+\)", job.text())
    assert list(job.summary()["lost_ranks"]) == ["2"]
    done = succeed("replay", job.run)
    assert f"{len(job.rows())} rounds of {job.run}: the same bits in" in done.stdout


def test_a_replay_stops_where_its_run_stopped(place):
    """A run of 24 rounds was stopped after five; its learning rates are those of 24 rounds."""
    folder = place / "short"
    shutil.copytree(place / "whole", folder)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(place / "whole")[:5]))
    done = succeed("replay", folder)
    assert f"5 rounds of {folder}: the same bits in" in done.stdout
    assert [row["round"] for row in rows(place / "short-replay")] == [0, 1, 2, 3, 4]
    assert json.loads((place / "short-replay" / "summary.json").read_text())["exit_reason"] == "stopped"


@pytest.mark.parametrize(
    ("kind", "size", "number", "every"),
    [("alone", 1, signal.SIGTERM, 1), pytest.param("mpirun", 3, signal.SIGUSR1, 50, marks=pytest.mark.smoke)],
)
def test_a_stopped_run_can_be_resumed(start, kind, size, number, every):
    """Signals are repeated, as by Slurm at a time limit.

    The exit code is 75, the run prints the command that resumes it, and no complete round is lost.
    """
    job = start(kind, size, cold=False, checkpoint={"every": every}, **PARTIAL)
    job.wait_for_rounds(3)
    job.process.send_signal(number)
    job.process.send_signal(number)
    assert job.wait() == RESUMABLE, job.text()
    assert f"fedmpi resume {job.run}" in job.text()
    job.assert_stopped(number)
    complete = job.rows()[-1]["round"]
    done = succeed("resume", job.run, f"rounds={complete + 4}")
    assert f"resuming after round {complete} (" in done.stdout
    assert_same(job.run, run_undisturbed(job, complete + 4))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.lr=0.5"], r"cannot be resumed, as the experiment has changed: train.lr is 0.5, was 0.01"),
        (
            ["comm.compression=bf16"],
            "cannot be resumed, as the experiment has changed: comm.compression is bf16, was fp32",
        ),
        (["seed=3"], "seed is 3, was 0"),
        (["data.partition.alpha=5"], "data.partition.alpha is 5, was 0.3; partition changed"),
    ],
)
def test_resuming_with_other_settings_is_rejected(place, words, said):
    done = fedmpi("resume", place / "whole", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("error:") == 1
    assert len(rows(place / "whole")) == 24


PLUGIN = """
from torch import nn

def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


def test_changed_plug_ins_and_data_are_named(tmp_path):
    """Changed plug-ins are also copied. A function that creates one of torch's modules counts as a plug-in, too."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("from fedmpi.data.partitions.random_partitions import iid as deal\n")
    table = {"x": np.random.default_rng(0).normal(size=(90, 64)), "y": np.arange(90) % 3}
    np.savez(tmp_path / "a.npz", **table)
    deal = {"scheme": f"{tmp_path}/other/mine.py:deal", "clients": 3}
    tree = {
        "name": "own",
        "rounds": 1,
        "output": str(tmp_path),
        "data": {"source": "npz", "path": "a.npz", "root": str(tmp_path), "partition": deal},
        "model": {"name": f"{tmp_path}/mine.py:net"},
        "method": {"name": "fedavg"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = succeed("run", tmp_path / "run.yaml")
    run = tmp_path / "own"
    told = {each["copy"]: each for each in json.loads((run / "environment.json").read_text())["plugins"]}
    assert sorted(told) == ["plugins/mine-2.py", "plugins/mine.py"]
    for copy, each in told.items():
        content = (run / copy).read_bytes()
        assert Path(each["file"]).read_bytes() == content
        assert hashlib.sha256(content).hexdigest() == each["sha256"]
    (tmp_path / "mine.py").write_text(PLUGIN + "# edited\n")
    np.savez(tmp_path / "a.npz", **{**table, "x": table["x"] + 1})
    done = fedmpi("resume", run, "rounds=2")
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    for said in ("plug-in mine-2.py changed (the run used", f"training data changed (npz, in {tmp_path})", "=accept"):
        assert said in done.stderr
    assert "mine.py" not in done.stderr
    done = succeed("resume", run, "rounds=2", "checkpoint.changes=accept")
    assert len(rows(run)) == 2
    assert (run / "plugins" / "mine-2.py").read_text().endswith("# edited\n")


def test_accepted_changes_are_recorded_and_must_be_accepted_again(place):
    assert fedmpi("run", place / "run.yaml", "name=changed", "rounds=2").returncode == 0
    done = succeed("resume", place / "changed", "rounds=3", "train.lr=0.3", "checkpoint.changes=accept")
    said = "accepted: train.lr is 0.3, was 0.01; from round 2 on"
    assert said in done.stdout
    assert said in (place / "changed" / "log.txt").read_text()
    assert yaml.safe_load((place / "changed" / "config.yaml").read_text())["checkpoint"]["changes"] == "refuse"
    done = fedmpi("resume", place / "changed", "rounds=4", "train.lr=0.9")
    assert done.returncode == 2
    assert "train.lr is 0.9, was 0.3" in done.stderr
    assert fedmpi("resume", place / "changed", "rounds=4").returncode == 0


def test_resume_rejects_name_and_output(place):
    for command, word in (("resume", "name=zz"), ("resume", "output=zz"), ("replay", "name=zz")):
        done = fedmpi(command, place / "whole", word)
        said = f"error: {word} is not allowed here, because {place / 'whole'} determines the run; remove this override"
        assert (done.returncode, said in done.stderr) == (2, True)


# ---- preempted again and again ----
def preempt(folder, times, seed):
    """Stop an endless run `times` times, each time at a random moment after a random number of rounds; then let it end.

    Returns the job, and the number of rounds at its end.
    """
    chance, job = random.Random(seed), None
    for _ in range(times):
        if job is None:
            job = Job(folder, "script mpirun", 3, checkpoint={"resume": "auto"}, **PARTIAL)
        else:
            job.start()
        # One in four in the start, before any round; the others some rounds later, anywhere in one.
        more = 0 if chance.random() < 0.25 else chance.randint(1, 4)
        if more:
            job.wait_for_rounds(len(job.rows()) + more)
        else:
            job.wait_for(lambda job=job: processes(str(folder / "run.yaml"), "OMPI_COMM_WORLD_RANK="))
        time.sleep(chance.random() * (0.2 if more else 4))
        job.process.send_signal(chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]))
        assert job.wait() == RESUMABLE, job.text()
    rounds = len(job.rows()) + 3
    job.start(f"rounds={rounds}")
    assert job.wait() == 0, job.text()
    return job, rounds


@pytest.mark.parametrize("times", [pytest.param(3, marks=pytest.mark.smoke), pytest.param(20, marks=pytest.mark.soak)])
def test_preemptions_do_not_change_the_bits(tmp_path, times):
    job, rounds = preempt(tmp_path / "torn", times, 0 if times == 3 else random.randrange(10**6))
    assert job.text().count("stopped early") <= times
    assert "Traceback" not in job.text()
    assert_same(job.run, run_undisturbed(job, rounds))


# ---- one job at a time ----
def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(("kind", "size"), [("alone", 1), ("mpirun", 2)])
def test_a_running_run_cannot_be_resumed(start, kind, size):
    """The first job is stopped meanwhile, so that only the second could change the directory.

    A killed job holds no lock.
    """
    job = start()
    job.wait_for_rounds(1)
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(job.process.pid))
    before = contents(job.run)
    done = fedmpi("resume", job.run, kind=kind, size=size)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1
    assert f"{job.run} is in use by process {job.process.pid} on host" in done.stderr
    assert contents(job.run) == before
    job.kill()
    done = succeed("resume", job.run, f"rounds={len(job.rows()) + 3}")


@pytest.mark.smoke
def test_status_of_a_stopped_resumed_and_killed_run(start):
    job = start()
    job.wait_for_rounds(1)
    done = succeed("status", job.run)
    assert f"running (process {job.process.pid} on " in done.stdout
    assert "1 on 1 host" in done.stdout
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(LIMIT_S) == RESUMABLE
    done = fedmpi("status", job.run, "--json")
    assert (json.loads(done.stdout)["state"], done.returncode) == ("stopped", RESUMABLE)
    job.start("checkpoint.resume=must")
    job.wait_for(lambda: not (job.run / "summary.json").exists())
    assert fedmpi("status", job.run).returncode == 0
    job.kill()
    done = fedmpi("status", job.run)
    assert done.returncode == RESUMABLE
    assert "state       died" in done.stdout
    assert f"fedmpi resume {job.run}" in done.stdout


# ---- given weights ----
INITIAL = {
    "rounds": 3,
    "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 5, "alpha": 0.5}},
    "model": {"name": "logistic"},
    "method": {"name": "fedper"},
    "cohort": {"fraction": 0.4},
    "evaluate": {"protocol": ["personal"]},
}


def test_a_run_from_initial_weights_resumes_without_their_file(tmp_path):
    """The ranks may differ.

    Clients that train for the first time after the resume start from the given weights, too.
    """
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**INITIAL, "output": str(tmp_path)}))

    def hashes(name):
        return [(row["sha256"], row["personal_loss"]) for row in rows(tmp_path / name)]

    succeed("run", tmp_path / "run.yaml", "name=first", "rounds=1", "seed=4")
    first = tmp_path / "first"
    said = succeed("run", tmp_path / "run.yaml", "name=alone", f"init.from={first}").stdout
    assert "2 of 2 tensors of the model are loaded from" in said
    succeed("run", tmp_path / "run.yaml", "name=ranks", f"init.from={first}", kind="mpirun", size=3)
    succeed("run", tmp_path / "run.yaml", "name=cut", f"init.from={first}", "rounds=1")
    (first / "model.safetensors").unlink()
    succeed("resume", tmp_path / "cut", "rounds=3")
    assert hashes("alone") == hashes("ranks") == hashes("cut")
    other = tmp_path / "other.safetensors"
    save_file({"head.bias": torch.zeros(10)}, other)
    done = fedmpi("run", tmp_path / "run.yaml", "name=cut", f"init.from={other}", "checkpoint.resume=auto")
    assert done.returncode == 2
    assert "initial weights changed" in done.stderr
