"""Pictures named in a CSV file, with a class each and, if wanted, a site and a part."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, natural_order, near_duplicates
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import (
    PARTS,
    check_groups,
    checked_fraction,
    find,
    joined,
    reads_columns,
    tell_of_travellers,
)
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import Axes, DecodeOptions, Pages, PixelRange, Size
from fedmpi.data.sources.pictures.held_out import Files, check_site, held_out, parted
from fedmpi.data.sources.pictures.table_of_files import Row, rows
from fedmpi.data.sources.tables.files import GAPS
from fedmpi.data.sources.tables.index import FEW

Name = Annotated[str, Field(min_length=1)]


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
    background: str = "white",
    axes: Axes | None = None,
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None,
    val: Literal["join", "leave"] = "join",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
    small_sites: Literal["refuse", "keep"] = "refuse",
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
    with several pages or frames; refuse; first; or channels, all of them, one page after the other. background: the
    colour over which transparent pixels are blended (white, black, #204060). axes: HWC or CHW, of .npy files whose
    shape allows both.
    small_sites: with one training picture, or one class; refused or kept.
    """
    decoding = DecodeOptions(size, channels, mean, std, pixel_range, pages, background, axes)
    if site is not None and (site_column is None or class_names is None):
        key = "site_column" if site_column is None else "class_names"
        raise UserError(f"csv_images: data.{key} is missing; silos need it")
    share = checked_fraction(test_fraction, f"data.split_column: {split_column}" if split_column else "")
    at = find(root, (path,), "csv_images", "correct data.root or data.path")
    options = {"picture_column": picture_column, "label_column": label_column}
    options |= {"site_column": site_column} if site_column else {}
    options |= {"split_column": split_column} if split_column else {}
    options |= {"group_column": group_column} if group_column else {}
    columns = {"picture_column": picture_column, "label_column": label_column, "delimiter": delimiter, "folder": folder}
    table = rows(at, list(options.values()), delimiter, list(options))
    _check_gaps(table, label_column, class_names or ())
    names = list(class_names or _classes(table, label_column, at))

    def files(mine: Sequence[Row]) -> Files:
        labels = [names.index(row.values[label_column]) for row in mine]
        return Files([root / folder / _file(row, picture_column) for row in mine], labels, [row.at for row in mine])

    def warn_of_depths(mine: Sequence[Row]) -> None:
        its = files(mine)
        reading.warn_of_depths(its.paths, decoding, its.rows)

    def groups(mine: Sequence[Row]) -> list[str]:
        return [row.values[group_column] for row in mine] if group_column else []

    def one(mine: Sequence[Row], whose: str) -> Dataset:
        if split_column is None:
            return held_out(files(mine), share, names, decoding, groups(mine))
        part = [PARTS[row.values[split_column].lower()] for row in mine]
        train = [row for want in ("train", "val")[: 2 if val == "join" else 1] for row in _of(mine, part, want)]
        if not train:
            none = f"none of {count(len(mine), 'row')}{whose}, the first in line {mine[0].at.rpartition(' ')[2]},"
            raise UserError(f"{at}: {none} is of the training part ({split_column})")
        return parted(files(train), files(_of(mine, part, "test")), names, decoding, groups(train))

    def check_parts(mine: Sequence[Row]) -> None:
        test = [bool(split_column) and PARTS[row.values[split_column or ""].lower()] == "test" for row in mine]
        check_groups(groups(mine), [not each for each in test], lambda k: mine[k].at, f"{group_column}")

    if site_column is None:
        _check(table, picture_column, label_column, names, split_column)
        check_parts(table)
        warn_of_depths(table)
        return reads_columns(one(table, ""), **columns)
    sites = natural_order([row.values[site_column] for row in table])
    twice = near_duplicates(dict.fromkeys(row.values[site_column] for row in table))
    if twice:
        first, last = (next(row.at for row in table if row.values[site_column] == name) for name in twice)
        said = f"data: {twice[0]!r} ({first}) and {twice[1]!r} ({last}) are two sites; are they one?"
        warnings.warn(said, stacklevel=2)
    if site is not None and site not in sites:
        raise UserError(f"{at}: no row is of the site {site!r} ({site_column}); it has {', '.join(sites)}")
    chosen = sites if site is None else [site]
    rows_of = [row for row in table if row.values[site_column] in chosen]
    _check(rows_of, picture_column, label_column, names, split_column)
    check_parts(rows_of)  # of all sites at once: a patient of two of them is one patient
    if split_column is None:
        tell_of_travellers(groups(rows_of), [row.values[site_column] for row in rows_of])
    warn_of_depths(rows_of)
    found = []
    with reading.warned_of_once():
        for name in chosen:
            mine = [row for row in table if row.values[site_column] == name]
            whose = f" of the site {name!r} ({site_column})"
            found.append(check_site(one(mine, whose), name, mine[0].at, names, small_sites))
    return reads_columns(found[0] if site is not None else joined(found, sites), **columns)


