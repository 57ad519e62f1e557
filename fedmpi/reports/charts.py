"""Charts of reports, drawn by matplotlib as SVG for the page, and as SVG and PNG files.

A chart is drawn in the colours of paper. In the page each colour becomes a CSS variable with that colour as its default
(`fill: var(--c0,#0072b2)`), so that one drawing serves light and dark screens. Colours are Okabe and Ito's, which
colour-blind readers tell apart; lines differ in dashes and marks, too.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedmpi.analysis.figures import COLOURS as OKABE_ITO
from fedmpi.analysis.figures import DASHES, MARKERS, save
from fedmpi.common.text import printable, shorten

COLOURS = (*OKABE_ITO[:-1], "#111111")  # matplotlib leaves black out of an SVG, and nothing could replace it
INK, SOFT, RULE, WHITE = "#1b1b1b", "#6b6b6b", "#e3e3e3", "#fefefe"
VARIABLES = {colour.lower(): f"c{i}" for i, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "ink", SOFT: "soft", RULE: "rule", WHITE: "on"}
KINDS = [to_rgba(colour, alpha) for alpha in (1.0, 0.5) for colour in COLOURS]  # of boxes
STYLE: Any = {
    **{"svg.fonttype": "none", "text.parse_math": False, "font.size": 11, "text.color": INK, "axes.labelcolor": INK},
    **{"figure.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": SOFT, "grid.color": RULE},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.axisbelow": True},
    **{"xtick.bottom": False, "ytick.left": False, "xtick.labelcolor": INK, "ytick.labelcolor": INK},
    **{
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titley": 1.0,
        "legend.frameon": False,
        "legend.fontsize": 11,
    },
}
WIDE, LETTER, LINE = 5.6, 0.087, 0.24  # inches: of a chart, of a letter, of a line of text
POINTS, MARKS = 600, 20  # of a line, at most
TIPS = 600  # boxes that tell their number under the pointer; more would make the page slow
SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Series:
    """A line. y: None or nan makes a gap; low, high: the band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Lines:
    series: Sequence[Series]
    x_label: str
    y_label: str
    whole_x: bool = True  # x are whole numbers
    from_zero: bool = False  # the y axis begins at 0


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, one under another, each of parts in a row. parts: name -> a length for each bar."""

    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    x_label: str


@dataclass(frozen=True)
class Grid:
    """A coloured cell for each number. values: a row for each of `rows`; None and nan: grey.

    signed: colours are of both signs, such as for cosines; otherwise numbers begin at 0.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    row_label: str
    column_label: str
    unit: str  # of the numbers, or what they are
    signed: bool = False
    written: bool = False  # the numbers stand in the cells, if there is room


Box = tuple[float, float, float, str]  # row, from, to, what it says under the pointer


@dataclass(frozen=True)
class Spans:
    """Time spans in rows. boxes: kind -> the spans of one colour."""

    rows: Sequence[str]
    boxes: Mapping[str, Sequence[Box]]
    x_label: str


Chart = Lines | Bars | Grid | Spans


