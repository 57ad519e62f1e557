"""List files with their classes or masks, sites and parts, and read them into one data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import shorten, sort_naturally
from fedmpi.data.csv_file import decode_cells
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.source_utils import (
    PART_BY_WORD,
    check_groups_not_split,
    concat_sites,
    encode_groups,
    find_file,
    get_ignored_target,
    resolve_test_fraction,
    split_train_test,
)
from fedmpi.data.sources.tables.read_table import read_table


@dataclass(frozen=True)
class LabelledFile:
    """An image or volume with its class or its mask.

    Attributes:
        file: the file of the image or volume.
        label: the name of its class; "" if it has a mask.
        mask: the file of its mask; Path() if it has a class.
        location: the row that lists the file ("a.csv, line 7"); "" if no table lists it.
        site: the name of its site; "" if there are no sites.
        part: train, val or test; "" if unknown.
        group: its group, such as a patient; files of one group are never split between parts.
    """

    file: Path
    label: str = ""
    mask: Path = Path()
    location: str = ""
    site: str = ""
    part: str = ""
    group: str = ""

    def make_error(self, text: str) -> UserError:
        """Return a UserError with this text, preceded by the location of the row that lists the file."""
        return UserError(f"{self.location}: {text}" if self.location else text)


ReadSite = Callable[[Sequence[LabelledFile], np.ndarray, np.ndarray], Dataset]


def dataset_from_files(
    samples: Sequence[LabelledFile],
    read_site: ReadSite,
    source: str,
    *,
    classes: Sequence[str] = (),
    silo: str | None = None,
    test_fraction: float | None = None,
    split_column: str | None = None,
) -> Dataset:
    """Read files into a data set, site by site, in the order in which the sites first occur.

    Args:
        read_site: a function that returns the data set of a site, given its files and the indices of its training part
            and test part.
        source: the name of the data source, for messages.
        classes: the names of the classes, ordered by class number; () for files with masks.
        silo: the silo that owns the files; None if there are no silos.
        test_fraction: the fraction of each class at each site that is held out as the test part if the files are not
            assigned to parts, with the same files for every seed.
        split_column: the column of the CSV file that contains the part of each file.
    """
    groups = [sample.group for sample in samples if sample.group]
    # Groups are checked across sites, because the same patient may occur at two sites.
    check_groups_not_split(groups, [sample.part != "test" for sample in samples], lambda k: samples[k].location)
    samples_by_site: dict[str, list[LabelledFile]] = {}
    for sample in samples:
        samples_by_site.setdefault(sample.site, []).append(sample)
    number, sites = {name: k for k, name in enumerate(classes)}, {}
    for site, samples_of_site in samples_by_site.items():
        labels = np.array([number.get(sample.label, 0) for sample in samples_of_site], dtype=np.int64)
        train, test = _split_parts(samples_of_site, labels, split_column, test_fraction)
        if not len(train):
            whose = f"of {site} " if site else ""
            raise UserError(
                f"{source}: no sample {whose}is in the training set; correct data.path, or the split into train and "
                "test"
            )
        own_groups = [samples_of_site[k].group for k in train if samples_of_site[k].group]
        sites[site] = replace(read_site(samples_of_site, train, test), group=encode_groups(own_groups))
    (first, data), *others = sites.items()
    for site, part in others:
        if part.input_shape != data.input_shape:
            sizes = " and ".join(" x ".join(map(str, each.train_x.shape[2:])) for each in (data, part))
            raise UserError(f"{source}: the images of {first} and {site} have different sizes, {sizes}; set data.size")
    return data if silo is not None or "" in sites else concat_sites(list(sites.values()), list(sites))


def _split_parts(
    samples: Sequence[LabelledFile], labels: np.ndarray, split_column: str | None, test_fraction: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of a site's training and test part; draw them if files are not assigned to parts."""
    is_test = np.array([sample.part == "test" for sample in samples], dtype=bool)
    if split_column or is_test.any():
        resolve_test_fraction(
            test_fraction, f"data.split_column ({split_column!r})" if split_column else "the folder 'test'"
        )
        return np.flatnonzero(~is_test), np.flatnonzero(is_test)
    fraction, groups = resolve_test_fraction(test_fraction), [sample.group for sample in samples if sample.group]
    return split_train_test(labels, fraction, groups) if samples else (labels, labels)


