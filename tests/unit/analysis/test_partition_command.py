"""`fedmpi partition`: what it prints, a file that gives the same division again, a picture, mistakes in one line."""

import numpy as np
import torch
from helpers import ROOT, fedmpi

from fedmpi.analysis.partition import distances, histograms
from fedmpi.common.inputs import Inputs
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.data.partitions.given import file

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_distances_by_hand():
    counts = np.array([[6, 0, 0], [0, 3, 3]])  # of all samples 1/2, 1/4, 1/4 are of each class
    assert distances(counts).tolist() == [0.5, 0.5]


def test_symbols_have_no_mean():
    tokens, y = torch.arange(60).view(20, 3), torch.arange(20) % 2
    for x in (tokens, Inputs({"ids": tokens, "mask": torch.ones(20, 3)})):
        data = split(Dataset(x, y, x, y, 2), "iid", 4, 0)
        edges, counts = histograms(data)
        assert (len(edges), counts.shape) == (0, (4, 0))


def test_what_is_written_is_the_same_division(tmp_path):
    path, picture = tmp_path / "parts.csv", tmp_path / "parts.svg"
    first = fedmpi("partition", QUICKSTART, "data.validation=0.2", "--write", path, "--draw", picture)
    assert first.returncode == 0, first.stderr
    said = first.stdout.splitlines()
    assert said[0].startswith("4 clients, 1,1")  # a fifth of 1,438 samples is held out
    assert len([line for line in said if line and line[0] in "0123"]) == 4  # a line a client in the map
    features = tmp_path / "parts-features.svg"
    assert said[-3:] == [f"written: {each}" for each in (path, picture, features)]
    assert all("<svg" in each.read_text() for each in (picture, features))
    whole = fedmpi("partition", QUICKSTART)
    again = fedmpi("partition", QUICKSTART, f"data.partition={{scheme: file, path: {path}}}")
    assert again.stdout == whole.stdout


def test_many_clients_are_written_and_some_drawn(tmp_path):
    config = [QUICKSTART, f"data.source={__file__}:rows", "data.partition={scheme: iid, clients: 6000}"]
    done = fedmpi("partition", *config, "--write", tmp_path / "parts.csv")
    assert done.returncode == 0, done.stderr
    given = file(np.zeros(12_000), None, np.random.default_rng(), path=tmp_path / "parts.csv")
    assert np.array_equal(given.order, split(rows(None), "iid", 6_000, 0).parts.order)
    drawn = fedmpi("partition", *config, "--draw", tmp_path / "parts.svg")
    assert drawn.returncode == 0, drawn.stderr


def rows(root) -> Dataset:
    y = torch.arange(12_000) % 2
    return Dataset(torch.zeros(12_000, 1), y, torch.zeros(4, 1), y[:4], 2)
