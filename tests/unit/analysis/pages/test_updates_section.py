"""Drift and conflict over the rounds, as updates.jsonl has them."""

import json

import pytest

from fedmpi.analysis.pages.runs import read
from fedmpi.analysis.pages.section import Figure, Text
from fedmpi.analysis.pages.sections import updates

GRAM = {"cosine_mean": 0.2, "cosine_min": -0.5, "negative_pairs": 0.25, "eigenvalues": [6.0, 3.0, 1.0]}


def made(path, rows, seed=0):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: fedavg}}\n")
    (path / "metrics.jsonl").write_text('{"round": 0, "accuracy": 50.0}\n')
    (path / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told(*paths):
    section = updates.agreement(read(paths))
    return {part.name: part for part in section.parts if isinstance(part, Figure)}, section


def row(t, norms, direction, **more):
    return {"round": t, "clients": list(range(2, 2 + len(norms))), "norms": norms, "direction": direction, **more}


def test_of_one_run(tmp_path):
    along = {"to_direction": [0.9, None, -0.1]}
    rows = [row(0, [1.0, 2.0, 3.0], 1.0, **GRAM, **along), row(1, [2.0, 4.0], 3.0)]
    found, section = told(made(tmp_path / "r", rows))
    norms = found["updates-norms"]
    assert norms.data == [[0, "2", 1.0], [1, "2", 2.0], [0, "3", 2.0], [1, "3", 4.0], [0, "4", 3.0]]
    assert [(line.label, line.x, line.y) for line in norms.chart.series][2] == ("4", [0], [3.0])
    (kept,) = found["updates-kept"].chart.series
    assert kept.y == [1 / 2, 1.0]  # over the mean norms 2 and 3
    spectrum = found["updates-spectrum"].chart.series
    assert [line.y for line in spectrum] == [[0.6], [0.3], [0.1]]
    assert found["updates-cosines"].data == [[0, 0.2, -0.5]]
    assert found["updates-negative-pairs"].data[0][:3] == ["r", 0, 0.25]
    assert found["updates-direction"].chart.values == [[0.9], [-0.1]]
    assert found["updates-direction"].chart.signed
    assert not [part for part in section.parts if isinstance(part, Text)]


def test_of_many_clients_there_is_a_band_and_of_many_rounds_some(tmp_path):
    norms = [float(k + 1) for k in range(90)]
    rows = [row(t, norms, 1.0, to_direction=[0.5] * 90, **GRAM) for t in range(200)]
    found, _ = told(made(tmp_path / "r", rows))
    (line,) = found["updates-norms"].chart.series
    assert (line.y[0], line.low[0], line.high[0]) == (45.5, 1.0, 90.0)
    grid = found["updates-direction"]
    assert (len(grid.chart.rows), len(grid.chart.columns)) == (45, 50)
    assert len(grid.data) == 90 * 200
    assert "every 2th" in grid.note or "every 4th" in grid.note


def test_of_several_runs(tmp_path):
    """Means over the seeds; sample standard deviations."""
    for seed, direction in ((0, 1.0), (1, 3.0)):
        made(tmp_path / f"r{seed}", [row(0, [2.0, 2.0], direction, **GRAM)], seed)
    found, _ = told(tmp_path)
    (kept,) = found["updates-kept"].data
    assert kept[2:] == [1.0, pytest.approx(2**-0.5), 2]
    assert found["updates-spectrum"].data[0][2] == pytest.approx(0.6)
    assert found["updates-cosine-min"].data[0][2] == -0.5


def test_where_little_or_nothing_is_recorded(tmp_path):
    assert updates.agreement(read([made(tmp_path / "none", [])])) is None
    found, section = told(made(tmp_path / "some", [row(0, [1.0], 1.0)]))
    assert found.keys() == {"updates-norms", "updates-kept"}
    assert "record.updates: gram" in next(part.text for part in section.parts if isinstance(part, Text))
