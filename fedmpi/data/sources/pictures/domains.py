"""PACS and Office-Home: the same classes in four styles, each style a site."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import show
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.by_hand import HOME_FOLDERS, PACS, PACS_FOLDERS
from fedmpi.data.fetching.getting import advice
from fedmpi.data.sources.common import by_site, find
from fedmpi.data.sources.pictures.decode import DecodeOptions
from fedmpi.data.sources.pictures.folders import files_in
from fedmpi.data.sources.pictures.held_out import Files, held_out, parted

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")  # 1..7 in the authors' lists
DAMAGED = "sketch/dog/n02103406_4068-1.png"  # in the authors' lists, and no picture
HOME = {  # site: how copies of the set call its folder
    "art": ("Art", "art"),
    "clipart": ("Clipart", "clipart"),
    "product": ("Product", "product"),
    "real_world": ("Real World", "Real_World", "RealWorld", "real_world"),
}
_CLASSES = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch
Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet Kettle
Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes
Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table Telephone
ToothBrush Toys Trash_Can Webcam
"""
HOME_CLASSES = _CLASSES.split()

Size = Annotated[int, Field(ge=1, le=4096)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def pacs(
    root: Path,
    *,
    site: str | None = None,
    size: Size = 224,
    split: Literal["draw", "files"] = "draw",
    test_fraction: Fraction = 0.2,
) -> Dataset:
    """PACS (Li 2017): 9,991 colour pictures, 7 classes; art_painting, cartoon, photo and sketch are the sites.

    Folders SITE/CLASS in root/PACS, root/PACS/kfold, root/pacs/images or root/kfold. split: draw: test_fraction of each
    class of each site is its test part, the same for every seed; files: the authors' SITE_train_kfold.txt and
    SITE_crossval_kfold.txt (SITE_test_kfold.txt holds both). size: each picture is scaled and cut to size x size.
    """
    decoding = DecodeOptions(size, 3, MEAN, STD)
    folders = {name: (name,) for name in PACS}

    def one(name: str) -> Dataset:
        folder = _folder(root, "pacs", PACS_FOLDERS, folders, name)
        if split == "files":
            train, test = (_listed(folder, f"{name}_{part}_kfold.txt") for part in ("train", "crossval"))
            return parted(train, test, PACS_CLASSES, decoding)
        return held_out(files_in(folder, PACS_CLASSES, allowed="PACS's"), test_fraction, PACS_CLASSES, decoding)

    return by_site("pacs", list(PACS), site, one)


def office_home(root: Path, *, site: str | None = None, size: Size = 224, test_fraction: Fraction = 0.2) -> Dataset:
    """Office-Home (Venkateswara 2017): 15,588 colour pictures, 65 classes; four styles are the sites.

    Sites: art, clipart, product, real_world: folders Art, Clipart, Product and Real World in
    root/OfficeHomeDataset_10072016, root/office_home or root/OfficeHome, with a folder for each class. test_fraction of
    each class of each site is its test part, the same for every seed. size: each picture is scaled and cut to size x
    size.
    """
    decoding = DecodeOptions(size, 3, MEAN, STD)

    def one(name: str) -> Dataset:
        folder = _folder(root, "office_home", HOME_FOLDERS, HOME, name)
        return held_out(files_in(folder, HOME_CLASSES, allowed="Office-Home's"), test_fraction, HOME_CLASSES, decoding)

    return by_site("office_home", list(HOME), site, one)


def _folder(root: Path, what: str, homes: Sequence[str], folders: Mapping[str, Sequence[str]], name: str) -> Path:
    """The folder of a site."""
    for home in homes:
        for folder in folders[name]:
            if os.path.isdir(root / home / folder):
                return root / home / folder
    raise MissingDataError(
        f"{what}: there is no folder {folders[name][0]} in {' or '.join(str(root / home) for home in homes)} "
        f"(data.root = {root}); {advice(what, root)}"
    )


def _listed(folder: Path, name: str) -> Files:
    """The pictures of one of the authors' lists: `sketch/dog/5281.png 1`, relative to the folder of the sites."""
    home = folder.parent
    places = (home, home.parent, home.parent / "splits", home / "splits", home.parent.parent / "splits")
    remedy = "put the authors' lists there, or take data.split: draw"
    path = find(home, [os.path.relpath(place / name, home) for place in places], "pacs", remedy)
    paths, labels, rows = [], [], []
    for k, line in enumerate(path.read_text(encoding="ascii", errors="replace").splitlines(), 1):
        file, _, label = line.strip().rpartition(" ")
        if not line.strip() or file == DAMAGED:
            continue
        if not label.isdigit() or not 1 <= int(label) <= len(PACS_CLASSES) or not file.startswith(f"{folder.name}/"):
            raise UserError(
                f"{path}, line {k}: a picture of {folder.name} and its class 1..7 are needed, found {show(line)}"
            )
        paths.append(home / file)
        labels.append(int(label) - 1)
        rows.append(f"{path}, line {k}")
    if not paths:
        raise UserError(f"{path} names no picture")
    return Files(paths, labels, rows)
