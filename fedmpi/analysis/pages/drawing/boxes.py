"""What is drawn in rectangles: bars, grids of numbers, spans of time. Those of one colour are one path."""

from __future__ import annotations

from collections.abc import Sequence

from fedmpi.analysis.pages.drawing.canvas import LETTER, LINE, WIDE, Canvas
from fedmpi.analysis.pages.drawing.scale import Scale, ends, short, ticks
from fedmpi.analysis.pages.html import text
from fedmpi.analysis.pages.section import Bars, Grid, Spans

COLOURS, LEVELS, TOLD, THINNEST = 7, 20, 600, 0.15  # shades of a grid; boxes that say what they are; units
HATCHED = ' stroke="var(--on)" stroke-width="1.2" stroke-dasharray="1.5 2"'  # the second time a colour is used


GAP = 'style="fill:var(--soft);fill-opacity:.45"'  # where there is no value


def bars(canvas: Canvas, chart: Bars) -> None:
    canvas.legend([(_swatch(i), name) for i, name in enumerate(chart.parts)] if len(chart.parts) > 1 else [])
    left = _left(chart.labels)
    signs = (1, -1)  # parts below zero are put end to end on that side
    stacks = [[part[k] for part in chart.parts.values()] for k in range(len(chart.labels))]
    reach = [sum(sign * max(sign * length, 0.0) for length in stack) for stack in stacks for sign in signs]
    scale = Scale(*ends(reach or [0.0], from_zero=True), left, WIDE - 16)
    thick = _thickness(len(chart.labels))
    top, bottom = canvas.height + 4, canvas.height + 4 + thick * len(chart.labels)
    canvas.x_axis(scale, ticks(scale.low, scale.high, 5), chart.x_label, top, bottom)
    ends_at = {sign: [0.0] * len(chart.labels) for sign in signs}
    for i, (name, lengths) in enumerate(chart.parts.items()):
        found = []
        for k, length in enumerate(lengths):
            so_far = ends_at[-1 if length < 0 else 1]
            x, end = sorted((scale(so_far[k]), scale(so_far[k] + length)))
            so_far[k] += length
            width = end - x
            if width >= THINNEST:
                box = (x, top + k * thick + thick * 0.12, width, thick * 0.76)
                found.append((box, f"{chart.labels[k]}: {name} {length:.4g}"))
        _boxes(canvas, found, f'style="fill:var(--c{i % COLOURS})"' + (HATCHED if i >= COLOURS else ""))
    _row_labels(canvas, chart.labels, left, top, thick)


def spans(canvas: Canvas, chart: Spans) -> None:
    kinds = list(chart.kinds)
    canvas.legend([(_swatch(i), kind) for i, kind in enumerate(kinds)])
    left, thick = _left(chart.rows), _thickness(len(chart.rows))
    low, high = ends([at for span in chart.spans for at in (span.start, span.end)])
    scale = Scale(low, high, left, WIDE - 16)
    top, bottom = canvas.height + 4, canvas.height + 4 + thick * len(chart.rows)
    canvas.x_axis(scale, ticks(low, high, 6), chart.x_label, top, bottom)
    for i, kind in enumerate(kinds):
        found = []
        for span in chart.spans:
            x, width = scale(span.start), scale(span.end) - scale(span.start)
            if span.kind == kind and width >= THINNEST:
                box = (x, top + span.row * thick + thick * 0.12, width, thick * 0.76)
                found.append((box, span.said or f"{chart.rows[span.row]}: {kind}"))
        _boxes(canvas, found, f'style="fill:var(--c{i % COLOURS})"' + (HATCHED if i >= COLOURS else ""))
    _row_labels(canvas, chart.rows, left, top, thick)


def grid(canvas: Canvas, chart: Grid) -> None:
    values = [v for row in chart.values for v in row if v is not None and v == v]
    most = max((abs(v) for v in values), default=1.0) or 1.0
    _shades(canvas, chart, most)
    left, columns = _left(chart.rows), max(len(chart.columns), 1)
    wide = min((WIDE - 12 - left) / columns, 64.0)
    high = _thickness(len(chart.rows)) if not chart.written else LINE + 2
    top = canvas.height + 4
    found: dict[tuple[int, bool], list[tuple[tuple[float, float, float, float], str]]] = {}
    gaps: list[tuple[tuple[float, float, float, float], str]] = []
    for r, row in enumerate(chart.values):
        for c, v in enumerate(row):
            if v is None or v != v:
                said = f"{chart.rows[r]}, {chart.columns[c]}: none"
                gaps.append(((left + c * wide, top + r * high, wide, high), said))
                continue
            level = round(abs(v) / most * LEVELS)
            said = f"{chart.rows[r]}, {chart.columns[c]}: {v:.6g}"
            found.setdefault((level, v < 0), []).append(((left + c * wide, top + r * high, wide, high), said))
    told = len(values) <= TOLD
    _boxes(canvas, gaps, f'{GAP} shape-rendering="crispEdges"', told)
    for (level, negative), boxes in sorted(found.items()):
        if level:
            shade = f'style="fill:var(--c{int(negative)});fill-opacity:{level / LEVELS:g}" shape-rendering="crispEdges"'
            _boxes(canvas, boxes, shade, told)
    if chart.written and wide >= LETTER * 3:
        for r, row in enumerate(chart.values):
            for c, v in enumerate(row):
                if v is not None and v == v:
                    strong = "m v" if abs(v) / most > 0.6 else "m w"
                    canvas.write(left + (c + 0.5) * wide, top + (r + 0.7) * high, _brief(v, wide), strong)
    bottom, right = top + high * len(chart.rows), left + wide * columns
    canvas.add(f'<path class="axis" d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}V{top:.1f}z"/>')
    _row_labels(canvas, chart.rows, left, top, high)
    _column_labels(canvas, chart, left, wide, bottom)


