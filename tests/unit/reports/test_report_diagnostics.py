"""Sections on what was measured inside the rounds, as update_stats.jsonl and analysis.jsonl have it."""

import json

import pytest

from fedmpi.reports import diagnostics, report
from fedmpi.reports.page import Figure
from fedmpi.reports.run_groups import read_runs


def made(path, rows, seed=0, file="analysis"):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: fedavg}}\n")
    (path / "metrics.jsonl").write_text('{"round": 0, "accuracy": 50.0}\n')
    (path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def figures(section, *paths):
    return {part.name: part for part in section(read_runs(paths)) if isinstance(part, Figure)}


def test_without_records_there_is_no_section(tmp_path):
    odd = [
        {"round": "x", "losses": 3, "features": 3},
        {"losses": {"local": 1.0}},
        {"round": 1, "features": {"rank": "?"}},
        {"round": 0, "orthogonality": {}},
        {"round": 1, "layers": {"layers": ["a"]}},
    ]
    for i, rows in enumerate(([], odd)):
        names = {section.name for section in report.build_sections(read_runs([made(tmp_path / str(i), rows)]))}
        assert not names & {"analysis", "features", "steps", "updates"}


# ---- analysis ----
LOSSES = {"local": 1.0, "shift": 0.5, "aggregation": -0.25, "total": 1.25}
KNOWN = {"before": 40.0, "after": 60.0, "local_mean": 30.0}
DRIFT = {"divergence": 2.0, "consistency": None}


def test_analysis_of_one_run(tmp_path):
    rows = [
        {"round": 0, "clients": [4, 7], "losses": LOSSES, "knowledge": KNOWN, "contribution": {"gain": [0.1, -0.2]}},
        {"round": 5, "clients": [7], "losses": {**LOSSES, "total": 2.0}, "drift": DRIFT, "contribution": {"gain": [1]}},
    ]
    found = figures(diagnostics.build_analysis_section, made(tmp_path / "r", rows))
    assert list(found) == ["analysis-losses", "analysis-drift", "analysis-knowledge", "analysis-gain"]
    assert found["analysis-losses"].data == [[0, 1.25, 1.0, 0.5, -0.25], [5, 2.0, 1.0, 0.5, -0.25]]
    assert found["analysis-drift"].data == [[5, 2.0, None]]
    assert [line.y for line in found["analysis-knowledge"].chart.series] == [[60.0], [40.0], [30.0]]
    assert found["analysis-gain"].chart.values == [[0.1, None], [-0.2, 1.0]]
    assert found["analysis-gain"].data == [[0, "4", 0.1], [0, "7", -0.2], [5, "7", 1.0]]


# ---- features ----
SEEN = {"deviation": 0.3, "deviation_local": 0.2, "rank": 4.0, "rank_local": 3.0}
SEEN |= {"uniformity": 0.4, "uniformity_local": 0.5, "classifier": 2.5, "classifier_local": 1.0}


def test_features_of_one_run(tmp_path):
    rows = [{"round": 0, "features": SEEN}, {"round": 5, "features": {**SEEN, "deviation": 0.35}}]
    found = figures(diagnostics.build_features_section, made(tmp_path / "r", rows))
    assert list(found) == [f"features-{name}" for name in ("deviation", "classifier", "uniformity", "rank")]
    assert found["features-deviation"].data == [[0, 0.3, 0.2], [5, 0.35, 0.2]]


# ---- local steps ----
STEPS = {"loss": 0.5, "cosine": -0.25, "head": -0.5}
LAYERS = {
    "layers": ["body", "head"],
    "strength": [0.1, 0.2],
    "evenness": [0.9, 0.8],
    "columns": [0.3, 0.4],
    "norm": [1.0, 2.0],
    "entries": [81, 16],
}


def test_local_steps_of_one_run(tmp_path):
    rows = [{"round": t, "orthogonality": {**STEPS, "cosine": -0.1 * t}, "layers": LAYERS} for t in range(9)]
    found = figures(diagnostics.build_local_steps_section, made(tmp_path / "r", rows))
    assert list(found) == ["steps-loss", "steps-cosine", "steps-layers"]
    assert found["steps-cosine"].data[2] == [2, -0.2, -0.5]
    assert [line.y[1] for line in found["steps-cosine"].chart.series] == [-0.1, -0.5]
    bars = found["steps-layers"]
    assert (bars.chart.rows, bars.chart.spans) == (["body", "head"], {"strength": [(0, 0.0, 0.1), (1, 0.0, 0.2)]})
    assert bars.data[1] == [0, "head", 0.2, 0.8, 0.4, 2.0, 16]
    assert len(bars.data) == 18


# ---- updates ----
GRAM = {"cosine_mean": 0.2, "cosine_min": -0.5, "negative_pairs": 0.25, "eigenvalues": [6.0, 3.0, 1.0]}


def updates_row(t, norms, direction, **more):
    return {"round": t, "clients": list(range(2, 2 + len(norms))), "norms": norms, "direction": direction, **more}


def test_updates_of_one_run(tmp_path):
    along = {"to_direction": [0.9, None, -0.1]}
    rows = [updates_row(0, [1.0, 2.0, 3.0], 1.0, **GRAM, **along), updates_row(1, [2.0, 4.0], 3.0)]
    found = figures(diagnostics.build_updates_section, made(tmp_path / "r", rows, file="update_stats"))
    assert found["updates-norms"].data == [[0, 2.0], [1, 3.0]]
    norms = found["updates-by-client"]
    assert norms.data == [[0, "2", 1.0], [1, "2", 2.0], [0, "3", 2.0], [1, "3", 4.0], [0, "4", 3.0]]
    assert norms.chart.values == [[1.0, 2.0], [2.0, 4.0], [3.0, None]]
    (kept,) = found["updates-kept"].chart.series
    assert kept.y == [1 / 2, 1.0]  # over the mean norms 2 and 3
    spectrum = found["updates-spectrum"].chart.series
    assert [line.y for line in spectrum] == [[0.6], [0.3]]
    assert found["updates-cosine"].data == [[0, 0.2, -0.5]]
    assert found["updates-negative-pairs"].data == [[0, 0.25]]
    assert found["updates-direction"].chart.values == [[0.9], [-0.1]]
    assert found["updates-direction"].chart.signed


def test_updates_of_many_clients_and_rounds_some_are_drawn(tmp_path):
    norms = [float(k + 1) for k in range(90)]
    rows = [updates_row(t, norms, 1.0, to_direction=[0.5] * 90, **GRAM) for t in range(200)]
    found = figures(diagnostics.build_updates_section, made(tmp_path / "r", rows, file="update_stats"))
    grid = found["updates-direction"]
    assert (len(grid.chart.rows), len(grid.chart.columns)) == (45, 50)
    assert len(grid.data) == 90 * 200
    assert "45 of 90 clients are shown" in grid.note


def test_updates_of_several_runs(tmp_path):
    """Means over the seeds; sample standard deviations."""
    for seed, direction in ((0, 1.0), (1, 3.0)):
        made(tmp_path / f"r{seed}", [updates_row(0, [2.0, 2.0], direction, **GRAM)], seed, "update_stats")
    found = figures(diagnostics.build_updates_section, tmp_path)
    (kept,) = found["updates-kept"].data
    assert kept[2:] == [1.0, pytest.approx(2**-0.5), 2]
    assert found["updates-spectrum-0"].data[0][2] == pytest.approx(0.6)
    assert found["updates-cosine-cosine_min"].data[0][2] == -0.5
