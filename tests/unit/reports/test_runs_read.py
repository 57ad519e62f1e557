"""Reading run directories for reports, groups of runs, transmitted parameters, and fairness over clients."""

import json

import numpy as np
import pytest

from fedmpi.common.errors import UserError
from fedmpi.reports import report, results, run_facts
from fedmpi.reports.page import Figure, Table
from fedmpi.reports.run_groups import extract_curve, read_runs


def write_run(path, *, seed=0, method="fedavg", values=(50.0, 60.0), clients=(), **other):
    path.mkdir(parents=True)
    extra = "".join(f"{key}: {value}\n" for key, value in other.items())
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: {method}}}\n{extra}")
    rows = [{"round": t, "accuracy": value} for t, value in enumerate(values)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clients))
    return path


def test_runs_that_differ_only_in_seeds_form_a_group(tmp_path):
    for method in ("fedavg", "fedprox"):
        for seed in (0, 1):
            write_run(tmp_path / f"{method}-{seed}", seed=seed, method=method, train="{lr: 0.1}")
    (tmp_path / "notes").mkdir()
    groups = read_runs([tmp_path]).groups
    assert [(group.name, len(group.runs)) for group in groups] == [("fedavg-0", 2), ("fedprox-0", 2)]
    labels = {
        f"{m}-{k}": {"method": m, "train.lr": "0.1", "seed": str(k)} for m in ("fedavg", "fedprox") for k in (0, 1)
    }
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": list(labels), "labels": labels}))
    assert [group.name for group in read_runs([tmp_path]).groups] == ["fedavg", "fedprox"]
    assert read_runs([tmp_path / "fedavg-0"]).groups[0].name == "fedavg-0"


def test_a_mean_over_different_data_has_a_warning(tmp_path):
    """The settings are equal; different partitions for different seeds are normal."""
    for seed in (0, 1, 2):
        run = write_run(tmp_path / f"r{seed}", seed=seed)
        digests = {"(training data)": "old" if seed else "new", "(partition)": str(seed)}
        (run / "identity.json").write_text(json.dumps(digests))
    assert "Runs with the same settings differ in training data." in report.render_report(read_runs([tmp_path]))


def test_the_band_is_the_sample_standard_deviation(tmp_path):
    runs = [write_run(tmp_path / f"r{seed}", seed=seed, values=(10.0 * seed, 50.0)) for seed in (1, 2, 3)]
    (figure,) = (
        part for section in report.build_sections(read_runs(runs)) for part in section.parts if isinstance(part, Figure)
    )
    # 10, 20, 30 have mean 20 and sample standard deviation 10
    assert figure.data == [["mean of 3 runs", 0, 20.0, 10.0, 3], ["mean of 3 runs", 1, 50.0, 0.0, 3]]
    (line,) = figure.chart.series
    assert (line.low[0], line.high[0]) == (10.0, 30.0)


