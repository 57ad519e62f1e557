"""Implement `fedmpi reproduce`: download the data of a published table, train its runs, and compare each cell.

Tables are sweep files in configs/papers and configs/benchmarks. The verdict on a cell is "=" if our mean lies within
one published standard deviation of the published mean, "~" if it lies within two, "!" if it is farther away, "?" if
there is no standard deviation to compare with, and "" if runs are missing.
"""

from __future__ import annotations

import hashlib
import json
import site
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import pluralize, suggest_name
from fedmpi.common.version import __version__
from fedmpi.config import Settings
from fedmpi.config.loading import redact_override
from fedmpi.data.download import fetch
from fedmpi.runtime.record.metadata import find_installed_version
from fedmpi.sweeps import expand, progress, results_table, table_formats
from fedmpi.sweeps.expand import Sweep
from fedmpi.sweeps.results_table import ResultsTable

PrintLine = Callable[[str], None]
TABLE_FOLDERS = ("papers", "benchmarks")
VERDICTS = {
    "=": "within the published spread",
    "~": "within two",
    "!": "outside",
    "?": "without a spread",
    "": "missing",
}


def list_config_folders() -> list[Path]:
    """Return the folders that may contain configs: that of the source tree, those of a wheel, and ./configs."""
    package = Path(__file__).parents[2]
    shared = (place / "share" / "fedmpi" / "configs" for place in (Path(sys.prefix), Path(site.getuserbase())))
    return [package / "configs", *shared, Path("configs").absolute()]


def list_tables() -> dict[str, Path]:
    """Return {name of a published table: its sweep file} for all tables.

    Raises:
        UserError: if no tables are installed.
    """
    for place in list_config_folders():
        tables = {path.stem: path for folder in TABLE_FOLDERS for path in sorted((place / folder).glob("*.yaml"))}
        if tables:
            return {name: path for name, path in tables.items() if "_common" not in name}
    looked = ", ".join(map(str, list_config_folders()))
    raise UserError(f"reproduce: no folders papers and benchmarks in {looked}; install fedmpi with its configs")


def find_table(name: str) -> Path:
    """Return the sweep file of a published table, given its name or path; raise UserError if there is no such table."""
    known = list_tables()
    stem = name.removesuffix(".yaml").rpartition("/")[2]
    if stem not in known:
        raise UserError(f"reproduce: unknown table '{name}'; {suggest_name(stem, known)}")
    return known[stem]


def find_datasets(sweep: Sweep) -> dict[str, Settings]:
    """Return {name of a data set: settings of one run that uses it} for all data sets of a sweep.

    The data sets of MedMNIST are listed individually.
    """
    examples: dict[str, Settings] = {}
    for settings in map(sweep.run_settings, sweep.covering_labels()):
        source = settings.data.source
        name = str(settings.data.options.get("set", source)) if source == "medmnist" else source
        examples.setdefault(name, settings)
    return examples


def describe_tables(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each published table and a description: number of runs, data sets, and publication."""
    for name, path in list_tables().items():
        sweep = expand.load_sweep(path, overrides)
        published = f", published by {sweep.published[0].source}" if sweep.published else ""
        yield name, f"{pluralize(len(sweep.labels), 'run')} on {', '.join(find_datasets(sweep))}{published}"


def fetch_data(sweep: Sweep, print_line: PrintLine) -> None:
    """Download the missing data sets of a sweep.

    Raises:
        UserError: if a data set cannot be downloaded automatically; the message says how to get it.
    """
    from fedmpi.runtime import build_data

    for name, settings in find_datasets(sweep).items():
        root = settings.data.root
        if name not in fetch.CATALOGUE:
            build_data.make_source(settings)(root)
            continue
        with fetch.download_lock(root):
            if fetch.fetch_dataset(name, root):
                print_line(f"downloaded {name} to {root}")


def write_comparison(sweep: Sweep, to: Path, print_line: PrintLine) -> int:
    """Print the results of a sweep next to the published results, and write table.md, table.csv and verdict.json.

    Returns:
        The exit code: 1 if a published cell has no result, or if our result is more than two standard deviations away
        from the published one; otherwise 0.

    Raises:
        UserError: if no run has finished, or the files cannot be written.
    """
    tables = [
        results_table.collect_results(sweep, metric, summary_part)
        for summary_part, metric in (each.metric_key for each in sweep.published)
    ]
    tables = tables or [results_table.collect_results(sweep, None, None)]
    for line in (line for cells in tables for line in (*table_formats.format_text(cells), "")):
        print_line(line)
    facts = build_verdict(tables)
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / "table.md").write_text("\n".join(map(table_formats.format_markdown, tables)), encoding="utf-8")
        (to / "table.csv").write_text(table_formats.format_csv(facts["cells"]), encoding="utf-8")
        (to / "verdict.json").write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--to: cannot write {to}: {error.strerror}; choose another directory") from error
    counts = ", ".join(f"{number} {word}" for word, number in facts["verdict"].items())
    print_line(
        f"verdict: {counts or 'this table has no published values'}; written: {to}/verdict.json, table.csv, table.md"
    )
    return 1 if facts["verdict"].keys() & {VERDICTS["!"], VERDICTS[""]} else 0


def build_verdict(tables: Sequence[ResultsTable]) -> dict[str, Any]:
    """Return the content of verdict.json: the verdict on each cell, and the number of cells per verdict."""
    sweep = tables[0].sweep
    cells = [
        row | {"verdict": VERDICTS.get(row["verdict"])} for each in tables for row in table_formats.to_records(each)
    ]
    finished = [run for _, run in sweep.final_runs() if run and progress.read_state(run).status == progress.DONE]
    return {
        "table": sweep.path.stem,
        "sha256": hashlib.sha256(sweep.path.read_bytes()).hexdigest(),
        "overrides": [redact_override(text) for text in sweep.overrides],
        "published": sweep.published[0].source if sweep.published else None,
        "fedmpi": __version__,
        "torch": find_installed_version("torch"),
        "verdict": dict(Counter(cell["verdict"] for cell in cells if cell["verdict"] is not None)),
        "sha256_of_models": {run.name: progress.read_last_row(run)["sha256"] for run in finished},
        "cells": cells,
    }
