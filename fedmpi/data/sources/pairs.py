"""Files of images and of their masks: which belong together, at which site, in which part."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import natural_order, shorten
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import (
    PARTS,
    check_groups,
    checked_fraction,
    find,
    holdout,
    ignored_target,
    joined,
    number_groups,
    warn_of_divided_groups,
)
from fedmpi.data.sources.pictures.image_dataset import Row, class_folders, read_rows


@dataclass(frozen=True)
class Pair:
    """An image and its mask. at: the row that names them ("a.csv, line 7"), "" if none does; part: train, val, test, or
    "" where nothing says it; group: whose pairs stay together."""

    image: Path
    mask: Path
    at: str = ""
    part: str = ""
    group: str = ""

    def error(self, text: str) -> UserError:
        return UserError(f"{self.at}: {text}" if self.at else text)


@dataclass(frozen=True)
class Naming:
    """How files are named below the folder of a site. image, mask: patterns with one *, which stands for the name that
    the two have in common; endings: where a pattern has no ending of its own, those that are understood."""

    image: str
    mask: str
    endings: Sequence[str] = ()

    def __post_init__(self) -> None:
        for key, pattern in (("image_pattern", self.image), ("mask_pattern", self.mask)):
            if pattern.count("*") != 1 or pattern.startswith("/") or self.image == self.mask:
                needed = "a path below the site's folder with one *, which stands for the name that images and masks"
                raise UserError(f"data.{key}: {pattern!r}; {needed} have in common, is needed, another one for each")

    def pairs(self, folder: Path, part: str = "") -> list[Pair]:
        """The pairs in a folder in the natural order of their names. Raises UserError for an image or mask alone."""
        masks = self._files(folder, self.mask)
        images = self._files(folder, self.image, but=masks.values())
        for name in natural_order({*images} ^ {*masks}):
            has = f"{images[name]} has no mask" if name in images else f"{masks[name]} has no image"
            wanted = folder / (self.mask if name in images else self.image).replace("*", name)
            raise UserError(f"{has} {wanted}; add it, or remove the other one")
        return [Pair(images[name], masks[name], part=part) for name in natural_order(images)]

    def _files(self, folder: Path, pattern: str, but: Collection[Path] = ()) -> dict[str, Path]:
        """name -> file, of those that a pattern names and that are not in `but`."""
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


@dataclass(frozen=True)
class Columns:
    """The columns of a CSV file that names pairs."""

    image: str
    mask: str
    site: str | None
    split: str | None
    group: str | None

    def options(self) -> dict[str, str]:
        """key of the config -> column"""
        every = {"image_column": self.image, "mask_column": self.mask, "site_column": self.site}
        every |= {"split_column": self.split, "group_column": self.group}
        return {key: column for key, column in every.items() if column is not None}


@dataclass(frozen=True)
class Pairs:
    """The pairs of files of a source; `by_site` lists them.

    path: a folder, or a CSV file; sites: whether the folder holds one for each site; site: the silo that is asked for.
    """

    source: str
    root: Path
    path: str
    naming: Naming
    columns: Columns
    delimiter: str
    sites: bool
    site: str | None

    def by_site(self) -> dict[str, list[Pair]]:
        """site -> its pairs; the site is "" where all are of one."""
        if Path(self.path).suffix.lower() in (".csv", ".tsv", ".txt"):
            return self._in_table()
        extra = next((key for key in self.columns.options() if key not in ("image_column", "mask_column")), None)
        if extra:
            raise UserError(f"{self.source}: data.{extra} is a column of a CSV file, and data.path names a folder")
        home = self.root / self.path
        if not os.path.isdir(home / (self.site or ".")):
            missing = f"there is no folder {home / (self.site or '.')} (data.root = {self.root})"
            raise MissingDataError(f"{self.source}: {missing}; correct data.root, data.path or data.silos")
        if self.site is not None or not self.sites:
            return {self.site or "": self._in_folder(home / (self.site or "."))}
        names = class_folders(home)
        if not names or any(name.lower() in PARTS for name in names):
            problem = f"{home} holds {'no folder' if not names else 'parts'}, and each folder is a site"
            raise UserError(f"{self.source}: {problem}; say data.sites: false, or correct data.path")
        return {name: self._in_folder(home / name) for name in names}

    def _in_folder(self, home: Path) -> list[Pair]:
        parts = {name: PARTS[name.lower()] for name in class_folders(home) if name.lower() in PARTS}
        if "train" in parts.values():
            pairs = [pair for name, part in parts.items() for pair in self.naming.pairs(home / name, part)]
        else:
            pairs = self.naming.pairs(home)
        if not pairs:
            patterns = f"{self.naming.image} (data.image_pattern) and {self.naming.mask} (data.mask_pattern)"
            raise UserError(f"{self.source}: {home} holds no file {patterns}; correct data.path or the patterns")
        return pairs

    def _in_table(self) -> dict[str, list[Pair]]:
        at = find(self.root, (self.path,), self.source, "correct data.root or data.path")
        if self.site is not None and not self.columns.site:
            raise UserError(f"{self.source}: data.site_column is missing; silos need it")
        options = self.columns.options()
        by_site: dict[str, list[Pair]] = {}
        seen: dict[Path, str] = {}
        for row in read_rows(at, list(options.values()), self.delimiter, list(options)):
            pair = self._pair(row)
            if pair.image in seen:
                raise pair.error(f"the image {pair.image} is that of {seen[pair.image]}, too; leave one of them out")
            seen[pair.image] = row.at
            by_site.setdefault(row.values[self.columns.site] if self.columns.site else "", []).append(pair)
        names = natural_order(by_site) if self.site is None else [self.site]
        if names[0] not in by_site:
            raise UserError(f"{at}: no row is of the site {self.site!r}; it has {', '.join(natural_order(by_site))}")
        return {name: by_site[name] for name in names}

    def _pair(self, row: Row) -> Pair:
        files = [self.root / row.values[name].replace("\\", "/") for name in (self.columns.image, self.columns.mask)]
        word = row.values[self.columns.split].lower() if self.columns.split else ""
        if word and word not in PARTS:
            raise UserError(f"{row.at}: {self.columns.split} is {word!r}; allowed: {', '.join(PARTS)}")
        group = row.values[self.columns.group] if self.columns.group else ""
        return Pair(files[0], files[1], row.at, PARTS.get(word, ""), group)


def dataset(
    pairs: Pairs,
    by_site: Mapping[str, Sequence[Pair]],
    read: Callable[[Sequence[Pair], Sequence[int], Sequence[int]], Dataset],
    val: str,
    test_fraction: float | None,
) -> Dataset:
    """The data set of all pairs, or of those of one silo.

    by_site: as `Pairs.by_site`. read: (pairs of a site, places of the training part, of the test part) -> its data.
    val: whether the validation part joins the training part or is left out. test_fraction: of each site's pairs, where
    nothing says the test part.
    """
    grouped = [(pair, site) for site, own in by_site.items() for pair in own if pair.group]
    groups = [pair.group for pair, _ in grouped]
    if pairs.columns.split:  # of all sites at once: a patient of two of them is one patient
        trained = [pair.part != "test" for pair, _ in grouped]
        check_groups(groups, trained, lambda k: grouped[k][0].at, f"{pairs.columns.group}")
    else:
        warn_of_divided_groups(groups, [site for _, site in grouped])
    sites = {}
    for site, own in by_site.items():
        own_pairs = [pair for pair in own if val == "join" or pair.part != "val"]
        train, test = _split(own_pairs, f" of {site}" if site else "", pairs, test_fraction)
        own_groups = [own_pairs[k].group for k in train if own_pairs[k].group]
        sites[site] = replace(read(own_pairs, train, test), group=number_groups(own_groups))
    first = next(iter(sites))
    for site, part in sites.items():
        if part.input_shape != sites[first].input_shape:
            sizes = " and ".join(" x ".join(map(str, each.train_x.shape[2:])) for each in (sites[first], part))
            raise UserError(f"{pairs.source}: {first} and {site} have images of {sizes}; give data.size")
    return sites[first] if pairs.site is not None or "" in sites else joined(list(sites.values()), list(sites))


def _split(own: Sequence[Pair], whose: str, pairs: Pairs, test_fraction: float | None) -> tuple[list[int], list[int]]:
    """Places of the training part and of the test part."""
    test = [k for k, pair in enumerate(own) if pair.part == "test"]
    train = [k for k, pair in enumerate(own) if pair.part != "test"]
    if test or pairs.columns.split:
        checked_fraction(test_fraction, f"{pairs.columns.split or 'a folder `test`'}{whose}")
    elif own:
        labels, groups = np.zeros(len(own), dtype=np.int64), [pair.group for pair in own if pair.group]
        train, test = (rows.tolist() for rows in holdout(labels, checked_fraction(test_fraction), groups))
    if not train:
        raise UserError(f"{pairs.source}: no pair{whose} is of the training part; correct data.path or the parts")
    return train, test


@dataclass(frozen=True)
class MaskValues:
    """From the numbers in masks to class numbers.

    classes: how many, whose numbers the masks hold; or values: the number of class 0, 1, ... in the masks. One of the
    two is needed.
    """

    source: str
    classes: int | None
    values: Sequence[int] | None

    def __post_init__(self) -> None:
        values, ignore = self.values, ignored_target()
        if values is None:
            return
        if len(set(values)) < len(values) or self.classes not in (None, len(values)):
            problem = f"data.mask_values is {list(values)} and data.classes {self.classes}"
            raise UserError(f"{self.source}: {problem}; one number a class is needed, each once")
        if isinstance(ignore, int) and (ignore in values or 0 <= ignore < len(values)):
            problem = f"task.ignore is {ignore}, which is a class of data.mask_values, or its number"
            raise UserError(f"{self.source}: {problem}; ignore another number")

    @property
    def many(self) -> int:
        return len(self.values) if self.values is not None else self.classes or 0

    def numbers(self, mask: np.ndarray, pair: Pair) -> Tensor:
        """int64, of the same shape; task.ignore stays what it is. Raises UserError for a number that is no class."""
        numbers = mask.astype(np.int64)
        if not np.array_equal(numbers, mask):
            raise pair.error(f"{pair.mask} holds numbers that are not whole; a mask holds the number of a class")
        allowed = list(range(self.many)) if self.values is None else list(self.values)
        unknown = [value for value in np.unique(numbers).tolist() if value not in allowed and value != ignored_target()]
        if unknown:
            holds = f"{pair.mask} holds {shorten(', '.join(map(str, unknown)))}"
            only = f"{shorten(', '.join(map(str, allowed)) or 'none')} are allowed"
            keys = "data.classes says how many classes there are, or data.mask_values the number of each in the masks"
            raise pair.error(f"{self.source}: {holds}; {only}: {keys}; task.ignore names a number that does not count")
        if self.values is None:
            return torch.from_numpy(numbers)
        out = numbers.copy()
        for number, value in enumerate(self.values):
            out[numbers == value] = number
        return torch.from_numpy(out)


def check_shapes(pair: Pair, image: Sequence[int], mask: Sequence[int]) -> None:
    """Raise UserError unless an image and its mask have the same size."""
    if tuple(image) != tuple(mask):
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in (image, mask))
        raise pair.error(f"{pair.image} and its mask {pair.mask} are of different sizes, {sizes}")
