"""Results tables: means, deviations and paired differences computed by hand; verdicts; missing runs; all formats."""

import csv
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from statistics import stdev

import pytest

from fedmpi.analysis import charts
from fedmpi.common.errors import UserError
from fedmpi.sweeps import expand, results_table, sweep_status, table_formats

RUN = """\
output: OUTPUT
rounds: 1
data: {source: digits, partition: {scheme: iid, clients: 3}}
model: {name: logistic}
method: {name: fedavg}
"""
SWEEP = """\
name: t
grid:
  method: {A: {}, B_2: {method: {name: fedprox}}}
  train.lr: [0.1, 0.5]
  seed: [0, 1, 2]
published:
  source: Somebody
  values: {A: {"0.1": [52, 1], "0.5": 40}, B_2: {"0.1": [60, 20]}}
"""
FIGURES = {
    ("A", "0.1"): (50.0, 52.0, 54.0),
    ("A", "0.5"): (40.0, 50.0, 60.0),
    ("B_2", "0.1"): (53.0, 54.0, 58.0),
    ("B_2", "0.5"): (10.0, 61.0),
}
ODD = """\
grid:
  "m & 100% of_{it} #1 $x$ ~ ^ \\\\ <a|b>":
    "A_b & \\\\c": {}
    "50% *": {train: {lr: 0.2}}
    "[x]": {train: {lr: 0.3}}
"""
NO_NUMBERS = "grid: {m: {A: {}, B: {train: {lr: 1}}, C: {train: {lr: 2}}}, seed: [0, 1, 2]}\n"


def write_sweep(file, text, summary_of_run):
    """Write a sweep file and finished runs, and return the sweep.

    summary_of_run(labels) is the summary of a run; None: the run is missing.
    """
    file.write_text(RUN.replace("OUTPUT", str(file.parent)) + text)
    sweep = expand.load_sweep(file)
    for labels, settings in sweep.first_stage_runs():
        if (facts := summary_of_run(labels)) is not None:
            write_run(settings, rounds=1, **facts)
    return sweep


def write_run(settings, **summary):
    run = settings.output / settings.name
    run.mkdir(parents=True, exist_ok=True)
    (run / "identity.json").write_text(json.dumps(settings.identity()))
    (run / "metrics.jsonl").write_text("".join(f'{{"round": {t}}}\n' for t in range(settings.rounds)))
    (run / "summary.json").write_text(json.dumps({"exit_reason": "finished", **summary}))


def summary_of(value, at=0):
    return {"last": {"accuracy": value}, "last_round": {"accuracy": at}}


def runs_with_directory(sweep):
    """Return labels and settings of the runs that have a directory."""
    return [each for each in sweep.first_stage_runs() if (each[1].output / each[1].name).exists()]


@pytest.fixture
def sweep(tmp_path):
    def summary_of_run(labels):
        values = dict(enumerate(FIGURES[labels["method"], labels["train.lr"]]))
        last = {"accuracy": values.get(int(labels["seed"])), "loss": 1.0}
        return {"last": last, "best": last} if last["accuracy"] else None

    return write_sweep(tmp_path / "t.yaml", SWEEP, summary_of_run)


def test_a_sweep_directory_records_the_sweep_file_and_overrides(tmp_path, sweep, monkeypatch):
    """Also after the directory was moved; secrets are not recorded."""
    expand.load_sweep(sweep.path, ["train.batch_size=7", "output=elsewhere"]).write_run_list(tmp_path / "t", ["a"])
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "t").rename(tmp_path / "moved" / "t")
    monkeypatch.chdir(tmp_path)
    file, overrides = sweep_status.read_sweep_file_and_overrides(Path("moved/t"))
    reloaded = expand.load_sweep(file, overrides)
    assert reloaded.path == sweep.path
    (_, settings), *_ = reloaded.first_stage_runs()
    assert (settings.train.batch_size, settings.output) == (7, moved)
    expand.load_sweep(sweep.path, ["model.token=abc"]).write_run_list(moved, ["a"])
    assert "abc" not in (moved / "sweep.json").read_text()
    with pytest.raises(UserError, match="does not contain a secret of the original command line"):
        sweep_status.read_sweep_file_and_overrides(moved)
    sweep.path.unlink()
    sweep.write_run_list(moved, ["a"])
    with pytest.raises(UserError, match="does not exist any more"):
        sweep_status.read_sweep_file_and_overrides(moved)
    with pytest.raises(UserError, match=r"contains no valid sweep.json; give the sweep's YAML file"):
        sweep_status.read_sweep_file_and_overrides(tmp_path)


