"""Run directories as a report reads them: whole, cut, foreign."""

import json

from fedmpi.reports import report
from fedmpi.reports.groups import read
from fedmpi.reports.page import Figure
from fedmpi.reports.run_data import curve


def made(path, *, seed=0, method="fedavg", values=(50.0, 60.0), **other):
    path.mkdir(parents=True)
    extra = "".join(f"{key}: {value}\n" for key, value in other.items())
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: {method}}}\n{extra}")
    rows = [{"round": t, "accuracy": value} for t, value in enumerate(values)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_of_a_sweep_are_grouped_by_what_differs_besides_the_seed(tmp_path):
    for method in ("fedavg", "fedprox"):
        for seed in (0, 1):
            made(tmp_path / f"{method}-{seed}", seed=seed, method=method, train="{lr: 0.1}")
    (tmp_path / "notes").mkdir()
    groups = read([tmp_path]).groups
    assert [(group.name, len(group.runs)) for group in groups] == [("fedavg", 2), ("fedprox", 2)]
    assert read([tmp_path / "fedavg-0"]).groups[0].name == "fedavg-0"


def test_a_mean_over_different_code_or_data_has_a_warning(tmp_path):
    """Though their settings are the same; a partition is another one for each seed."""
    for seed in (0, 1, 2):
        run = made(tmp_path / f"r{seed}", seed=seed)
        digests = {"(training data)": "old" if seed else "new", "(partition)": str(seed)}
        (run / "identity.json").write_text(json.dumps(digests))
    assert "Runs differ in training data, though the settings say the same." in report.html(read([tmp_path]))


def test_the_band_is_the_sample_standard_deviation(tmp_path):
    runs = [made(tmp_path / f"r{seed}", seed=seed, values=(10.0 * seed, 50.0)) for seed in (1, 2, 3)]
    (figure,) = (part for section in report.sections(read(runs)) for part in section.parts if isinstance(part, Figure))
    # of 10, 20, 30: mean 20, standard deviation 10 with n - 1
    assert figure.data == [["mean of 3 runs", 0, 20.0, 10.0, 3], ["mean of 3 runs", 1, 50.0, 0.0, 3]]
    (line,) = figure.chart.series
    assert (line.low[0], line.high[0]) == (10.0, 30.0)


def test_damage_is_noted_and_the_rest_is_read(tmp_path):
    run = made(tmp_path / "r")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"round": 2, "accuracy": null}\n{"rou')
    (run / "partition.json").write_text("{")
    (only,) = read([run]).all
    assert curve(only.rows, "accuracy") == {0: 50.0, 1: 60.0}
    assert [note for note in only.notes if "metrics" in note] == ["metrics.jsonl: 2 lines cut or damaged, and left out"]
    assert "partition.json is damaged: no JSON object" in only.notes
