"""Compare five aggregations of LoRA adapters with training all weights: table and figure of docs/results.md.

    fedmpi sweep configs/campaigns/lora.yaml
    python benchmarks/lora.py [--runs runs/lora]

With --runs, the program first writes benchmarks/results/lora.csv from the runs of the sweep, one line per run:

    aggregation             `server.lora`, or `all` if all weights are trained
    accuracy                of the global model, in percent, after the last round
    accuracy_mean_last_10   the mean of the accuracy over the last ten rounds
    lora_distance           the mean of the metric `lora_distance` over all rounds; empty for `all`
    sent_bytes              bytes that a client sends in a round
    received_bytes          bytes that it receives
    sha256                  the first digits of the hash of the last model

It then prints the tables, and draws docs/figures/lora.png.
"""

import argparse
import csv
import json
import math
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import t as student

ROOT = Path(__file__).parents[1]
CSV = ROOT / "benchmarks" / "results" / "lora.csv"
FIGURE = ROOT / "docs" / "figures" / "lora.png"
KEYS = ("aggregation", "clients", "alpha", "seed")
METRICS = ("accuracy", "accuracy_mean_last_10", "lora_distance", "sent_bytes", "received_bytes", "sha256")
SETTINGS = [(clients, alpha) for clients in ("4", "10") for alpha in ("0.1", "1")]
WEIGHTS = ("all", "separate", "freeze_a", "exact", "svd", "stack")
PAIRS = [("exact", "separate"), ("svd", "separate"), ("svd", "exact"), ("stack", "exact"), ("freeze_a", "exact")]
PAIRS += [("exact", "all"), ("svd", "all")]
TRAFFIC = [
    ("4", "sent_bytes", "sent"),
    ("4", "received_bytes", "received, 4 clients"),
    ("10", "received_bytes", "received, 10 clients"),
]
TRAFFIC_COLOURS = ("0.25", "0.55", "0.78")
LABELS = {"all": "all weights"}


def read_run(folder):
    """Return the line of a run directory as {column: value}."""
    weights, clients, alpha, seed = folder.name.split("_")
    summary = json.loads((folder / "summary.json").read_text())
    if summary["exit_reason"] != "finished":
        raise SystemExit(f"{folder}: the run is not finished; repeat the command of the sweep")
    rounds = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    distances = [row["lora_distance"] for row in rounds if "lora_distance" in row]
    labels = (weights.replace("-", "_"), *(text.partition("-")[2] for text in (clients, alpha, seed)))
    return dict(zip(KEYS, labels, strict=True)) | {
        "accuracy": f"{summary['last']['accuracy']:.2f}",
        "accuracy_mean_last_10": f"{summary['mean_last_10']['accuracy']:.3f}",
        "lora_distance": f"{fmean(distances):.3g}" if distances else "",
        "sent_bytes": summary["client_sent_bytes"],
        "received_bytes": summary["client_received_bytes"],
        "sha256": rounds[-1]["sha256"][:16],
    }


def write_results(runs, path=CSV):
    """Write the CSV file from the run directories in a folder."""
    lines = [read_run(summary.parent) for summary in runs.glob("*/summary.json")]
    lines.sort(key=lambda line: (WEIGHTS.index(line["aggregation"]), *(float(line[key]) for key in KEYS[1:])))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*KEYS, *METRICS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_results(path=CSV):
    """Return {(weights, clients, alpha): [line of each seed]}."""
    cells = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            cells.setdefault((line["aggregation"], line["clients"], line["alpha"]), []).append(line)
    return cells


def values(lines, metric):
    return [float(line[metric]) for line in lines]


def standard_error(numbers):
    return stdev(numbers) / math.sqrt(len(numbers))


def format_mean(numbers):
    return f"{fmean(numbers):.2f} +- {standard_error(numbers):.2f}"


def format_difference(first, second):
    """Return the mean of paired differences with its standard error; * if their 95 % interval does not contain 0."""
    numbers = [a - b for a, b in zip(first, second, strict=True)]
    mean, error = fmean(numbers), standard_error(numbers)
    sign = " *" if abs(mean) > error * student.ppf(0.975, len(numbers) - 1) else ""
    return f"{mean:+.2f} +- {error:.2f}{sign}"


