"""Figures as PNG for papers and slides, by matplotlib, which is imported only when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmpi.analysis.figures import COLOURS, DASHES, MARKERS, save
from fedmpi.analysis.pages.drawing.lines import MARKED
from fedmpi.analysis.pages.section import Bars, Figure, Grid, Lines, Spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL, ROW, LARGEST = 0.28, 0.22, 20.0  # inches
FEW = 6  # lines whose names have room beside them
MISSING = "0.8"  # grey: 0 is white


def png(figure: Figure, path: Path) -> Path:
    """The same numbers as in the SVG, on white. path: ends in .png."""
    from matplotlib.figure import Figure as Paper

    paper = Paper(figsize=_size(figure.chart), layout="constrained")
    axes = paper.subplots()
    drawers: dict[type, Any] = {Lines: _lines, Bars: _bars, Grid: _grid, Spans: _spans}
    drawers[type(figure.chart)](axes, figure.chart)
    axes.set_title(_plain(figure.title), fontsize="medium")
    return save(paper, path)


def _size(chart: Any) -> tuple[float, float]:
    if isinstance(chart, Lines):
        many = sum(not each.faint for each in chart.series)
        return 6.4, 4.2 + (ROW * many if many > FEW else 0)
    rows = len(chart.labels) if isinstance(chart, Bars) else len(chart.rows)
    wide = max(4.5, min(1.8 + CELL * len(chart.columns), LARGEST)) if isinstance(chart, Grid) else 7.2
    return wide, max(2.2, min(1.5 + ROW * rows, LARGEST))


def _lines(axes: Axes, chart: Lines) -> None:
    from matplotlib.ticker import MaxNLocator

    i = 0
    for each in chart.series:
        y = [float("nan") if v is None else v for v in each.y]
        if each.faint:
            axes.plot(each.x, y, color="0.7", linewidth=0.8)
            continue
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        marks: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markevery": -(-len(each.x) // MARKED) or 1}
        axes.plot(each.x, y, markersize=4, **marks, label=_plain(each.label), **style)
        if len(each.low):
            ends = [[float("nan") if v is None else v for v in side] for side in (each.low, each.high)]
            axes.fill_between(each.x, ends[0], ends[1], color=style["color"], alpha=0.18, linewidth=0)
        i += 1
    if chart.log and any(v is not None and v > 0 for each in chart.series for v in each.y):
        axes.set_yscale("log")
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(_plain(chart.x_label))
    axes.set_ylabel(_plain(chart.y_label))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if i > FEW:
        axes.legend(frameon=False, fontsize="small", bbox_to_anchor=(0, -0.16), loc="upper left")
    elif i > 1:
        axes.legend(frameon=False, fontsize="small")


def _bars(axes: Axes, chart: Bars) -> None:
    places, ends = range(len(chart.labels)), [0.0] * len(chart.labels)
    for i, (name, lengths) in enumerate(chart.parts.items()):
        hatch = "//" if i >= len(COLOURS) else None
        axes.barh(places, lengths, left=ends, color=COLOURS[i % len(COLOURS)], hatch=hatch, label=_plain(name))
        ends = [a + b for a, b in zip(ends, lengths, strict=True)]
    _rows(axes, chart.labels)
    axes.set_xlabel(_plain(chart.x_label))
    if len(chart.parts) > 1:
        axes.legend(frameon=False, fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")


def _grid(axes: Axes, chart: Grid) -> None:
    values = [[float("nan") if v is None else v for v in row] for row in chart.values]
    most = max((abs(v) for row in values for v in row if v == v), default=1.0) or 1.0
    kind, low = ("RdBu", -most) if chart.signed else ("Blues", 0.0)
    axes.set_facecolor(MISSING)
    picture = axes.imshow(values, cmap=kind, vmin=low, vmax=most, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(picture, ax=axes, label=_plain(chart.unit))
    _rows(axes, chart.rows)
    every = -(-len(chart.columns) // 30) or 1
    shown = range(0, len(chart.columns), every)
    long = max(map(len, chart.columns), default=0) > 4
    axes.set_xticks(list(shown), [_plain(chart.columns[c]) for c in shown], rotation=35 if long else 0)
    axes.set_xlabel(_plain(chart.column_label))
    axes.set_ylabel(_plain(chart.row_label))


def _spans(axes: Axes, chart: Spans) -> None:
    for i, kind in enumerate(chart.kinds):
        mine = [span for span in chart.spans if span.kind == kind]
        if not mine:  # matplotlib would give it another colour in the legend
            continue
        where, left, width = [s.row for s in mine], [s.start for s in mine], [s.end - s.start for s in mine]
        hatch = "//" if i >= len(COLOURS) else None
        axes.barh(where, width, left=left, color=COLOURS[i % len(COLOURS)], hatch=hatch, label=_plain(kind))
    _rows(axes, chart.rows)
    axes.set_xlabel(_plain(chart.x_label))
    axes.legend(frameon=False, fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")


def _rows(axes: Axes, labels: Any) -> None:
    every = -(-len(labels) // 80) or 1
    shown = range(0, len(labels), every)
    axes.set_yticks(list(shown), [_plain(labels[k]) for k in shown], fontsize="small")
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _plain(text: str) -> str:
    """A dollar in a name begins no formula."""
    return text.replace("$", r"\$")
