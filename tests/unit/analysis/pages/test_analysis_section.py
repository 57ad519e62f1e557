"""What lies behind the rounds, as analysis.jsonl has it."""

import json

import pytest

from fedmpi.analysis.pages.runs import read
from fedmpi.analysis.pages.sections import analysis

LOSSES = {"local": 1.0, "shift": 0.5, "aggregation": -0.25, "total": 1.25}
KNOWN = {"before": 40.0, "after": 60.0, "local_mean": 30.0}
DRIFT = {"divergence": 2.0, "consistency": None}


def made(path, rows, seed=0):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: fedavg}}\n")
    (path / "metrics.jsonl").write_text('{"round": 0, "accuracy": 50.0}\n')
    (path / "analysis.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told(*paths):
    section = analysis.measured(read(paths))
    return section and {part.name: part for part in section.parts}


def test_of_one_run(tmp_path):
    rows = [
        {"round": 0, "clients": [4, 7], "losses": LOSSES, "knowledge": KNOWN, "contribution": {"gain": [0.1, -0.2]}},
        {"round": 5, "clients": [7], "losses": {**LOSSES, "total": 2.0}, "drift": DRIFT, "contribution": {"gain": [1]}},
    ]
    found = told(made(tmp_path / "r", rows))
    assert list(found) == ["analysis-losses", "analysis-drift", "analysis-knowledge", "analysis-gain"]
    assert found["analysis-losses"].data == [[0, 1.25, 1.0, 0.5, -0.25], [5, 2.0, 1.0, 0.5, -0.25]]
    assert found["analysis-drift"].data == [[5, 2.0, None]]
    assert [line.y for line in found["analysis-knowledge"].chart.series] == [[60.0], [40.0], [30.0]]
    assert found["analysis-gain"].chart.values == [[0.1, None], [-0.2, 1.0]]
    assert found["analysis-gain"].data == [[0, "4", 0.1], [0, "7", -0.2], [5, "7", 1.0]]


def test_of_several_seeds_means_and_bands(tmp_path):
    runs = [
        made(tmp_path / str(s), [{"round": 0, "clients": [0], "losses": {**LOSSES, "shift": shift}}], s)
        for s, shift in enumerate((1.0, 3.0))
    ]
    found = told(*runs)
    (line,) = found["analysis-shift"].chart.series
    assert (line.y, line.low) == ([2.0], [pytest.approx(2 - 2**0.5)])
    assert "analysis-divergence" not in found


def test_without_it_there_is_no_section(tmp_path):
    assert told(made(tmp_path / "r", [])) is None
    assert told(made(tmp_path / "odd", [{"round": "x", "losses": 3}, {"losses": LOSSES}])) is None
