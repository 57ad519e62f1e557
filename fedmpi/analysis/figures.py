"""The pictures. This is the only file that imports matplotlib, and only when a picture is made.

Figures are made without pyplot, which would choose a window system and keep global state. Colours are Okabe and Ito's,
which colour-blind readers tell apart too; lines also differ in marker or dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, BLACK = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#D55E00", "#000000"),
)
COLOURS, DASHES, MARKERS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK), ("-", "--", "-.", ":"), "os^Dv"
DPI = 150
UNITS = {"accuracy": "%"}  # of metrics; others have none


def save(figure: Figure, path: Path, **options: Any) -> Path:
    """As its ending says, PNG mostly; equal figures give equal files."""
    nameless = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, dpi=DPI, metadata=nameless[path.suffix], **options)
    return path


def variance(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Above: variances by round, of the clients and of both aggregates. Below: the ratio of the two aggregates."""
    figure = _new(6.4, 5.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    t = [row["round"] for row in rows]
    lines = (
        ("clients", "clients' own kernels", BLACK, ":", "o"),
        ("kernel_mean", "kernels averaged (FedAvg)", BLUE, "-", "s"),
        ("product_mean", "product of averages (decomposition)", RED, "--", "^"),
    )
    for key, label, colour, dash, marker in lines:
        above.plot(t, [row[key] for row in rows], dash, color=colour, marker=marker, markersize=4, label=label)
    above.set_ylim(bottom=0)
    above.set_ylabel("variance (squared weights)")
    above.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above, where no line is
    below.axhline(1, color=BLUE)
    below.plot(t, [row["ratio"] for row in rows], "--", color=RED, marker="^", markersize=4)
    below.set_ylabel("product of averages /\nkernels averaged")
    below.set_xlabel("communication round")
    figure.align_ylabels()
    _whole_numbers(below.xaxis)
    return _plain(figure)


def communication(curves: Sequence[Mapping[str, Any]], metric: str) -> Figure:
    """The metric of each run over all parameters transmitted so far, up and down."""
    from matplotlib.ticker import EngFormatter

    figure = _new(6.4, 4.2)
    axes = figure.subplots()
    names = [Path(curve["run"]).name for curve in curves]
    for i, curve in enumerate(curves):
        x = [point["up"] + point["down"] for point in curve["points"]]
        y = [point["value"] for point in curve["points"]]
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        label = names[i] if names.count(names[i]) == 1 else curve["run"]
        axes.plot(x, y, marker=MARKERS[i % len(MARKERS)], markersize=4, label=label, **style)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set_xlabel("transmitted parameters, up and down, all clients")
    axes.set_ylabel(f"{metric.replace('_', ' ')} ({UNITS[metric]})" if metric in UNITS else metric.replace("_", " "))
    axes.legend(frameon=False)
    return _plain(figure)


def partition(counts: Any, sizes: Any, edges: Any, means: Any) -> Figure:
    """Who holds what, a row a client: how much of which class, the area of a dot its samples; the histogram (N, bins)
    of its samples' mean values, where there are `edges`; its samples."""
    clients, classes = counts.shape
    widths = [3, 3, 1] if len(edges) else [3, 1]
    figure = _new(10.2 if len(edges) else 7.2, min(2 + 0.18 * clients, 12))
    left, *middle, right = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    if counts.any():
        k, c = counts.nonzero()
        share = counts[k, c] / counts.max()
        left.scatter(c, k, s=min(120.0, 9000 / max(clients, 12)) * share, color=BLUE, linewidth=0)
        left.set_xlim(-0.5, classes - 0.5)
        left.set_xlabel("class")
        _whole_numbers(left.xaxis)
    else:
        left.text(0.5, 0.5, "targets are numbers", ha="center", va="center", transform=left.transAxes)
        left.set_xticks([])
    for axes in middle:
        shares = means / means.sum(1, keepdims=True).clip(1)
        rows = [k - 0.5 for k in range(clients + 1)]
        shades = axes.pcolormesh(edges, rows, 100 * shares, cmap="Blues", vmin=0)
        axes.set_xlabel("mean value of a sample")
        figure.colorbar(shades, ax=axes, label="% of the client's samples")
    right.barh(range(clients), sizes, color=ORANGE, height=0.8)
    right.set_xlabel("training samples")
    left.set_ylabel("client")
    left.set_ylim(clients - 0.5, -0.5)
    _whole_numbers(left.yaxis)
    _plain(figure)
    for axes in middle:
        axes.grid(False)
    return figure


def landscape(axis: Sequence[float], height: Sequence[Sequence[float]]) -> Figure:
    """Contours of the loss around a model, which lies at (0, 0)."""
    figure = _new(5.2, 4.4)
    axes = figure.subplots()
    filled = axes.contourf(axis, axis, height, levels=14, cmap="cividis")
    axes.plot(0, 0, "*", color=RED, markeredgecolor=BLACK, markersize=13, label="the model")
    axes.set_xlabel("along the first eigenvector")
    axes.set_ylabel("along the second")
    axes.set_xticks([axis[0], 0, axis[-1]])
    axes.set_yticks([axis[0], 0, axis[-1]])
    axes.set_aspect("equal")
    axes.legend(loc="lower left", fontsize="small", framealpha=1)
    figure.colorbar(filled, label="training loss")
    return _plain(figure)


def sweep(lines: Mapping[str, Sequence[tuple[str, float, float]]], x_label: str, y_label: str) -> Figure:
    """A table of a sweep, with a line for each name: (label on the x axis, mean, standard deviation or nan), in the
    labels' order; a mean that is nan is a gap.

    Where all labels are numbers they have their places, on a logarithmic axis where they span a factor of 30, and the
    axis runs the way in which they stand: alphas from 100 to 0.01 to the right. Words have no order: points alone.
    """
    figure = _new(5.4, 4.2)
    axes = figure.subplots()
    labels = list(dict.fromkeys(label for points in lines.values() for label, _, _ in points))
    at = _as_numbers(labels)
    places = at or list(range(len(labels)))
    log = at is not None and min(at) > 0 and max(at) >= 30 * min(at)
    if log:
        axes.set_xscale("log")
    for i, (name, points) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)] if at else ""}
        beside = 0.008 * (i - (len(lines) - 1) / 2)  # of the axis, or one line's bars would hide another's
        place = dict(zip(labels, _shifted(places, beside, log), strict=True))
        x, y, spread = (list(each) for each in zip(*((place[a], m, s) for a, m, s in points), strict=True))
        axes.errorbar(x, y, spread, marker=MARKERS[i % len(MARKERS)], markersize=4.5, capsize=3, label=name, **style)
    if at:
        axes.set_xticks(at, labels)
        axes.minorticks_off()
    else:
        axes.set_xticks(range(len(labels)), labels, rotation=20 if max(map(len, labels)) > 8 else 0)
    if at and at[0] > at[-1]:
        axes.invert_xaxis()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if any(lines):
        axes.legend(frameon=False)
    return _plain(figure)


def _as_numbers(labels: Sequence[str]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def _shifted(places: Sequence[float], share: float, log: bool) -> list[float]:
    """The places, moved along by a share of the axis."""
    low, high = min(places), max(places)
    return [x * (high / low) ** share if log else x + share * (high - low) for x in places]


def _new(width_in: float, height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def _plain(figure: Figure) -> Figure:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