@pytest.mark.parametrize("without", [{"B_2"}, {"A", "B_2"}])
def test_a_metric_is_read_under_the_name_that_most_runs_have(sweep, without):
    """If most runs have no accuracy of a global model (as with FedPer), the personal accuracy of all runs is shown."""
    sweep_with_protocols = expand.load_sweep(sweep.path, ["evaluate.protocol=[global, personal]"])
    for labels, settings in runs_with_directory(sweep_with_protocols):
        last = {"personal_accuracy": 70.0 + int(labels["seed"])}
        last |= {} if labels["method"] in without else {"accuracy": 50.0}
        write_run(settings, last=last, best=last)
    for metric in (None, "accuracy"):
        table = results_table.collect_results(sweep_with_protocols, metric, None)
        assert table_formats.format_caption(table).startswith("personal accuracy, after the last round")
        assert table.cells["A", "0.1"].values == {"0": 70.0, "1": 71.0, "2": 72.0}
        assert (
            table_formats.format_notes(table)[0] == "personal_accuracy is compared, because most runs have no accuracy"
        )
    only_a = expand.load_sweep(sweep.path, ["evaluate.protocol=[global, personal]", "include={method: A}"])
    assert results_table.collect_results(only_a, None, None).metric == (
        "personal_accuracy" if "A" in without else "accuracy"
    )


@pytest.mark.parametrize("item", ["(training data)", "(test data)", "(partition)"])
def test_runs_with_different_data_or_code_are_not_averaged(sweep, item):
    def digests(change=lambda labels: {}):
        """Write digests that depend on the seed only for the partition, with changes(labels) on top."""
        for labels, settings in runs_with_directory(sweep):
            same = {"(training data)": "d", "(test data)": "e", "(partition)": labels["seed"], "(code of fedmpi)": "f"}
            path = settings.output / settings.name / "identity.json"
            path.write_text(json.dumps(settings.identity() | same | change(labels)))

    digests()
    assert results_table.collect_results(sweep, None, "last").notes == ()
    run_with_other_digest = {"method": "A", "train.lr": "0.5", "seed": "1"}
    digests(lambda labels: {item: "x"} if labels == run_with_other_digest else {})
    with pytest.raises(UserError, match=f"{re.escape(item[1:-1])}, so their mean would be meaningless; move .*=accept"):
        results_table.collect_results(sweep, None, "last")
    remaining = expand.load_sweep(sweep.path, ["exclude=[{method: A, train.lr: 0.5, seed: 1}]"])
    assert results_table.collect_results(remaining, None, "last").notes == ()
    table = results_table.collect_results(expand.load_sweep(sweep.path, ["checkpoint.changes=accept"]), None, "last")
    assert re.match(f"mixed: a_lr-0.1_seed-. and .* differ in {re.escape(item[1:-1])}", table.notes[0])
    digests(lambda labels: {"(training data)": "x"} if labels["seed"] == "2" else {})
    with pytest.raises(UserError, match="differ in training data"):
        results_table.collect_results(sweep, None, "last")


def test_means_and_paired_differences_by_hand(sweep):
    lines = table_formats.format_text(results_table.collect_results(sweep, None, "last"))
    assert lines[0].startswith(
        "accuracy, after the last round, mean and sample standard deviation (n - 1) over 3 seeds; in brackets: Somebody"
    )
    assert lines[2].split() == ["method", "lr", "0.1", "lr", "0.5"]
    assert "52.00 +- 2.00 [52.00 +- 1.00 =]" in lines[3]
    assert "50.00 +- 10.00 [40.00 =]" in lines[3]
    assert f"55.00 +- {stdev([53, 54, 58]):.2f} [60.00 +- 20.00 =]" in lines[4]
    assert "(2 of 3)" in lines[4]
    # 3, 2, 4: mean 3, standard error 1 / sqrt 3; -30, 11: mean -9.5, standard error 20.5
    assert "+3 +- 0.58 * better" in lines[-4]
    assert "-9.5 +- 20" in lines[-4]
    assert "worse" not in lines[-4]
    assert lines[-2:] == ["missing: B_2 0.5 (seed 2)", f"to train what is missing: fedmpi sweep {sweep.path}"]
    transposed = table_formats.format_text(results_table.collect_results(sweep, None, "last", "train.lr"))
    assert transposed[2].split()[0] == "train.lr"
    assert "50.00 +- 10.00 [40.00 =]" in transposed[4]
    assert transposed[0].endswith(f"fedmpi table {sweep.path} --round last --rows train.lr")


