"""HAM10000: skin lesions from four sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.by_hand import HAM_FOLDERS, HAM_TABLES
from fedmpi.data.fetching.getting import advice
from fedmpi.data.sources.common import by_site, find
from fedmpi.data.sources.pictures.decode import DecodeOptions
from fedmpi.data.sources.pictures.held_out import Files, held_out
from fedmpi.data.sources.pictures.table_of_files import Row, rows

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
SOURCES = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
COLUMNS = ("lesion_id", "image_id", "dx", "dataset")


def ham10000(
    root: Path,
    *,
    site: str | None = None,
    size: Annotated[int, Field(ge=1, le=4096)] = 224,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
    lesions: Literal["apart", "mixed"] = "apart",
) -> Dataset:
    """HAM10000 (Tschandl 2018): 10,015 pictures of skin lesions, 7 classes, of four sources, which are the sites.

    HAM10000_metadata.csv, with its column `dataset`, and the .jpg files anywhere below root/HAM10000. Sites:
    vidir_molemax, vidir_modern, rosendahl, vienna_dias. test_fraction of each class of each site is its test part, the
    same for every seed; lesions: apart: all pictures of a lesion are on one side; mixed: pictures are drawn whatever
    they show. size: each picture is scaled and cut to size x size.
    """
    remedy = advice("ham10000", root)
    path = find(root, [f"{at}/{file}" for at in HAM_FOLDERS for file in HAM_TABLES], "ham10000", remedy)
    table = rows(path, COLUMNS, "\t" if path.suffix == ".tab" else ",")
    for row in table:
        for column, allowed in (("dx", CLASSES), ("dataset", SOURCES)):
            if row.values[column] not in allowed:
                raise UserError(f"{row.at}: {column} is {row.values[column]!r}; allowed: {', '.join(allowed)}")
    files = {file.stem: file for file in sorted(path.parent.rglob("*.jpg")) if not file.name.startswith(".")}
    decoding = DecodeOptions(size, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's

    def one(name: str) -> Dataset:
        mine = [row for row in table if row.values["dataset"] == name]
        if not mine:
            raise UserError(f"{path} has no row of the source {name}")
        groups = [row.values["lesion_id"] for row in mine] if lesions == "apart" else []
        return held_out(_files(mine, files, path), test_fraction, CLASSES, decoding, groups)

    return by_site("ham10000", SOURCES, site, one)


def _files(table: list[Row], files: dict[str, Path], path: Path) -> Files:
    for row in table:
        if row.values["image_id"] not in files:
            raise UserError(
                f"{row.at}: there is no picture {row.values['image_id']}.jpg below {path.parent}; unpack both "
                "archives of pictures there"
            )
    labels = [CLASSES.index(row.values["dx"]) for row in table]
    return Files([files[row.values["image_id"]] for row in table], labels, [row.at for row in table])
