"""Public data sets whose files are pictures: CINIC-10, Tiny-ImageNet, PACS, Office-Home, HAM10000, Retina, COVID-FL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import show
from fedmpi.data.csv_file import csv_rows
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.catalogue import COVID_SITES, HAM_FOLDERS, HAM_TABLES, HOME_FOLDERS, PACS, PACS_FOLDERS
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.common import by_site, find
from fedmpi.data.sources.pictures.decode import DecodeOptions, Size
from fedmpi.data.sources.pictures.image_dataset import (
    Files,
    class_folders,
    dataset_of_files,
    pictures_by_class,
    read_rows,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of pixels in 0..1, per channel
CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")  # as the authors number them
HOME = {  # site: how copies of the set call its folder
    "art": ("Art", "art"),
    "clipart": ("Clipart", "clipart"),
    "product": ("Product", "product"),
    "real_world": ("Real World", "Real_World", "RealWorld", "real_world"),
}
HAM_CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
HAM_SOURCES = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")

Fraction = Annotated[float, Field(ge=0, lt=1)]


def _folder(root: Path, what: str, paths: Sequence[str]) -> Path:
    """The first of the folders that is there. Raises MissingDataError if none is."""
    folder = next((root / path for path in paths if (root / path).is_dir()), None)
    if folder is None:
        places = " or ".join(str(root / path) for path in paths)
        raise MissingDataError(f"{what}: there is no folder {places} (data.root = {root}); {advice(what, root)}")
    return folder


def cinic10(root: Path, *, download: bool = False, val: Literal["join", "leave"] = "leave") -> Dataset:
    """CINIC-10 (Darlow 2018): 90,000 + 90,000 colour 32x32 images, 10 classes, in root/CINIC-10/{train,test}.

    val: its 90,000 of `valid` join the training part, or are left out (FedSOL).
    """
    ready("cinic10", root, download)

    def files(part: str) -> Files:
        return pictures_by_class(_folder(root, "cinic10", [f"CINIC-10/{part}"]), CINIC_CLASSES, allowed="CINIC-10's")

    train = files("train") + files("valid") if val == "join" else files("train")
    decoding = DecodeOptions(32, 3, (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))  # of the training pictures
    return dataset_of_files(train, files("test"), CINIC_CLASSES, decoding)


def tiny_imagenet(root: Path, *, download: bool = False) -> Dataset:
    """Tiny-ImageNet (Le 2015): 100,000 + 10,000 colour 64x64 images, 200 classes, in root/tiny-imagenet-200.

    The test part is its validation part, as in the papers: the labels of `test` were never published. Classes are
    numbered in the order of their WordNet names.
    """
    ready("tiny_imagenet", root, download)
    home, remedy = "tiny-imagenet-200", advice("tiny_imagenet", root)
    names = sorted(find(root, (f"{home}/wnids.txt",), "tiny_imagenet", remedy).read_text(encoding="ascii").split())
    notes = find(root, (f"{home}/val/val_annotations.txt",), "tiny_imagenet", remedy)
    paths, labels, rows = [], [], []
    for k, line in enumerate(notes.read_text(encoding="ascii", errors="replace").splitlines(), 1):
        file, label, *_ = [*line.split("\t"), ""]  # behind them the box of the object
        if label not in names:
            needed = f"a file and a class of wnids.txt are needed, found {show(line)}"
            raise UserError(f"{notes}, line {k}: {needed}; {remedy}")
        paths.append(notes.parent / "images" / file)
        labels.append(names.index(label))
        rows.append(f"{notes}, line {k}")
    train = pictures_by_class(root / home / "train", names, "images", "wnids.txt")
    return dataset_of_files(train, Files(paths, labels, rows), names, DecodeOptions(64, 3, MEAN, STD))


def pacs(root: Path, *, site: str | None = None, size: Size = 224, test_fraction: Fraction = 0.2) -> Dataset:
    """PACS (Li 2017): 9,991 colour pictures, 7 classes; art_painting, cartoon, photo and sketch are the sites.

    Folders SITE/CLASS in root/PACS, root/PACS/kfold, root/pacs/images or root/kfold. test_fraction of each class of
    each site is its test part, the same for every seed. size: each picture is scaled and cut to size x size.
    """

    def read_site(name: str) -> Dataset:
        folder = _folder(root, "pacs", [f"{home}/{name}" for home in PACS_FOLDERS])
        files = pictures_by_class(folder, PACS_CLASSES, allowed="PACS's")
        return dataset_of_files(files, test_fraction, PACS_CLASSES, DecodeOptions(size, 3, MEAN, STD))

    return by_site("pacs", list(PACS), site, read_site)


def office_home(root: Path, *, site: str | None = None, size: Size = 224, test_fraction: Fraction = 0.2) -> Dataset:
    """Office-Home (Venkateswara 2017): 15,588 colour pictures, 65 classes; four styles are the sites.

    Sites: art, clipart, product, real_world: folders Art, Clipart, Product and Real World in
    root/OfficeHomeDataset_10072016, root/office_home or root/OfficeHome, with a folder for each class. test_fraction of
    each class of each site is its test part, the same for every seed. size: each picture is scaled and cut to size x
    size.
    """

    def read_site(name: str) -> Dataset:
        folder = _folder(root, "office_home", [f"{home}/{folder}" for home in HOME_FOLDERS for folder in HOME[name]])
        classes = class_folders(folder)
        if len(classes) != 65:
            raise UserError(f"{folder} holds {len(classes)} folders of classes; Office-Home has 65 at each site")
        files = pictures_by_class(folder, classes)
        return dataset_of_files(files, test_fraction, classes, DecodeOptions(size, 3, MEAN, STD))

    return by_site("office_home", list(HOME), site, read_site)


def ham10000(root: Path, *, site: str | None = None, size: Size = 224, test_fraction: Fraction = 0.2) -> Dataset:
    """HAM10000 (Tschandl 2018): 10,015 pictures of skin lesions, 7 classes, of four sources, which are the sites.

    HAM10000_metadata.csv, with its column `dataset`, and the .jpg files anywhere below root/HAM10000. Sites:
    vidir_molemax, vidir_modern, rosendahl, vienna_dias. test_fraction of each class of each site is its test part, the
    same for every seed; all pictures of a lesion are on one side. size: each picture is scaled and cut to size x size.
    """
    tables = [f"{folder}/{file}" for folder in HAM_FOLDERS for file in HAM_TABLES]
    path = find(root, tables, "ham10000", advice("ham10000", root))
    rows = read_rows(path, ("lesion_id", "image_id", "dx", "dataset"), "\t" if path.suffix == ".tab" else ",")
    pictures = {file.stem: file for file in sorted(path.parent.rglob("*.jpg")) if not file.name.startswith(".")}
    for row in rows:
        for column, allowed in (("dx", HAM_CLASSES), ("dataset", HAM_SOURCES)):
            if row.values[column] not in allowed:
                raise UserError(f"{row.at}: {column} is {row.values[column]!r}; allowed: {', '.join(allowed)}")

    def read_site(name: str) -> Dataset:
        mine = [row for row in rows if row.values["dataset"] == name]
        if not mine:
            raise UserError(f"{path} has no row of the source {name}")
        images = [row.values["image_id"] for row in mine]
        files = Files(
            [pictures.get(image, path.parent / f"{image}.jpg") for image in images],
            [HAM_CLASSES.index(row.values["dx"]) for row in mine],
            [row.at for row in mine],
        )
        lesions = [row.values["lesion_id"] for row in mine]
        return dataset_of_files(files, test_fraction, HAM_CLASSES, DecodeOptions(size, 3, MEAN, STD), lesions)

    return by_site("ham10000", HAM_SOURCES, site, read_site)


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
    return _ssl_fl(root, "retina", "Retina", f"5_clients/{split}", sites, site, 2, decoding)


def covid_fl(root: Path, *, site: str | None = None, size: Size = 224) -> Dataset:
    """COVID-FL (Yan 2023): chest X-rays, 3 classes (normal, pneumonia, COVID-19), of twelve sites, in root/COVID-FL.

    Files labels.csv (`name,label`), test.csv, 12_clients/split_real/SITE.csv (a name a line), and the pictures
    train/NAME, test/NAME. Sites: bimcv, cohen, eurorad, gz, ml-workgroup, ricord_c, rsna-0 ... rsna-4, sirm. The test
    part is common to all, in silo mode too. size: each picture is scaled and cut to size x size.
    """
    decoding = DecodeOptions(size, 3, MEAN, STD)
    return _ssl_fl(root, "covid_fl", "COVID-FL", "12_clients/split_real", COVID_SITES, site, 3, decoding)


def _ssl_fl(
    root: Path,
    what: str,
    home: str,
    split: str,
    sites: tuple[str, ...],
    site: str | None,
    classes: int,
    decoding: DecodeOptions,
) -> Dataset:
    """A data set in the layout of SSL-FL (Yan 2023): a table of labels, and a list of files for each client."""
    if site is not None and site not in sites:
        raise UserError(f"{what}: there is no site {site!r}; allowed: {', '.join(sites)}")

    def lines(path: str) -> Iterator[tuple[str, list[str]]]:
        """Yield where each line is, and its fields."""
        file = find(root, (f"{home}/{path}",), what, advice(what, root))
        for number, fields in csv_rows(file, remedy="fetch it anew"):
            yield f"{file}, line {number}", [field.strip() for field in fields]

    allowed = {f"{k}{end}": k for k in range(classes) for end in ("", ".0")}  # the authors write 0.0, 1.0
    labels: dict[str, int] = {}
    for at, fields in lines("labels.csv"):
        if len(fields) < 2 or fields[1] not in allowed:
            needed = f"a name and a label 0..{classes - 1} are needed, found {show(','.join(fields))}"
            raise UserError(f"{at}: {needed}")
        labels[fields[0]] = allowed[fields[1]]

    def listed(path: str, part: str) -> Files:
        """The files that a list names, each once, in the order of their first lines."""
        places: dict[str, str] = {}
        for at, fields in lines(path):
            places.setdefault(fields[0], at)
            if fields[0] not in labels:
                raise UserError(f"{at}: {fields[0]!r} has no label in labels.csv")
        paths = [root / home / part / name for name in places]
        return Files(paths, [labels[name] for name in places], list(places.values()))

    parts = [listed(f"{split}/{name}.csv", "train") for name in (sites if site is None else (site,))]
    data = dataset_of_files(
        sum(parts, Files([], [])), listed("test.csv", "test"), [str(k) for k in range(classes)], decoding
    )
    if site is not None:
        return data
    owner = torch.repeat_interleave(torch.tensor([len(part.labels) for part in parts]))
    return replace(data, site=owner, site_names=sites)
