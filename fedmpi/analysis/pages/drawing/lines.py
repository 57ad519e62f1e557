"""Lines with bands, over rounds mostly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedmpi.analysis.pages.drawing.canvas import LETTER, WIDE, Canvas
from fedmpi.analysis.pages.drawing.scale import Scale, ends, powers, short, ticks
from fedmpi.analysis.pages.section import Lines, Series

HIGH, COLOURS, MARKED = 210, 7, 20  # of the plot; colours there are; marks of a line, about
DASHES = ("", ' stroke-dasharray="7 4"', ' stroke-dasharray="2 3"', ' stroke-dasharray="9 3 2 3"')
MOST = 600  # points drawn of a line; the screen has no more
MARKS = (
    "M{x} {y}m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z", "M{x} {y}m-3 -3h6v6h-6z", "M{x} {y}m0 -4l4 7h-8z",
    "M{x} {y}m0 -4.5l4 4.5l-4 4.5l-4 -4.5z", "M{x} {y}m0 4l4 -7h-8z",
)  # fmt: skip
Point = tuple[float, float]


def draw(canvas: Canvas, chart: Lines) -> None:
    named = [each for each in chart.series if not each.faint]
    if len(named) > 1:
        canvas.legend([(_sample(i), each.label) for i, each in enumerate(named)])
    x_scale, y_scale, marks = _scales(canvas, chart)
    top, bottom = y_scale.end, y_scale.begin
    for v in marks:
        canvas.add(f'<path class="grid" d="M{x_scale.begin:.1f} {y_scale(v):.1f}H{x_scale.end:.1f}"/>')
        canvas.write(x_scale.begin - 6, y_scale(v) + 4.5, short(v), "e")
    canvas.write(6, top - 8, chart.y_label, room=WIDE - 12)
    canvas.x_axis(x_scale, ticks(x_scale.low, x_scale.high, 7, whole=chart.whole_x), chart.x_label, top, bottom)
    canvas.add(f'<path class="axis" d="M{x_scale.begin:.1f} {bottom:.1f}H{x_scale.end:.1f}"/>')
    i = 0
    for each in sorted(chart.series, key=lambda s: not s.faint):
        _band(canvas, each, chart.log, x_scale, y_scale, i)
        runs = list(_runs(thinned(each.x, each.y), chart.log, x_scale, y_scale))
        path = "".join(_path(run) for run in runs)
        if each.faint:
            canvas.add(f'<path class="faint" d="{path}"/>')
            continue
        colour = f"var(--c{i % COLOURS})"
        canvas.add(f'<path class="line" style="stroke:{colour}"{dash(i)} d="{path}"/>')
        spots = "".join(MARKS[i % len(MARKS)].format(x=f"{x:.1f}", y=f"{y:.1f}") for x, y in marked(runs))
        canvas.add(f'<path class="box" style="fill:{colour}" d="{spots}"/>')
        i += 1


def _scales(canvas: Canvas, chart: Lines) -> tuple[Scale, Scale, list[float]]:
    """Both axes, and the numbers beside the upright one, which decide how much room it takes."""
    values = [v for s in chart.series for v in (*s.y, *s.low, *s.high) if v is not None and v == v]
    log = chart.log and any(v > 0 for v in values)
    low, high = ends([v for v in values if v > 0] if log else values, from_zero=chart.from_zero and not log)
    low, high = (max(low, high * 1e-12), high) if log else (low, high)
    marks = powers(low, high) if log else ticks(low, high, 5)
    left = 16 + LETTER * max((len(short(v)) for v in marks), default=1)
    x_low, x_high = ends([x for s in chart.series for x in s.x])
    top = canvas.height + 22
    return Scale(x_low, x_high, left, WIDE - 14), Scale(low, high, top + HIGH, top, log), marks


def _band(canvas: Canvas, each: Series, log: bool, x: Scale, y: Scale, i: int) -> None:
    if not len(each.low):
        return
    above, below = (
        list(_runs(thinned(each.x, values), log, x, y)) for values in (each.high, [_floor(v, log, y) for v in each.low])
    )
    for upper, lower in zip(above, below, strict=False):
        path = _path(upper) + _path(lower[::-1]).replace("M", "L") + "z"
        canvas.add(f'<path class="band" style="fill:var(--c{i % COLOURS})" d="{path}"/>')


def _floor(value: float | None, log: bool, y: Scale) -> float | None:
    """The lower end of a band may lie below all that a logarithmic axis shows."""
    return max(value, y.low) if log and value is not None else value


def thinned(x: Sequence[float], y: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """At most about MOST points, the last one with them."""
    every = -(-len(x) // MOST)
    points = list(zip(x, y, strict=True))
    return points[::every] + (points[-1:] if every > 1 and (len(points) - 1) % every else [])


def _runs(points: Sequence[tuple[float, float | None]], log: bool, x: Scale, y: Scale) -> Iterator[list[Point]]:
    """Stretches of points without a gap, as places."""
    run: list[Point] = []
    for at, value in points:
        if value is None or value != value or (log and value <= 0):
            if run:
                yield run
            run = []
        else:
            run.append((x(at), y(value)))
    if run:
        yield run


def marked(runs: Sequence[list[Point]]) -> list[Point]:
    """The points that have a mark: all of a few, some of many, and each that stands alone."""
    every = max(1, -(-sum(map(len, runs)) // MARKED) * 2 - 1)
    return [point for run in runs for point in (run if len(run) == 1 else run[::every])]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def dash(i: int) -> str:
    return DASHES[i % len(DASHES)]


def _sample(i: int) -> str:
    mark = MARKS[i % len(MARKS)].format(x=11, y=6)
    colour = f"var(--c{i % COLOURS})"
    line = f'<path class="line" style="stroke:{colour}"{dash(i)} d="M0 6H22"/>'
    return f'{line}<path class="box" style="fill:{colour}" d="{mark}"/>'
