"""What is known of each public data set: its files, their addresses and checksums, home and licence (catalogue.json).

MD5s are those that torchvision and MedMNIST (medmnist/info.py, version 3.0.2) check; CINIC-10's and Tiny-ImageNet's
are those that several public loaders check. docs/data.md has more.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A file, or a folder with so many files below it, relative to data.root; any of `paths` will do."""

    paths: tuple[str, ...]
    files: int = 0  # of a folder; 0: any number


class Download(NamedTuple):
    """One file to fetch. `into`: it is an archive, whose content goes to that folder; it is deleted afterwards."""

    urls: tuple[str, ...]  # the first that answers is taken
    path: str  # relative to data.root
    md5: str
    into: str = ""


class Listing(NamedTuple):
    """A data set of `fedmpi data`."""

    what: str  # "grey 28x28 digits, 10 classes"
    config: str  # under `data:` in a config
    home: str
    licence: str
    parts: tuple[Part, ...]
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # what to do where there is no download: sites that ask for an account or a click


class MedMNIST(NamedTuple):
    """One set of MedMNIST. samples: training, validation, test; md5: by the sizes of SIZES."""

    classes: int
    channels: int
    samples: tuple[int, int, int]
    md5: tuple[str, ...]


SIZES = (28, 64, 128, 224)  # pixels of MedMNIST v2 and MedMNIST+


def _expand(pattern: str) -> list[str]:
    """Return the paths of a pattern: `{train,test}.bin` is train.bin and test.bin."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in product(*pieces)]


def _parts(*paths: Any) -> list[Part]:
    """Return the parts of an entry of `files`: patterns of places for the same files, and their number in a folder."""
    patterns = [path for path in paths if isinstance(path, str)]
    number = next((path for path in paths if isinstance(path, int)), 0)
    return [Part(places, number) for places in zip(*map(_expand, patterns), strict=True)]


def _listing(files: list[Any], downloads: tuple[Any, ...] = (), **facts: str) -> Listing:
    parts = tuple(part for entry in files for part in _parts(*entry))
    return Listing(parts=parts, downloads=tuple(Download(tuple(d.pop("urls")), **d) for d in downloads), **facts)


def medmnist_file(name: str, size: int) -> str:
    """`pathmnist` and 28 -> pathmnist; other sizes: pathmnist_64."""
    return name if size == SIZES[0] else f"{name}_{size}"


def _medmnist_listing(name: str, size: int, md5: str) -> Listing:
    row, file = MEDMNIST[name], f"{medmnist_file(name, size)}.npz"
    labels = "labels a picture" if name == "chestmnist" else "classes"
    url = f"https://zenodo.org/records/10519652/files/{file}?download=1"
    return Listing(
        f"{'colour' if row.channels == 3 else 'grey'} {size}x{size} medical pictures, {row.classes} {labels}",
        f"source: medmnist, set: {name}" + ("" if size == SIZES[0] else f", size: {size}"),
        "https://medmnist.com/",
        "CC BY-NC 4.0" if name == "dermamnist" else "CC BY 4.0",
        (Part((f"medmnist/{file}", file)),),
        (Download((url,), f"medmnist/{file}", md5),),
    )


_CONTENT = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MEDMNIST = {name: MedMNIST(**row) for name, row in _CONTENT["medmnist"].items()}
SETS: dict[str, Listing] = {name: _listing(**row) for name, row in _CONTENT["sets"].items()}
SETS |= {
    medmnist_file(name, size): _medmnist_listing(name, size, md5)
    for name, row in MEDMNIST.items()
    for size, md5 in zip(SIZES, row.md5, strict=True)
}
