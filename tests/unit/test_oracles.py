"""benchmarks/oracles: what is handed over is the run, what differs is said, the page shows the CSV; and other programs,
where they are installed."""

import csv
import importlib.util
import os
import re
import sys
from importlib import import_module

import pytest
import torch
from helpers import ROOT

FOLDER = ROOT / "benchmarks" / "oracles"
MODULES = ("ours", "task", "cases", "cases_fluke", "cases_more", "readings", "readings_fluke", "compare")
PYTHONS = dict(each.split("=", 1) for each in os.environ.get("FEDMPI_ORACLES", "").split())  # program=interpreter ...


@pytest.fixture
def oracles(monkeypatch):
    """The modules of the folder by name, gone afterwards: other folders have modules of these names, too."""
    monkeypatch.syspath_prepend(FOLDER)
    yield {name: import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("make_oracles")


def test_a_run_is_the_same_whether_it_is_written_down(oracles, tmp_path):
    run = oracles["ours"].run
    assert torch.equal(run({}, tmp_path).w, run({}).w)
    assert torch.get_default_dtype() == torch.float32


# ---- the page ----
def test_the_page_shows_the_results(page):
    text = page.PAGE.read_text()
    assert page.page(text, page.rows()) == text, "run: python docs/make_oracles.py"
    assert page.page(text, page.rows()[1:]) != text


def test_each_difference_has_its_place_on_the_page(oracles, page):
    headings = set(re.findall(r"^### (\S+)$", page.PAGE.read_text(), re.M))
    cases = {(case.peer, case.method): case for case in oracles["compare"].CASES}
    assert headings == {case.why for case in cases.values()} - {""}
    assert {(row["peer"], row["method"]) for row in page.rows()} == set(cases)
    for row in page.rows():
        if row["verdict"] == "does not run":
            continue
        agrees = float(row["relative"]) < 1e-5
        explained = not agrees and float(row["with_reading"] or "inf") < 1e-5
        assert row["verdict"] == ("agrees" if agrees else "explained" if explained else "differs")
        assert row["verdict"] != "differs", row
        assert row["why"] == ("" if agrees else cases[row["peer"], row["method"]].why)


# ---- other programs ----
@pytest.mark.parametrize("peer", ["fluke", "pfl", "fedlab", "flower", "pfllib", "flgo"])
def test_the_other_program(oracles, page, monkeypatch, tmp_path, peer):
    """Makes the CSV's verdicts anew, where the program is here or FEDMPI_ORACLES says which interpreter has it."""
    compare = oracles["compare"]
    if peer not in PYTHONS and importlib.util.find_spec(compare.PEERS[peer][1].split(".")[0]) is None:
        pytest.skip(f"{compare.PEERS[peer][0]} is not installed")
    python = PYTHONS.get(peer, sys.executable)
    made = tmp_path / "oracles.csv"
    monkeypatch.setattr(sys, "argv", ["compare.py", peer, "--python", f"{peer}={python}", "--to", str(made)])
    compare.main()
    with made.open(newline="") as file:
        found = {(row["method"], row["what"]): row["verdict"] for row in csv.DictReader(file)}
    kept = {(row["method"], row["what"]): row["verdict"] for row in page.rows() if row["peer"] == peer}
    assert found == kept