def _classes(table: Sequence[Row], column: str, at: Path) -> list[str]:
    """Those that the column holds; UserError for one alone, and for two that a slip tells apart."""
    names = natural_order([row.values[column] for row in table])
    if len(names) == 1:
        what = f"the column {column!r} holds one class alone, {names[0]!r}"
        raise UserError(f"{at}: {what}; two are needed, or those that there are in data.class_names")
    twice = near_duplicates(dict.fromkeys(row.values[column] for row in table))
    if twice:
        first, last = (next(row.at for row in table if row.values[column] == name) for name in twice)
        said = f"{last}: the class is {twice[1]!r}, and in {first} {twice[0]!r}"
        raise UserError(f"{said}; are they one? mend it, or name the classes in data.class_names")
    if len(table) >= FEW and len(names) > 0.5 * len(table):
        said = f"data.label_column: the column {column!r} has {len(names)} classes in {len(table)} rows"
        warnings.warn(f"{at}: {said}; it seems to number or to name the pictures, not their classes", stacklevel=3)
    return names


def _check_gaps(table: Sequence[Row], column: str, classes: Sequence[str]) -> None:
    """Raise UserError for the first label that is a word for a gap (NA, nan) and no class by its name."""
    for row in table:
        word = row.values[column]
        if word.casefold() in GAPS and word not in classes:
            said = (
                f"the column {column!r} holds {word!r}, which says that nothing is known; fill it, or leave the row out"
            )
            raise UserError(f"{row.at}: {said}; if it is a class, name all of them in data.class_names")


def _file(row: Row, column: str) -> Path:
    """As the row has it; what Windows writes between folders is no part of a name elsewhere."""
    return Path(row.values[column].replace("\\", "/"))


def _of(table: Sequence[Row], part: Sequence[str], want: str) -> list[Row]:
    return [row for row, its in zip(table, part, strict=True) if its == want]


def _check(
    table: Sequence[Row], picture_column: str, label_column: str, names: Sequence[str], split_column: str | None
) -> None:
    """Raises for the first row whose class or part is none, or whose picture another row has: one of the two might be
    trained on and the other tested on."""
    twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if twice is not None:
        raise UserError(f"csv_images: data.class_names holds {twice!r} twice")
    seen: dict[str, str] = {}
    for row in table:
        picture = str(_file(row, picture_column))
        if picture in seen:
            raise UserError(f"{row.at}: the picture {picture} is that of {seen[picture]}, too; leave one of them out")
        seen[picture] = row.at
        label = row.values[label_column]
        if label not in names:
            allowed = f"is not one of data.class_names: {', '.join(names)}"
            raise UserError(f"{row.at}: the class {label!r} ({label_column}) {allowed}")
        if split_column and row.values[split_column].lower() not in PARTS:
            word = row.values[split_column]
            raise UserError(f"{row.at}: {split_column} is {word!r}; allowed: {', '.join(PARTS)}")