def _brief(value: float, room: float) -> str:
    plain = f"{value:.0f}" if value == round(value) else f"{value:.3g}"
    return next((said for said in (plain, short(value)) if len(said) * 6.5 < room), "")


def _shades(canvas: Canvas, chart: Grid, most: float) -> None:
    """What the shades mean: from 0, or from -most, to most; and what the rows are."""
    steps = [k / 4 for k in range(-4 if chart.signed else 0, 5)]
    width = 14 * len(steps)
    said = f"{short(-most) if chart.signed else '0'}", f"{short(most)} {chart.unit}"
    x = WIDE - 12 - width - LETTER * len(said[1]) - 6
    canvas.write(x - 6, canvas.height + 13, said[0], "e")
    for k, share in enumerate(steps):
        style = f"fill:var(--c{int(share < 0)});fill-opacity:{abs(share):g};stroke:var(--rule)"
        canvas.add(f'<path style="{style}" d="M{x + 14 * k:.1f} {canvas.height + 3:.1f}h14v11h-14z"/>')
    canvas.write(x + width + 6, canvas.height + 13, said[1])
    gap = any(v is None or v != v for row in chart.values for v in row)
    if gap:  # 0 is white
        canvas.add(f'<path {GAP} d="M6 {canvas.height + 3:.1f}h14v11h-14z"/>')
        canvas.write(24, canvas.height + 13, "none")
    canvas.write(64 if gap else 6, canvas.height + 13, chart.row_label, room=x - (98 if gap else 40))
    canvas.height += LINE + 4


def _column_labels(canvas: Canvas, chart: Grid, left: float, wide: float, bottom: float) -> None:
    longest = max(map(len, chart.columns), default=1) * LETTER + 8
    every = max(1, -(-int(longest) // max(int(wide), 1))) if longest > wide else 1
    slanted = every > 1 and len(chart.columns) <= 24 and longest > 3 * LETTER + 8
    drop = 18.0
    if slanted:  # few long names: aslant, all of them
        drop = min(longest, 110) * 0.6 + 14
        for c, name in enumerate(chart.columns):
            x, y = left + (c + 0.6) * wide, bottom + 12
            place = f'x="{x:.1f}" y="{y:.1f}" class="e" transform="rotate(-35 {x:.1f} {y:.1f})"'
            canvas.add(f"<text {place}>{text(name if len(name) < 17 else name[:15] + '…')}</text>")
    else:
        for c in range(0, len(chart.columns), every):
            canvas.write(left + (c + 0.5) * wide, bottom + 16, chart.columns[c], "m")
    middle = left + wide * len(chart.columns) / 2
    canvas.write(max(middle, LETTER * len(chart.column_label) / 2), bottom + drop + 16, chart.column_label, "m")
    canvas.height = bottom + drop + 24


def _boxes(
    canvas: Canvas, found: Sequence[tuple[tuple[float, float, float, float], str]], style: str, told: bool = True
) -> None:
    """Rectangles of one colour. told: each says what it is, unless they are too many."""
    if told and len(found) <= TOLD:
        for (x, y, w, h), said in found:
            place = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
            canvas.add(f"<rect {place} {style}><title>{text(said)}</title></rect>")
    elif found:
        path = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for (x, y, w, h), _ in found)
        canvas.add(f'<path {style} d="{path}"/>')


def _swatch(i: int) -> str:
    hatch = HATCHED if i >= COLOURS else ""
    return f'<rect x="4" width="14" height="11" style="fill:var(--c{i % COLOURS})"{hatch}/>'


def _left(labels: Sequence[str]) -> float:
    return min(max((len(label) for label in labels), default=1) * LETTER + 14, 150.0)


def _thickness(rows: int) -> float:
    """Of a row: none needs more than a line of text, and many share a tall drawing."""
    return max(min(22.0, 520 / max(rows, 1)), 2.5)


def _row_labels(canvas: Canvas, labels: Sequence[str], left: float, top: float, thick: float) -> None:
    every = max(1, -(-14 // max(int(thick), 1))) if thick < 14 else 1
    for k in range(0, len(labels), every):
        canvas.write(left - 6, top + (k + 0.5) * thick + 4.5, labels[k], "e", left - 12)
