"""The same sources on the real files, where they are at hand: $FEDMPI_DATA, or shared/data beside the repository."""

import os
from pathlib import Path

import pytest
import torch

from fedmpi.data.federated import split
from fedmpi.data.sources.heart_disease import heart_disease
from fedmpi.data.sources.mnist import fashion_mnist, mnist
from fedmpi.data.sources.npz import npz

ROOT = Path(os.environ.get("FEDMPI_DATA") or Path(__file__).parents[3] / "shared" / "data")


def needs(folder):
    return pytest.mark.skipif(not (ROOT / folder).is_dir(), reason=f"{ROOT / folder} is not there")


@needs("heart_disease")
def test_heart_disease():
    data = heart_disease(ROOT)
    sizes = torch.bincount(data.site) + torch.bincount(data.test_site)
    assert sizes.tolist() == [303, 294, 123, 200]
    y, owner = torch.cat([data.train_y, data.test_y]), torch.cat([data.site, data.test_site])
    # num 0 by hospital: 164, 188, 8, 51 (UCI); the rest have the disease
    assert [int((y[owner == k] == 0).sum()) for k in range(4)] == [164, 188, 8, 51]
    assert (data.train_x[data.site == 2][:, 4] == 0).all()  # Switzerland measured no cholesterol
    for k in range(4):
        assert data.train_x[data.site == k].mean(0).abs().max() < 1e-5
    fed = split(data, "site", None, seed=0)
    assert (fed.train_sizes + fed.test_sizes).tolist() == [303, 294, 123, 200]
    assert torch.equal(heart_disease(ROOT, site="va").train_x, data.train_x[data.site == 3])


@needs("MNIST")
def test_mnist():
    data = mnist(ROOT)
    assert data.train_x.shape == (60000, 1, 28, 28)
    assert data.test_x.shape == (10000, 1, 28, 28)
    # counts of the digits as published
    assert torch.bincount(data.train_y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(data.train_x.mean()) < 1e-3
    assert abs(data.train_x.std() - 1) < 1e-3


@needs("FashionMNIST")
def test_fashion_mnist():
    data = fashion_mnist(ROOT)
    assert torch.bincount(data.train_y).tolist() == [6000] * 10
    assert torch.bincount(data.test_y).tolist() == [1000] * 10
    assert abs(data.train_x.mean()) < 1e-3
    assert abs(data.train_x.std() - 1) < 1e-3


@needs("medmnist")
def test_pneumoniamnist():
    """The published counts are 4,708 + 524 + 624."""
    for val, n in (("join", 4708 + 524), ("leave", 4708)):
        data = npz(ROOT, path="medmnist/pneumoniamnist.npz", val=val)
        assert (len(data.train_y), len(data.test_y), data.classes) == (n, 624, 2)
