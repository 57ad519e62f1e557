"""Run directories as a report reads them: whole, cut, foreign; groups of them; fairness over their clients."""

import json

import numpy as np
import pytest

from fedmpi.common.errors import UserError
from fedmpi.reports import report, results, run_facts
from fedmpi.reports.page import Figure, Table
from fedmpi.reports.run_groups import extract_curve, read_runs


def made(path, *, seed=0, method="fedavg", values=(50.0, 60.0), clients=(), **other):
    path.mkdir(parents=True)
    extra = "".join(f"{key}: {value}\n" for key, value in other.items())
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: {method}}}\n{extra}")
    rows = [{"round": t, "accuracy": value} for t, value in enumerate(values)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clients))
    return path


def test_runs_of_a_sweep_are_grouped_by_what_differs_besides_the_seed(tmp_path):
    for method in ("fedavg", "fedprox"):
        for seed in (0, 1):
            made(tmp_path / f"{method}-{seed}", seed=seed, method=method, train="{lr: 0.1}")
    (tmp_path / "notes").mkdir()
    groups = read_runs([tmp_path]).groups
    assert [(group.name, len(group.runs)) for group in groups] == [("fedavg-0", 2), ("fedprox-0", 2)]
    labels = {
        f"{m}-{k}": {"method": m, "train.lr": "0.1", "seed": str(k)} for m in ("fedavg", "fedprox") for k in (0, 1)
    }
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": list(labels), "labels": labels}))
    assert [group.name for group in read_runs([tmp_path]).groups] == ["fedavg", "fedprox"]
    assert read_runs([tmp_path / "fedavg-0"]).groups[0].name == "fedavg-0"


def test_a_mean_over_different_code_or_data_has_a_warning(tmp_path):
    """Though their settings are the same; a partition is another one for each seed."""
    for seed in (0, 1, 2):
        run = made(tmp_path / f"r{seed}", seed=seed)
        digests = {"(training data)": "old" if seed else "new", "(partition)": str(seed)}
        (run / "identity.json").write_text(json.dumps(digests))
    assert "Runs with the same settings differ in training data." in report.render_report(read_runs([tmp_path]))


def test_the_band_is_the_sample_standard_deviation(tmp_path):
    runs = [made(tmp_path / f"r{seed}", seed=seed, values=(10.0 * seed, 50.0)) for seed in (1, 2, 3)]
    (figure,) = (
        part for section in report.build_sections(read_runs(runs)) for part in section.parts if isinstance(part, Figure)
    )
    # of 10, 20, 30: mean 20, standard deviation 10 with n - 1
    assert figure.data == [["mean of 3 runs", 0, 20.0, 10.0, 3], ["mean of 3 runs", 1, 50.0, 0.0, 3]]
    (line,) = figure.chart.series
    assert (line.low[0], line.high[0]) == (10.0, 30.0)


def test_damage_is_noted_and_the_rest_is_read(tmp_path):
    run = made(tmp_path / "r")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"round": 2, "accuracy": null}\n{"rou')
    (run / "partition.json").write_text("{")
    (only,) = read_runs([run]).all
    assert extract_curve(only.rows, "accuracy") == {0: 50.0, 1: 60.0}
    assert [note for note in only.notes if "metrics" in note] == [
        "metrics.jsonl: 2 lines cut off or damaged, and ignored"
    ]
    assert "partition.json is damaged: it contains no JSON object" in only.notes


# ---- parameters transmitted ----
def transmitting(path, rows):
    keys = ("round", "up_parameters", "down_parameters", "accuracy")
    run = made(path)
    rows = [dict(zip(keys, (t, *row), strict=True)) for t, row in enumerate(rows)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_parameters_are_summed_up_to_each_measured_round_and_averaged_beside_the_first_run(tmp_path):
    full = transmitting(tmp_path / "full", [(1000, 1000, 1.0), (1000, 1000, 2.0)])
    # four rounds: 1000 + 3 * 200 up, 2 * 1000 + 2 * 200 down, so 400 and 600 in an average round
    fast = transmitting(tmp_path / "fast", [(1000, 1000, None), (200, 1000, 2.0), (200, 200, None), (200, 200, 4.5)])
    lines = []
    run_facts.compare_communication([full, fast], "accuracy", tmp_path, lines.append)
    assert [line.split()[1:] for line in lines[2:4]] == [
        ["2", "1,000", "1,000", "2,000", "1.000", "1.000", "1.000", "2.00"],
        ["4", "400", "600", "1,000", "0.400", "0.600", "0.500", "4.50"],
    ]
    points = json.loads((tmp_path / "communication.json").read_text())["points"][2:]
    assert [list(point.values())[1:] for point in points] == [[1, 1200, 2000, 2.0], [3, 1600, 2400, 4.5]]
    few = transmitting(tmp_path / "few", [(1, 1, None), (1, 1, 2.0)])
    with pytest.raises(UserError, match="accuracy was measured after 1 round; a curve needs at least 2"):
        run_facts.compare_communication([few], "accuracy", tmp_path, print)


# ---- fairness ----
def test_jain_against_its_definition():
    def jain(x):
        return results.compute_client_statistics(x, lower_is_better=False)["Jain's index"]

    x = [90.0, 80.0, 20.0, 70.0]
    assert jain(x) == pytest.approx(sum(x) ** 2 / (4 * sum(v * v for v in x)))
    assert jain(x) == pytest.approx(1 / (1 + np.var(x) / np.mean(x) ** 2))
    assert jain([3 * v for v in x]) == pytest.approx(jain(x))
    assert jain([1e300, 1e300]) == 1
    assert [jain(x) for x in ([0.0, 0.0], [1.0, -1.0])] == [None] * 2


def test_worst_and_best_tenths():
    x = [float(v) for v in range(25)]
    found = results.compute_client_statistics(x[::-1], lower_is_better=False)
    assert (found["worst"], found["mean"], found["std"]) == (0, 12, pytest.approx(np.std(x)))
    assert (found["worst 10 %"], found["best 10 %"]) == (0.5, 23.5)
    found = results.compute_client_statistics(x, lower_is_better=True)
    assert (found["worst"], found["worst 10 %"], found["best 10 %"]) == (24, 23.5, 0.5)


def judged(t, *values):
    return [
        {"round": t, "client": k, "protocol": "personal", "samples": 9, "accuracy": v} for k, v in enumerate(values)
    ]


def test_fairness_of_runs_and_groups(tmp_path):
    told = [*judged(0, 10.0, 10.0), *judged(3, 60.0, 80.0)]
    one = results.build_clients_section(read_runs([made(tmp_path / "a", clients=told)]))
    (table,) = (part for part in one if isinstance(part, Table))
    assert [[row[0], *row[5:]] for row in table.rows] == [
        ["a", 70.0, 10.0, 60.0, 80.0, pytest.approx(140**2 / (2 * (60**2 + 80**2)))]
    ]
    made(tmp_path / "b", clients=judged(3, 50.0, None), method="ditto")
    several = results.build_clients_section(read_runs([tmp_path / "a", tmp_path / "b"]))
    table = next(part for part in several if isinstance(part, Table) and "fairness" in part.title)
    assert table.rows[1] == ["b", *[50.0] * 5, 0.0, 50.0, 50.0, 1.0]
    (curve,) = (part for part in several if getattr(part, "name", "").endswith("-worst"))
    assert curve.data[:2] == [["a", 0, 10.0, None, 1], ["a", 3, 60.0, None, 1]]