# ---- CSV files ----
def read_csv_rows(path: Path, columns: Mapping[str, str], delimiter: str = ",") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the location ("a.csv, line 7") and the cells, stripped of spaces, of each row of a CSV file.

    Args:
        columns: a dict that maps options of the config to column names; the cells of a row are a dict with the same
            keys.
        delimiter: the character that separates the cells.

    Raises:
        UserError: the file cannot be read, or a column or a value is missing; the message names the line.
    """
    table = read_table(path, delimiter)
    cells = {
        key: [str(cell).strip() for cell in decode_cells(table.column(name, key))] for key, name in columns.items()
    }
    for k in range(len(table)):
        values = {key: column[k] for key, column in cells.items()}
        gap = next((columns[key] for key, value in values.items() if not value), None)
        if gap is not None:
            raise UserError(
                f"{table.row_location(k)}: the cell in column {gap!r} is empty; fill in a value, or remove the row"
            )
        yield table.row_location(k), values


def list_files_in_table(
    source: str, root: Path, path: str, folder: str, columns: Mapping[str, str | None], delimiter: str, silo: str | None
) -> list[LabelledFile]:
    """Return the files that a CSV file lists, sorted by site; in silo mode only those of the silo.

    Args:
        source: the name of the data source, for messages.
        root: the folder `data.root`.
        path: the CSV file, relative to root.
        folder: the folder of the listed files, relative to root.
        columns: a dict that maps options of the config to column names, or to None if there is no such column. The
            first key is the option for the column with the files; the others are label_column or mask_column,
            site_column, split_column and group_column.
        delimiter: the character that separates the cells.
        silo: the name of the silo; None if there are no silos.
    """
    if silo is not None and not columns["site_column"]:
        raise UserError(
            f"{source}: data.silos requires data.site_column; set it to the column with the site of each row"
        )
    table_file = find_file(root, (path,), source, "correct data.root or data.path")
    (file_key, _), *_ = columns.items()
    samples: dict[Path, LabelledFile] = {}
    for location, values in read_csv_rows(table_file, {key: name for key, name in columns.items() if name}, delimiter):
        part = values.get("split_column", "")
        if part and part.lower() not in PART_BY_WORD:
            raise UserError(
                f"{location}: column {columns['split_column']!r} contains {part!r}; allowed values: "
                f"{', '.join(PART_BY_WORD)}"
            )
        # On Windows, paths may be written with backslashes.
        file, mask = (Path(values.get(key, "").replace("\\", "/")) for key in (file_key, "mask_column"))
        label, site, group = (values.get(key, "") for key in ("label_column", "site_column", "group_column"))
        image_folder = root / folder
        sample = LabelledFile(
            image_folder / file, label, image_folder / mask, location, site, PART_BY_WORD.get(part.lower(), ""), group
        )
        if file in samples:
            raise sample.make_error(
                f"image {file} is already listed in {samples[file].location}; remove one of the two rows"
            )
        samples[file] = sample
    order = {site: k for k, site in enumerate(sort_naturally(sample.site for sample in samples.values()))}
    if silo is not None and silo not in order:
        raise UserError(f"{table_file}: site {silo!r} has no rows; sites in this file: {', '.join(order)}")
    selected = [sample for sample in samples.values() if silo in (None, sample.site)]
    return sorted(selected, key=lambda sample: order[sample.site])


# ---- folders ----
def list_subfolders(folder: Path) -> list[str]:
    """Return the names of the subfolders in natural order; hidden folders and __MACOSX are skipped."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; correct its permissions") from error
    return sort_naturally(name for name in names if not name.startswith((".", "__MACOSX")))