def svg(chart: Chart, name: str, title: str, *, alone: bool = False) -> str:
    """Return the chart as an element of a page.

    Args:
        name: unlike that of any other chart in the page, since ids contain it.
        alone: it is to be a file, on white paper and with plain colours.
    """
    tips, text = list[list[str]](), io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that matplotlib's font lacks, and the reader's screen has
        figure = DRAW[type(chart)](chart, tips).figure
        figure.savefig(text, format="svg", metadata={"Date": None})
    # What stands before is the head of a file, and a style that would be that of the whole page.
    drawn = re.sub(r"\A.*?</metadata>\s*<defs>\s*<style.*?</defs>", "", text.getvalue(), flags=re.DOTALL)
    pieces = re.split(r'<g id="tips-(\d+)">(.*?)</g>', drawn, flags=re.DOTALL)
    for i in range(1, len(pieces), 3):  # a place in `tips`, the boxes as matplotlib draws them, and what follows
        paths = zip(re.split(r"(?<=\")/>", pieces[i + 1]), tips[int(pieces[i])], strict=False)
        boxes = "".join(f"{path}><title>{escape(tip)}</title></path>" for path, tip in paths)
        pieces[i : i + 2] = "", f'<g shape-rendering="crispEdges">{boxes}</g>'
    drawn = "".join(pieces)
    drawn = re.sub(r'<g id="[^"]*">', "<g>", drawn)
    drawn = re.sub(r"(?<= d=\")[^\"]*", lambda d: re.sub(r"(\.\d)\d+", r"\1", d[0]).replace("\n", ""), drawn)
    drawn = re.sub(r" clip-path=\"[^\"]*\"|<clipPath.*?</clipPath>", "", drawn, flags=re.DOTALL)  # nothing to cut off
    drawn = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui,sans-serif", drawn)
    for colour, variable in () if alone else VARIABLES.items():
        drawn = drawn.replace(f": {colour}", f": var(--{variable},{colour})")
    drawn = re.sub(r">\s+<", "><", drawn).strip()
    height, label = f"{72 * figure.get_figheight():g}", escape(printable(title))
    paper = 'xmlns="http://www.w3.org/2000/svg" style="background:#fff" width="720" ' if alone else ""
    size = f'viewBox="0 0 {72 * WIDE:g} {height}" role="img" aria-label="{label}"'
    return f'<svg {paper}xmlns:xlink="http://www.w3.org/1999/xlink" {size}>{drawn}'


