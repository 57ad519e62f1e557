"""The battery of battery.py: one process, gloo (started as by torchrun), MPI and gloo under a real mpirun."""

import ast
from pathlib import Path

import pytest

SIZE = 3  # no power of two: the broadcast's tree is uneven
STARTS = {
    "solo": lambda ranks: ranks.start("battery.py", envs=[{}], backend="auto"),
    "gloo": lambda ranks: ranks.torchrun("battery.py", size=SIZE),
    "mpi": lambda ranks: ranks.mpirun("battery.py", size=SIZE),
    "gloo under mpirun": lambda ranks: ranks.mpirun("battery.py", size=SIZE, backend="gloo"),
}
CLASSES = {"solo": "Solo", "gloo": "Gloo", "mpi": "Mpi", "gloo under mpirun": "Gloo"}
PROGRAM = ast.parse(Path(__file__).with_name("battery.py").read_text())
CHECKS = [node.name for node in PROGRAM.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@pytest.fixture(scope="module", params=list(STARTS))
def battery(request, ranks_of_session):
    return request.param, STARTS[request.param](ranks_of_session())


@pytest.mark.parametrize("check", CHECKS)
def test_check(battery, check):
    name, outcome = battery
    size = 1 if name == "solo" else SIZE
    assert sorted(outcome.reports) == list(range(size)), outcome.text
    for rank, reports in outcome.reports.items():
        errors = [report["error"] for report in reports if report["check"] == check]
        assert errors == [""], f"rank {rank}: {errors}\n{outcome.text}"


def test_all_left_in_peace(battery):
    name, outcome = battery
    assert set(outcome.codes) == {0}, outcome.text
    assert {report["class"] for reports in outcome.reports.values() for report in reports} == {CLASSES[name]}