def format_rows(rows):
    """Return the text of a table in which all cells of a column start at the same position."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def format_tables(cells):
    """Return the text of the tables of accuracies, paired differences, distances and bytes."""
    heads = [f"{clients} clients, alpha {alpha}" for clients, alpha in SETTINGS]

    def row(label, function, metric, *names):
        each = [[values(cells[(weights, *setting)], metric) for weights in names] for setting in SETTINGS]
        return [label, *(function(*lists) for lists in each)]

    tables = [
        [["accuracy", *heads], *(row(weights, format_mean, "accuracy", weights) for weights in WEIGHTS)],
        [["difference", *heads], *(row(" - ".join(p), format_difference, "accuracy", *p) for p in PAIRS)],
        [["distance", *heads], *(row(w, lambda x: f"{fmean(x):.2g}", "lora_distance", w) for w in WEIGHTS[1:])],
        [["bytes", *(label for *_, label in TRAFFIC)]],
    ]
    for weights in WEIGHTS:
        tables[-1].append([weights, *(f"{get_bytes(cells, weights, *where):,}" for *where, _ in TRAFFIC)])
    return "\n\n".join(map(format_rows, tables))


def get_bytes(cells, weights, clients, column):
    """Return a size, which does not depend on alpha and the seed."""
    lines = [line for (name, count, _), each in cells.items() if (name, count) == (weights, clients) for line in each]
    (size,) = {int(line[column]) for line in lines}
    return size


def draw(cells, path=FIGURE):
    """Draw the accuracies, the distances from the exact mean, and the bytes."""
    from matplotlib.figure import Figure

    from fedmpi.analysis.charts import BLACK, COLOURS, MARKERS, save_figure

    canvas = Figure(figsize=(13, 4.4), layout="constrained")
    accuracy, distance, traffic = canvas.subplots(1, 3, width_ratios=[1.15, 1.15, 1])
    colours = dict(zip(WEIGHTS, (BLACK, *COLOURS[:5]), strict=True))
    markers = dict(zip(WEIGHTS, ("P", *MARKERS), strict=True))
    for axes, metric in ((accuracy, "accuracy"), (distance, "lora_distance")):
        for k, weights in enumerate(WEIGHTS[metric == "lora_distance" :]):
            numbers = [values(cells[(weights, *setting)], metric) for setting in SETTINGS]
            axes.errorbar(
                [x + 0.13 * (k - 2.5) for x in range(len(SETTINGS))],
                [fmean(each) for each in numbers],
                [standard_error(each) for each in numbers],
                fmt=markers[weights],
                color=colours[weights],
                markersize=6,
                capsize=3,
                label=LABELS.get(weights, weights),
            )
        for x in range(len(SETTINGS) - 1):
            axes.axvline(x + 0.5, color="0.85", linewidth=1)
        names = [f"{clients} clients\nalpha {alpha}" for clients, alpha in SETTINGS]
        axes.set_xticks(range(len(SETTINGS)), names)
        axes.set_xlim(-0.5, len(SETTINGS) - 0.5)
        axes.grid(axis="y", alpha=0.3)
    accuracy.set(title="accuracy after the last round (%)", ylim=(54, 87))
    accuracy.legend(frameon=False, ncols=3, fontsize="small", loc="lower center")
    distance.set(title="relative distance from the exact mean")
    for k, (clients, column, label) in enumerate(TRAFFIC):
        sizes = [get_bytes(cells, weights, clients, column) / 1000 for weights in WEIGHTS]
        y = [each + 0.27 * (k - 1) for each in range(len(WEIGHTS))]
        bars = traffic.barh(y, sizes, 0.25, color=TRAFFIC_COLOURS[k], label=label)
        traffic.bar_label(bars, [f"{size:.0f}" for size in sizes], padding=3, fontsize="small")
    traffic.set_yticks(range(len(WEIGHTS)), [LABELS.get(weights, weights) for weights in WEIGHTS])
    traffic.invert_yaxis()
    traffic.set(title="kB per client and round", xlim=(0, 920))
    traffic.legend(frameon=False, fontsize="small", loc="upper right", bbox_to_anchor=(1, 0.7))
    save_figure(canvas, path)


def main():
    """Run the program with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="the folder of the runs")
    arguments = parser.parse_args()
    if arguments.runs:
        write_results(arguments.runs)
    cells = read_results()
    print(format_tables(cells))
    draw(cells)


if __name__ == "__main__":
    main()
