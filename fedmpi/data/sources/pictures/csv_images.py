"""Pictures named in a CSV file, with a class each and, if wanted, a site and a part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import (
    PARTS,
    check_groups,
    checked_fraction,
    find,
    joined,
    warn_of_divided_groups,
    with_columns,
)
from fedmpi.data.sources.pictures.decode import DecodeOptions, Pages, PixelRange, Size
from fedmpi.data.sources.pictures.image_dataset import (
    Files,
    check_class_names,
    dataset_of_files,
    read_rows,
)
from fedmpi.data.sources.tables.files import GAPS

Name = Annotated[str, Field(min_length=1)]


class Picture(NamedTuple):
    """A row of the CSV file. part: train, val or test, "" where nothing says it; site, group: "" without a column."""

    at: str
    file: Path
    label: str
    site: str
    part: str
    group: str


def csv_images(
    root: Path,
    *,
    path: Name,
    site: str | None = None,
    folder: Name = ".",
    picture_column: Name = "path",
    label_column: Name = "label",
    site_column: Name | None = None,
    split_column: Name | None = None,
    group_column: Name | None = None,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    mean: tuple[float, ...] = (0.5,),
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.5,),
    pixel_range: PixelRange | None = None,
    pages: Pages = "refuse",
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None,
    val: Literal["join", "leave"] = "join",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
) -> Dataset:
    """Pictures that the CSV file root/path names, a row each, with their class and, if wanted, their site and part.

    picture_column: files, relative to root/folder; label_column: classes; site_column: sites, for `scheme: site` and
    for silos, which open the pictures of their own rows alone; split_column: train, val or test of each row. Without
    it, test_fraction (0.2) of each class of each site is its test part, the same for every seed. val: its pictures join
    the training part, or are left out. group_column: whose pictures stay together, such as patients': in the test part,
    the training part or what data.validation puts aside.
    class_names: the classes in order, else those in the column, in natural order (1, 2, 10); silos need it, for a
    site's table may lack a class. delimiter: between fields.
    size: each picture is scaled and cut at its centre to size x size; without it all must be of one size. channels: 1
    grey, 3 colour. mean, std: of pixels in 0..1, one number or one a channel. pixel_range: [low, high], which become 0
    and 1; or file, the least and the largest value of each file; images of more than 8 bits need it. pages: of files
    with several pages or frames; refused, or the first is read.
    """
    decoding = DecodeOptions(size, channels, mean, std, pixel_range, pages)
    check_class_names("csv_images", class_names, site)
    if site is not None and site_column is None:
        raise UserError("csv_images: data.site_column is missing; silos need it")
    fraction = checked_fraction(test_fraction, f"data.split_column: {split_column}" if split_column else "")
    at = find(root, (path,), "csv_images", "correct data.root or data.path")
    columns = {"picture_column": picture_column, "label_column": label_column, "site_column": site_column}
    columns |= {"split_column": split_column, "group_column": group_column}
    rows = _rows(at, {key: column for key, column in columns.items() if column}, delimiter)
    names = list(class_names or natural_order(row.label for row in rows))
    sites = natural_order(row.site for row in rows)
    if site is not None and site not in sites:
        raise UserError(f"{at}: no row is of the site {site!r} ({site_column}); it has {', '.join(sites)}")
    rows = [row for row in rows if site in (None, row.site)]
    _check(rows, names, label_column, explicit=class_names is not None)
    groups = [row.group for row in rows if group_column]
    # Groups are checked in the rows of all sites at once, for a patient of two of them is one patient.
    check_groups(groups, [row.part != "test" for row in rows], lambda k: rows[k].at, f"{group_column}")
    if site_column and split_column is None:
        warn_of_divided_groups(groups, [row.site for row in rows])

    def files(some: Sequence[Picture]) -> Files:
        labels = [names.index(row.label) for row in some]
        return Files([root / folder / row.file for row in some], labels, [row.at for row in some])

    def read_site(name: str) -> Dataset:
        mine = [row for row in rows if row.site == name and (row.part != "val" or val == "join")]
        train = [row for row in mine if row.part != "test"]
        if not train:
            whose = f" of the site {name!r} ({site_column})" if site_column else ""
            raise UserError(f"{at}: no row{whose} is of the training part ({split_column})")
        test = files([row for row in mine if row.part == "test"]) if split_column else fraction
        return dataset_of_files(files(train), test, names, decoding, [row.group for row in train if group_column])

    read = [read_site(name) for name in (sites if site is None else [site])]
    data = joined(read, sites) if site_column and site is None else read[0]
    return with_columns(
        data, picture_column=picture_column, label_column=label_column, delimiter=delimiter, folder=folder
    )


def _rows(at: Path, columns: dict[str, str], delimiter: str) -> list[Picture]:
    """columns: the keys of the config that name one -> its name."""
    pictures = []
    for row in read_rows(at, list(columns.values()), delimiter, list(columns)):
        cells = {key: row.values[column] for key, column in columns.items()}
        part = cells.get("split_column", "")
        if part and part.lower() not in PARTS:
            raise UserError(f"{row.at}: {columns['split_column']} is {part!r}; allowed: {', '.join(PARTS)}")
        file = Path(cells["picture_column"].replace("\\", "/"))  # as Windows writes names
        site, group = cells.get("site_column", ""), cells.get("group_column", "")
        pictures.append(Picture(row.at, file, cells["label_column"], site, PARTS.get(part.lower(), ""), group))
    return pictures


def _check(rows: Sequence[Picture], names: Sequence[str], label_column: str, explicit: bool) -> None:
    """Raise UserError for the first row whose class is none, or whose picture another row has: one of the two might be
    trained on and the other tested on. explicit: whether the config names the classes."""
    if len(names) == 1:
        what = f"the column {label_column!r} holds one class alone, {names[0]!r}"
        raise UserError(f"{rows[0].at}: {what}; two are needed, or those that there are in data.class_names")
    first: dict[Path, str] = {}
    for row in rows:
        other = first.setdefault(row.file, row.at)
        if other != row.at:
            raise UserError(f"{row.at}: the picture {row.file} is that of {other}, too; leave one of them out")
        if row.label not in names:
            allowed = f"is not one of data.class_names: {', '.join(names)}"
            raise UserError(f"{row.at}: the class {row.label!r} ({label_column}) {allowed}")
        if row.label.casefold() in GAPS and not explicit:
            reason = f"the column {label_column!r} holds {row.label!r}, a word for a gap; fill it, or leave the row out"
            raise UserError(f"{row.at}: {reason}; if it is a class, name all of them in data.class_names")
