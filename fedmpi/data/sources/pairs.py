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
from fedmpi.common.text import natural_order
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
            if pattern.count("*") != 1 or pattern.startswith("/"):
                raise UserError(
                    f"data.{key}: {pattern!r}; a path below the site's folder with one * is needed, which stands for "
                    "what the names of an image and its mask have in common"
                )
        if self.image == self.mask:
            raise UserError(f"data.image_pattern and data.mask_pattern are both {self.image!r}; they must differ")

    def pairs(self, folder: Path, part: str = "") -> list[Pair]:
        """The pairs in a folder in the natural order of their names. Raises UserError for an image or mask alone."""
        masks = self._files(folder, self.mask)
        taken = set(masks.values())
        images = {name: file for name, file in self._files(folder, self.image, taken).items() if file not in taken}
        for name, file in images.items():
            if name not in masks:
                wanted = self.mask.replace("*", name)
                raise UserError(
                    f"{file} has no mask {folder / wanted} (data.mask_pattern); add it, or remove the image"
                )
        for name, file in masks.items():
            if name not in images:
                wanted = self.image.replace("*", name)
                raise UserError(
                    f"{file} has no image {folder / wanted} (data.image_pattern); add it, or remove the mask"
                )
        return [Pair(images[name], masks[name], part=part) for name in natural_order(images)]

    def _files(self, folder: Path, pattern: str, but: Collection[Path] = ()) -> dict[str, Path]:
        """name -> file, of those that a pattern names and that are not in `but`."""
        first, last = pattern.split("*")
        found: dict[str, Path] = {}
        for file in sorted(folder.glob(f"{pattern}.*" if self._open(pattern) else pattern)):
            if file.name.startswith(".") or not file.is_file() or file in but:
                continue
            if self._open(pattern) and file.suffix.lower() not in self.endings:
                continue
            path = file.relative_to(folder).as_posix()
            path = path[: -len(file.suffix)] if self._open(pattern) else path
            name = path[len(first) : len(path) - len(last)]
            if name in found:
                raise UserError(f"{found[name]} and {file} have the same name; leave one of them out")
            found[name] = file
        return found

    def _open(self, pattern: str) -> bool:
        """Whether any known ending may follow."""
        return bool(self.endings) and Path(pattern.replace("*", "x")).suffix.lower() not in self.endings


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
    """What a source is told of its files; `found` lists the pairs of each site.

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

    def found(self) -> dict[str, list[Pair]]:
        """site -> its pairs; the site is "" where all are of one."""
        if Path(self.path).suffix.lower() in (".csv", ".tsv", ".txt"):
            return self._in_table()
        if self.columns.site or self.columns.split or self.columns.group:
            given = next(key for key in self.columns.options() if key not in ("image_column", "mask_column"))
            raise UserError(f"{self.source}: data.{given} is a column of a CSV file, and data.path names a folder")
        return self._in_folders()

    def _in_folders(self) -> dict[str, list[Pair]]:
        home = self.root / self.path
        if not os.path.isdir(home):
            raise MissingDataError(
                f"{self.source}: there is no folder {home} (data.root = {self.root}); correct data.root or data.path"
            )
        names = class_folders(home)
        if self.site is not None and self.site not in names:
            there = ", ".join(names) or "no folder"
            raise MissingDataError(
                f"{self.source}: there is no folder {home / self.site} (data.silos); {home} has {there}"
            )
        if not self.sites and self.site is None:
            return {"": self._of(home)}
        part = next((name for name in names if name.lower() in PARTS), None)
        if self.site is None and (part or not names):
            what = f"{home / part} is a part" if part else f"{home} holds no folder"
            raise UserError(
                f"{self.source}: {what}, and each folder is a site; say data.sites: false, or correct data.path"
            )
        return {name: self._of(home / name) for name in ([self.site] if self.site else names)}

    def _of(self, home: Path) -> list[Pair]:
        parts = [name for name in class_folders(home) if name.lower() in PARTS]
        parts = parts if any(PARTS[name.lower()] == "train" for name in parts) else []
        pairs = [pair for name in parts for pair in self.naming.pairs(home / name, PARTS[name.lower()])]
        pairs = pairs if parts else self.naming.pairs(home)
        if not pairs:
            asked = f"{self.naming.image} (data.image_pattern) and {self.naming.mask} (data.mask_pattern)"
            raise UserError(
                f"{self.source}: {home} holds no file {asked}; correct data.root, data.path or the patterns"
            )
        return pairs

    def _in_table(self) -> dict[str, list[Pair]]:
        at = find(self.root, (self.path,), self.source, "correct data.root or data.path")
        if self.site is not None and not self.columns.site:
            raise UserError(f"{self.source}: data.site_column is missing; silos need it")
        options = self.columns.options()
        table = read_rows(at, list(options.values()), self.delimiter, list(options))
        sites = natural_order(row.values[self.columns.site] for row in table) if self.columns.site else [""]
        if self.site is not None and self.site not in sites:
            raise UserError(
                f"{at}: no row is of the site {self.site!r} ({self.columns.site}); it has {', '.join(sites)}"
            )
        chosen = sites if self.site is None else [self.site]
        seen: dict[Path, str] = {}
        found: dict[str, list[Pair]] = {name: [] for name in chosen}
        for row in table:
            whose = row.values[self.columns.site] if self.columns.site else ""
            if whose in found:
                pair = self._pair(row)
                if pair.image in seen:
                    raise pair.error(
                        f"the image {pair.image} is that of {seen[pair.image]}, too; leave one of them out"
                    )
                seen[pair.image] = row.at
                found[whose].append(pair)
        return found

    def _pair(self, row: Row) -> Pair:
        image, mask = (
            self.root / Path(row.values[name].replace("\\", "/")) for name in (self.columns.image, self.columns.mask)
        )
        part, group = "", row.values[self.columns.group] if self.columns.group else ""
        if self.columns.split:
            word = row.values[self.columns.split]
            if word.lower() not in PARTS:
                raise UserError(f"{row.at}: {self.columns.split} is {word!r}; allowed: {', '.join(PARTS)}")
            part = PARTS[word.lower()]
        return Pair(image, mask, row.at, part, group)


def dataset(
    pairs: Pairs,
    found: Mapping[str, Sequence[Pair]],
    read: Callable[[Sequence[Pair], Sequence[int], Sequence[int]], Dataset],
    val: str,
    test_fraction: float | None,
) -> Dataset:
    """The data set of all pairs, or of those of one silo.

    found: what `pairs.found` gives. read: (pairs of a site, places of the training part, of the test part) -> its data.
    val: whether the validation part joins the training part or is left out. test_fraction: of each site's pairs, where
    nothing says the test part.
    """
    everyone = [(pair, site) for site, its in found.items() for pair in its]
    if pairs.columns.split:  # of all sites at once: a patient of two of them is one patient
        given = [pair for pair, _ in everyone if pair.group]
        check_groups(
            [pair.group for pair in given],
            [pair.part != "test" for pair in given],
            lambda k: given[k].at,
            f"{pairs.columns.group}",
        )
    else:
        warn_of_divided_groups([pair.group for pair, _ in everyone if pair.group], [site for _, site in everyone])
    parts = []
    for site, its in found.items():
        kept = [pair for pair in its if val == "join" or pair.part != "val"]
        train, test = _split(kept, site, pairs, test_fraction)
        groups = [kept[k].group for k in train if kept[k].group]
        parts.append(replace(read(kept, train, test), group=number_groups(groups)))
    for site, part in zip(found, parts, strict=True):
        if part.input_shape != parts[0].input_shape:
            sizes = " and ".join(" x ".join(map(str, each.train_x.shape[2:])) for each in (parts[0], part))
            raise UserError(f"{pairs.source}: {next(iter(found))} and {site} have images of {sizes}; give data.size")
    named = pairs.site is None and "" not in found
    return joined(parts, list(found)) if named else parts[0]


def _split(its: Sequence[Pair], site: str, pairs: Pairs, test_fraction: float | None) -> tuple[list[int], list[int]]:
    """Places of the training part and of the test part."""
    groups = [pair.group for pair in its if pair.group]
    of = f" of {site}" if site else ""
    if any(pair.part for pair in its):
        train, test = ([k for k, pair in enumerate(its) if (pair.part == "test") == out] for out in (False, True))
        said = pairs.columns.split or "a folder `test`"
        if test or pairs.columns.split:
            checked_fraction(test_fraction, f"{said}{of}")
            check_groups(groups, [pair.part != "test" for pair in its], lambda k: its[k].at, f"{pairs.columns.group}")
            if not train:
                raise UserError(f"{pairs.source}: no pair{of} is of the training part ({said})")
            return train, test
    fraction = checked_fraction(test_fraction)
    if not its:
        raise UserError(f"{pairs.source}: there is no pair{of}; correct data.path")
    first, last = holdout(np.zeros(len(its), dtype=np.int64), fraction, groups)
    return first.tolist(), last.tolist()


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
        values, ignore = self.values or (), ignored_target()
        twice = next((value for k, value in enumerate(values) if value in values[:k]), None)
        if twice is not None:
            raise UserError(f"{self.source}: data.mask_values holds {twice} twice; one number a class")
        if self.values is not None and self.classes not in (None, len(values)):
            raise UserError(
                f"{self.source}: data.classes is {self.classes}, but data.mask_values has {len(values)} numbers"
            )
        if self.values is not None and isinstance(ignore, int) and (ignore in values or 0 <= ignore < len(values)):
            raise UserError(
                f"{self.source}: task.ignore is {ignore}, which is a class of data.mask_values, or its number; ignore "
                "another number"
            )

    @property
    def many(self) -> int:
        return len(self.values) if self.values is not None else self.classes or 0

    def numbers(self, mask: np.ndarray, pair: Pair) -> Tensor:
        """int64, of the same shape; task.ignore stays what it is. Raises UserError for a number that is no class."""
        if mask.dtype.kind == "f" and not (np.isfinite(mask).all() and (mask == np.rint(mask)).all()):
            raise pair.error(f"{pair.mask} holds numbers that are not whole; a mask holds the number of a class")
        found = mask.astype(np.int64)
        seen = np.unique(found)
        if not self.many:
            held = ", ".join(map(str, seen[:10].tolist())) + (", ..." if len(seen) > 10 else "")
            raise pair.error(
                f"{self.source}: {pair.mask} holds {held}; say data.classes, how many classes there are, if these are "
                "their numbers, else data.mask_values, the number of each class in the masks, such as [0, 255]"
            )
        allowed = list(range(self.many)) if self.values is None else list(self.values)
        ignore = ignored_target()
        odd = [value for value in seen.tolist() if value not in allowed and value != ignore]
        if odd:
            key = "data.classes" if self.values is None else "data.mask_values"
            some = ", ".join(map(str, allowed[:10])) + (", ..." if len(allowed) > 10 else "")
            advice = "task.ignore names a number that does not count"
            raise pair.error(f"{pair.mask} holds {odd[0]}; {some} are allowed ({key}); {advice}")
        if self.values is None:
            return torch.from_numpy(found)
        out = found.copy()
        for number, value in enumerate(self.values):
            out[found == value] = number
        return torch.from_numpy(out)


def check_shapes(pair: Pair, image: Sequence[int], mask: Sequence[int]) -> None:
    """Raises UserError unless an image and its mask have the same size."""
    if tuple(image) != tuple(mask):
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in (image, mask))
        raise pair.error(f"{pair.image} and its mask {pair.mask} are of different sizes, {sizes}")
