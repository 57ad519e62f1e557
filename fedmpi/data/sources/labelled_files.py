"""List files that have a class or a mask each, with their sites and parts, and read them into one data set."""

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
    """A file with the name of its class, or with its mask.

    Attributes:
        file: the image or volume.
        label: the name of its class; "" if it has a mask.
        mask: the file of its mask.
        at: the row that names the file ("a.csv, line 7"); "" if no table names it.
        site: the site that owns it; "" if there is only one.
        part: train, val or test; "" if unknown.
        group: files of one group, such as a patient, stay together.
    """

    file: Path
    label: str = ""
    mask: Path = Path()
    location: str = ""
    site: str = ""
    part: str = ""
    group: str = ""

    def make_error(self, text: str) -> UserError:
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
    """Return the data set of all samples, one site after another in the order of their first samples.

    Args:
        samples: the files.
        read_site: a function of the samples of a site, the indices of its training part and those of its test part; it
            returns the data set of the site.
        source: the name of the data source, for messages.
        classes: the names of the classes in the order of their numbers; () for samples with masks.
        silo: in silo mode the site that owns the samples.
        test_fraction: the share of each class of each site that is the test part if no part is given; the draw is the
            same for every seed.
        split_column: the column of the CSV file that holds the part of each sample.
    """
    groups = [sample.group for sample in samples if sample.group]
    # Groups are checked across sites, because the same patient may occur at two sites.
    check_groups_not_split(groups, [sample.part != "test" for sample in samples], lambda k: samples[k].location)
    by_site: dict[str, list[LabelledFile]] = {}
    for sample in samples:
        by_site.setdefault(sample.site, []).append(sample)
    number, sites = {name: k for k, name in enumerate(classes)}, {}
    for site, own in by_site.items():
        labels = np.array([number.get(sample.label, 0) for sample in own], dtype=np.int64)
        train, test = _split_parts(own, labels, split_column, test_fraction)
        if not len(train):
            whose = f"{source}: no sample{f' of {site}' if site else ''}"
            raise UserError(f"{whose} is of the training part; correct data.path or the parts")
        own_groups = [own[k].group for k in train if own[k].group]
        sites[site] = replace(read_site(own, train, test), group=encode_groups(own_groups))
    (first, data), *others = sites.items()
    for site, part in others:
        if part.input_shape != data.input_shape:
            sizes = " and ".join(" x ".join(map(str, each.train_x.shape[2:])) for each in (data, part))
            raise UserError(f"{source}: {first} and {site} have images of {sizes}; give data.size")
    return data if silo is not None or "" in sites else concat_sites(list(sites.values()), list(sites))


