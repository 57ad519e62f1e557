"""`fedmpi compare`: the round in which two runs part is the first one, and what cannot be read is never "the same"."""

import json
import shutil

import pytest
import yaml
from helpers import fedmpi

from fedmpi.runtime.reading import compare as comparing

CONFIG = {
    "rounds": 4,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 3}},
    "model": {"name": "logistic"},
    "method": {"name": "fedavg"},
    "report": False,
    "evaluate": {"protocol": ["global", "personal"]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """a and again: one experiment twice; lr: another learning rate."""
    place = tmp_path_factory.mktemp("runs")
    (place / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(place)}))
    for words in (["name=a"], ["name=again"], ["name=lr", "train.lr=0.02"]):
        assert fedmpi("run", place / "run.yaml", *words).returncode == 0
    return place


@pytest.fixture
def copy(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "copy")
    return tmp_path / "copy"


def changed(file, round_, **new):
    """Other values in one line."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["round"] == round_:
            row.update(new)
            break
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_one_experiment_twice(runs):
    found = comparing.compare(runs / "a", runs / "again")
    assert found["same"]
    assert [found[each] for each in ("settings", "code", "data", "versions", "machine")] == [{}] * 5
    done = fedmpi("compare", runs / "a", runs / "again")
    assert (done.returncode, done.stdout.splitlines()[2]) == (0, "the same results in all 4 rounds")


def test_another_setting(runs):
    done = fedmpi("compare", runs / "a", runs / "lr", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["settings"] == {"train.lr": ["0.01", "0.02"]}
    assert found["hash"]["round"] == found["figure"]["round"] == found["client"]["round"] == 0
    assert found["data"] == {}
    assert found["model"]


@pytest.mark.parametrize(
    ("new", "key", "said"),
    [
        ({"sha256": "0" * 64}, "hash", "the models part in round 2"),
        ({"loss": 0.5}, "figure", "loss differs from round 2 on"),
        ({"accuracy": None}, "figure", "accuracy differs from round 2 on"),
        ({"cohort": [0]}, "figure", "cohort differs from round 2 on"),
        ({"extra": 1}, "figure", "extra differs from round 2 on"),
    ],
)
def test_one_digit_of_one_round(runs, copy, new, key, said):
    changed(copy / "metrics.jsonl", 2, **new)
    found = comparing.compare(runs / "a", copy)
    assert (found["same"], found[key]["round"], comparing.verdict(found)) == (False, 2, said)
    assert comparing.compare(copy, runs / "a")[key]["round"] == 2


def test_evaluation_alone_differs_and_so_do_the_rounds(runs, copy):
    changed(copy / "metrics.jsonl", 2, loss=0.5)
    said = comparing.lines(comparing.compare(runs / "a", copy), 200)
    assert said[2:4] == [
        "loss differs from round 2 on",
        "  the models have the same SHA-256 in all 4 rounds that both have",
    ]
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:3]))
    said = comparing.lines(comparing.compare(runs / "a", copy), 200)
    assert said[2:4] == ["rounds: A has 4, B 3", "loss differs from round 2 on"]
    changed(copy / "metrics.jsonl", 1, sha256="0" * 64)
    assert not any("same SHA-256" in line for line in comparing.lines(comparing.compare(runs / "a", copy), 200))


def test_seconds_and_bytes_are_no_results(runs, copy):
    changed(copy / "metrics.jsonl", 2, wall_s=77.0, sent_bytes=1)
    assert comparing.compare(runs / "a", copy)["same"]


def test_a_client_and_the_final_model(runs, copy):
    changed(copy / "clients.jsonl", 1, accuracy=12.0)
    found = comparing.compare(runs / "a", copy)
    assert (found["same"], found["client"]["round"], found["client"]["client"]) == (False, 1, 0)
    assert comparing.verdict(found) == "client 0 differs from round 1 on"
    shutil.copy(runs / "a" / "clients.jsonl", copy)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    found = comparing.compare(runs / "a", copy)
    assert not found["same"]
    assert comparing.verdict(found) == "the final models differ, and no round does"


def test_a_line_that_one_side_lacks(runs, copy):
    lines = (copy / "clients.jsonl").read_text().splitlines(keepends=True)
    (copy / "clients.jsonl").write_text("".join(lines[:-1]))
    assert comparing.compare(runs / "a", copy)["client"]["values"] == [True, False]


def test_fewer_rounds(runs, copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # half a line is none yet
    done = fedmpi("compare", runs / "a", copy)
    assert done.returncode == 1
    assert "the same results as far as both go: A has 4 rounds, B 3" in done.stdout


def test_sweeps_run_by_run(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "other", ignore=shutil.ignore_patterns("again"))
    changed(tmp_path / "other" / "lr" / "metrics.jsonl", 3, sha256="0" * 64)
    found = comparing.sweeps(runs, tmp_path / "other")
    assert (found["same"], found["only"]) == (False, [["again"], []])
    assert comparing.lines(found, 80)[2:] == [
        "lr: the models part in round 3",
        "only in A: again",
        "1 of 2 runs that both have with the same results",
    ]
    assert fedmpi("compare", runs, runs).returncode == 0
