"""A figure as files: NAME.svg, NAME.png, and NAME.csv with its numbers."""

from __future__ import annotations

from pathlib import Path

from fedmpi.analysis.pages.drawing.raster import png
from fedmpi.analysis.pages.drawing.svg import draw
from fedmpi.analysis.pages.page import as_csv
from fedmpi.analysis.pages.section import Figure


def write(figure: Figure, to: Path) -> None:
    (to / f"{figure.name}.svg").write_text(draw(figure, alone=True), encoding="utf-8")
    (to / f"{figure.name}.csv").write_text(as_csv(figure), encoding="utf-8")
    png(figure, to / f"{figure.name}.png")
