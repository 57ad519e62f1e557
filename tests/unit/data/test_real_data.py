"""Data sources read the real files correctly, if these are in $FEDMPI_DATA or in shared/data next to the repository."""

import os
from pathlib import Path

import pytest
import torch

from fedmpi.data.federated import split
from fedmpi.data.sources.flamby import heart_disease, tcga_brca
from fedmpi.data.sources.images.public_arrays import medmnist
from fedmpi.data.sources.named_arrays import npz

ROOT = Path(os.environ.get("FEDMPI_DATA") or Path(__file__).parents[4] / "shared" / "data")


def needs(folder):
    return pytest.mark.skipif(not (ROOT / folder).is_dir(), reason=f"{ROOT / folder} does not exist")


@needs("heart_disease")
def test_heart_disease_equals_that_of_flamby():
    """Sizes equal those in Table 1 of the FLamby paper."""
    data = heart_disease(ROOT, variant="flamby")
    assert torch.bincount(data.site).tolist() == [199, 172, 30, 85]
    assert torch.bincount(data.test_site).tolist() == [104, 89, 16, 45]
    assert data.train_x.shape[1] == 13
    for k in range(4):
        x = data.train_x[data.site == k]
        varies = x.std(0) > 0  # cholesterol was not measured in Switzerland
        assert x.mean(0).abs().max() < 1e-5
        assert (x.std(0)[varies] - 1).abs().max() < 1e-5
    assert torch.equal(split(data, "site", None, seed=0).global_test.x, data.global_test_x)
    assert (data.global_test_x - data.test_x).abs().amax(1).min() > 0.01
    # The two test sets of a hospital contain the same patients in the same order, on two scales.
    assert torch.equal(*(x[data.test_site == 0, 0].argsort(stable=True) for x in (data.global_test_x, data.test_x)))
    assert torch.equal(heart_disease(ROOT, site="va", variant="flamby").train_x, data.train_x[data.site == 3])
    pooled = heart_disease(ROOT, variant="flamby", standardise="pooled")
    assert pooled.train_x.mean(0).abs().max() < 1e-5
    assert (pooled.train_x.std(0) - 1).abs().max() < 1e-5
    assert torch.equal(pooled.test_x, data.test_x)
    assert torch.equal(pooled.global_test_x, data.global_test_x)


@needs("tcga_brca")
def test_tcga_brca_has_the_published_sizes():
    data = tcga_brca(ROOT)
    assert torch.bincount(data.site).tolist() == [248, 156, 164, 129, 129, 40]  # Table 1 of the FLamby paper: 311, 196,
    assert torch.bincount(data.test_site).tolist() == [63, 40, 42, 33, 33, 11]  # 206, 162, 162, 51
    assert (data.train_x.shape, data.test_x.shape) == ((866, 39), (222, 39))
    y = torch.cat([data.train_y, data.test_y])
    assert y[:, 0].unique().tolist() == [0, 1]
    assert (y[:, 1] >= 0).all()
    assert (data.train_x[:, 0].min(), data.train_x[:, 0].max()) == (26, 90)  # years of age


@needs("medmnist")
def test_pneumoniamnist_has_the_published_sizes():
    """The published counts are 4,708 + 524 + 624."""
    data, same = npz(ROOT, path="medmnist/pneumoniamnist.npz"), medmnist(ROOT, set="pneumoniamnist")
    assert (len(data.train_y), len(data.test_y), data.classes) == (4708 + 524, 624, 2)
    assert torch.equal(same.train_y, data.train_y)
    torch.testing.assert_close(same.test_x[:].all_inputs(), data.test_x.all_inputs() * 2 - 1)
    assert len(medmnist(ROOT, set="pneumoniamnist", val="leave").train_y) == 4708
