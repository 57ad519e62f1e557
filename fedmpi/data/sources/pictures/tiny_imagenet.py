"""Tiny-ImageNet as it comes: training pictures by class, validation pictures with a table of their classes."""

from __future__ import annotations

from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.text import show
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.common import find
from fedmpi.data.sources.pictures.decode import DecodeOptions
from fedmpi.data.sources.pictures.folders import files_in
from fedmpi.data.sources.pictures.held_out import Files, parted

DECODING = DecodeOptions(64, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's


def tiny_imagenet(root: Path, *, download: bool = False) -> Dataset:
    """Tiny-ImageNet (Le 2015): 100,000 + 10,000 colour 64x64 images, 200 classes, in root/tiny-imagenet-200.

    The test part is its validation part, as in the papers: the labels of `test` were never published. Classes are
    numbered in the order of their WordNet names.
    """
    ready("tiny_imagenet", root, download)
    folder = root / "tiny-imagenet-200"
    remedy = advice("tiny_imagenet", root)
    names = find(root, ("tiny-imagenet-200/wnids.txt",), "tiny_imagenet", remedy).read_text(encoding="ascii").split()
    names.sort()
    notes = find(root, ("tiny-imagenet-200/val/val_annotations.txt",), "tiny_imagenet", remedy)
    train = files_in(folder / "train", names, "images", "wnids.txt")
    return parted(train, _annotated(notes, names, remedy), names, DECODING)


def _annotated(notes: Path, names: list[str], remedy: str) -> Files:
    """val_annotations.txt: file, class and box of each picture, between tabs."""
    number = {name: k for k, name in enumerate(names)}
    paths, labels, rows = [], [], []
    for k, line in enumerate(notes.read_text(encoding="ascii", errors="replace").splitlines(), 1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in number:
            raise UserError(
                f"{notes}, line {k}: a file and a class of wnids.txt are needed, found {show(line)}; {remedy}"
            )
        paths.append(notes.parent / "images" / fields[0])
        labels.append(number[fields[1]])
        rows.append(f"{notes}, line {k}")
    return Files(paths, labels, rows)
