"""`fedmpi report`: all that is recorded of runs, as one page."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmpi.analysis.pages.drawing.raster import png
from fedmpi.analysis.pages.drawing.svg import draw
from fedmpi.analysis.pages.page import BROKEN, as_csv, damaged, page
from fedmpi.analysis.pages.run import named
from fedmpi.analysis.pages.runs import Runs, read
from fedmpi.analysis.pages.section import Figure, Section, Table, Text
from fedmpi.analysis.pages.sections import (
    analysis,
    classes,
    clients,
    faults,
    features,
    learning,
    overview,
    partition,
    provenance,
    settings,
    steps,
    time,
    traffic,
    updates,
)
from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.config import Settings
from fedmpi.runtime.record import durable
from fedmpi.runtime.record.run_dir import REPORT

Say = Callable[[str], None]
MOST_BYTES = 2_900_000  # of a page

SECTIONS: tuple[Callable[[Runs], Section | None], ...] = (  # in the order of the page; one that gives None is left out
    overview.summary,
    learning.curves,
    learning.own,
    clients.spread,
    updates.agreement,
    analysis.measured,
    features.seen,
    steps.measured,
    classes.accuracy,
    partition.held,
    traffic.bytes_,
    time.seconds,
    faults.told,
    settings.asked,
    provenance.environment,
    provenance.hashes,
)


def sections(runs: Runs) -> list[Section]:
    """What there is to tell. A part that cannot be made of damaged files says so, and the others stand."""
    found = []
    for make in SECTIONS:
        try:
            section = make(runs)
        except BROKEN as error:
            name = f"{make.__module__.rpartition('.')[2]}-{make.__name__}"
            section = Section(name, make.__name__.replace("_", " ").capitalize(), (damaged(error),))
        if section is not None:
            found.append(section)
    return _named(found)


def _named(found: Sequence[Section]) -> list[Section]:
    """Names of figures are those of files and of places in the page: plain, and no two alike. A task's metric may be
    called anything."""
    taken = set[str]()

    def named(part: Figure | Table | Text) -> Figure | Table | Text:
        if not isinstance(part, Figure):
            return part
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", part.name).strip("-")[:80] or "figure"
        name = next(n for i in itertools.count(1) if (n := plain if i == 1 else f"{plain}-{i}") not in taken)
        taken.add(name)
        return replace(part, name=name)

    return [replace(section, parts=[named(part) for part in section.parts]) for section in found]


def after_run(settings: Settings, result: Mapping[str, Any]) -> Path | None:
    """What a run ends with: report.html in its directory, unless `report: false`. result: of runtime/run.py; {} on
    ranks other than 0. What goes wrong is a warning: the run is complete without."""
    if not settings.report or "directory" not in result:
        return None
    path = Path(result["directory"])
    try:
        runs = read([settings.working_dir / path])
        content = html(runs, sections(runs)).encode()
        durable.write(settings.working_dir / path / REPORT, content, settings.output_mode == "private")
    except Exception as error:
        said = f"report: {path / REPORT} was not written ({error!r}); the run is complete without it"
        warnings.warn(f"{said}. Once more: fedmpi report {path}", stacklevel=2)
        return None
    return path / REPORT


def analyse(paths: Sequence[Path], to: Path | None, figures: Path | None, say: Say) -> None:
    """`fedmpi report`. to: the file; None: report.html in the directory, of several here."""
    runs = read(paths)
    to = to or (paths[0] / REPORT if len(paths) == 1 else Path(REPORT))
    if to.suffix not in (".html", ".htm") or to.is_dir():
        raise UserError(f"--to: {to}: a file whose name ends in .html is needed")
    found = sections(runs)
    try:
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            for figure in (part for section in found for part in section.parts if isinstance(part, Figure)):
                try:
                    write_figure(figure, figures)
                except BROKEN as error:
                    say(f"not written: {figure.name}: {damaged(error).text}")
        private = any(run.config.get("output_mode") == "private" for run in runs.all)
        durable.write(to, html(runs, found).encode(), private)
    except OSError as error:
        raise UserError(f"{error.filename or to}: {error.strerror}; choose another place (--to, --figures)") from error
    if figures is not None:
        say(f"written: {figures}/*.svg, .png, .csv")
    say(f"written: {to}")
    if notes := [f"{run.path}: {note}" for run in runs.all for note in run.notes]:
        more = f", and {count(len(notes) - 1, 'more note')} in the page's Faults" if len(notes) > 1 else ""
        warnings.warn(f"not all could be read: {notes[0]}{more}", stacklevel=2)


def html(runs: Runs, found: Sequence[Section]) -> str:
    """The page. One that would be too large leaves out the numbers behind its largest figures."""
    parts = [part for section in found for part in section.parts if isinstance(part, Figure)]
    title = runs.alone.name if runs.alone else f"{count(len(runs.all), 'run')} in {_place(runs)}"
    made = page(title, _lead(runs), found, draw)
    for figure in sorted(parts, key=lambda each: -len(each.data)):
        if len(made) <= MOST_BYTES:
            break
        slim = replace(figure, data=(), note=f"{figure.note} Too many numbers for this page: fedmpi report --figures.")
        found = [replace(s, parts=[slim if p is figure else p for p in s.parts]) for s in found]
        made = page(title, _lead(runs), found, draw)
    return made


def _place(runs: Runs) -> str:
    places = list(dict.fromkeys(run.path.resolve().parent.name for run in runs.all))
    return ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")


def _lead(runs: Runs) -> list[str]:
    """What it is, in a line."""
    c = runs.all[0].config
    shared = [named(c[key]) for key in ("data.source", "model.name") if key in c and key not in runs.differing]
    methods = ", ".join(dict.fromkeys(named(run.config.get("method.name", "?")) for run in runs.all))
    return [f"{methods} on {', '.join(shared) or 'several data sets or models'}"]


def write_figure(figure: Figure, to: Path) -> None:
    """Write a figure as NAME.svg, NAME.png, and NAME.csv with its numbers."""
    (to / f"{figure.name}.svg").write_text(draw(figure, alone=True), encoding="utf-8")
    (to / f"{figure.name}.csv").write_text(as_csv(figure), encoding="utf-8")
    png(figure, to / f"{figure.name}.png")
