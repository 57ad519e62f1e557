"""A run directory that is to be gone on with, replayed or read after somebody or something has damaged it: one message,
nothing lost that was there."""

import hashlib
import json
import shutil

import pytest
from helpers import fedmpi

WORDS = (
    *("configs/quickstart.yaml", "method.name=fedavg", "model={name: mlp, hidden: [8]}", "rounds=3"),
    *("timeline=false", "report=false"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    done = fedmpi("run", *WORDS, f"output={place}", "name=whole")
    assert done.returncode == 0, done.stderr
    return place / "whole"


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def content(place):
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file() and path.name not in ("lock", "log.txt")
    }


def refused(said, *words):
    done = fedmpi(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    return done


def lines(run):
    return (run / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rounds=2"], "rounds: 2, but this run has completed 3 of them"),
        (["checkpoint.every=0", "rounds=4"], "checkpoint.every: 0 keeps nothing to go on from"),
        (["train.lr=0.5", "rounds=4"], "train.lr is 0.5, was 0.05"),
    ],
)
def test_who_is_refused_has_changed_nothing(run, words, said):
    before = content(run)
    refused(said, "resume", run, *words)
    refused(said, "run", *WORDS, f"output={run.parent}", "name=run", "checkpoint.resume=auto", *words)
    assert content(run) == before


def test_the_config_of_a_run_that_went_on_can_be_run_again(run):
    done = fedmpi("resume", run, "rounds=4")
    assert done.returncode == 0, done.stderr
    assert "going on after round 2 (3 of 4 done)" in done.stdout
    again = fedmpi("run", run / "config.yaml", "name=again")
    assert again.returncode == 0, again.stderr
    assert [json.loads(line)["sha256"] for line in lines(run)] == [
        json.loads(line)["sha256"] for line in lines(run.parent / "again")
    ]


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "clients.jsonl", "seal.json"])
def test_a_directory_in_place_of_a_file_is_named(run, name):
    (run / name).unlink()
    (run / name).mkdir()
    refused(f"cannot write {run / name}: Is a directory", "resume", run, "rounds=4")


@pytest.mark.parametrize("name", ["metrics.jsonl", "updates.jsonl", "placement.jsonl"])
def test_and_of_a_run_that_was_killed(run, name):
    (run / "summary.json").unlink()
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    refused(f"{run / name}", "resume", run, "rounds=4")


def test_losses_of_another_kind_say_what_they_lack(run):
    said = f"faults.replay: {run}/metrics.jsonl:1 is no row of the faults.jsonl of a run (it has no 'ranks')"
    refused(said, "run", *WORDS, f"output={run.parent}", "name=again", f"faults.replay={run}/metrics.jsonl")


@pytest.mark.parametrize("row", ['{"round": 0}', '{"round": 0, "ranks": {}, "clients": [], "gone": 3}', "[]"])
def test_losses_to_be_given_are_those_of_a_run(tmp_path, row):
    (tmp_path / "faults.jsonl").write_text(f"{row}\n")
    words = [*WORDS, f"output={tmp_path}", f"faults.replay={tmp_path}/faults.jsonl"]
    refused(f"faults.replay: {tmp_path}/faults.jsonl", "run", *words)


@pytest.mark.parametrize("text", ["[1, 2]", "{", "null", "NaN"])
def test_a_line_that_is_none(run, text):
    first, *rest = lines(run)
    (run / "metrics.jsonl").write_text("\n".join([first, text, *rest]) + "\n")
    said = f"{run}/metrics.jsonl:2 is no row of a run; it was changed, or the disk is bad"
    refused(said, "replay", run)
    refused(said, "analyse", "communication", run, "--to", run.parent / "to")
    done = fedmpi("resume", run, "rounds=4")  # the others are as they were
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["round"] for line in lines(run)] == [0, 1, 2, 3]


def test_lines_that_are_gone(run):
    (run / "metrics.jsonl").write_text("")
    refused("metrics.jsonl is empty: no round of this run was written", "replay", run)
    done = fedmpi("resume", run, "rounds=4")
    assert done.returncode == 0, done.stderr
    assert "metrics.jsonl was changed or cut: of rounds 0 to 1 it has 0" in done.stderr


def test_checkpoints_that_are_gone(run):
    before = [json.loads(line)["sha256"] for line in lines(run)]
    shutil.rmtree(run / "checkpoints")
    kept = [file for file in run.iterdir() if file.is_file() and file.name not in ("log.txt", "lock")]
    there = {file.name: file.read_bytes() for file in kept}
    refused("is a run that has come to its end, and no checkpoint of it is whole", "resume", run, "rounds=4")
    assert {name: (run / name).read_bytes() for name in there} == there
    (run / "summary.json").unlink()  # as if it had been cut
    done = fedmpi("resume", run, "rounds=4")
    assert done.returncode == 0, done.stderr
    assert "no checkpoint is whole, 3 rounds to be trained anew: from the start" in done.stdout
    assert [json.loads(line)["sha256"] for line in lines(run)][:3] == before


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"files": {}}'])
def test_a_seal_that_is_none(run, text):
    """It counted as a seal: rounds that nobody replayed passed for sealed."""
    (run / "seal.json").write_text(text)
    done = fedmpi("verify", run, "--rounds", "1")
    assert done.returncode == 1, done.stdout
    assert "ALTERED" in done.stdout
    assert "seal.json" in done.stdout
