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
from fedmpi.data.leaks import FEW
from fedmpi.data.sources.common import (
    PARTS,
    check_groups,
    checked_fraction,
    find,
    joined,
    warn_of_divided_groups,
    with_columns,
)
from fedmpi.data.sources.pictures import reading
from fedmpi.data.sources.pictures.decode import Axes, DecodeOptions, Pages, PixelRange, Size
from fedmpi.data.sources.pictures.image_dataset import (
    Files,
    Row,
    check_site,
    dataset_of_parts,
    dataset_with_test_part,
    read_rows,
)
from fedmpi.data.sources.tables.files import GAPS

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
    named = {"picture_column": picture_column, "label_column": label_column, "site_column": site_column}
    named |= {"split_column": split_column, "group_column": group_column}
    options = {key: column for key, column in named.items() if column}
    columns = {"picture_column": picture_column, "label_column": label_column, "delimiter": delimiter, "folder": folder}
    table = read_rows(at, list(options.values()), delimiter, list(options))
    _check_gaps(table, label_column, class_names or ())
    names = list(class_names or _classes(table, label_column, at))
    sites = natural_order([row.values[site_column] for row in table]) if site_column else [""]
    if site_column:
        _warn_of_near_duplicates(table, site_column)
    if site is not None and site not in sites:
        raise UserError(f"{at}: no row is of the site {site!r} ({site_column}); it has {', '.join(sites)}")
    chosen = sites if site is None else [site]
    whose = [row.values[site_column] if site_column else "" for row in table]
    opened = [(row, name) for row, name in zip(table, whose, strict=True) if name in chosen]
    every = [row for row, _ in opened]

    def files(mine: Sequence[Row]) -> Files:
        labels = [names.index(row.values[label_column]) for row in mine]
        return Files([root / folder / _file(row, picture_column) for row in mine], labels, [row.at for row in mine])

    def groups(mine: Sequence[Row]) -> list[str]:
        return [row.values[group_column] for row in mine] if group_column else []

    def parts(mine: Sequence[Row]) -> list[str]:
        return [PARTS[row.values[split_column].lower()] for row in mine] if split_column else []

    def read_site(mine: Sequence[Row], name: str) -> Dataset:
        if split_column is None:
            return dataset_with_test_part(files(mine), share, names, decoding, groups(mine))
        by_part: dict[str, list[Row]] = {"train": [], "val": [], "test": []}
        for row, part in zip(mine, parts(mine), strict=True):
            by_part[part].append(row)
        train = by_part["train"] + (by_part["val"] if val == "join" else [])
        if not train:
            said = f" of the site {name!r} ({site_column})" if site_column else ""
            none = f"none of {count(len(mine), 'row')}{said}, the first in line {mine[0].at.rpartition(' ')[2]},"
            raise UserError(f"{at}: {none} is of the training part ({split_column})")
        return dataset_of_parts(files(train), files(by_part["test"]), names, decoding, groups(train))

    _check(every, picture_column, label_column, names, split_column)
    # Groups are checked in the rows of all sites at once, for a patient of two of them is one patient.
    check_groups(groups(every), [part != "test" for part in parts(every)], lambda k: every[k].at, f"{group_column}")
    if site_column and split_column is None:
        warn_of_divided_groups(groups(every), [name for _, name in opened])
    its = files(every)
    reading.warn_of_depths(its.paths, decoding, its.rows)
    found = []
    with reading.warned_of_once():
        for name in chosen:
            mine = [row for row, of in opened if of == name]
            data = read_site(mine, name)
            found.append(check_site(data, name, mine[0].at, names, small_sites) if site_column else data)
    data = joined(found, sites) if site_column and site is None else found[0]
    return with_columns(data, **columns)


def _warn_of_near_duplicates(table: Sequence[Row], site_column: str) -> None:
    """Warn of two sites whose names differ by a slip alone."""
    twice = near_duplicates(dict.fromkeys(row.values[site_column] for row in table))
    if twice:
        first, last = (next(row.at for row in table if row.values[site_column] == name) for name in twice)
        said = f"data: {twice[0]!r} ({first}) and {twice[1]!r} ({last}) are two sites; are they one?"
        warnings.warn(said, stacklevel=3)


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
