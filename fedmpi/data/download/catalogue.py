"""The catalogue of public data sets (catalogue.json): their files, URLs, checksums, home pages and licences.

The MD5 checksums are those of torchvision and MedMNIST (medmnist/info.py, version 3.0.2); the checksums of CINIC-10 and
Tiny-ImageNet are used by several public loaders. docs/data.md describes the data sets.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple


class DatasetPart(NamedTuple):
    """A file or a folder of a data set, at one of several possible paths relative to data.root."""

    paths: tuple[str, ...]
    files: int = 0  # number of files in the folder; 0: any number, or a file


class Download(NamedTuple):
    """One file to download.

    If `into` is set, the file is an archive, which is unpacked into this folder and then deleted.
    """

    urls: tuple[str, ...]  # tried in this order
    path: str  # relative to data.root
    md5: str
    into: str = ""


class CatalogueEntry(NamedTuple):
    """A data set in the catalogue, as shown by `fedmpi data`."""

    description: str  # "grey 28x28 digits, 10 classes"
    config: str  # what to write under `data:` in a config
    home: str
    licence: str
    parts: tuple[DatasetPart, ...]
    downloads: tuple[Download, ...] = ()
    manual_steps: str = (
        ""  # instructions if the data set cannot be downloaded automatically, for example because an account is needed
    )


class MedMNISTSet(NamedTuple):
    """A data set of MedMNIST.

    samples: the numbers of training, validation and test samples; md5: one checksum per image size, in the order of
    MEDMNIST_SIZES.
    """

    classes: int
    channels: int
    samples: tuple[int, int, int]
    md5: tuple[str, ...]


MEDMNIST_SIZES = (28, 64, 128, 224)  # width and height in pixels in MedMNIST v2 and MedMNIST+


def _expand_pattern(pattern: str) -> list[str]:
    """Expand the braces of a pattern: `{train,test}.bin` gives train.bin and test.bin."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in product(*pieces)]


def _make_parts(*paths: Any) -> list[DatasetPart]:
    """Return the files or folders that an entry of `files` in catalogue.json describes.

    paths: one or more patterns, whose braces stand for several files: `{train,test}.bin`. Several patterns give
    alternative paths for each file. For folders, the last element is an integer: the number of files in each folder.
    """
    patterns = [path for path in paths if isinstance(path, str)]
    number = next((path for path in paths if isinstance(path, int)), 0)
    return [DatasetPart(alternatives, number) for alternatives in zip(*map(_expand_pattern, patterns), strict=True)]


def _make_entry(files: list[Any], downloads: tuple[Any, ...] = (), **facts: str) -> CatalogueEntry:
    """Make the catalogue entry of a data set from its fields in catalogue.json; `facts` are all other fields."""
    parts = tuple(part for entry in files for part in _make_parts(*entry))
    return CatalogueEntry(parts=parts, downloads=tuple(Download(tuple(d.pop("urls")), **d) for d in downloads), **facts)


def medmnist_file(name: str, size: int) -> str:
    """Return the name of a MedMNIST file without extension: pathmnist for size 28, pathmnist_64 for size 64."""
    return name if size == MEDMNIST_SIZES[0] else f"{name}_{size}"


def _make_medmnist_entry(name: str, size: int, md5: str) -> CatalogueEntry:
    """Make the catalogue entry of a MedMNIST data set with images of this size; md5: the checksum of its file."""
    row, file = MEDMNIST[name], f"{medmnist_file(name, size)}.npz"
    labels = "labels per image" if name == "chestmnist" else "classes"
    url = f"https://zenodo.org/records/10519652/files/{file}?download=1"
    return CatalogueEntry(
        f"{'colour' if row.channels == 3 else 'grey'} {size}x{size} medical images, {row.classes} {labels}",
        f"source: medmnist, set: {name}" + ("" if size == MEDMNIST_SIZES[0] else f", size: {size}"),
        "https://medmnist.com/",
        "CC BY-NC 4.0" if name == "dermamnist" else "CC BY 4.0",
        (DatasetPart((f"medmnist/{file}", file)),),
        (Download((url,), f"medmnist/{file}", md5),),
    )


_CONTENT = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MEDMNIST = {name: MedMNISTSet(**row) for name, row in _CONTENT["medmnist"].items()}
CATALOGUE: dict[str, CatalogueEntry] = {name: _make_entry(**row) for name, row in _CONTENT["sets"].items()}
CATALOGUE |= {
    medmnist_file(name, size): _make_medmnist_entry(name, size, md5)
    for name, row in MEDMNIST.items()
    for size, md5 in zip(MEDMNIST_SIZES, row.md5, strict=True)
}
