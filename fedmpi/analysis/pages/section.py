"""What a report is made of. A section is a function of the runs; it is listed in report.py.

    def losses(runs: Runs) -> Section | None:
        if not any(run.rows for run in runs.all):
            return None                      # no run has such a record: the section is left out
        return Section("losses", "Losses", (Figure("loss", "Loss", Lines(...), ("round", "loss"), rows),))

All text is plain text: page.py escapes it, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Value = float | int | str | None  # of a cell; None and nan: empty


@dataclass(frozen=True)
class Series:
    """A line. y: None or nan leaves a gap; low, high: the band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    faint: bool = False  # thin and grey, without a place in the legend


@dataclass(frozen=True)
class Lines:
    series: Sequence[Series]
    x_label: str
    y_label: str
    whole_x: bool = True  # x are whole numbers
    from_zero: bool = False  # the y axis begins at 0
    log: bool = False  # the y axis is logarithmic


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, one under another, each of parts in a row. parts: name -> a length for each bar."""

    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    x_label: str


@dataclass(frozen=True)
class Grid:
    """A coloured rectangle for each number. values: a row for each of `rows`; None and nan: empty.

    signed: from the lowest to the highest by way of 0, such as cosines; otherwise from 0 on.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    row_label: str
    column_label: str
    unit: str  # what a number is
    signed: bool = False
    written: bool = False  # the numbers stand in the rectangles, where they have the room


@dataclass(frozen=True)
class Span:
    row: int
    start: float
    end: float
    kind: str
    said: str = ""  # shown under the pointer


@dataclass(frozen=True)
class Spans:
    """What happened from when to when, in rows."""

    rows: Sequence[str]
    spans: Sequence[Span]
    kinds: Sequence[str]  # all there are, in the order of the colours
    x_label: str


@dataclass(frozen=True)
class Figure:
    """A picture with its numbers. name: of its files, unlike any other in the report; head, data: the CSV."""

    name: str
    title: str
    chart: Lines | Bars | Grid | Spans
    head: Sequence[str]
    data: Sequence[Sequence[Value]]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; long ones are folded away where `folded` gives them a heading to be opened."""

    head: Sequence[str]
    rows: Sequence[Sequence[Value]]
    title: str = ""
    note: str = ""
    folded: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph: a remark, or with `main` what the page is about."""

    text: str
    warning: bool = False
    main: bool = False


@dataclass(frozen=True)
class Section:
    """name: the anchor in the page, unlike any other."""

    name: str
    title: str
    parts: Sequence[Figure | Table | Text]
