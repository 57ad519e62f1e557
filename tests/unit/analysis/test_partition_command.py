"""`fedmpi partition`: what it prints, a file that gives the same division again, a picture, mistakes in one line."""

import numpy as np
import torch
from helpers import ROOT, fedmpi

from fedmpi.analysis.partition import compute_label_skew
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.data.partitions.site_and_file import partition_from_file

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_distances_by_hand():
    counts = np.array([[6, 0, 0], [0, 3, 3]])  # of all samples 1/2, 1/4, 1/4 are of each class
    assert compute_label_skew(counts).tolist() == [0.5, 0.5]


def test_what_is_written_is_the_same_division(tmp_path):
    path, picture = tmp_path / "parts.csv", tmp_path / "parts.svg"
    first = fedmpi("partition", QUICKSTART, "data.validation=0.2", "--write", path, "--plot", picture)
    assert first.returncode == 0, first.stderr
    said = first.stdout.splitlines()
    assert said[0].startswith("4 clients, 1,1")  # a fifth of 1,438 samples is held out
    assert len([line for line in said if line and line[0] in "0123"]) == 4  # a line a client in the map
    assert said[-2:] == [f"written: {each}" for each in (path, picture)]
    assert "<svg" in picture.read_text()
    whole = fedmpi("partition", QUICKSTART)
    again = fedmpi("partition", QUICKSTART, f"data.partition={{scheme: file, path: {path}}}")
    assert again.stdout == whole.stdout


def test_many_clients_are_written_and_some_drawn(tmp_path):
    config = [QUICKSTART, f"data.source={__file__}:rows", "data.partition={scheme: iid, clients: 6000}"]
    path = tmp_path / "parts.csv"
    done = fedmpi("partition", *config, "--write", path, "--plot", tmp_path / "parts.svg")
    assert done.returncode == 0, done.stderr
    given = partition_from_file(np.zeros(12_000), None, np.random.default_rng(), path=path)
    assert np.array_equal(given.order, split(rows(None), "iid", 6_000, 0).parts.order)


def rows(root) -> Dataset:
    y = torch.arange(12_000) % 2
    return Dataset(torch.zeros(12_000, 1), y, torch.zeros(4, 1), y[:4], 2)
