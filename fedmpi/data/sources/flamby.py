"""The data sources `heart_disease` and `tcga_brca`: tables of patients, as FLamby uses them.

The variant flamby of UCI Heart Disease has the same rows as Fed-Heart-Disease, so that results can be compared with the
published tables: Ogier du Terrail et al. FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic
Healthcare Settings. NeurIPS 2022; flamby/datasets/fed_heart_disease/dataset.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten_repr
from fedmpi.data.csv_file import iter_csv_rows
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.source_utils import concat_sites, find_file, select_sites, split_train_test
from fedmpi.data.sources.tables.read_table import Table, read_table
from fedmpi.data.sources.tables.table_preprocessing import (
    FeatureColumn,
    TablePreparation,
    TrainingStatistics,
    compute_column_moments,
    standardise_columns,
)

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FIRST_TEN_FEATURES = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
FEATURES = [*FIRST_TEN_FEATURES, "slope", "ca", "thal"]
NUMBER = re.compile(r"[-+]?[0-9]{0,6}\.?[0-9]+\.?")  # float() would also accept nan, inf and 1_000
# FLamby leaves out slope, ca and thal, and one-hot encodes cp and restecg.
FLAMBY_COLUMNS, CP_COLUMN, RESTECG_COLUMN = (0, 1, 3, 4, 5, 7, 8, 9), 2, 6
FLAMBY_TRAIN_FRACTION = 0.66


def heart_disease(
    root: Path,
    *,
    site: str | None = None,
    variant: Literal["whole", "flamby"] = "whole",
    standardise: Literal["site", "pooled"] = "site",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
) -> Dataset:
    """UCI Heart Disease (Detrano 1989): 303 + 294 + 123 + 200 patients of four hospitals, 13 features, 2 classes.

    The files are processed.{cleveland,hungarian,switzerland,va}.data in root/heart_disease or in root. The classes are
    num = 0 and num > 0. Each hospital is prepared from its own data only: missing values are replaced by the mean of
    the column over the hospital's training part, then the column is standardised with the mean and standard deviation
    of that part. A column that is constant or entirely missing there becomes 0.

    variant: whole (all patients), or flamby (FLamby's Fed-Heart-Disease). flamby leaves out the columns slope, ca and
    thal, and then the patients with missing values (740 remain). cp and restecg are one-hot encoded (13 features). The
    training part consists of the 66 % of the patients that FLamby selects. The global test set is standardised with the
    statistics of the training parts of all hospitals.
    standardise: the statistics with which training rows are standardised: site (mean and standard deviation of the
    hospital's own training part), or pooled (of the training parts of all hospitals, for a model that is trained
    centrally on all rows; only for the variant flamby). The test rows of each hospital are always standardised with the
    statistics of its own training part.
    test_fraction: the fraction of each class at each hospital that is held out as its test part, with the same rows for
    every seed.
    """
    names = select_sites("heart_disease", HOSPITALS, site)
    if standardise == "pooled" and (site is not None or variant != "flamby"):
        raise UserError(
            "heart_disease: data.standardise: pooled needs data.variant: flamby and the rows of all hospitals; remove "
            "data.standardise, or set data.variant: flamby and data.partition instead of data.silos"
        )
    if variant == "flamby" and test_fraction != 0.2:
        raise UserError(
            "heart_disease: data.test_fraction has no effect with data.variant: flamby (34 % test rows); remove "
            "data.test_fraction"
        )
    tables = [_read_hospital(root, name) for name in names]
    if variant == "flamby":
        return _flamby_dataset(tables, names, standardise == "pooled")
    hospitals = [_prepare_hospital(table, test_fraction) for table in tables]
    data = hospitals[0][0] if site is not None else concat_sites([part for part, _ in hospitals], names)
    fits = (
        {"": hospitals[0][1]}
        if site is not None
        else {name: fit for name, (_, fit) in zip(names, hospitals, strict=True)}
    )
    preparation = TablePreparation(
        columns=tuple(map(FeatureColumn, FEATURES)),
        sites=fits,
        labels=("num",),
        class_names=("0", "1"),
        missing="impute",
        site_column="hospital",
        zero_is_gap=("chol",),
    )
    return replace(data, preparation=preparation)


def _prepare_hospital(table: np.ndarray, test_fraction: float) -> tuple[Dataset, TrainingStatistics]:
    """Return the standardised data set of one hospital, and the statistics used to standardise it."""
    x, y = table[:, :-1], (table[:, -1] > 0).astype(np.int64)
    cholesterol = x[:, FEATURES.index("chol")]
    cholesterol[cholesterol == 0] = np.nan  # 0 mg/dl means not measured (all patients in Switzerland)
    train, test = split_train_test(y, test_fraction)
    mean, std = (numbers.tolist() for numbers in compute_column_moments(x[train]))
    tx, ty = torch.from_numpy(standardise_columns(x, mean, std)).float(), torch.from_numpy(y)
    fit = TrainingStatistics((None,) * len(FEATURES), tuple(mean), tuple(std))
    return Dataset(tx[train], ty[train], tx[test], ty[test], classes=2), fit


def _read_hospital(root: Path, name: str) -> np.ndarray:
    """Read the table of one hospital, (n, 14) float64, with NaN for `?`."""
    file = f"processed.{name}.data"
    path = find_file(
        root, (f"heart_disease/{file}", file), "heart_disease", "correct data.root, or download the files from UCI"
    )
    rows = []
    for number, cells in iter_csv_rows(path, remedy="download the file again"):
        row = ["nan" if cell.strip() == "?" else cell.strip() for cell in cells]
        is_complete = len(row) == len(FEATURES) + 1 and row[-1] in ("0", "1", "2", "3", "4")
        wrong = next((cell for cell in row if cell != "nan" and not NUMBER.fullmatch(cell)), None)
        if not is_complete or wrong is not None:
            content = shorten_repr(",".join(cells) if wrong is None else wrong)
            raise UserError(
                f"{path}, line {number}: {content} is not allowed; a row must have {len(FEATURES)} values, each a "
                "number of at most 6 digits or ? (missing), and then a diagnosis from 0 to 4; download the file again"
            )
        rows.append(list(map(float, row)))
    if not rows:
        raise UserError(f"{path} is empty; download the file again")
    return np.array(rows)


# ---- FLamby ----
def _flamby_dataset(tables: Sequence[np.ndarray], names: Sequence[str], pooled: bool) -> Dataset:
    """Combine the hospitals of the variant flamby into one data set.

    Each hospital is standardised with the statistics of its own training part, and the global test set with those of
    all training parts.

    Args:
        tables: the table of each hospital, (n, 14).
        names: the names of the hospitals.
        pooled: whether training rows, too, are standardised with the statistics of all training parts, as in FLamby's
            pooled training.
    """
    parts = [_prepare_flamby_hospital(table) for table in tables]
    sites = []
    for x, y, train in parts:
        z = _standardise_as_flamby(x, x[train])
        sites.append(Dataset(z[train], y[train], z[~train], y[~train], classes=2))
    if len(sites) == 1:
        return sites[0]
    train_x, test_x = torch.cat([x[t] for x, _, t in parts]), torch.cat([x[~t] for x, _, t in parts])
    data = concat_sites(sites, names, global_test_x=_standardise_as_flamby(test_x, train_x))
    return replace(data, train_x=_standardise_as_flamby(train_x, train_x)) if pooled else data


def _prepare_flamby_hospital(table: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare the patients of one hospital as FLamby does.

    Patients with a missing value among the first ten measurements are left out; patients with a cholesterol of 0 are
    kept. cp and restecg are one-hot encoded, and the column of the first category is left out. scikit-learn draws the
    test part, stratified if both classes have more than two patients.

    Args:
        table: the patients, (n', 14).

    Returns:
        The inputs (n, 13) float32, not standardised; the classes (n,); and whether a row is a training row, (n,) bool.
    """
    from sklearn.model_selection import train_test_split  # imported here, because the import takes a second

    table = table[~np.isnan(table[:, : len(FIRST_TEN_FEATURES)]).any(1)]
    y = (table[:, -1] > 0).astype(np.int64)
    dummies = [table[:, CP_COLUMN] == value for value in (2, 3, 4)] + [
        table[:, RESTECG_COLUMN] == value for value in (1, 2)
    ]
    x = np.concatenate([table[:, FLAMBY_COLUMNS], np.stack(dummies, axis=1)], axis=1)
    counts = np.unique(y, return_counts=True)[1]
    _, test = train_test_split(
        np.arange(len(y)),
        test_size=1.0 - FLAMBY_TRAIN_FRACTION,
        train_size=FLAMBY_TRAIN_FRACTION,
        random_state=43,
        shuffle=True,
        stratify=y if len(counts) > 1 and counts.min() > 2 else None,
    )
    train = ~np.isin(np.arange(len(y)), test)
    return torch.from_numpy(x).float(), torch.from_numpy(y), torch.from_numpy(train)


def _standardise_as_flamby(x: Tensor, by: Tensor) -> Tensor:
    """Standardise x by column, with the mean and the unbiased standard deviation (plus 1e-9) of `by`."""
    return (x - by.mean(0)) / (by.std(0) + 1e-9)


# ---- TCGA-BRCA ----
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
TARGET_COLUMNS = ("E", "T")  # event (1: died, 0: censored) and time in days


def tcga_brca(root: Path) -> Dataset:
    """TCGA-BRCA (FLamby 2022): 866 + 222 patients of six regions, 39 inputs; targets (n, 2) are event and time in days.

    The files brca.csv and train_test_split.csv are in root/tcga_brca or in root. They are FLamby's
    flamby/datasets/fed_tcga_brca/brca.csv and .../dataset_creation_scripts/train_test_split.csv. Inputs are used as
    stored (age in years). The eight patients without a region are left out.
    """
    remedy = "correct data.root, or download the files from github.com/owkin/FLamby, flamby/datasets/fed_tcga_brca"
    table, folds = (
        read_table(find_file(root, (f"tcga_brca/{name}", name), "tcga_brca", remedy), ",")
        for name in ("brca.csv", "train_test_split.csv")
    )
    fold_of_patient = _read_folds(folds)
    patients = table.parse_words("pid", "source")
    table = table.select_rows(np.flatnonzero([pid in fold_of_patient for pid in patients]))
    if not len(table):
        raise UserError(f"{table.path} and {folds.path} have no patient in common; download both again")
    parts, owner = zip(*(fold_of_patient[pid] for pid in table.parse_words("pid", "source")), strict=True)
    train, site = np.array(parts) == "train", torch.tensor(owner)
    names = [name for name in table.columns if name not in ("pid", *TARGET_COLUMNS)]
    x, y = (
        torch.from_numpy(np.stack([table.parse_numbers(name, "source") for name in columns], axis=1)).float()
        for columns in (names, TARGET_COLUMNS)
    )
    train_rows, test_rows = torch.from_numpy(train), torch.from_numpy(~train)
    owners = site[train_rows], site[test_rows], REGIONS
    preparation = TablePreparation(
        tuple(map(FeatureColumn, names)), {"": TrainingStatistics((None,) * len(names))}, TARGET_COLUMNS
    )
    return Dataset(x[train_rows], y[train_rows], x[test_rows], y[test_rows], 1, *owners, preparation=preparation)


def _read_folds(folds: Table) -> dict[str, tuple[str, int]]:
    """Return each patient's part (train or test) and region number, by patient id."""
    folds_by_patient = {}
    for row, (pid, fold) in enumerate(
        zip(folds.parse_words("pid", "source"), folds.parse_words("fold2", "source"), strict=True)
    ):
        part, _, number = fold.partition("_")
        if part not in ("train", "test") or number not in map(str, range(len(REGIONS))):
            raise UserError(
                f"{folds.row_location(row)}: column 'fold2' contains {fold!r}; must be train_K or "
                f"test_K, with K from 0 to {len(REGIONS) - 1}"
            )
        folds_by_patient[pid] = part, int(number)
    return folds_by_patient
