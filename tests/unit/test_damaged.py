"""A damaged run directory is refused with one message, and its files are not changed."""

import hashlib
import json
import re
import shutil

import pytest
from helpers import fedmpi

WORDS = (
    *("configs/quickstart.yaml", "method.name=fedavg", "model={name: mlp, hidden: [8]}", "rounds=3"),
    *("trace=false", "report=false"),
)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    result = fedmpi("run", *WORDS, f"output={place}", "name=whole")
    assert result.returncode == 0, result.stderr
    return place / "whole"


@pytest.fixture
def run(complete, tmp_path):
    return shutil.copytree(complete, tmp_path / "run")


def content(place):
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file() and path.name not in ("lock", "log.txt")
    }


def refused(text, *words):
    result = fedmpi(*words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert text in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def resumed(run):
    """Resume the run for a fourth round, and return the output."""
    result = fedmpi("resume", run, "rounds=4")
    assert result.returncode == 0, result.stderr
    assert rows(run, "round") == [0, 1, 2, 3]
    return result.stdout + result.stderr


def rows(run, key="sha256"):
    return [json.loads(line)[key] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["rounds=2"], "rounds: 2, but this run has already completed 3"),
        (["checkpoint.every=0", "rounds=4"], "checkpoint.every: 0 is not allowed if a run is resumed"),
    ],
)
def test_who_is_refused_has_changed_nothing(run, words, output):
    before = content(run)
    refused(output, "resume", run, *words)
    refused(output, "run", *WORDS, f"output={run.parent}", "name=run", "checkpoint.resume=auto", *words)
    assert content(run) == before


def test_the_config_of_a_resumed_run_can_be_run_again(run):
    assert "resuming after round 2 (3 of 4 completed)" in resumed(run)
    again = fedmpi("run", run / "config.yaml", "name=again")
    assert again.returncode == 0, again.stderr
    assert rows(run) == rows(run.parent / "again")


@pytest.mark.parametrize("row", ['{"round": 0}', '{"round": 0, "ranks": {}, "clients": [], "gone": 3}', "[]"])
def test_faults_to_replay_must_be_rows_of_a_run(tmp_path, row):
    file = tmp_path / "faults.jsonl"
    file.write_text(f"{row}\n")
    refused(
        "; must be the faults.jsonl of a run, or null", "run", *WORDS, f"output={tmp_path}", f"faults.replay={file}"
    )


@pytest.mark.parametrize("text", ["[1, 2]", "{"])
def test_a_damaged_line_is_an_error(run, text):
    first, *rest = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([first, text, *rest]) + "\n")
    message = f"{run}/metrics.jsonl:2: this line is not a valid row; the file was changed, or the disk is faulty"
    refused(message, "replay", run)
    resumed(run)  # the other lines are as they were


def test_removed_lines_are_reported(run):
    (run / "metrics.jsonl").write_text("")
    refused("metrics.jsonl is empty: this run has recorded no round", "replay", run)


def test_missing_checkpoints_are_an_error(run):
    before, files = rows(run), content(run)
    shutil.rmtree(run / "checkpoints")
    refused("this run has finished, but none of its checkpoints is intact", "resume", run, "rounds=4")
    assert content(run) == {name: digest for name, digest in files.items() if not name.startswith("checkpoints")}
    (run / "summary.json").unlink()  # as if it had been cut
    assert "no checkpoint is intact: starting again from round 0, 3 rounds are lost" in resumed(run)
    assert rows(run)[:3] == before


@pytest.mark.parametrize("text", ["{", '{"files": {}}'])
def test_a_damaged_checksum_file_is_reported(run, text):
    """Unreadable checksums do not count, since rounds that were not replayed would pass as verified."""
    (run / "checksums.json").write_text(text)
    result = fedmpi("verify", run, "--rounds", "1")
    assert result.returncode == 1, result.stdout
    assert re.search(r"ALTERED.*checksums\.json|checksums\.json.*ALTERED", result.stdout, re.DOTALL)
