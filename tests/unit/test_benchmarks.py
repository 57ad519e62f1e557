"""What the programs in benchmarks/ print is read again, and their arithmetic is right."""

import json
import re
import sys
from importlib import import_module

import numpy as np
import pytest
from helpers import ROOT

from fedmpi.config import sweep


@pytest.fixture(autouse=True)
def from_benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = [str(ROOT / folder) for folder in ("docs", "benchmarks", "benchmarks/gpu")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])


def test_lines_are_read_again(capsys):
    measure = import_module("measure")
    for text, what, ours, ratio, note in (
        ("a, b=1: fedmpi 1.200 s  by hand 1.000 s  ratio 1.20", "a, b=1", ("fedmpi", 1.2), 1.2, ""),
        ("mlp    9 values   fedmpi 2.5 ms   by hand 2 ms   ratio 1.25", "mlp, 9 values", ("fedmpi", 2.5), 1.25, ""),
        ("x: a cap 2,000.5 MiB  free 4 MiB  ratio 500.12  (so)", "x", ("a cap", 2000.5), 500.12, "so"),
        ("c=True  fedmpi 1 s  bare 1 s  ratio 1.0  (pairs 1 to 2)", "c=True", ("fedmpi", 1.0), 1, "pairs 1 to 2"),
    ):
        found = measure.read(text)
        assert (found["what"], found["ours"], found["ratio"], found["note"]) == (what, ours, ratio, note)
    assert measure.read("costs in ms: 1.2 a round, 3 a client") is None
    measure.line("of 3", ("fedmpi", 2.0), ("by hand", 4.0), note="twice as fast")
    assert measure.read(capsys.readouterr().out)["ratio"] == 0.5
    told = "mlp   199,210 parameters   by hand 1.5 ms   one by one 1.8 ms, ratio 1.20   packed 0.6 ms, 3 times as fast"
    assert [(row["what"], row["ours"][1], row["theirs"][1], round(row["ratio"], 2)) for row in measure.rows(told)] == [
        ("mlp, a client", 1.8, 1.5, 1.2),
        ("mlp, packed", 0.6, 1.8, 0.33),
    ]


def test_the_gpu_page_has_a_place_for_its_table():
    kit = import_module("kit")
    parts = [
        {"part": "tests", "code": 0, "lines": ["3 passed, 2 skipped"]},
        {"part": "W2", "code": 0, "lines": ["v: fedmpi 1.0 s  by hand 2.0 s  ratio 0.50  (peak 3 MiB)"]},
        {"part": "W1", "code": 1, "lines": ["RuntimeError: no"]},
    ]
    table = kit.table({"command": "make gpu", "seconds": 9, "machine": {"gpu": "a card", "cuda": None}, "parts": parts})
    page = kit.fill(kit.PAGE.read_text(), table)
    assert "| tests | 3 passed, 2 skipped |" in page
    assert "| W2 | v | 1 s | 2 s | 0.5 | peak 3 MiB |" in page
    assert "| W1 | FAILED: RuntimeError: no |" in page
    assert "gpu a card." in page
    assert kit.fill(page, table) == page


def test_principal_directions_of_updates():
    """Two clients that disagree along e_1 and share a tenth along e_2; then against the matrix itself."""
    directions = import_module("directions").directions
    rng = np.random.default_rng(0)
    for G in (np.array([[1.0, 0.1], [-1.0, 0.1]]), rng.normal(size=(4, 9))):
        norms = np.linalg.norm(G, axis=1)
        lam, mean, signs = directions(norms, G @ G.T / np.outer(norms, norms))
        values, v = np.linalg.eigh(G.T @ G / len(G))
        values, v = values[::-1][: len(G)], v[:, ::-1][:, : len(G)]
        assert lam == pytest.approx(values / values.sum())
        along = G.mean(0) @ v
        assert mean == pytest.approx(along**2 / (along**2).sum(), abs=1e-12)
        assert abs(signs @ np.sign(G @ v[:, 0])) == len(G)
    assert directions(np.array([1.005**0.5] * 2), np.array([[1, -0.98], [-0.98, 1]]))[1] == pytest.approx([0, 1])


PARTS_OF = {"niid_bench"}


def test_the_reproduced_cells_are_those_that_were_published():
    page = (ROOT / "docs/reproduced.md").read_text(encoding="utf-8")
    counted = re.search(r"All tables: (\d+) cells: (\d+) within the .* spread, (\d+) within two, (\d+)", page)
    every, *parts = map(int, counted.groups())
    assert sum(parts) == every
    assert f"{every} published cells" in (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks" / "results" / "reproduction").glob("*.json"):
        found = json.loads(path.read_text())
        made = sweep.load(ROOT / "configs" / "benchmarks" / f"{path.stem}.yaml")
        asked = sweep.load(made.path, [text for text in found["overrides"] if text.startswith("only=")])
        names = {asked.name(labels) for labels in asked.labels}
        published = [figures[0] for each in made.published for figures in each.values.values()]
        if path.stem in PARTS_OF:  # a table that is being trained
            assert found["sha256_of_models"].keys() < {made.name(labels) for labels in made.labels}
            assert found["sha256_of_models"].keys() <= names
            (theirs,) = made.published
            for cell in found["cells"]:
                assert cell["published"] == theirs.values[tuple(cell["labels"][axis] for axis in theirs.axes)][0]
            assert sum(cell["seeds"] for cell in found["cells"]) == len(found["sha256_of_models"])
        else:
            assert found["sha256_of_models"].keys() == names
            assert [cell["published"] for cell in found["cells"]] == published
