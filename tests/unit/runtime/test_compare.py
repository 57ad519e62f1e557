"""`fedmpi compare` names the first different round of two runs, and unreadable files are errors."""

import json
import shutil

import pytest
import yaml
from helpers import fedmpi

from fedmpi.runtime.inspection import compare as comparing

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
    """Run directories: `a` and `again` are equal experiments, `lr` has another learning rate."""
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
    """Change values in one line of a file."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["round"] == round_:
            row.update(new)
            break
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_equal_experiments_have_the_same_results(runs):
    facts = comparing.compare_runs(runs / "a", runs / "again")
    assert facts["same"]
    assert [facts[each] for each in comparing.GROUPS] == [{}] * 4
    result = fedmpi("compare", runs / "a", runs / "again")
    assert (result.returncode, result.stdout.splitlines()[2]) == (0, "the same results in all 4 rounds")


def test_a_different_setting_is_reported(runs):
    result = fedmpi("compare", runs / "a", runs / "lr", "--json")
    facts = json.loads(result.stdout)
    assert result.returncode == 1
    assert facts["settings"] == {"train.lr": ["0.01", "0.02"]}
    assert facts["hash"]["round"] == facts["metric"]["round"] == facts["client"]["round"] == 0
    assert facts["data"] == {}
    assert facts["model"]


@pytest.mark.parametrize(
    ("new", "key", "verdict"),
    [
        ({"sha256": "0" * 64}, "hash", "the models differ from round 2 on"),
        ({"loss": 0.5}, "metric", "the same models; loss differs from round 2 on"),
        ({"accuracy": None}, "metric", "the same models; accuracy differs from round 2 on"),
        ({"cohort": [0]}, "metric", "the same models; cohort differs from round 2 on"),
        ({"extra": 1}, "metric", "the same models; extra differs from round 2 on"),
        (
            {"wall_s": 77.0, "sent_bytes": 1},
            None,
            "the same results in all 4 rounds",
        ),  # seconds and bytes are no results
    ],
)
def test_one_changed_digit_of_a_round_is_reported(runs, copy, new, key, verdict):
    changed(copy / "metrics.jsonl", 2, **new)
    for facts in (comparing.compare_runs(runs / "a", copy), comparing.compare_runs(copy, runs / "a")):
        assert (facts["same"], comparing.format_verdict(facts)) == (key is None, verdict)
        assert key is None or facts[key]["round"] == 2


def test_a_client_and_the_final_model(runs, copy):
    changed(copy / "clients.jsonl", 1, accuracy=12.0)
    facts = comparing.compare_runs(runs / "a", copy)
    assert (facts["same"], facts["client"]["round"], facts["client"]["client"]) == (False, 1, 0)
    assert comparing.format_verdict(facts) == "client 0 differs from round 1 on"
    lines = (runs / "a" / "clients.jsonl").read_text().splitlines(keepends=True)
    (copy / "clients.jsonl").write_text("".join(lines[:-1]))
    assert comparing.compare_runs(runs / "a", copy)["client"]["values"][1] is None
    shutil.copy(runs / "a" / "clients.jsonl", copy)
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert (
        comparing.format_verdict(comparing.compare_runs(runs / "a", copy))
        == "the final models differ, but no round does"
    )


def test_resuming_with_fewer_rounds_is_an_error(runs, copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])  # half a line is none yet
    result = fedmpi("compare", runs / "a", copy)
    assert result.returncode == 1
    assert "the same results in all rounds that both have (A has 4 rounds, B 3 rounds)" in result.stdout
