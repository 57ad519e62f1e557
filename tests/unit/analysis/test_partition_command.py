"""`fedmpi partition`: its output, a file that reproduces the partition, and a plot."""

import numpy as np
import torch
from helpers import ROOT, fedmpi

from fedmpi.analysis.partition import compute_label_skew
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.data.partitions.site_and_file import partition_from_file

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_label_skew_by_hand():
    counts = np.array([[6, 0, 0], [0, 3, 3]])  # fractions of the classes in all samples: 1/2, 1/4, 1/4
    assert compute_label_skew(counts).tolist() == [0.5, 0.5]


def test_the_written_file_reproduces_the_partition(tmp_path):
    path, plot = tmp_path / "parts.csv", tmp_path / "parts.svg"
    first = fedmpi("partition", QUICKSTART, "data.validation=0.2", "--write", path, "--plot", plot)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[0].startswith("4 clients, 1,1")  # a fifth of the 1,438 samples are validation samples
    assert len([line for line in lines if line and line[0] in "0123"]) == 4  # one line per client
    assert lines[-2:] == [f"written: {each}" for each in (path, plot)]
    assert "<svg" in plot.read_text()
    without_file = fedmpi("partition", QUICKSTART)
    with_file = fedmpi("partition", QUICKSTART, f"data.partition={{scheme: file, path: {path}}}")
    assert with_file.stdout == without_file.stdout


def test_all_clients_are_written_and_a_subset_is_plotted(tmp_path):
    config = [QUICKSTART, f"data.source={__file__}:rows", "data.partition={scheme: iid, clients: 6000}"]
    path = tmp_path / "parts.csv"
    process = fedmpi("partition", *config, "--write", path, "--plot", tmp_path / "parts.svg")
    assert process.returncode == 0, process.stderr
    partition = partition_from_file(np.zeros(12_000), None, np.random.default_rng(), path=path)
    assert np.array_equal(partition.order, split(rows(None), "iid", 6_000, 0).parts.order)


def rows(root) -> Dataset:
    y = torch.arange(12_000) % 2
    return Dataset(torch.zeros(12_000, 1), y, torch.zeros(4, 1), y[:4], 2)