def find_part_folders(folder: Path) -> list[tuple[str, Path]]:
    """Return (part, subfolder) pairs for the subfolders train, val and test; [("", folder)] if there are none."""
    folders = [
        (PART_BY_WORD[name.lower()], folder / name) for name in list_subfolders(folder) if name.lower() in PART_BY_WORD
    ]
    return folders or [("", folder)]


def find_site_folders(source: str, root: Path, path: str, sites: bool, silo: str | None) -> dict[str, Path]:
    """Return a dict from the name of each site to its folder.

    Args:
        source: the name of the data source, for messages.
        root: the folder `data.root`.
        path: the folder of the data set, relative to root.
        sites: whether each subfolder is a site; otherwise the result is {"": root/path}.
        silo: the only site to return; None: return all sites.
    """
    folder = root / path
    if not os.path.isdir(folder):
        missing = f"folder {folder} not found (data.root = {root})"
        raise MissingDataError(f"{source}: {missing}; correct data.root or data.path")
    names = list_subfolders(folder) if sites or silo is not None else []
    if silo is not None:
        if not os.path.isdir(folder / silo):
            available = ", ".join(names) or "none"
            raise MissingDataError(
                f"{source}: folder {folder / silo} not found (data.silos); folders in {folder}: {available}"
            )
        return {silo: folder / silo}
    if not sites:
        return {"": folder}
    if not names or any(name.lower() in PART_BY_WORD for name in names):
        content = "folders such as train and test" if names else "no folders"
        problem = f"data.sites: true needs one folder per site, but {folder} contains {content}"
        raise UserError(f"{source}: {problem}; set data.sites: false, or correct data.path")
    return {name: folder / name for name in names}


@dataclass(frozen=True)
class PairPatterns:
    """File patterns for the images and masks in the folder of a site.

    Attributes:
        image, mask: the two patterns, each with one *, which stands for the name that an image and its mask share.
        endings: file name extensions. If a pattern ends with none of them, any of them may follow it. If `endings` is
            empty, patterns are used as they are.
    """

    image: str
    mask: str
    endings: Sequence[str] = ()

    def __post_init__(self) -> None:
        for key, pattern in (("image_pattern", self.image), ("mask_pattern", self.mask)):
            if pattern.count("*") != 1 or pattern.startswith("/") or self.image == self.mask:
                needed = (
                    "must be a path below the site's folder with one *, which stands for the name that an image and"
                )
                raise UserError(
                    f"data.{key}: {pattern!r} is not allowed; {needed} its mask share; the two patterns must differ"
                )

    def find_pairs(self, site_folder: Path, site: str) -> list[LabelledFile]:
        """Return the image-mask pairs in the folder of a site, or in its subfolders train, val and test."""
        folders = find_part_folders(site_folder)
        folders = folders if any(part == "train" for part, _ in folders) else [("", site_folder)]
        samples = [pair for part, folder in folders for pair in self._match_pairs(folder, part, site)]
        if not samples:
            patterns = f"{self.image} (data.image_pattern) and {self.mask} (data.mask_pattern)"
            raise UserError(f"no files in {site_folder} match {patterns}; correct data.path or the patterns")
        return samples

    def _match_pairs(self, folder: Path, part: str, site: str) -> list[LabelledFile]:
        """Match the images of a folder to their masks by name; raise UserError if an image or a mask is missing."""
        masks = self._match_files(folder, self.mask)
        images = self._match_files(folder, self.image, but=masks.values())
        for name in sort_naturally({*images} ^ {*masks}):
            has = f"{images[name]} has no mask" if name in images else f"{masks[name]} has no image"
            partner = folder / (self.mask if name in images else self.image).replace("*", name)
            raise UserError(f"{has} {partner}; add the missing file, or remove the other one")
        return [LabelledFile(images[name], mask=masks[name], part=part, site=site) for name in sort_naturally(images)]

    def _match_files(self, folder: Path, pattern: str, but: Collection[Path] = ()) -> dict[str, Path]:
        """Return the files that match a pattern, keyed by the name that * stands for; files in `but` are left out."""
        any_ending = bool(self.endings) and Path(pattern.replace("*", "x")).suffix.lower() not in self.endings
        prefix, suffix = pattern.split("*")
        files: dict[str, Path] = {}
        for file in sorted(folder.glob(f"{pattern}.*" if any_ending else pattern)):
            is_other = any_ending and file.suffix.lower() not in self.endings
            if file.name.startswith(".") or not file.is_file() or file in but or is_other:
                continue
            path = file.relative_to(folder).as_posix()
            path = path[: -len(file.suffix)] if any_ending else path
            name = path[len(prefix) : len(path) - len(suffix)]
            if name in files:
                raise UserError(f"{files[name]} and {file} have the same name; remove one of them")
            files[name] = file
        return files


