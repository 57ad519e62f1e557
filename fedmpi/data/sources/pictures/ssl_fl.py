"""Retina and COVID-FL in the layout of SSL-FL (Yan 2023): a table of labels, and a list of files for each client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import show
from fedmpi.data.csv_file import csv_rows
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.by_hand import COVID_SITES
from fedmpi.data.fetching.getting import advice
from fedmpi.data.sources.common import find
from fedmpi.data.sources.pictures.decode import DecodeOptions
from fedmpi.data.sources.pictures.held_out import Files, parted

Size = Annotated[int, Field(ge=1, le=4096)]


def retina(
    root: Path,
    *,
    site: str | None = None,
    split: Literal["split_1", "split_2", "split_3"] = "split_1",
    size: Size = 256,
) -> Dataset:
    """Retina (Kaggle; Yan 2023): fundus pictures, 2 classes, of 5 clients in three splits, in root/Retina.

    Files labels.csv (`name,label`), test.csv, 5_clients/SPLIT/client_1.csv ... client_5.csv (a name a line), and the
    pictures as arrays train/NAME, test/NAME (.npy, (H, W, 3) of 0..255). The sites are client_1 ... client_5; the test
    part is common to all, in silo mode too. size: each picture is scaled and cut to size x size.
    split: which of the three ways of dividing the pictures.
    """
    sites = tuple(f"client_{k}" for k in range(1, 6))
    decoding = DecodeOptions(size, 3, (0.5007, 0.5010, 0.5019), (0.0342, 0.0535, 0.0484))
    return _open(root, "retina", "Retina", f"5_clients/{split}", sites, site, 2, decoding)


def covid_fl(root: Path, *, site: str | None = None, size: Size = 224) -> Dataset:
    """COVID-FL (Yan 2023): chest X-rays, 3 classes (normal, pneumonia, COVID-19), of twelve sites, in root/COVID-FL.

    Files labels.csv (`name,label`), test.csv, 12_clients/split_real/SITE.csv (a name a line), and the pictures
    train/NAME, test/NAME. Sites: bimcv, cohen, eurorad, gz, ml-workgroup, ricord_c, rsna-0 ... rsna-4, sirm. The test
    part is common to all, in silo mode too. size: each picture is scaled and cut to size x size.
    """
    decoding = DecodeOptions(size, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's
    return _open(root, "covid_fl", "COVID-FL", "12_clients/split_real", COVID_SITES, site, 3, decoding)


def _open(
    root: Path,
    what: str,
    home: str,
    split: str,
    sites: tuple[str, ...],
    site: str | None,
    classes: int,
    decoding: DecodeOptions,
) -> Dataset:
    if site is not None and site not in sites:
        raise UserError(f"{what}: there is no site {site!r}; allowed: {', '.join(sites)}")
    remedy = advice(what, root)
    labels = _labels(find(root, (f"{home}/labels.csv",), what, remedy), classes)
    mine = sites if site is None else (site,)
    lists = [find(root, (f"{home}/{split}/{name}.csv",), what, remedy) for name in mine]
    parts = [_named(path, root / home / "train", labels) for path in lists]
    test = _named(find(root, (f"{home}/test.csv",), what, remedy), root / home / "test", labels)
    train = Files([], [])
    for part in parts:
        train = train + part
    whole = parted(train, test, [str(k) for k in range(classes)], decoding)
    if site is not None:
        return whole
    owner = torch.repeat_interleave(torch.tensor([len(part.labels) for part in parts]))
    return replace(whole, site=owner, site_names=sites)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    return [(number, [field.strip() for field in row]) for number, row in csv_rows(path, remedy="fetch it anew")]


def _labels(path: Path, classes: int) -> dict[str, int]:
    """name -> label; the authors write labels as 0.0, 1.0."""
    labels = {}
    for number, line in _lines(path):
        try:
            label = float(line[1])
            if label not in range(classes):
                raise ValueError
        except (IndexError, ValueError):
            told = f"a name and a label 0..{classes - 1} are needed, found {show(','.join(line))}"
            raise UserError(f"{path}, line {number}: {told}") from None
        labels[line[0]] = int(label)
    return labels


def _named(path: Path, folder: Path, labels: dict[str, int]) -> Files:
    """The files that a list names, each once."""
    lines = {line[0]: number for number, line in reversed(_lines(path))}
    paths, classes, rows = [], [], []
    for name, number in sorted(lines.items(), key=lambda entry: entry[1]):
        if name not in labels:
            raise UserError(f"{path}, line {number}: {name!r} has no label in labels.csv")
        paths.append(folder / name)
        classes.append(labels[name])
        rows.append(f"{path}, line {number}")
    if not paths:
        raise UserError(f"{path} names no picture")
    return Files(paths, classes, rows)
