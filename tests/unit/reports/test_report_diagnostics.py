"""Sections of a report on measurements within rounds, from update_stats.jsonl and analysis.jsonl."""

import json

import pytest

from fedmpi.reports import diagnostics, report
from fedmpi.reports.page import Figure
from fedmpi.reports.run_groups import read_runs


def write_run(path, rows, seed=0, file="analysis"):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: fedavg}}\n")
    (path / "metrics.jsonl").write_text('{"round": 0, "accuracy": 50.0}\n')
    (path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_figures(section, *paths):
    return {part.name: part for part in section(read_runs(paths)) if isinstance(part, Figure)}


def test_without_valid_records_there_is_no_section(tmp_path):
    damaged_rows = [
        {"round": "x", "losses": 3, "features": 3},
        {"losses": {"local": 1.0}},
        {"round": 1, "features": {"rank": "?"}},
        {"round": 0, "orthogonality": {}},
        {"round": 1, "layers": {"layers": ["a"]}},
    ]
    for i, rows in enumerate(([], damaged_rows)):
        names = {section.name for section in report.build_sections(read_runs([write_run(tmp_path / str(i), rows)]))}
        assert not names & {"analysis", "features", "steps", "updates"}


# ---- analysis ----
LOSSES = {"local": 1.0, "shift": 0.5, "aggregation": -0.25, "total": 1.25}
KNOWLEDGE = {"before": 40.0, "after": 60.0, "local_mean": 30.0}
DRIFT = {"divergence": 2.0, "consistency": None}


def test_the_analysis_section_of_one_run_has_the_recorded_numbers(tmp_path):
    rows = [
        {
            "round": 0,
            "clients": [4, 7],
            "losses": LOSSES,
            "knowledge": KNOWLEDGE,
            "contribution": {"gain": [0.1, -0.2]},
        },
        {"round": 5, "clients": [7], "losses": {**LOSSES, "total": 2.0}, "drift": DRIFT, "contribution": {"gain": [1]}},
    ]
    figures_by_name = build_figures(diagnostics.build_analysis_section, write_run(tmp_path / "r", rows))
    assert list(figures_by_name) == ["analysis-losses", "analysis-drift", "analysis-knowledge", "analysis-gain"]
    assert figures_by_name["analysis-losses"].data == [[0, 1.25, 1.0, 0.5, -0.25], [5, 2.0, 1.0, 0.5, -0.25]]
    assert figures_by_name["analysis-drift"].data == [[5, 2.0, None]]
    assert [line.y for line in figures_by_name["analysis-knowledge"].chart.series] == [[60.0], [40.0], [30.0]]
    assert figures_by_name["analysis-gain"].chart.values == [[0.1, None], [-0.2, 1.0]]
    assert figures_by_name["analysis-gain"].data == [[0, "4", 0.1], [0, "7", -0.2], [5, "7", 1.0]]


# ---- features ----
FEATURES = {"deviation": 0.3, "deviation_local": 0.2, "rank": 4.0, "rank_local": 3.0}
FEATURES |= {"uniformity": 0.4, "uniformity_local": 0.5, "classifier": 2.5, "classifier_local": 1.0}


def test_the_features_section_of_one_run_has_the_recorded_numbers(tmp_path):
    rows = [{"round": 0, "features": FEATURES}, {"round": 5, "features": {**FEATURES, "deviation": 0.35}}]
    figures_by_name = build_figures(diagnostics.build_features_section, write_run(tmp_path / "r", rows))
    assert list(figures_by_name) == [f"features-{name}" for name in ("deviation", "classifier", "uniformity", "rank")]
    assert figures_by_name["features-deviation"].data == [[0, 0.3, 0.2], [5, 0.35, 0.2]]


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


def test_the_local_steps_section_of_one_run_has_the_recorded_numbers(tmp_path):
    rows = [{"round": t, "orthogonality": {**STEPS, "cosine": -0.1 * t}, "layers": LAYERS} for t in range(9)]
    figures_by_name = build_figures(diagnostics.build_local_steps_section, write_run(tmp_path / "r", rows))
    assert list(figures_by_name) == ["steps-loss", "steps-cosine", "steps-layers"]
    assert figures_by_name["steps-cosine"].data[2] == [2, -0.2, -0.5]
    assert [line.y[1] for line in figures_by_name["steps-cosine"].chart.series] == [-0.1, -0.5]
    bars = figures_by_name["steps-layers"]
    assert (bars.chart.rows, bars.chart.spans) == (["body", "head"], {"strength": [(0, 0.0, 0.1), (1, 0.0, 0.2)]})
    assert bars.data[1] == [0, "head", 0.2, 0.8, 0.4, 2.0, 16]
    assert len(bars.data) == 18


# ---- updates ----
GRAM = {"cosine_mean": 0.2, "cosine_min": -0.5, "negative_pairs": 0.25, "eigenvalues": [6.0, 3.0, 1.0]}


def updates_row(t, norms, direction, **more):
    return {"round": t, "clients": list(range(2, 2 + len(norms))), "norms": norms, "direction": direction, **more}


def test_the_updates_section_of_one_run_has_the_recorded_numbers(tmp_path):
    along = {"to_direction": [0.9, None, -0.1]}
    rows = [updates_row(0, [1.0, 2.0, 3.0], 1.0, **GRAM, **along), updates_row(1, [2.0, 4.0], 3.0)]
    figures_by_name = build_figures(
        diagnostics.build_updates_section, write_run(tmp_path / "r", rows, file="update_stats")
    )
    assert figures_by_name["updates-norms"].data == [[0, 2.0], [1, 3.0]]
    norms = figures_by_name["updates-by-client"]
    assert norms.data == [[0, "2", 1.0], [1, "2", 2.0], [0, "3", 2.0], [1, "3", 4.0], [0, "4", 3.0]]
    assert norms.chart.values == [[1.0, 2.0], [2.0, 4.0], [3.0, None]]
    (relative_norm,) = figures_by_name["updates-aggregate"].chart.series
    assert relative_norm.y == [1 / 2, 1.0]  # divided by the mean norms 2 and 3
    spectrum = figures_by_name["updates-spectrum"].chart.series
    assert [line.y for line in spectrum] == [[0.6], [0.3]]
    assert figures_by_name["updates-cosine"].data == [[0, 0.2, -0.5]]
    assert figures_by_name["updates-negative-pairs"].data == [[0, 0.25]]
    assert figures_by_name["updates-direction"].chart.values == [[0.9], [-0.1]]
    assert figures_by_name["updates-direction"].chart.signed


def test_heat_maps_show_a_subset_of_many_clients_and_rounds(tmp_path):
    norms = [float(k + 1) for k in range(90)]
    rows = [updates_row(t, norms, 1.0, to_direction=[0.5] * 90, **GRAM) for t in range(200)]
    figures_by_name = build_figures(
        diagnostics.build_updates_section, write_run(tmp_path / "r", rows, file="update_stats")
    )
    grid = figures_by_name["updates-direction"]
    assert (len(grid.chart.rows), len(grid.chart.columns)) == (45, 50)
    assert len(grid.data) == 90 * 200
    assert "45 of 90 clients are shown" in grid.note


def test_updates_of_several_runs_are_averaged_over_seeds(tmp_path):
    """Figures contain means and sample standard deviations over seeds."""
    for seed, direction in ((0, 1.0), (1, 3.0)):
        write_run(tmp_path / f"r{seed}", [updates_row(0, [2.0, 2.0], direction, **GRAM)], seed, "update_stats")
    figures_by_name = build_figures(diagnostics.build_updates_section, tmp_path)
    (relative_norm,) = figures_by_name["updates-aggregate"].data
    assert relative_norm[2:] == [1.0, pytest.approx(2**-0.5), 2]
    assert figures_by_name["updates-spectrum-0"].data[0][2] == pytest.approx(0.6)
    assert figures_by_name["updates-cosine-cosine_min"].data[0][2] == -0.5