def write(chart: Chart, name: str, title: str, folder: Path) -> None:
    """Write the chart as NAME.svg and NAME.png."""
    (folder / f"{name}.svg").write_text(svg(chart, name, title, alone=True), encoding="utf-8")
    with rc_context({**STYLE, "savefig.facecolor": "white"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = DRAW[type(chart)](chart, []).figure
        figure.suptitle(printable(title), y=1 + 0.1 / figure.get_figheight(), fontsize=11, va="bottom")
        save(figure, folder / f"{name}.png", bbox_inches="tight")


def _axes(
    high: float, left: float, bottom: float, legend: Sequence[tuple[Any, str]] = (), above: float = 0.0, wide: float = 0
) -> Axes:
    """Make the axes of a chart below its legend and `above`, space for a line of text. All in inches.

    wide: 0 takes the whole width.
    """
    longest = min(max((len(name) for _, name in legend), default=1), 60)
    columns = min(max(int((WIDE - 0.1) / (0.55 + LETTER * longest)), 1), max(len(legend), 1))
    total = high + LINE * -(-len(legend) // columns) + above + 0.1 + bottom
    figure = Figure(figsize=(WIDE, total))
    if legend:
        handles, names = zip(*legend, strict=True)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 1), "ncols": columns}
        figure.legend(
            handles, [shorten(printable(name), 60) for name in names], borderpad=0.2, labelspacing=0.35, **place
        )
    return figure.add_axes((left / WIDE, bottom / total, (wide or WIDE - left - 0.2) / WIDE, high / total))


def _numbers(axis: Any, most: int, *, integer: bool = False) -> None:
    axis.set_major_locator(MaxNLocator(most, integer=integer, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(short))
    axis.grid(True)


def short(value: float, _: object = None) -> str:
    """Format a number beside an axis.

    >>> [short(v) for v in (0.0, 0.25, 20.0, 1500.0, 2e6, 1e-5, -3.0)]
    ['0', '0.25', '20', '1.5k', '2M', '1e-05', '-3']
    """
    for size, suffix in SUFFIXES:
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def _lines(chart: Lines, tips: list[list[str]]) -> Axes:
    looks: list[dict[str, Any]] = [
        {"color": COLOURS[i % 7], "linestyle": DASHES[i % 4], "marker": MARKERS[i % 5], "markersize": 5, "lw": 1.7}
        for i in range(len(chart.series))
    ]
    named = zip(looks, chart.series, strict=True) if len(chart.series) > 1 else ()
    axes = _axes(2.5, 0.7, 0.5, [(Line2D([], [], **look), each.label) for look, each in named], LINE)
    for look, each in zip(looks, chart.series, strict=True):
        every = -(-len(each.x) // POINTS) or 1
        indices = sorted({*range(0, len(each.x), every), len(each.x) - 1} - {-1})
        x, y, low, high = (
            np.array([math.nan if v is None else v for v in side], float)[indices if len(side) else []]
            for side in (each.x, each.y, each.low, each.high)
        )
        gap = np.isnan([math.nan, *y, math.nan])
        alone = ~gap[1:-1] & gap[:-2] & gap[2:]  # a point between two gaps shows by its mark only
        marked = np.flatnonzero(alone | (np.arange(len(x)) % (-(-len(x) // MARKS) or 1) == 0))
        axes.plot(x, y, markevery=list(marked), **look)
        if len(low):
            axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.margins(x=0.02)
    least, most = axes.get_ylim()
    if not most - least > 1e-9 * max(abs(least), abs(most)):  # rounding makes no curve
        axes.set_ylim(least - 0.5, most + 0.5)
    if chart.from_zero and least > -0.1 * most:
        axes.set_ylim(bottom=0)
    _numbers(axes.yaxis, 5)
    _numbers(axes.xaxis, 7, integer=chart.whole_x)
    axes.set_xlabel(shorten(printable(chart.x_label), 70))
    axes.set_title(shorten(printable(chart.y_label), 70), x=-0.65 / (WIDE - 0.9))
    return axes


def _rows(labels: Sequence[str], bottom: float, legend: Sequence[tuple[Any, str]] = (), cells: int = 0) -> Axes:
    """Make axes with a row for each label, from 0 at the top; many rows are thin. cells: columns of a grid."""
    thick = max(min(0.28, 6.5 / max(len(labels), 1)), 0.03)
    names = [shorten(printable(label), 24) for label in labels]
    left = LETTER * max(map(len, names), default=1) + 0.2
    wide = min((WIDE - left - 0.2), 0.75 * cells)
    axes = _axes(thick * max(len(names), 1), left, bottom, legend, LINE if cells else 0.0, wide)
    every = math.ceil(0.17 / thick) if thick < 0.17 else 1
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set_ylim(len(names) - 0.5, -0.5)
    return axes


def _boxes(axes: Axes, tips: list[list[str]], boxes: Sequence[Box], colours: Any, high: float = 0.76) -> None:
    """Draw boxes within their rows."""
    corners = [[(a, r - high / 2), (b, r - high / 2), (b, r + high / 2), (a, r + high / 2)] for r, a, b, _ in boxes]
    drawn = PolyCollection(corners, facecolors=colours, linewidths=0)
    if len(boxes) <= TIPS:
        drawn.set_gid(f"tips-{len(tips)}")
        tips.append([printable(tip) for *_, tip in boxes])
    axes.add_collection(drawn, autolim=False)


def _bars(chart: Bars, tips: list[list[str]]) -> Axes:
    boxes = {name: list[Box]() for name in chart.parts}
    reach = {-1: [0.0] * len(chart.labels), 1: [0.0] * len(chart.labels)}  # parts below 0 are put end to end there
    for name, lengths in chart.parts.items():
        for k, length in enumerate(lengths):
            ends = reach[-1 if length < 0 else 1]
            start, end = sorted((ends[k], ends[k] + length))
            boxes[name].append((k, start, end, f"{chart.labels[k]}: {name} {length:.4g}"))
            ends[k] += length
    return _spans(Spans(chart.labels, boxes, chart.x_label), tips)


def _spans(chart: Spans, tips: list[list[str]]) -> Axes:
    legend = [(Patch(color=KINDS[i % len(KINDS)]), kind) for i, kind in enumerate(chart.boxes)]
    axes = _rows(chart.rows, 0.5, legend if len(legend) > 1 else ())
    low = min((start for boxes in chart.boxes.values() for _, start, _, _ in boxes), default=0)
    high = max((end for boxes in chart.boxes.values() for _, _, end, _ in boxes), default=0)
    axes.set_xlim(low, high if high > low else low + 1)
    for i, boxes in enumerate(chart.boxes.values()):
        thick_enough = [box for box in boxes if box[2] - box[1] > (high - low) / 3000]
        _boxes(axes, tips, thick_enough, KINDS[i % len(KINDS)])
    _numbers(axes.xaxis, 6)
    axes.set_xlabel(shorten(printable(chart.x_label), 60))
    return axes


def _grid(chart: Grid, tips: list[list[str]]) -> Axes:
    values = np.array([[math.nan if v is None else v for v in row] for row in chart.values], float)
    most = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 0.0
    colours = np.where((values < 0)[..., None], to_rgba(COLOURS[1]), to_rgba(COLOURS[0]))
    colours[..., 3] = np.abs(values) / (most or 1.0)
    colours[np.isnan(values)] = to_rgba(SOFT, 0.45)
    columns = [shorten(printable(name), 16) for name in chart.columns]
    longest, many = LETTER * max(map(len, columns), default=1), len(columns)
    slanted = longest / LETTER > 3 and many <= 24 and longest * many > WIDE - 1
    axes = _rows(chart.rows, 0.5 + 0.6 * longest * slanted, cells=max(many, 1))
    cell = WIDE * axes.get_position().width / max(many, 1)
    if values.size <= TIPS:
        boxes = [
            (r, c - 0.5, c + 0.5, f"{chart.rows[r]}, {chart.columns[c]}: {'none' if math.isnan(v) else f'{v:.6g}'}")
            for (r, c), v in np.ndenumerate(values)
        ]
        _boxes(axes, tips, boxes, colours.reshape(-1, 4), 1.0)
    else:
        extent = (-0.5, len(columns) - 0.5, len(chart.rows) - 0.5, -0.5)
        axes.imshow(colours, aspect="auto", interpolation="nearest", extent=extent)
    if chart.written and cell >= 0.25:
        for (r, c), v in np.ndenumerate(values):
            text = "" if math.isnan(v) else short(round(v, 3 if most < 10 else 1))
            if text and 0.8 * LETTER * len(text) < cell:
                axes.text(c, r, text, ha="center", va="center", fontsize=9, color=WHITE if abs(v) > 0.6 * most else INK)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    every = 1 if slanted else math.ceil((longest + 0.08) / cell)
    look: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axes.set_xticks(range(0, len(columns), every), columns[::every], **look)
    axes.set_xlabel(shorten(printable(chart.column_label), 60))
    _shades(axes, tips, chart, most, bool(np.isnan(values).any()))
    return axes


def _shades(axes: Axes, tips: list[list[str]], chart: Grid, most: float, gaps: bool) -> None:
    """What the colours of a grid mean, at the top right."""
    figure: Any = axes.figure
    high, shades = figure.get_figheight(), np.linspace(-1 if chart.signed else 0, 1, 9 if chart.signed else 5)
    figure.text(0.05 / WIDE, 1 - 0.15 / high, shorten(printable(chart.row_label), 24), va="center")
    text = f"{short(most)} {shorten(printable(chart.unit), 24)}{', grey: none' if gaps else ''}"
    wide = 0.16 * len(shades)
    left = WIDE - 0.15 - LETTER * len(text) - wide
    key = figure.add_axes((left / WIDE, 1 - 0.22 / high, wide / WIDE, 0.15 / high))
    colours = [to_rgba(COLOURS[int(s < 0)], abs(s)) for s in shades]
    _boxes(key, tips, [(0, i - 0.5, i + 0.5, f"{s * most:.3g}") for i, s in enumerate(shades)], colours, 1.0)
    key.set(xlim=(-0.5, len(shades) - 0.5), ylim=(-0.5, 0.5))
    key.set_axis_off()
    key.text(-0.8, 0, short(-most) if chart.signed else "0", ha="right", va="center")
    key.text(len(shades) - 0.2, 0, text, va="center")


# Each draws a chart in a figure of its own, and appends to `tips` the texts of each collection of boxes; its gid is
# `tips-` and the place in the list.
DRAW: dict[type, Any] = {Lines: _lines, Bars: _bars, Grid: _grid, Spans: _spans}
