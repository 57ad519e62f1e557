"""Generate random patients for the _small files of FLamby's benchmarks, with the same sites, patients and columns."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import fedmpi


def hospitals(root: Path) -> fedmpi.Dataset:
    """Return 740 patients of four hospitals, with 13 standard normal inputs and a disease from a logistic model."""
    g = torch.Generator().manual_seed(0)
    site = _sites([303, 261, 46, 130])
    x = torch.randn(len(site), 13, generator=g)
    pull = torch.randn(13, generator=g) * 0.5
    offset = torch.tensor([-0.2, -0.6, 2.0, 1.0])[site]  # nearly all patients in Switzerland are ill
    y = (torch.rand(len(site), generator=g) < torch.sigmoid(x @ pull + offset)).long()
    return _divided(x, y, site, 0.34, 2, ("cleveland", "hungarian", "switzerland", "va"))


def regions(root: Path) -> fedmpi.Dataset:
    """Return 1,088 patients of six regions: the age in years and 38 columns of 0 and 1; targets are event and days.

    The time to death, with hazard exp(x . pull), and the time until a patient is lost to follow-up are exponential.
    """
    g = torch.Generator().manual_seed(0)
    site = _sites([311, 196, 206, 162, 162, 51])
    age = (58 + 13 * torch.randn(len(site), 1, generator=g)).clamp(26, 90)
    x = torch.cat([age, (torch.rand(len(site), 38, generator=g) < 0.2).float()], dim=1)
    pull = torch.cat([torch.tensor([0.03]), torch.randn(38, generator=g)])
    death, lost = torch.empty(2, len(site)).exponential_(generator=g) * torch.tensor([[20000.0], [1200.0]])
    death = death * torch.exp(2 - x @ pull)
    y = torch.stack([(death < lost).float(), torch.minimum(death, lost).round()], dim=1)
    return _divided(x, y, site, 0.2, 1, ("Northeast", "South", "West", "Midwest", "Europe", "Canada"))


def _sites(sizes: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(sizes))


def _divided(x: Tensor, y: Tensor, site: Tensor, held: float, classes: int, names: tuple[str, ...]) -> fedmpi.Dataset:
    """Return a data set in which the last rows of each site, a fraction `held`, are its test rows."""
    sizes = torch.bincount(site).tolist()
    last = torch.cat([torch.arange(n) >= round(n * (1 - held)) for n in sizes])
    return fedmpi.Dataset(x[~last], y[~last], x[last], y[last], classes, site[~last], site[last], names)