def find_image_mask_pairs(
    source: str, root: Path, path: str, patterns: PairPatterns, sites: bool, silo: str | None
) -> list[LabelledFile]:
    """Return the image-mask pairs in root/path or, if `sites` or `silo` is set, in the folders of the sites."""
    folders = find_site_folders(source, root, path, sites, silo)
    return [sample for site, folder in folders.items() for sample in patterns.find_pairs(folder, site)]


# ---- masks ----
@dataclass(frozen=True)
class MaskValues:
    """The conversion from the values in masks to class numbers.

    Attributes:
        source: the name of the data source, for messages.
        classes: the number of classes if masks contain class numbers; None: use `values`.
        values: the values of class 0, 1, ... in the masks; None: use `classes`.
    """

    source: str
    classes: int | None
    values: Sequence[int] | None

    def __post_init__(self) -> None:
        values, ignore = self.values, get_ignored_target()
        if values is None:
            return
        if len(set(values)) < len(values) or self.classes not in (None, len(values)):
            problem = f"data.mask_values is {list(values)}, and data.classes is {self.classes or 'null'}"
            raise UserError(f"{self.source}: {problem}; set one distinct value per class")
        if isinstance(ignore, int) and (ignore in values or 0 <= ignore < len(values)):
            problem = f"task.ignore is {ignore}, which is the value or the number of a class (data.mask_values)"
            raise UserError(f"{self.source}: {problem}; set task.ignore to another number")

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.allowed_values)

    @property
    def allowed_values(self) -> Sequence[int]:
        """The values that masks may contain, besides `task.ignore`."""
        return range(self.classes or 0) if self.values is None else self.values

    def to_classes(self, mask: np.ndarray, pair: LabelledFile) -> Tensor:
        """Convert the values of a mask to int64 class numbers.

        `task.ignore` stays unchanged; any other value that is not a class raises UserError.
        """
        numbers = mask.astype(np.int64)
        if not np.array_equal(numbers, mask):
            raise pair.make_error(
                f"{pair.mask} contains numbers that are not integers; masks must contain class numbers"
            )
        unknown = {*np.unique(numbers).tolist()} - {*self.allowed_values, get_ignored_target()}
        if unknown:
            holds = f"{pair.mask} contains {shorten(', '.join(map(str, sorted(unknown))))}"
            only = f"allowed: {shorten(', '.join(map(str, self.allowed_values)) or 'none')}"
            keys = (
                "set data.classes (the number of classes) or data.mask_values (the value of each class), or task.ignore"
            )
            raise pair.make_error(f"{self.source}: {holds}; {only}; {keys} for a value that losses and metrics ignore")
        if self.values is None:
            return torch.from_numpy(numbers)
        out = numbers.copy()
        for number, value in enumerate(self.values):
            out[numbers == value] = number
        return torch.from_numpy(out)


def check_same_size(pair: LabelledFile, image: Sequence[int], mask: Sequence[int]) -> None:
    """Raise UserError unless an image and its mask have the same size."""
    if tuple(image) != tuple(mask):
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in (image, mask))
        raise pair.make_error(
            f"{pair.file} and its mask {pair.mask} have different sizes, {sizes}; correct one of them"
        )
