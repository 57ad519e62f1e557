"""Local steps and layers, as analysis.jsonl has them."""

import pytest
from test_analysis_section import made

from fedmpi.analysis.pages.runs import read
from fedmpi.analysis.pages.sections import steps

STEPS = {"loss": 0.5, "cosine": -0.25, "head": -0.5, "step_losses": [0.0, 0.1], "step_cosines": [None, -0.25]}
LAYERS = {
    "layers": ["body", "head"],
    "strength": [0.1, 0.2],
    "evenness": [0.9, 0.8],
    "columns": [0.3, 0.4],
    "norm": [1.0, 2.0],
    "entries": [81, 16],
}


def told(*paths):
    section = steps.measured(read(paths))
    return section and {part.name: part for part in section.parts}


def test_of_one_run(tmp_path):
    rows = [{"round": t, "orthogonality": {**STEPS, "cosine": -0.1 * t}, "layers": LAYERS} for t in range(9)]
    found = told(made(tmp_path / "r", rows))
    assert list(found) == ["steps-loss", "steps-cosine", "steps-first", "steps-layers"]
    assert found["steps-cosine"].data[2] == [2, -0.2, -0.5]
    assert [line.y[1] for line in found["steps-cosine"].chart.series] == [-0.1, -0.5]
    assert [line.label for line in found["steps-first"].chart.series] == ["round 2", "round 5", "round 8"]
    assert found["steps-first"].data[:2] == [[0, 1, None], [0, 2, -0.25]]
    bars = found["steps-layers"]
    assert (bars.chart.labels, bars.chart.parts) == (["body", "head"], {"strength": [0.1, 0.2]})
    assert bars.data[1] == [0, "head", 0.2, 0.8, 0.4, 2.0, 16]
    assert len(bars.data) == 18


def test_of_several_a_line_each(tmp_path):
    runs = [made(tmp_path / str(s), [{"round": 3, "orthogonality": {**STEPS, "loss": s}}], s) for s in (1.0, 3.0)]
    found = told(*runs)
    assert list(found) == ["steps-loss", "steps-cosine", "steps-head"]
    (line,) = found["steps-loss"].chart.series
    assert (line.y, line.low) == ([2.0], [pytest.approx(2 - 2**0.5)])
    assert found["steps-head"].chart.series[0].y == [-0.5]


def test_without_it_there_is_no_section(tmp_path):
    assert told(made(tmp_path / "r", [])) is None
    odd = [{"round": 0, "orthogonality": {}}, {"round": "x", "layers": 3}, {"round": 1, "layers": {"layers": ["a"]}}]
    assert told(made(tmp_path / "odd", [{"round": 1, "losses": {}}])) is None
    assert told(made(tmp_path / "empty", odd)) is None
