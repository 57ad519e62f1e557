"""TCGA-BRCA as FLamby has it: survival of 1,088 patients with breast cancer in six regions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import find
from fedmpi.data.sources.tables.files import Table, read
from fedmpi.data.sources.tables.preparation import Column, Fit, TablePreparation

REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
AIMS = ("E", "T")  # whether the patient died (1) or was lost to sight (0), and after how many days


def tcga_brca(root: Path) -> Dataset:
    """TCGA-BRCA (FLamby 2022): 866 + 222 patients of six regions, 39 inputs; targets (n, 2) are event and time in days.

    Files brca.csv and train_test_split.csv in root/tcga_brca or in root: FLamby's
    flamby/datasets/fed_tcga_brca/brca.csv and .../dataset_creation_scripts/train_test_split.csv. Inputs are taken as
    they stand (the age is in years); the eight patients without a region are left out.
    """
    remedy = "correct data.root; the files are in github.com/owkin/FLamby, flamby/datasets/fed_tcga_brca"
    table, folds = (
        read(find(root, (f"tcga_brca/{name}", name), "tcga_brca", remedy), ",")
        for name in ("brca.csv", "train_test_split.csv")
    )
    fold = _folds(folds)
    who = table.words("pid", "source")
    table = table.keep(np.flatnonzero([pid in fold for pid in who]))
    if not len(table):
        raise UserError(f"{table.path}: no patient of it is in {folds.path}; fetch both anew")
    parts, owner = zip(*(fold[pid] for pid in table.words("pid", "source")), strict=True)
    train, site = np.array(parts) == "train", torch.tensor(owner)
    names = [name for name in table.columns if name not in ("pid", *AIMS)]
    x, y = (
        torch.from_numpy(np.stack([table.numbers(name, "source") for name in columns], axis=1)).float()
        for columns in (names, AIMS)
    )
    first, last = torch.from_numpy(train), torch.from_numpy(~train)
    owners = site[first], site[last], REGIONS
    preparation = TablePreparation(tuple(map(Column, names)), {"": Fit((None,) * len(names))}, AIMS)
    return Dataset(x[first], y[first], x[last], y[last], 1, *owners, preparation=preparation)


def _folds(folds: Table) -> dict[str, tuple[str, int]]:
    """Return by patient the part, train or test, and the region's number."""
    folds_by_patient = {}
    for row, (pid, fold) in enumerate(zip(folds.words("pid", "source"), folds.words("fold2", "source"), strict=True)):
        part, _, number = fold.partition("_")
        if part not in ("train", "test") or number not in map(str, range(len(REGIONS))):
            raise UserError(f"{folds.at(row)}: fold2 is {fold!r}; train_0 to test_{len(REGIONS) - 1} are allowed")
        folds_by_patient[pid] = part, int(number)
    return folds_by_patient
