"""Draw line charts, bar charts and heat maps with matplotlib, as SVG for an HTML page or as files.

pyplot is not used, because it selects a GUI back end and has global state. Charts are drawn in colours for a white
background. In the SVG for a page, each colour becomes the default of a CSS variable (`fill: var(--c0,#0072b2)`), so
that the same SVG suits light and dark themes. The colours are those of Okabe and Ito, which colour-blind readers can
distinguish; lines also differ in dashes and markers.
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
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedmpi.common.text import escape_unprintable, shorten

BLUE, RED, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
BLACK = "#111111"  # not #000000, which matplotlib omits from SVG, so that no variable could replace it
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)
LINE_STYLES, MARKERS = ("-", "--", "-.", ":"), "os^Dv"
TEXT_COLOUR, AXIS_COLOUR, GRID_COLOUR, WHITE = "#1b1b1b", "#6b6b6b", "#e3e3e3", "#fefefe"
CSS_VARIABLES = {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
CSS_VARIABLES |= {TEXT_COLOUR: "ink", AXIS_COLOUR: "soft", GRID_COLOUR: "rule", WHITE: "on"}
BAR_COLOURS = [to_rgba(colour, alpha) for alpha in (1.0, 0.5) for colour in COLOURS]  # colours of bars
STYLE_FILE = Path(__file__).with_suffix(".mplstyle")
CHART_WIDTH, LETTER_WIDTH, LINE_HEIGHT = (
    5.6,
    0.087,
    0.24,
)  # inches: width of a chart, width of a letter, height of a line of text
MAX_POINTS, MAX_MARKERS = 600, 20  # maximum numbers of points and markers of a line
MAX_VECTOR_CELLS = (
    600  # maximum number of cells of a heat map that is drawn as vectors; a larger one is drawn as an image
)
TICK_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Series:
    """One line of a line chart.

    Attributes:
        y: the values; None and NaN leave a gap.
        low, high: lower and upper limits of a band around the line; (): no band.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class LineChart:
    """A chart with one or more lines."""

    series: Sequence[Series]
    x_label: str
    y_label: str
    integer_x: bool = True
    from_zero: bool = False  # the y axis begins at 0
    log_x: bool = False
    ticks: Sequence[str] = ()  # labels on the x axis in place of numbers, one for each x of the first line


@dataclass(frozen=True)
class BarChart:
    """A chart of horizontal bars in rows.

    Attributes:
        rows: the label of each row.
        spans: for each label in the legend, the row, start and end of each bar.
    """

    rows: Sequence[str]
    spans: Mapping[str, Sequence[tuple[int, float, float]]]
    x_label: str


