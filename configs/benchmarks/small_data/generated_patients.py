"""Generate random patients for the _small files of FLamby's benchmarks, with the real sites, sizes and columns."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import fedmpi


def hospitals(root: Path) -> fedmpi.Dataset:
    """Return 740 patients of four hospitals, with 13 standard normal inputs and a disease from a logistic model."""
    g = torch.Generator().manual_seed(0)
    site = _repeat_sites([303, 261, 46, 130])
    x = torch.randn(len(site), 13, generator=g)
    coefficients = torch.randn(13, generator=g) * 0.5
    offset = torch.tensor([-0.2, -0.6, 2.0, 1.0])[site]  # nearly all patients in Switzerland are ill
    y = (torch.rand(len(site), generator=g) < torch.sigmoid(x @ coefficients + offset)).long()
    return _split_each_site(x, y, site, 0.34, 2, ("cleveland", "hungarian", "switzerland", "va"))


def regions(root: Path) -> fedmpi.Dataset:
    """Return 1,088 patients of six regions, with age in years, 38 columns of 0 and 1, and targets event and days.

    The time to death, with hazard exp(x . coefficients), and the time to loss to follow-up are exponential.
    """
    g = torch.Generator().manual_seed(0)
    site = _repeat_sites([311, 196, 206, 162, 162, 51])
    age = (58 + 13 * torch.randn(len(site), 1, generator=g)).clamp(26, 90)
    x = torch.cat([age, (torch.rand(len(site), 38, generator=g) < 0.2).float()], dim=1)
    coefficients = torch.cat([torch.tensor([0.03]), torch.randn(38, generator=g)])
    death, loss = torch.empty(2, len(site)).exponential_(generator=g) * torch.tensor([[20000.0], [1200.0]])
    death = death * torch.exp(2 - x @ coefficients)
    y = torch.stack([(death < loss).float(), torch.minimum(death, loss).round()], dim=1)
    return _split_each_site(x, y, site, 0.2, 1, ("Northeast", "South", "West", "Midwest", "Europe", "Canada"))


def _repeat_sites(sizes: Sequence[int]) -> Tensor:
    """Return the site of each patient, given the number of patients at each site."""
    return torch.repeat_interleave(torch.tensor(sizes))


def _split_each_site(
    x: Tensor, y: Tensor, site: Tensor, test_fraction: float, classes: int, names: tuple[str, ...]
) -> fedmpi.Dataset:
    """Return a data set in which the last rows of each site, a fraction `test_fraction`, are its test rows."""
    sizes = torch.bincount(site).tolist()
    is_test = torch.cat([torch.arange(n) >= round(n * (1 - test_fraction)) for n in sizes])
    return fedmpi.Dataset(
        x[~is_test], y[~is_test], x[is_test], y[is_test], classes, site[~is_test], site[is_test], names
    )
