"""Recorded results of benchmarks agree with the pages and configs."""

import re
import sys

import pytest
from helpers import ROOT

from fedmpi.sweeps import expand


@pytest.fixture(autouse=True)
def from_benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = [str(ROOT / folder) for folder in ("docs", "benchmarks", "benchmarks/gpu")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])


PARTS_OF = {"niid_bench"}


def test_the_reproduced_cells_are_those_that_were_published():
    page = (ROOT / "docs/reproduced.md").read_text(encoding="utf-8")
    counted = re.search(r"Of (\d+) means, (\d+) .* deviation, (\d+) by at most two, and (\d+) by more", page)
    every, *parts = map(int, counted.groups())
    assert sum(parts) == every
    assert f"{every} values from published tables" in (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
    import make_reproduction

    for name, actual in make_reproduction.results().items():
        made = expand.load_sweep(ROOT / "configs" / "benchmarks" / f"{name}.yaml")
        choice = [text for text in actual["overrides"] if text.startswith("include=")]
        asked = expand.load_sweep(made.path, choice)
        names = {asked.run_name(labels) for labels in asked.labels}
        published = [figures[0] for each in made.published for figures in each.values.values()]
        if name in PARTS_OF:  # a table that is being trained
            assert actual["sha256_of_models"].keys() < {made.run_name(labels) for labels in made.labels}
            assert actual["sha256_of_models"].keys() <= names
            (theirs,) = made.published
            for cell in actual["cells"]:
                assert cell["published"] == theirs.values[tuple(cell["labels"][axis] for axis in theirs.axes)][0]
            assert sum(cell["seeds"] for cell in actual["cells"]) == len(actual["sha256_of_models"])
        else:
            assert actual["sha256_of_models"].keys() == names
            assert [cell["published"] for cell in actual["cells"]] == published


def test_the_tables_of_adapters_are_those_of_the_recorded_runs():
    import lora

    cells = lora.read_results()
    assert {len(lines) for lines in cells.values()} == {3}
    assert f"```text\n{lora.format_tables(cells)}\n```" in (ROOT / "docs/results.md").read_text(encoding="utf-8")