@dataclass(frozen=True)
class HeatMap:
    """A chart with one coloured cell for each number of a matrix.

    Attributes:
        rows, columns: the labels of the rows and columns.
        values: one sequence for each row; None and NaN are shown in grey.
        unit: the unit of the numbers, or what they count.
        signed: whether the colour scale extends from negative to positive numbers, as for cosines, or begins at 0.
        show_numbers: whether numbers are printed in the cells if there is enough space.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    row_label: str
    column_label: str
    unit: str
    signed: bool = False
    show_numbers: bool = False


Chart = LineChart | BarChart | HeatMap


def make_stacked_bar_chart(rows: Sequence[str], parts: Mapping[str, Sequence[float]], x_label: str) -> BarChart:
    """Return a chart with one stacked bar per row; negative lengths extend to the left of 0.

    parts: for each label in the legend, the length of its segment in each row.

    >>> make_stacked_bar_chart(["a"], {"p": [1.0], "q": [2.0]}, "x").spans
    {'p': [(0, 0.0, 1.0)], 'q': [(0, 1.0, 3.0)]}
    """
    spans: dict[str, list[tuple[int, float, float]]] = {name: [] for name in parts}
    ends = {sign: [0.0] * len(rows) for sign in (False, True)}
    for name, lengths in parts.items():
        for k, length in enumerate(lengths):
            side = ends[length < 0]
            start, end = sorted((side[k], side[k] + length))
            spans[name].append((k, start, end))
            side[k] += length
    return BarChart(rows, spans, x_label)


def render_svg(chart: Chart, name: str, title: str) -> str:
    """Return the chart as an <svg> element.

    Args:
        chart: the chart.
        name: a name that is unique on the page; ids in the SVG are derived from it.
        title: the title for screen readers.
    """
    text = io.StringIO()
    with rc_context({"svg.hashsalt": name}, STYLE_FILE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's font may lack letters that browsers display
        figure = DRAW_FUNCTIONS[type(chart)](chart).figure
        figure.savefig(text, format="svg", metadata={"Date": None})
    # Remove the file header, and a style that would apply to the whole page.
    drawn = re.sub(r"\A.*?</metadata>\s*<defs>\s*<style.*?</defs>", "", text.getvalue(), flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*">', "<g>", drawn)
    drawn = re.sub(r"(?<= d=\")[^\"]*", lambda d: re.sub(r"(\.\d)\d+", r"\1", d[0]).replace("\n", ""), drawn)
    # Remove clip paths, since nothing extends beyond the axes.
    drawn = re.sub(r" clip-path=\"[^\"]*\"|<clipPath.*?</clipPath>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui,sans-serif", drawn)
    for colour, variable in CSS_VARIABLES.items():
        drawn = drawn.replace(f": {colour}", f": var(--{variable},{colour})")
    drawn = re.sub(r">\s+<", "><", drawn).strip()
    height, label = f"{72 * figure.get_figheight():g}", escape(escape_unprintable(title))
    size = f'viewBox="0 0 {72 * CHART_WIDTH:g} {height}" role="img" aria-label="{label}"'
    if not isinstance(chart, LineChart):  # without gaps between adjacent cells
        size += ' shape-rendering="crispEdges"'
    return f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {size}>{drawn}'


def write_chart(chart: Chart, path: Path, title: str) -> Path:
    """Write the chart to a .svg, .png or .pdf file and return its path."""
    with rc_context({"savefig.facecolor": "white", "svg.hashsalt": path.stem}, STYLE_FILE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = DRAW_FUNCTIONS[type(chart)](chart).figure
        figure.suptitle(escape_unprintable(title), y=1 + 0.1 / figure.get_figheight(), fontsize=11, va="bottom")
        return save_figure(figure, path, bbox_inches="tight")


def save_figure(figure: Figure, path: Path, **options: Any) -> Path:
    """Save a matplotlib figure without date and version, so that equal figures give equal files; return the path."""
    nameless = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, dpi=150, metadata=nameless[path.suffix], **options)
    return path


def format_tick(value: float, _: object = None) -> str:
    """Format the label of an axis tick.

    >>> [format_tick(v) for v in (0.0, 0.25, 20.0, 1500.0, 2e6, 1e-5, -3.0)]
    ['0', '0.25', '20', '1.5k', '2M', '1e-05', '-3']
    """
    for size, suffix in TICK_SUFFIXES:
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def _create_axes(
    high: float, left: float, bottom: float, legend: Sequence[tuple[Any, str]] = (), above: float = 0.0, wide: float = 0
) -> Axes:
    """Create a figure with a legend at the top and axes below it.

    All lengths are in inches: `high` and `wide` are the height and width of the axes (wide = 0: all available width);
    `left`, `bottom` and `above` are the margins around the axes. `legend` contains pairs of a matplotlib handle and a
    label.
    """
    longest = min(max((len(name) for _, name in legend), default=1), 60)
    columns = min(max(int((CHART_WIDTH - 0.1) / (0.55 + LETTER_WIDTH * longest)), 1), max(len(legend), 1))
    total = high + LINE_HEIGHT * -(-len(legend) // columns) + above + 0.1 + bottom
    figure = Figure(figsize=(CHART_WIDTH, total))
    if legend:
        handles, names = zip(*legend, strict=True)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 1), "ncols": columns}
        figure.legend(handles, [_shorten_text(name, 60) for name in names], borderpad=0.2, labelspacing=0.35, **place)
    return figure.add_axes(
        (left / CHART_WIDTH, bottom / total, (wide or CHART_WIDTH - left - 0.2) / CHART_WIDTH, high / total)
    )


def _shorten_text(text: str, length: int) -> str:
    """Return the text with unprintable characters escaped, shortened to at most `length` characters."""
    return shorten(escape_unprintable(text), length)


def _set_number_ticks(axis: Any, most: int, *, integer: bool = False) -> None:
    axis.set_major_locator(MaxNLocator(most, integer=integer, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(format_tick))
    axis.grid(True)


def _draw_lines(chart: LineChart) -> Axes:
    """Draw a line chart in a new figure."""
    looks: list[dict[str, Any]] = [
        {"color": COLOURS[i % 7], "linestyle": LINE_STYLES[i % 4], "marker": MARKERS[i % 5], "markersize": 5, "lw": 1.7}
        for i in range(len(chart.series))
    ]
    named = zip(looks, chart.series, strict=True) if len(chart.series) > 1 else ()
    axes = _create_axes(2.5, 0.7, 0.5, [(Line2D([], [], **look), each.label) for look, each in named], LINE_HEIGHT)
    for look, each in zip(looks, chart.series, strict=True):
        every = -(-len(each.x) // MAX_POINTS) or 1
        x, y, low, high = (
            np.array(side, object).astype(float)[::every] for side in (each.x, each.y, each.low, each.high)
        )
        gap = np.isnan([math.nan, *y, math.nan])
        alone = ~gap[1:-1] & gap[:-2] & gap[2:]  # a point between two gaps is visible by its marker only
        marked = np.flatnonzero(alone | (np.arange(len(x)) % (-(-len(x) // MAX_MARKERS) or 1) == 0))
        axes.plot(x, y, markevery=list(marked), **look)
        if len(low):
            axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.margins(x=0.02)
    least, most = axes.get_ylim()
    if not most - least > 1e-9 * max(abs(least), abs(most)):  # rounding errors of a constant
        axes.set_ylim(least - 0.5, most + 0.5)
    if chart.from_zero and least > -0.1 * most:
        axes.set_ylim(bottom=0)
    _set_number_ticks(axes.yaxis, 5)
    if chart.log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    if chart.ticks:
        axes.set_xticks(list(chart.series[0].x), [_shorten_text(label, 16) for label in chart.ticks])
    else:
        _set_number_ticks(axes.xaxis, 7, integer=chart.integer_x)
    axes.set_xlabel(_shorten_text(chart.x_label, 70))
    axes.set_title(_shorten_text(chart.y_label, 70), x=-0.65 / (CHART_WIDTH - 0.9))
    return axes


def _create_row_axes(
    labels: Sequence[str], bottom: float, legend: Sequence[tuple[Any, str]] = (), cells: int = 0
) -> Axes:
    """Create axes with one row per label, row 0 at the top; rows become thinner if there are more than 23.

    cells: the number of columns of a heat map; 0 for a bar chart, which uses the whole width.
    """
    thick = max(min(0.28, 6.5 / max(len(labels), 1)), 0.03)
    names = [_shorten_text(label, 24) for label in labels]
    left = LETTER_WIDTH * max(map(len, names), default=1) + 0.2
    wide = min((CHART_WIDTH - left - 0.2), 0.75 * cells)
    axes = _create_axes(thick * max(len(names), 1), left, bottom, legend, LINE_HEIGHT if cells else 0.0, wide)
    every = math.ceil(0.17 / thick) if thick < 0.17 else 1
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set_ylim(len(names) - 0.5, -0.5)
    return axes


def _draw_bars(chart: BarChart) -> Axes:
    """Draw a bar chart in a new figure."""
    legend = [(Patch(color=BAR_COLOURS[i % len(BAR_COLOURS)]), name) for i, name in enumerate(chart.spans)]
    axes = _create_row_axes(chart.rows, 0.5, legend if len(legend) > 1 else ())
    for i, spans in enumerate(chart.spans.values()):
        rows, starts, ends = np.array(spans, dtype=float).reshape(-1, 3).T
        axes.barh(rows, ends - starts, left=starts, height=0.76, color=BAR_COLOURS[i % len(BAR_COLOURS)], linewidth=0)
    every = [span for spans in chart.spans.values() for span in spans]
    low, high = min((span[1] for span in every), default=0), max((span[2] for span in every), default=0)
    axes.set_xlim(low, high if high > low else low + 1)
    _set_number_ticks(axes.xaxis, 6)
    axes.set_xlabel(_shorten_text(chart.x_label, 60))
    axes.yaxis.grid(False)
    return axes


def _draw_heat_map(chart: HeatMap) -> Axes:
    """Draw a heat map with its colour scale in a new figure."""
    values = np.array(chart.values, object).astype(float).reshape(len(chart.rows), -1)  # None is nan
    most = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 0.0
    columns = [_shorten_text(name, 16) for name in chart.columns]
    longest, many = LETTER_WIDTH * max(map(len, columns), default=1), len(columns)
    slanted = longest / LETTER_WIDTH > 3 and many <= 24 and longest * many > CHART_WIDTH - 1
    axes = _create_row_axes(chart.rows, 0.5 + 0.6 * longest * slanted, cells=max(many, 1))
    cell = CHART_WIDTH * axes.get_position().width / max(many, 1)
    _draw_cells(axes, values, most)
    if chart.show_numbers and cell >= 0.25:
        for (r, c), v in np.ndenumerate(values):
            text = "" if math.isnan(v) else format_tick(round(v, 3 if most < 10 else 1))
            if text and 0.8 * LETTER_WIDTH * len(text) < cell:
                axes.text(
                    c,
                    r,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=WHITE if abs(v) > 0.6 * most else TEXT_COLOUR,
                )
    every = 1 if slanted else math.ceil((longest + 0.08) / cell)
    look: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axes.set_xticks(range(0, len(columns), every), columns[::every], **look)
    axes.set_xlabel(_shorten_text(chart.column_label, 60))
    _draw_colour_scale(axes, chart, most, bool(np.isnan(values).any()))
    return axes


def _draw_cells(axes: Axes, values: np.ndarray, most: float) -> None:
    """Draw one cell per number: blue if positive, red if negative, paler if small, grey if NaN.

    most: the absolute value at which a cell is opaque; smaller values are more transparent.
    """
    colours = np.where((values < 0)[..., None], to_rgba(COLOURS[1]), to_rgba(COLOURS[0]))
    colours[..., 3] = np.abs(values) / (most or 1.0)
    colours[np.isnan(values)] = to_rgba(AXIS_COLOUR, 0.45)
    rows, columns = values.shape
    x, y = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    if values.size > MAX_VECTOR_CELLS:
        axes.imshow(colours, aspect="auto", interpolation="nearest", extent=(x[0], x[-1], y[-1], y[0]))
    else:
        axes.pcolormesh(x, y, colours)
    axes.set(xlim=(x[0], x[-1]), ylim=(y[-1], y[0]))


def _draw_colour_scale(axes: Axes, chart: HeatMap, most: float, gaps: bool) -> None:
    """Draw the colour scale of a heat map at the top right, and the label of the rows at the top left.

    Args:
        most: the largest absolute value, at the end of the scale.
        gaps: whether some cells have no value; if so, the scale explains that they are grey.
    """
    figure: Any = axes.figure
    high, shades = figure.get_figheight(), np.linspace(-1 if chart.signed else 0, 1, 9 if chart.signed else 5)
    figure.text(0.05 / CHART_WIDTH, 1 - 0.15 / high, _shorten_text(chart.row_label, 24), va="center")
    text = f"{format_tick(most)} {_shorten_text(chart.unit, 24)}{', grey: none' if gaps else ''}"
    wide = 0.16 * len(shades)
    left = CHART_WIDTH - 0.15 - LETTER_WIDTH * len(text) - wide
    key = figure.add_axes((left / CHART_WIDTH, 1 - 0.22 / high, wide / CHART_WIDTH, 0.15 / high))
    _draw_cells(key, shades[None], 1.0)
    key.set_axis_off()
    key.text(-0.8, 0, format_tick(-most) if chart.signed else "0", ha="right", va="center")
    key.text(len(shades) - 0.2, 0, text, va="center")


DRAW_FUNCTIONS: dict[type, Any] = {
    LineChart: _draw_lines,
    BarChart: _draw_bars,
    HeatMap: _draw_heat_map,
}  # functions that draw a chart in a new figure
