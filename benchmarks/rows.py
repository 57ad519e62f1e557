"""Print the runs of a sweep as lines of CSV: labels, chosen metrics of each run, and the hash of its last model.

    python benchmarks/rows.py SWEEP.yaml [KEY=VALUE ...] --figures accuracy losses.shift [--round last] > FILE.csv

One line per finished run. A metric whose name contains a dot is read from analysis.jsonl, others from summary.json; if
a run has no accuracy of the global model, that of the first protocol with one is used. `fedmpi table` shows means of
the same metrics.
"""

import argparse
import csv
import sys
from dataclasses import replace
from pathlib import Path

from fedmpi.sweeps import expand, progress


def make_row(labels, settings, figures, of):
    """Return [label, ..., metric, ..., hash] of a run; None if the run is not finished."""
    state = progress.read_state(settings)
    if state.status != progress.DONE:
        return None
    other = replace(state, summary=progress.summarize_diagnostics(settings))
    looks = ["", *(f"{protocol}_" for protocol in settings.evaluate.protocol)]  # prefixes of the run's protocols

    def value(name):
        if progress.is_diagnostic(name):
            return other.get_metric(of, name)
        results = (state.get_metric(of, look + name) for look in looks)
        return next((each for each in results if each == each), float("nan"))

    values = map(value, figures)
    return [*labels.values(), *(f"{value:.6g}" for value in values), progress.read_last_row(settings)["sha256"][:16]]


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE for every run")
    parser.add_argument("--figures", nargs="+", default=["accuracy"])
    parser.add_argument("--round", choices=["last", "mean_last_10"], default="last")
    given = parser.parse_intermixed_args()
    args = expand.load_sweep(given.sweep, given.settings)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*(axis.name for axis in args.axes), *given.figures, "sha256"])
    writer.writerows(filter(None, (make_row(*each, given.figures, given.round) for each in args.first_stage_runs())))


if __name__ == "__main__":
    main()
