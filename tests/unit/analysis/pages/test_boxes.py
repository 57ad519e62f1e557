"""Bars as long as their numbers, on either side of zero."""

import pytest

from fedmpi.analysis.pages.drawing import boxes
from fedmpi.analysis.pages.drawing.canvas import Canvas
from fedmpi.analysis.pages.section import Grid


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_where_there_is_no_value_is_no_zero(gap):
    """It is grey, and the legend says so; a zero has no box."""
    said = {}
    for values in ([[1.0, 0.0], [0.5, gap]], [[1.0, 0.0], [0.5, 0.0]]):
        canvas = Canvas()
        boxes.grid(canvas, Grid(["a", "b"], ["0", "1"], values, "client", "round", "share"))
        said[len(said)] = str(canvas.parts)
    assert "b, 1: none" in said[0]
    assert ">none<" in said[0]
    assert "none" not in said[1].replace('"none"', "").replace("fill:none", "")
