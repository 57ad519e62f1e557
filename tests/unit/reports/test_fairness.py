"""Fairness over clients: the numbers, and where the report has them."""

import json

import numpy as np
import pytest

from fedmpi.reports import results
from fedmpi.reports.groups import read
from fedmpi.reports.page import Table


def made(path, told, method="fedavg"):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: 0\nmethod: {{name: {method}}}\n")
    (path / "metrics.jsonl").write_text('{"round": 0, "accuracy": 50.0}\n')
    (path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    return path


def test_jain_against_its_definition():
    def jain(x):
        return results.over_clients(x, falling=False)["Jain's index"]

    x = [90.0, 80.0, 20.0, 70.0]
    assert jain(x) == pytest.approx(sum(x) ** 2 / (4 * sum(v * v for v in x)))
    assert jain(x) == pytest.approx(1 / (1 + np.var(x) / np.mean(x) ** 2))
    assert jain([3 * v for v in x]) == pytest.approx(jain(x))
    assert jain([1e300, 1e300]) == 1
    assert [jain(x) for x in ([0.0, 0.0], [1.0, -1.0])] == [None] * 2


def test_worst_and_best_tenths():
    x = [float(v) for v in range(25)]
    found = results.over_clients(x[::-1], falling=False)
    assert (found["worst"], found["mean"], found["std"]) == (0, 12, pytest.approx(np.std(x)))
    assert (found["worst 10 %"], found["best 10 %"]) == (0.5, 23.5)
    found = results.over_clients(x, falling=True)
    assert (found["worst"], found["worst 10 %"], found["best 10 %"]) == (24, 23.5, 0.5)


def judged(t, *values):
    return [
        {"round": t, "client": k, "protocol": "personal", "samples": 9, "accuracy": v} for k, v in enumerate(values)
    ]


def test_fairness_of_runs_and_groups(tmp_path):
    told = [*judged(0, 10.0, 10.0), *judged(3, 60.0, 80.0)]
    one = results.clients(read([made(tmp_path / "a", told)]))
    (table,) = (part for part in one if isinstance(part, Table))
    assert [[row[0], *row[5:]] for row in table.rows] == [
        ["a", 70.0, 10.0, 60.0, 80.0, pytest.approx(140**2 / (2 * (60**2 + 80**2)))]
    ]
    made(tmp_path / "b", judged(3, 50.0, None), "ditto")
    several = results.clients(read([tmp_path / "a", tmp_path / "b"]))
    table = next(part for part in several if isinstance(part, Table) and "fairness" in part.title)
    assert table.rows[1] == ["ditto", *[50.0] * 5, 0.0, 50.0, 50.0, 1.0]
    (curve,) = (part for part in several if getattr(part, "name", "").endswith("-worst"))
    assert curve.data[:2] == [["fedavg", 0, 10.0, None, 1], ["fedavg", 3, 60.0, None, 1]]