@pytest.mark.parametrize(
    ("published", "verdict"),
    [
        *(((51.0, 1.0), "="), ((54.0, 1.0), "~"), ((55.0, 1.0), "!"), ((55.0, 0.0), "~"), ((52.0, 0.0), "=")),
        *(((55.0, math.nan), "~"), ((57.0, math.nan), "!")),
    ],
)
def test_verdicts(published, verdict):
    cell = results_table.TableCell(
        ["0", "1", "2"], {"0": 50.0, "1": 52.0, "2": 54.0}, published=published
    )  # 52, with deviation 2
    assert results_table.compare_with_published(cell, 2) == verdict


def test_formats_contain_the_same_numbers(sweep, tmp_path):
    for ending in ("md", "tex", "csv", "txt"):
        table_formats.print_and_write_table(sweep, None, "best", None, tmp_path / f"t.{ending}", lambda line: None)
    latex = (tmp_path / "t.tex").read_text()
    assert r"B\_2 & 55.00 $\pm$ 2.65 [60.00 $\pm$ 20.00 =]" in latex
    assert latex.count(r"\\") == 3 + 2
    assert r"B\_2 & +3 $\pm$ 0.58 * better & -9.5 $\pm$ 20 \\" in latex
    assert "| A | 52.00 ± 2.00 [52.00 ± 1.00 =] |" in (tmp_path / "t.md").read_text()
    first, _, third, last = csv.DictReader((tmp_path / "t.csv").open())
    assert first == {
        **{"method": "A", "train.lr": "0.1", "metric": "accuracy", "of": "best", "mean": "52.0", "std": "2.0"},
        **{"seeds": "3", "seeds_asked": "3", "difference": "", "standard_error": "", "stands_out": ""},
        **{"published": "52.0", "published_std": "1.0", "verdict": "="},
    }
    names = ("difference", "standard_error", "stands_out")
    assert [third[name] for name in names] == ["3.0", str(stdev([3, 2, 4]) / 3**0.5), "better"]
    names = ("mean", "seeds", "seeds_asked", "published", "verdict")
    assert [last[name] for name in names] == ["35.5", "2", "3", "", ""]


def test_invalid_options_are_reported(sweep, tmp_path):
    for words, metric, of_, to in (
        ("--round: first is not allowed; must be last", None, "first", None),
        ("ending in .md, .tex", None, "last", tmp_path / "a.doc"),
        ("no run has a metric 'acuracy'; did you mean 'accuracy'", "acuracy", "last", None),
    ):
        with pytest.raises(UserError, match=words):
            table_formats.print_and_write_table(sweep, metric, of_, None, to, print)
    with pytest.raises(UserError, match="none of 12 runs is finished; to train them: fedmpi sweep"):
        results_table.collect_results(expand.load_sweep(sweep.path, ["name=other"]), None, "last")


def test_odd_names_and_one_seed(tmp_path):
    """Without seeds there are no deviations and no differences; special characters are escaped, and LaTeX compiles."""
    odd = write_sweep(tmp_path / "o%d_d.yaml", ODD, lambda labels: summary_of(0.5))
    for ending in ("md", "tex", "csv"):
        table_formats.print_and_write_table(odd, None, None, None, tmp_path / f"t.{ending}", lambda line: None)
    assert "+-" not in table_formats.format_text(results_table.collect_results(odd, None, None))[3]
    latex = (tmp_path / "t.tex").read_text()
    assert r"A\_b \& \textbackslash{}c & 0.500 \\" in latex
    assert r"50\% *" in latex
    assert "\n{}[x]" in latex
    assert r"| A\_b & \\c | 0.500 |" in (tmp_path / "t.md").read_text()
    assert next(csv.DictReader((tmp_path / "t.csv").open()))["mean"] == "0.5"
    if shutil.which("pdflatex"):
        begin = "\\documentclass{article}\\usepackage{booktabs}\\usepackage[T1]{fontenc}\\begin{document}\n"
        (tmp_path / "paper.tex").write_text(begin + latex + "\\end{document}\n", encoding="utf-8")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout[-2000:]


