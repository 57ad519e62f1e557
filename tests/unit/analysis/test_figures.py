"""The pictures: what is on them, and that making them leaves nothing behind."""

import pytest
import torch

from fedmpi.analysis import figures, sweep_picture
from fedmpi.analysis.filter_decomposition import gaussians


def curves(*runs):
    points = [{"round": t, "up": 10**6 * (t + 1), "down": 10**5, "value": 50.0 + t} for t in range(3)]
    return [{"run": run, "points": points} for run in runs]


def labels(axes):
    return axes.get_xlabel(), axes.get_ylabel(), [text.get_text() for text in axes.get_legend().get_texts()]


def test_runs_are_told_apart_by_more_than_colour():
    (axes,) = figures.communication(curves(*"abcdefgh"), "loss").axes
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()]
    assert len(set(looks)) == 8
    assert len({look[1:] for look in looks}) == 8


def test_a_cloud_of_many_averages_is_thinned():
    w = torch.zeros(1000, 2, dtype=torch.float64)
    figure = figures.landscapes({5: w}, gaussians.loss, gaussians.START, gaussians.OPTIMUM)
    clouds = [each for each in figure.axes[0].collections if hasattr(each, "get_sizes") and len(each.get_sizes())]
    assert len(clouds[0].get_offsets()) == figures.SHOWN


def test_a_sweep_over_numbers_runs_as_they_stand():
    """Alphas from large to small go to the right, on a logarithmic axis; words stand one after another."""
    nan = float("nan")
    points = [(label, i, 0.1) for i, label in enumerate(("100", "1", "0.01"))]
    (axes,) = sweep_picture.draw({"a": points, "b": points[1:]}, "alpha", "loss").axes
    assert axes.get_xscale() == "log"
    left, right = axes.get_xlim()
    assert left > 100 > 0.01 > right
    assert [text.get_text() for text in axes.get_xticklabels()] == ["100", "1", "0.01"]
    assert labels(axes) == ("alpha", "loss", ["a", "b"])
    a, b = (line.get_xdata() for line in axes.get_lines() if len(line.get_xdata()) and line.get_marker() in "os")
    assert len(a) == 3 > len(b)
    assert a == pytest.approx([100, 1, 0.01], rel=0.1)
    assert a[1] != b[0]  # beside each other, at the same label
    (axes,) = sweep_picture.draw({"": [("1", 1, nan), ("2", 2, nan), ("5", 3, nan)]}, "epochs", "loss").axes
    assert axes.get_xscale() == "linear"
    (axes,) = sweep_picture.draw({"m": [("A", 1, nan), ("B", 2, nan)]}, "method", "loss").axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["A", "B"]
