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
from torch.nn.functional import cross_entropy

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


def by_hand(task, mu=0.0):
    """FedAvg, or FedProx, in plain PyTorch from what was handed over; the global model after each round."""
    body, head = task.network()
    parameters, w, out = [*body.parameters(), *head.parameters()], task.w0, []
    for cohort, p in zip(task.cohorts.tolist(), task.p, strict=True):
        trained = []
        for k in cohort:
            torch.nn.utils.vector_to_parameters(w.clone(), parameters)
            for _ in range(task.epochs):
                for x, y in task.passes(k):
                    grads = torch.autograd.grad(cross_entropy(head(body(x)), y), parameters)
                    with torch.no_grad():
                        start = iter(w.split([each.numel() for each in parameters]))
                        for each, g in zip(parameters, grads, strict=True):
                            each -= task.lr * (g + mu * (each - next(start).view_as(each)))
            trained.append(torch.nn.utils.parameters_to_vector(parameters).detach())
        w = p @ torch.stack(trained)
        out.append(w)
    return torch.stack(out)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_what_is_handed_over_is_the_run(oracles, tmp_path, mu):
    mine = oracles["ours"].run({"method": {"name": "fedprox", "mu": mu}}, tmp_path)
    task = oracles["task"].Task(tmp_path)
    found = by_hand(task, mu)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, mine.w, rtol=0, atol=1e-14)
    assert not any(task.orders.values())  # every pass that fedmpi made was asked for
    torch.testing.assert_close(task.p[0] @ task.trained[0], mine.w[0], rtol=0, atol=1e-14)
    assert set(task.cohorts.flatten().tolist()) == set(range(5))  # every client takes part


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
