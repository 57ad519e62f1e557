"""Bars as long as their numbers, on either side of zero."""

import re

import pytest

from fedmpi.analysis.pages.drawing import boxes
from fedmpi.analysis.pages.drawing.canvas import Canvas
from fedmpi.analysis.pages.section import Bars, Grid


def drawn(parts):
    """(x, width, what it says) of each bar."""
    canvas = Canvas()
    boxes.bars(canvas, Bars([f"site {k}" for k in range(len(next(iter(parts.values()))))], parts, "r2"))
    found = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" [^>]*><title>([^<]*)', str(canvas.parts))
    return [(float(x), float(width), said) for x, width, said in found]


def test_on_both_sides_parts_are_put_end_to_end():
    bars = drawn({"a": [3.0, -1.0], "b": [1.0, -1.0], "c": [-2.0, 1.0]})
    at = {said: (x, x + width) for x, width, said in bars}
    zero, unit = at["site 0: a 3"][0], (at["site 0: a 3"][1] - at["site 0: a 3"][0]) / 3
    spans = {said: [round((end - zero) / unit, 1) for end in ends] for said, ends in at.items()}
    assert spans == {
        "site 0: a 3": [0, 3],
        "site 1: a -1": [-1, 0],
        "site 0: b 1": [3, 4],
        "site 1: b -1": [-2, -1],
        "site 0: c -2": [-2, 0],
        "site 1: c 1": [0, 1],
    }


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