def _split_parts(
    own: Sequence[LabelledFile], labels: np.ndarray, split_column: str | None, test_fraction: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training part and of the test part."""
    is_test = np.array([sample.part == "test" for sample in own], dtype=bool)
    if split_column or is_test.any():
        resolve_test_fraction(
            test_fraction, f"data.split_column: {split_column}" if split_column else "the folder test"
        )
        return np.flatnonzero(~is_test), np.flatnonzero(is_test)
    fraction, groups = resolve_test_fraction(test_fraction), [sample.group for sample in own if sample.group]
    return split_train_test(labels, fraction, groups) if own else (labels, labels)


# ---- CSV files ----
def read_csv_rows(path: Path, columns: Mapping[str, str], delimiter: str = ",") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield place ("a.csv, line 7") and cells of each row of a CSV file; spaces around a cell are removed.

    Args:
        path: the file.
        columns: key of the config -> name of the column. The cells have the same keys.
        delimiter: the separator of the cells.

    Raises:
        UserError: the file cannot be read, or a column or a value is missing; the message has the line.
    """
    table = read_table(path, delimiter)
    cells = {
        key: [str(cell).strip() for cell in decode_cells(table.column(name, key))] for key, name in columns.items()
    }
    for k in range(len(table)):
        values = {key: column[k] for key, column in cells.items()}
        gap = next((columns[key] for key, value in values.items() if not value), None)
        if gap is not None:
            raise UserError(f"{table.row_location(k)}: the column {gap!r} is empty; fill it, or leave the row out")
        yield table.row_location(k), values


def list_files_in_table(
    source: str, root: Path, path: str, folder: str, columns: Mapping[str, str | None], delimiter: str, silo: str | None
) -> list[LabelledFile]:
    """Return the samples that the CSV file root/path lists, sorted by site; in silo mode those of the silo only.

    columns: key of the config -> name of the column. The first one holds the files, relative to root/folder; the others
    are label_column or mask_column, site_column, split_column and group_column.
    """
    if silo is not None and not columns["site_column"]:
        raise UserError(f"{source}: data.site_column is missing; silos need it")
    at = find_file(root, (path,), source, "correct data.root or data.path")
    (file_key, _), *_ = columns.items()
    samples: dict[Path, LabelledFile] = {}
    for where, values in read_csv_rows(at, {key: name for key, name in columns.items() if name}, delimiter):
        part = values.get("split_column", "")
        if part and part.lower() not in PART_BY_WORD:
            raise UserError(f"{where}: {columns['split_column']} is {part!r}; allowed: {', '.join(PART_BY_WORD)}")
        # On Windows, paths may be written with backslashes.
        file, mask = (Path(values.get(key, "").replace("\\", "/")) for key in (file_key, "mask_column"))
        label, site, group = (values.get(key, "") for key in ("label_column", "site_column", "group_column"))
        home = root / folder
        sample = LabelledFile(home / file, label, home / mask, where, site, PART_BY_WORD.get(part.lower(), ""), group)
        if file in samples:
            raise sample.make_error(
                f"the picture {file} is that of {samples[file].location}, too; leave one of them out"
            )
        samples[file] = sample
    place = {site: k for k, site in enumerate(sort_naturally(sample.site for sample in samples.values()))}
    if silo is not None and silo not in place:
        raise UserError(f"{at}: no row is of the site {silo!r}; it has {', '.join(place)}")
    own = [sample for sample in samples.values() if silo in (None, sample.site)]
    return sorted(own, key=lambda sample: place[sample.site])


# ---- folders ----
def list_subfolders(folder: Path) -> list[str]:
    """Return the names of the subfolders in natural order, without hidden ones (.ipynb_checkpoints) and __MACOSX."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; correct its permissions") from error
    return sort_naturally(name for name in names if not name.startswith((".", "__MACOSX")))


def find_part_folders(home: Path) -> list[tuple[str, Path]]:
    """Return (part, folder) for the folders train, val and test in `home`; [("", home)] if there are none."""
    folders = [
        (PART_BY_WORD[name.lower()], home / name) for name in list_subfolders(home) if name.lower() in PART_BY_WORD
    ]
    return folders or [("", home)]


def find_site_folders(source: str, root: Path, path: str, sites: bool, silo: str | None) -> dict[str, Path]:
    """Return the folder of each site by name, in silo mode that of the silo only; {"": root/path} without `sites`."""
    home = root / path
    if not os.path.isdir(home):
        missing = f"there is no folder {home} (data.root = {root})"
        raise MissingDataError(f"{source}: {missing}; correct data.root or data.path")
    names = list_subfolders(home) if sites or silo is not None else []
    if silo is not None:
        if not os.path.isdir(home / silo):
            there = ", ".join(names) or "no folder"
            raise MissingDataError(f"{source}: there is no folder {home / silo} (data.silos); {home} has {there}")
        return {silo: home / silo}
    if not sites:
        return {"": home}
    if not names or any(name.lower() in PART_BY_WORD for name in names):
        problem = f"{home} holds {'parts' if names else 'no folder'}, and each folder is a site"
        raise UserError(f"{source}: {problem}; say data.sites: false, or correct data.path")
    return {name: home / name for name in names}


@dataclass(frozen=True)
class PairPatterns:
    """The patterns by which images and masks are found below the folder of a site.

    Attributes:
        image, mask: patterns with one *, which stands for the name that an image and its mask share.
        endings: the file name extensions that are accepted if a pattern has none of its own.
    """

    image: str
    mask: str
    endings: Sequence[str] = ()

    def __post_init__(self) -> None:
        for key, pattern in (("image_pattern", self.image), ("mask_pattern", self.mask)):
            if pattern.count("*") != 1 or pattern.startswith("/") or self.image == self.mask:
                needed = "a path below the site's folder with one *, which stands for the name that images and masks"
                raise UserError(f"data.{key}: {pattern!r}; {needed} have in common, is needed, another one for each")

    def find_pairs(self, home: Path, site: str) -> list[LabelledFile]:
        """Return the pairs of image and mask in the folder of a site, or in its folders train, val and test."""
        folders = find_part_folders(home)
        folders = folders if any(part == "train" for part, _ in folders) else [("", home)]
        samples = [pair for part, folder in folders for pair in self._match_pairs(folder, part, site)]
        if not samples:
            patterns = f"{self.image} (data.image_pattern) and {self.mask} (data.mask_pattern)"
            raise UserError(f"{home} holds no file {patterns}; correct data.path or the patterns")
        return samples

    def _match_pairs(self, folder: Path, part: str, site: str) -> list[LabelledFile]:
        """Return the images of a folder with their masks, by name; raise UserError if an image or mask is missing."""
        masks = self._match_files(folder, self.mask)
        images = self._match_files(folder, self.image, but=masks.values())
        for name in sort_naturally({*images} ^ {*masks}):
            has = f"{images[name]} has no mask" if name in images else f"{masks[name]} has no image"
            wanted = folder / (self.mask if name in images else self.image).replace("*", name)
            raise UserError(f"{has} {wanted}; add it, or remove the other one")
        return [LabelledFile(images[name], mask=masks[name], part=part, site=site) for name in sort_naturally(images)]

    def _match_files(self, folder: Path, pattern: str, but: Collection[Path] = ()) -> dict[str, Path]:
        """Return name -> file for the files that match a pattern and are not in `but`."""
        any_ending = bool(self.endings) and Path(pattern.replace("*", "x")).suffix.lower() not in self.endings
        first, last = pattern.split("*")
        files: dict[str, Path] = {}
        for file in sorted(folder.glob(f"{pattern}.*" if any_ending else pattern)):
            is_other = any_ending and file.suffix.lower() not in self.endings
            if file.name.startswith(".") or not file.is_file() or file in but or is_other:
                continue
            path = file.relative_to(folder).as_posix()
            path = path[: -len(file.suffix)] if any_ending else path
            name = path[len(first) : len(path) - len(last)]
            if name in files:
                raise UserError(f"{files[name]} and {file} have the same name; leave one of them out")
            files[name] = file
        return files


def find_image_mask_pairs(
    source: str, root: Path, path: str, patterns: PairPatterns, sites: bool, silo: str | None
) -> list[LabelledFile]:
    """Return the pairs of image and mask in the folder root/path, or in the folders of its sites."""
    homes = find_site_folders(source, root, path, sites, silo)
    return [sample for site, home in homes.items() for sample in patterns.find_pairs(home, site)]


# ---- masks ----
@dataclass(frozen=True)
class MaskValues:
    """The conversion from the values in masks to class numbers.

    Attributes:
        source: the name of the data source, for messages.
        classes: the number of classes if the masks hold class numbers.
        values: otherwise the value of class 0, 1, ... in the masks. Either `classes` or `values` is needed.
    """

    source: str
    classes: int | None
    values: Sequence[int] | None

    def __post_init__(self) -> None:
        values, ignore = self.values, get_ignored_target()
        if values is None:
            return
        if len(set(values)) < len(values) or self.classes not in (None, len(values)):
            problem = f"data.mask_values is {list(values)} and data.classes {self.classes}"
            raise UserError(f"{self.source}: {problem}; one number a class is needed, each once")
        if isinstance(ignore, int) and (ignore in values or 0 <= ignore < len(values)):
            problem = f"task.ignore is {ignore}, which is a class of data.mask_values, or its number"
            raise UserError(f"{self.source}: {problem}; ignore another number")

    @property
    def num_classes(self) -> int:
        return len(self.allowed_values)

    @property
    def allowed_values(self) -> Sequence[int]:
        return range(self.classes or 0) if self.values is None else self.values

    def to_classes(self, mask: np.ndarray, pair: LabelledFile) -> Tensor:
        """Convert the values of a mask to int64 class numbers; keep `task.ignore`, raise UserError for others."""
        numbers = mask.astype(np.int64)
        if not np.array_equal(numbers, mask):
            raise pair.make_error(f"{pair.mask} holds numbers that are not whole; a mask holds the number of a class")
        unknown = {*np.unique(numbers).tolist()} - {*self.allowed_values, get_ignored_target()}
        if unknown:
            holds = f"{pair.mask} holds {shorten(', '.join(map(str, sorted(unknown))))}"
            only = f"{shorten(', '.join(map(str, self.allowed_values)) or 'none')} are allowed"
            keys = "data.classes says how many classes there are, or data.mask_values the number of each in the masks"
            raise pair.make_error(
                f"{self.source}: {holds}; {only}: {keys}; task.ignore names a number that does not count"
            )
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
        raise pair.make_error(f"{pair.file} and its mask {pair.mask} are of different sizes, {sizes}")
