"""Real jobs that are killed and gone on with, elsewhere: the bits of the undisturbed run. And what is refused."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import BIN, ROOT, clean_env, fedmpi, launcher, warm

ULFM = bool(shutil.which("ompi_info", path=clean_env()["PATH"]))  # Open MPI's
CONFIG = {
    "name": "run",
    "rounds": 24,
    "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 6, "alpha": 0.3}},
    "model": {"name": "mlp"},
    "method": {"name": "scaffold"},
    "cohort": {"fraction": 0.5},
    "evaluate": {"protocol": ["global", "personal"]},
    "state": {"memory": 0.0005},  # two or three of the six rows
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(folder)}))
    done = fedmpi("run", folder / "run.yaml", "name=whole")
    assert done.returncode == 0, done.stderr
    return folder


def rows(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def same(a, b):
    """Rounds, bits and figures; each round once."""
    times = ("wall_s", "train_s", "wait_s", "server_s", "evaluate_s", "sent_bytes", "received_bytes")
    left, right = ([{k: v for k, v in row.items() if k not in times} for row in rows(x)] for x in (a, b))
    assert left == right
    lines = [sorted((x / "clients.jsonl").read_text().splitlines()) for x in (a, b)]
    assert lines[0] == lines[1]
    said = [(x / "updates.jsonl").read_text() for x in (a, b)]
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == len(left)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def killed(place, name, rounds, *command):
    """A job of its own session, killed whole when it has told so many rounds."""
    process = subprocess.Popen(
        command, env=clean_env(), cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    began = time.monotonic()
    while len(rows(place / name)) < rounds:
        assert time.monotonic() - began < 90
        if process.poll() is not None:
            break
        time.sleep(0.02)
    for path in [p for p in os.listdir("/proc") if p.isdigit()]:
        try:
            with open(f"/proc/{path}/cmdline") as said:
                mine = f"name={name}" in said.read() or f"{place}/{name}" in said.read()
            if mine:
                os.kill(int(path), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
    process.wait(20)


def test_killed_twice_and_ended_on_other_ranks(place):
    run = [str(BIN / "fedmpi"), "run", str(place / "run.yaml"), "name=torn", "checkpoint.resume=auto"]
    killed(place, "torn", 5, *launcher("mpirun", 3), *run)
    before = len(rows(place / "torn"))
    assert 5 <= before < 24
    killed(place, "torn", before + 4, *launcher("torchrun", 2), *run)
    done = fedmpi("resume", place / "torn", "comm.backend=mpi", kind="mpirun", size=4)
    assert done.returncode == 0, done.stderr
    assert "going on after round" in done.stdout
    same(place / "torn", place / "whole")


@pytest.mark.skipif(not ULFM, reason="no Open MPI 5")
def test_a_job_does_without_a_rank_that_is_killed(place):
    """The command that docs/reliability.md gives; its exit code is rank 0's. The replay has the same bits."""
    command = [str(ROOT / "launch" / "mpirun.sh"), "4", str(place / "run.yaml")]
    command += ["name=lossy", "faults.on_lost_rank=drop"]
    env = clean_env(FEDMPI_ULFM="1")
    with subprocess.Popen(command, env=env, cwd=place, stdout=subprocess.PIPE, text=True) as job:
        began = time.monotonic()
        while len(rows(place / "lossy")) < 3:
            assert time.monotonic() - began < 90
            time.sleep(0.02)
        os.kill(rank(2, "name=lossy"), signal.SIGKILL)
        said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    assert re.search(r"ranks lost on the way: 2 \(round \d+\)", said)
    summary = json.loads((place / "lossy" / "summary.json").read_text())
    assert (summary["exit_reason"], summary["rounds"], list(summary["lost_ranks"])) == ("finished", 24, ["2"])
    done = fedmpi("replay", place / "lossy")
    assert done.returncode == 0, done.stderr
    assert f"24 rounds of {place / 'lossy'}: the same bits in" in done.stdout


def test_a_replay_ends_where_its_run_did(place):
    """A run of 24 rounds that was stopped after five: their learning rates are those of 24."""
    folder = place / "short"
    shutil.copytree(place / "whole", folder)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(place / "whole")[:5]))
    done = fedmpi("replay", folder)
    assert done.returncode == 0, done.stderr
    assert f"5 rounds of {folder}: the same bits in" in done.stdout
    assert [row["round"] for row in rows(place / "short-replay")] == [0, 1, 2, 3, 4]
    assert json.loads((place / "short-replay" / "summary.json").read_text())["exit_reason"] == "stopped"


