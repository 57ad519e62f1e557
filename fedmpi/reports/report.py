"""Write an HTML page about one or more runs (`fedmpi report`)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedmpi.analysis import charts
from fedmpi.common.errors import UserError
from fedmpi.common.text import pluralize
from fedmpi.reports import diagnostics, results, run_facts
from fedmpi.reports.page import Figure, Paragraph, Part, Section, format_csv, render_page
from fedmpi.reports.run_groups import RunCollection, read_runs, strip_folders
from fedmpi.runtime.record import atomic_files
from fedmpi.runtime.record.run_dir import REPORT

DAMAGED_FILE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)  # raised for unexpected file contents
SECTIONS: tuple[tuple[str, str, str, Callable[[RunCollection], list[Part | None]]], ...] = (
    # name, title, attribute of Run that must not be empty in some run, function that returns the parts of the section
    ("summary", "Summary", "path", results.build_summary_section),
    ("learning", "Learning", "rows", results.build_learning_section),
    ("method", "Metrics of the method", "method_metrics", results.build_method_metrics_section),
    ("clients", "Clients", "clients", results.build_clients_section),
    ("updates", "Updates: drift and conflict", "updates", diagnostics.build_updates_section),
    ("analysis", "Analysis", "analysis", diagnostics.build_analysis_section),
    ("features", "Features and outputs", "analysis", diagnostics.build_features_section),
    ("steps", "Local steps", "analysis", diagnostics.build_local_steps_section),
    ("classes", "Classes", "rows", results.build_classes_section),
    ("partition", "Partition", "partition", results.build_partition_section),
    ("traffic", "Traffic", "rows", run_facts.build_metric_vs_traffic_section),
    ("time", "Time", "path", run_facts.build_time_section),
    ("faults", "Faults", "path", results.build_faults_section),
    ("settings", "Settings", "config", run_facts.build_settings_section),
    ("environment", "Environment", "environment", run_facts.build_environment_section),
)


def build_sections(runs: RunCollection) -> list[Section]:
    """Return all sections of the report for which the runs have records.

    If a file is damaged, sections that need it contain a warning instead. Names of figures are made unique and reduced
    to ASCII letters, digits, "_" and "-", since they serve as file names and anchors.
    """
    result, names = [], set[str]()
    for name, title, needs, make in SECTIONS:
        try:
            parts = [part for part in make(runs) if part] if any(getattr(run, needs) for run in runs.all) else []
        except DAMAGED_FILE_ERRORS as error:
            reason = "This section cannot be shown, because a file in the run directory is damaged"
            parts = [Paragraph(f"{reason} ({error!r}).", warning=True)]
        for i, part in enumerate(parts):
            if isinstance(part, Figure):
                plain = re.sub(r"[^A-Za-z0-9_-]+", "-", part.name).strip("-")[:80]
                while plain in names:
                    plain += "-2"
                names.add(plain)
                parts[i] = replace(part, name=plain)
        if parts:
            result.append(Section(name, title, parts))
    return result


def render_report(runs: RunCollection) -> str:
    """Return the report on one or more runs as an HTML page."""
    places = list(dict.fromkeys(run.path.resolve().parent.name for run in runs.all))
    where = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
    title = runs.single.name if runs.single else f"{pluralize(len(runs.all), 'run')} in {where}"
    config = runs.all[0].config
    shared = [
        strip_folders(config[k]) for k in ("data.source", "model.name") if k in config and k not in runs.differing_keys
    ]
    methods = ", ".join(dict.fromkeys(strip_folders(run.config.get("method.name", "?")) for run in runs.all))
    lead = f"{methods} on {', '.join(shared) or 'several data sets or models'}"
    parts = build_sections(runs)
    return render_page("page", title, [lead], titles={each.name: each.title for each in parts}, sections=parts)


def write_report(
    paths: Sequence[Path], to: Path | None, figures: Path | None, print_line: Callable[[str], None]
) -> None:
    """Write the report on runs and, if requested, its figures as separate files (`fedmpi report`).

    Args:
        paths: directories of runs or sweeps.
        to: the HTML file; None: report.html in the directory paths[0] or, if there are several paths, in the working
            directory.
        figures: directory to which each figure is written as .svg, .png and .csv; None: no such files.
        print_line: prints a line of output.

    Raises:
        UserError: if a directory contains no run, or a file cannot be written.
    """
    runs = read_runs(paths)
    to = to or (paths[0] / REPORT if len(paths) == 1 else Path(REPORT))
    if to.suffix not in (".html", ".htm") or to.is_dir():
        raise UserError(f"--to: {to} is not allowed; must be a file name ending in .html")
    try:
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            for part in (part for section in build_sections(runs) for part in section.parts):
                if isinstance(part, Figure):
                    for suffix in ("svg", "png"):
                        charts.write_chart(part.chart, figures / f"{part.name}.{suffix}", part.title)
                    (figures / f"{part.name}.csv").write_text(format_csv(part), encoding="utf-8")
            print_line(f"written: {figures}/*.svg, .png, .csv")
        atomic_files.write_atomically(to, render_report(runs).encode())
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or to}: {error.strerror}; choose another file or directory (--to, --figures)"
        ) from error
    print_line(f"written: {to}")
    if notes := [f"{run.path}: {note}" for run in runs.all for note in run.notes]:
        more = (
            f", and {pluralize(len(notes) - 1, 'more note')} in the section Faults of the page"
            if len(notes) > 1
            else ""
        )
        warnings.warn(f"not all files could be read: {notes[0]}{more}", stacklevel=2)
