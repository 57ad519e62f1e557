"""The pictures: what is on them, and that making them leaves nothing behind."""

import torch

from fedmpi.analysis import figures
from fedmpi.analysis.filter_decomposition import gaussians


def curves(*runs):
    points = [{"round": t, "up": 10**6 * (t + 1), "down": 10**5, "value": 50.0 + t} for t in range(3)]
    return [{"run": run, "points": points} for run in runs]


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