def rank(number, word):
    """The process of a rank of the job whose command line has `word`."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_text().split("\0")
            if word in (path / "cmdline").read_text() and f"OMPI_COMM_WORLD_RANK={number}" in environment:
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {number}")


@pytest.mark.parametrize(
    ("kind", "size", "number", "every"), [("alone", 1, signal.SIGTERM, 1), ("mpirun", 3, signal.SIGUSR1, 50)]
)
def test_a_request_to_stop_is_gone_on_with(place, kind, size, number, every):
    """Repeated, as by Slurm at a time limit; exit code 75, and the command to go on with. Nothing that was complete
    is lost, however rare checkpoints are."""
    name = f"asked{every}"
    command = [*launcher(kind, size), "fedmpi", "run", str(place / "run.yaml"), f"name={name}"]
    command += [f"checkpoint.every={every}"]
    process = subprocess.Popen(command, env=warm(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while len(rows(place / name)) < 3:
        time.sleep(0.02)
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.1)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == 75, said
    assert f"fedmpi resume {place / name}" in said
    assert json.loads((place / name / "summary.json").read_text())["exit_reason"] == f"signal {int(number)}"
    complete = rows(place / name)[-1]["round"]
    done = fedmpi("resume", place / name)
    assert done.returncode == 0, done.stderr
    assert f"going on after round {complete} (" in done.stdout
    same(place / name, place / "whole")


def test_more_rounds(place):
    done = fedmpi("run", place / "run.yaml", "name=more", "rounds=9")
    assert done.returncode == 0, done.stderr
    done = fedmpi("resume", place / "more", "rounds=24")
    assert done.returncode == 0, done.stderr
    same(place / "more", place / "whole")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.lr=0.5"], r"cannot go on as this experiment: train.lr is 0.5, was 0.01"),
        (["comm.wire=bf16"], "cannot go on with another comm.wire: comm.wire.up.name is 'bf16', was 'fp32'. What"),
        (
            ["comm.wire.down=int8", "checkpoint.changes=accept"],
            "comm.wire.down.name is 'int8', was 'fp32'. What clients",
        ),
        (["seed=3"], "seed is 3, was 0"),
        (["data.partition.alpha=5"], "data.partition.alpha is 5, was 0.3; partition changed"),
    ],
)
def test_another_experiment_is_refused(place, words, said):
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


def test_plug_ins_and_data_that_changed_are_named(tmp_path):
    """And copied, for the user's eyes alone where that was asked for. A function that makes a module of torch's own
    counts as well."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("from fedmpi.data.partitions.even import iid as deal\n")
    table = {"x": np.random.default_rng(0).normal(size=(90, 64)), "y": np.arange(90) % 3}
    np.savez(tmp_path / "a.npz", **table)
    deal = {"scheme": f"{tmp_path}/other/mine.py:deal", "clients": 3}
    tree = {
        "name": "own",
        "rounds": 1,
        "output": str(tmp_path),
        "output_mode": "private",
        "data": {"source": "npz", "path": "a.npz", "root": str(tmp_path), "partition": deal},
        "model": {"name": f"{tmp_path}/mine.py:net"},
        "method": {"name": "fedavg"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = fedmpi("run", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "own"
    told = {each["copy"]: each for each in json.loads((run / "environment.json").read_text())["plugins"]}
    assert sorted(told) == ["plugins/mine-2.py", "plugins/mine.py"]
    for copy, each in told.items():
        content = (run / copy).read_bytes()
        assert Path(each["file"]).read_bytes() == content
        assert hashlib.sha256(content).hexdigest() == each["sha256"]
        assert (run / copy).stat().st_mode & 0o777 == 0o600
    assert (run / "plugins").stat().st_mode & 0o777 == 0o700
    (tmp_path / "mine.py").write_text(PLUGIN + "# edited\n")
    np.savez(tmp_path / "a.npz", **{**table, "x": table["x"] + 1})
    done = fedmpi("resume", run, "rounds=2")
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    for said in ("plug-in mine-2.py changed (as", f"training data changed (npz a.npz, below {tmp_path})", "=accept"):
        assert said in done.stderr
    assert "mine.py" not in done.stderr
    done = fedmpi("resume", run, "rounds=2", "checkpoint.changes=accept")
    assert done.returncode == 0, done.stderr
    assert len(rows(run)) == 2
    assert (run / "plugins" / "mine-2.py").read_text().endswith("# edited\n")


def test_what_was_accepted_once_is_written_down_and_asked_for_again(place):
    assert fedmpi("run", place / "run.yaml", "name=changed", "rounds=2").returncode == 0
    done = fedmpi("resume", place / "changed", "rounds=3", "train.lr=0.3", "checkpoint.changes=accept")
    assert done.returncode == 0, done.stderr
    said = "accepted: train.lr is 0.3, was 0.01; from round 2 on"
    assert said in done.stdout
    assert said in (place / "changed" / "log.txt").read_text()
    assert yaml.safe_load((place / "changed" / "config.yaml").read_text())["checkpoint"]["changes"] == "refuse"
    done = fedmpi("resume", place / "changed", "rounds=4", "train.lr=0.9")
    assert done.returncode == 2
    assert "train.lr is 0.9, was 0.3" in done.stderr
    assert fedmpi("resume", place / "changed", "rounds=4").returncode == 0


def test_must_and_what_is_no_run(place, tmp_path):
    done = fedmpi("run", place / "run.yaml", "name=none", "checkpoint.resume=must")
    assert (done.returncode, "holds no run to go on with" in done.stderr) == (2, True)
    done = fedmpi("resume", tmp_path)
    assert (done.returncode, "is no run directory" in done.stderr) == (2, True)
    for command, word in (("resume", "name=zz"), ("resume", "output=zz"), ("replay", "name=zz")):
        done = fedmpi(command, place / "whole", word)
        said = f"error: {word}: has no effect here, for {place / 'whole'} says where the run is; leave it out"
        assert (done.returncode, said in done.stderr) == (2, True)


def test_nothing_is_kept_where_nothing_is_asked_for(place):
    done = fedmpi("run", place / "run.yaml", "name=bare", "rounds=2", "checkpoint.every=0", "state.memory=null")
    assert done.returncode == 0, done.stderr
    assert not (place / "bare" / "checkpoints").exists()
    assert not (place / "bare" / "state").exists()