def test_damaged_files_are_noted_and_all_others_are_read(tmp_path):
    run = write_run(tmp_path / "r")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"round": 2, "accuracy": null}\n{"rou')
    (run / "partition.json").write_text("{")
    (only,) = read_runs([run]).all
    assert extract_curve(only.rows, "accuracy") == {0: 50.0, 1: 60.0}
    assert [note for note in only.notes if "metrics" in note] == [
        "metrics.jsonl: 2 incomplete or damaged lines ignored"
    ]
    assert "partition.json is damaged: it contains no JSON object" in only.notes


# ---- parameters transmitted ----
def write_run_with_traffic(path, rows):
    keys = ("round", "up_parameters", "down_parameters", "accuracy")
    run = write_run(path)
    rows = [dict(zip(keys, (t, *row), strict=True)) for t, row in enumerate(rows)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_transmitted_parameters_are_summed_and_compared_with_the_first_run(tmp_path):
    full = write_run_with_traffic(tmp_path / "full", [(1000, 1000, 1.0), (1000, 1000, 2.0)])
    # four rounds: 1000 + 3 * 200 up, 2 * 1000 + 2 * 200 down, so 400 and 600 in an average round
    fast = write_run_with_traffic(
        tmp_path / "fast", [(1000, 1000, None), (200, 1000, 2.0), (200, 200, None), (200, 200, 4.5)]
    )
    lines = []
    run_facts.compare_communication([full, fast], "accuracy", tmp_path, lines.append)
    assert [line.split()[1:] for line in lines[2:4]] == [
        ["2", "1,000", "1,000", "2,000", "1.000", "1.000", "1.000", "2.00"],
        ["4", "400", "600", "1,000", "0.400", "0.600", "0.500", "4.50"],
    ]
    points = json.loads((tmp_path / "communication.json").read_text())["points"][2:]
    assert [list(point.values())[1:] for point in points] == [[1, 1200, 2000, 2.0], [3, 1600, 2400, 4.5]]
    few = write_run_with_traffic(tmp_path / "few", [(1, 1, None), (1, 1, 2.0)])
    with pytest.raises(UserError, match="accuracy was measured in fewer than 2 rounds, too few for a curve"):
        run_facts.compare_communication([few], "accuracy", tmp_path, print)


# ---- fairness ----
def test_jains_index_equals_its_definition():
    def jain(x):
        return results.compute_client_statistics(x, lower_is_better=False)["Jain's index"]

    x = [90.0, 80.0, 20.0, 70.0]
    assert jain(x) == pytest.approx(sum(x) ** 2 / (4 * sum(v * v for v in x)))
    assert jain(x) == pytest.approx(1 / (1 + np.var(x) / np.mean(x) ** 2))
    assert jain([3 * v for v in x]) == pytest.approx(jain(x))
    assert jain([1e300, 1e300]) == 1
    assert [jain(x) for x in ([0.0, 0.0], [1.0, -1.0])] == [None] * 2


def test_statistics_of_the_worst_and_best_clients():
    x = [float(v) for v in range(25)]
    statistics = results.compute_client_statistics(x[::-1], lower_is_better=False)
    assert (statistics["worst"], statistics["mean"], statistics["std"]) == (0, 12, pytest.approx(np.std(x)))
    assert (statistics["worst 10 %"], statistics["best 10 %"]) == (0.5, 23.5)
    statistics = results.compute_client_statistics(x, lower_is_better=True)
    assert (statistics["worst"], statistics["worst 10 %"], statistics["best 10 %"]) == (24, 23.5, 0.5)


def client_rows(t, *values):
    return [
        {"round": t, "client": k, "protocol": "personal", "samples": 9, "accuracy": v} for k, v in enumerate(values)
    ]


def test_fairness_of_single_runs_and_groups(tmp_path):
    rows_of_clients = [*client_rows(0, 10.0, 10.0), *client_rows(3, 60.0, 80.0)]
    one = results.build_clients_section(read_runs([write_run(tmp_path / "a", clients=rows_of_clients)]))
    (table,) = (part for part in one if isinstance(part, Table))
    assert [[row[0], *row[5:]] for row in table.rows] == [
        ["a", 70.0, 10.0, 60.0, 80.0, pytest.approx(140**2 / (2 * (60**2 + 80**2)))]
    ]
    write_run(tmp_path / "b", clients=client_rows(3, 50.0, None), method="ditto")
    several = results.build_clients_section(read_runs([tmp_path / "a", tmp_path / "b"]))
    table = next(part for part in several if isinstance(part, Table) and "fairness" in part.title)
    assert table.rows[1] == ["b", *[50.0] * 5, 0.0, 50.0, 50.0, 1.0]
    (curve,) = (part for part in several if getattr(part, "name", "").endswith("-worst"))
    assert curve.data[:2] == [["a", 0, 10.0, None, 1], ["a", 3, 60.0, None, 1]]
