"""Figures as SVG: text stays text, and colours are the page's variables, so that light and dark are one drawing.

A drawing is WIDE units wide, which is what a phone's column holds at readable letters; the page stretches it.
"""

from __future__ import annotations

from fedmpi.analysis.pages.drawing import boxes, lines
from fedmpi.analysis.pages.drawing.canvas import WIDE, Canvas
from fedmpi.analysis.pages.html import text
from fedmpi.analysis.pages.section import Bars, Figure, Grid, Lines, Spans

# Okabe and Ito's, as in analysis/figures.py; in the dark the deep ones are lighter
LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DARK = ("#4FA3D9", "#F0803C", "#2FC79B", "#E0A0C4", "#E69F00", "#A5D8F7", "#F0F0F0")
RULES = """
svg text{font:13px system-ui,sans-serif;fill:var(--ink)}
svg .m{text-anchor:middle}svg .e{text-anchor:end}svg .v{fill:var(--on);font-size:11px}svg .w{font-size:11px}
svg .axis{stroke:var(--soft);fill:none}svg .grid{stroke:var(--rule);fill:none}
svg .line{fill:none;stroke-width:2;stroke-linejoin:round}svg .band{stroke:none;opacity:.18}
svg .faint{fill:none;stroke:var(--soft);stroke-width:1;opacity:.6}svg .box{stroke:none}
"""


def colours(palette: tuple[str, ...], ink: str, soft: str, rule: str, on: str) -> str:
    """CSS variables of a drawing."""
    own = "".join(f"--c{i}:{colour};" for i, colour in enumerate(palette))
    return f"{own}--ink:{ink};--soft:{soft};--rule:{rule};--on:{on};"


ON_LIGHT = colours(LIGHT, "#1b1b1b", "#6b6b6b", "#e3e3e3", "#ffffff")
ON_DARK = colours(DARK, "#ececec", "#a0a0a0", "#333a42", "#0d1117")


def draw(figure: Figure, *, alone: bool = False) -> str:
    """The SVG of a figure. alone: as a file, with colours and white paper of its own."""
    canvas = Canvas()
    chart = figure.chart
    if isinstance(chart, Lines):
        lines.draw(canvas, chart)
    elif isinstance(chart, Bars):
        boxes.bars(canvas, chart)
    elif isinstance(chart, Grid):
        boxes.grid(canvas, chart)
    elif isinstance(chart, Spans):
        boxes.spans(canvas, chart)
    own = f'xmlns="http://www.w3.org/2000/svg" width="{WIDE * 1.5:g}" ' if alone else ""
    style = f"<style>svg{{{ON_LIGHT}background:#fff}}{RULES}</style>" if alone else ""
    size = f'viewBox="0 0 {WIDE} {canvas.height:.0f}" role="img" aria-label="{text(figure.title)}"'
    return f"<svg {own}{size}>{style}{''.join(canvas.parts)}</svg>"