def test_values_that_are_not_finite_are_ignored_and_listed(tmp_path):
    """A value of an earlier round does not replace that of the last round."""
    figures = {
        "A": [summary_of(50.0), summary_of(99.0, at=-1), None],
        "B": [summary_of(60.0), summary_of(70.0), summary_of(80.0)],
        "C": [summary_of(99.0, at=-1), {"last": {"accuracy": None}}, {"last": {}}],
    }
    sweep = write_sweep(tmp_path / "t.yaml", NO_NUMBERS, lambda labels: figures[labels["m"]][int(labels["seed"])])
    table = results_table.collect_results(sweep, None, None)
    values = {key: cell.values for key, cell in table.cells.items()}
    assert values == {("A",): {"0": 50.0}, ("B",): {"0": 60.0, "1": 70.0, "2": 80.0}, ("C",): {}}
    lines = table_formats.format_text(table)
    assert lines[3].split() == ["A", "50.00", "(1", "of", "3)"]
    assert lines[5].split() == ["C", "nan"]
    assert "paired" not in " ".join(lines)  # with one common seed there is no standard error
    assert "missing: A (seed 2)" in lines
    assert "not a number: A (seed 1); C (seed 0, 1, 2)" in lines
    assert "not a number: A (seed 1)" in table_formats.format_latex(table)


@pytest.mark.parametrize(("scatter", "word"), [(0.1, "higher"), (1.0, ""), (0.0, "")])
def test_diagnostics_can_be_metrics(sweep, scatter, word):
    """The verdict is "higher" or "lower", since it is not known which is better.

    By hand: for seed s, the shift of method B_2 is 1 + scatter s higher. For three seeds, a significant difference
    exceeds 4.303 standard errors; equal differences have no standard error.
    """
    for labels, settings in runs_with_directory(sweep):
        more = (1.0 + scatter * int(labels["seed"])) * (labels["method"] == "B_2")
        rows = [{"round": 0, "losses": {"shift": 9.0, "aggregation": None, "matrix": [[1.0]]}}]
        rows.append({"round": 1, "losses": {"shift": 0.5 + more, "aggregation": -0.25}})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (settings.output / settings.name / "analysis.jsonl").write_text(text)
    table = results_table.collect_results(sweep, "losses.shift", None)
    assert table.cells["A", "0.1"].values == {"0": 0.5, "1": 0.5, "2": 0.5}
    assert table_formats.format_text(table)[0].startswith("losses.shift, after the last round")
    assert results_table.collect_results(sweep, "losses.shift", "mean_last_10").cells["A", "0.5"].values["0"] == 4.75
    expected = (pytest.approx(1.0 + scatter), pytest.approx(scatter / 3**0.5), word)
    assert results_table.compute_paired_difference(table, ("B_2", "0.1")) == expected


def test_plots_show_means_and_deviations(sweep, tmp_path, monkeypatch):
    """The labels of the rows, on the x axis, are numbers or words."""
    charts_written = []
    monkeypatch.setattr(charts, "write_chart", lambda chart, to, title: charts_written.append(chart))
    for rows in ("train.lr", None):
        with pytest.warns(UserWarning, match=r"not plotted, because seeds are missing: (0.5 B_2|B_2 0.5)$"):
            table_formats.print_and_write_table(sweep, None, "last", rows, tmp_path / "t.png", lambda line: None)
    numbers, words = charts_written
    assert (numbers.x_label, numbers.y_label, numbers.ticks) == ("lr", "accuracy (%)", ["0.1", "0.5"])
    a, b = numbers.series
    assert (a.label, a.x, a.y, a.low, a.high) == ("A", [0.1, 0.5], [52.0, 50.0], [50.0, 40.0], [54.0, 60.0])
    assert b.label == "B_2"
    assert math.isnan(b.y[1])
    assert [line.label for line in words.series] == ["lr 0.1", "lr 0.5"]
    assert (words.series[0].x, words.ticks) == ([0.0, 1.0], ["A", "B_2"])
