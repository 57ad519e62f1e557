"""Data sets of the LEAF benchmark, as its preprocess.sh writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import natural_order, show
from fedmpi.data.dataset import Dataset
from fedmpi.data.pictures import Pictures, of_bytes
from fedmpi.data.sources import leaf_text
from fedmpi.data.sources.by_client import as_floats, image_bytes, with_sites
from fedmpi.data.sources.common import finite
from fedmpi.data.sources.leaf_json import REMEDY, read_users
from fedmpi.data.sources.pictures.decode import DecodeOptions, is_picture
from fedmpi.data.sources.pictures.image_dataset import Files, dataset_of_parts

Kind = Literal["numbers", "characters", "texts", "image files"]

OPTIONS: dict[Kind | None, tuple[str, ...]] = {
    "numbers": ("shape", "classes"),
    "characters": ("alphabet",),
    "texts": ("classes", "words", "vocabulary", "length"),
    "image files": ("classes", "size"),
}
CELEBA = "raw/img_align_celeba"  # where LEAF's scripts expect the images, beside train/ and test/
FEMNIST = 784, (1, 28, 28)  # the only image shape that can be told from the number of values
TWEET = 4  # the field of a row of Sent140 that is the text


@dataclass
class Part:
    """The training or test part as the files hold it, by user."""

    folder: Path
    kind: Kind | None = None
    x: dict[str, Any] = field(default_factory=dict)
    y: dict[str, np.ndarray] = field(default_factory=dict)  # (n,) numbers; (n,) strings of characters

    def owner(self, users: Sequence[str]) -> np.ndarray:
        """(n,) the number of each sample's user."""
        return np.repeat(np.arange(len(users)), [len(self.y[user]) if user in self.y else 0 for user in users])

    def labels(self, users: Sequence[str]) -> np.ndarray:
        found = [self.y[user] for user in users if user in self.y]
        return np.concatenate(found)

    def inputs(self, users: Sequence[str]) -> list[Any]:
        return [self.x[user] for user in users if user in self.x]

    def values(self, users: Sequence[str]) -> list[str]:
        """Texts, or names of files."""
        return [value for mine in self.inputs(users) for value in mine]


def leaf(
    root: Path,
    *,
    path: Annotated[str, Field(min_length=1)],
    shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None,
    classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None,
    alphabet: Annotated[str, Field(min_length=2)] | None = None,
    words: Literal["count", "sequence"] | None = None,
    vocabulary: Annotated[int, Field(ge=1, le=1_000_000)] | None = None,
    length: Annotated[int, Field(ge=1, le=100_000)] | None = None,
    size: Annotated[int, Field(ge=1, le=4096)] | None = None,
) -> Dataset:
    """The folder root/path of a LEAF data set, with *.json in train/ and in test/; each user is a site.

    Users are in ascending order of their names, numbers by size. What a sample is follows from x and y: numbers with a
    class or a real number (FEMNIST, Synthetic); strings with one character as y (Shakespeare), symbols (n, L) for
    `task: {name: next_symbol}`, where the character that follows is the only target that counts, as in LEAF; texts with
    a class (Sent140); image files with a class (CelebA), which are read from root/path/raw/img_align_celeba.

    path: the folder that holds train/ and test/, relative to data.root.
    shape: of a sample of numbers; without it 784 numbers are an image (1, 28, 28), others a vector.
    classes: the number of classes, else the largest label + 1; 1 makes whole numbers the targets of a regression.
    alphabet: the characters in the order of their numbers; without it, those of the training part, sorted, and one more
    if others occur in the test part.
    words: of a text; count (the default): how often each of the `vocabulary` words occurs, (n, vocabulary) float32;
    sequence: the first `length` words, (n, length) int64, 0 after the end, 1 for other words, 2, 3, ... for those of
    the vocabulary. As in LEAF a word is made of letters, digits, _ and ', or is one of . , ! ? ;
    vocabulary: the number of words, the most frequent ones of the training part; 1000 if it is left out.
    length: of a sequence of words; 25 if it is left out.
    size: image files are scaled and cut at their centre to size x size; 84 if it is left out.
    """
    folder = root / path
    train, test = _read(folder / "train"), _read(folder / "test")
    if train.kind != test.kind:
        raise UserError(f"{folder}: x is {train.kind} in train/ and {test.kind} in test/; they must be alike")
    given = {"shape": shape, "classes": classes, "alphabet": alphabet, "words": words, "vocabulary": vocabulary}
    given |= {"length": length, "size": size}
    useless = next((key for key, value in given.items() if value is not None and key not in OPTIONS[train.kind]), None)
    if useless:
        raise UserError(f"data.{useless} changes nothing, for x in {folder} is {train.kind}; leave it out")
    if length and words != "sequence":
        raise UserError("data.length changes nothing without data.words: sequence; leave it out")
    users = natural_order([*train.y, *test.y])
    if train.kind == "characters":
        data = leaf_text.next_characters(_strings(train, users), _strings(test, users), alphabet, folder)
    else:
        y, test_y, outputs = _targets(train.labels(users), test.labels(users), classes, folder)
        if train.kind == "numbers":
            x, test_x = _arrays(train.inputs(users), test.inputs(users), shape, folder)
            data = Dataset(x, y, test_x, test_y, outputs)
        elif train.kind == "texts":
            both = train.values(users), test.values(users)
            x, test_x = leaf_text.encode(*both, words or "count", vocabulary or 1000, length or 25)
            data = Dataset(x, y, test_x, test_y, outputs)
        else:
            files = _files(train, users, y, folder), _files(test, users, test_y, folder)
            data = dataset_of_parts(
                *files, [str(k) for k in range(outputs)], DecodeOptions(size or 84, 3, (0.5,), (0.5,))
            )
    return with_sites(data, users, train.owner(users), test.owner(users))


def _read(folder: Path) -> Part:
    """All files of one part; each user is in one of them."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise MissingDataError(
            f"leaf: there is no file {folder}/*.json; correct data.root or data.path, or run LEAF's preprocess.sh with "
            "`-t sample`, which writes train/ and test/"
        )
    part = Part(folder)
    for file in files:
        for user, entry in read_users(file):
            _add(part, user, entry, f"{file}, user {user!r}")
    if part.kind is None:
        raise UserError(f"{folder}: no user has a sample; {REMEDY}")
    return part


def _add(part: Part, user: str, entry: Any, at: str) -> None:
    x, y = (entry.get(key) if isinstance(entry, dict) else None for key in ("x", "y"))
    if not isinstance(x, list) or not isinstance(y, list):
        raise UserError(f"{at}: {show(entry)} has no lists x and y; {REMEDY}")
    if len(x) != len(y):
        raise UserError(f"{at}: x has {len(x)} samples and y has {len(y)}; they must have as many")
    if user in part.y:
        raise UserError(f"{at} occurs twice in {part.folder}; each user must be in one file")
    if not x:
        return
    kind = _kind(x[0], y[0], at)
    if part.kind not in (None, kind):
        raise UserError(f"{at}: x is {kind}, that of the users before {part.kind}; they must be alike")
    part.kind = kind
    part.x[user], part.y[user] = _convert(kind, x, y, at)


def _kind(x: Any, y: Any, at: str) -> Kind:
    first = x
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, (int, float)):
        return "numbers"
    if isinstance(x, str) and isinstance(y, str) and len(y) == 1:
        return "characters"
    if isinstance(x, str):
        return "image files" if is_picture(Path(x)) else "texts"
    if isinstance(x, list) and len(x) > TWEET and all(isinstance(cell, str) for cell in x):
        return "texts"
    raise UserError(
        f"{at}: a sample is x = {show(x)}, y = {show(y)}; numbers (FEMNIST, Synthetic), strings with the next "
        "character (Shakespeare), texts (Sent140) and image files (CelebA) can be read; for others write a source of "
        "your own"
    )


def _convert(kind: Kind, x: list[Any], y: list[Any], at: str) -> tuple[Any, np.ndarray]:
    """x and y of a user without Python's numbers."""
    if kind == "characters":
        return leaf_text.code_points(x, y, at), np.zeros(len(y))
    try:
        labels = np.array(y, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{at}: y holds {show(y[0])}; a number for each sample is needed ({error})") from error
    if labels.ndim != 1:
        raise UserError(f"{at}: y[0] is {show(y[0])}; one number for each sample is needed")
    if kind == "numbers":
        try:
            with np.errstate(over="ignore"):  # values beyond float32 are reported with their row
                numbers = np.array(x, dtype=np.float64).astype(np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"{at}: x does not have as many numbers in each sample ({error})") from error
        stored = image_bytes(numbers)
        return numbers if stored is None else stored, labels
    texts = [row[TWEET] if isinstance(row, list) and len(row) > TWEET else row for row in x]
    odd = next((row for row in texts if not isinstance(row, str)), None)
    if odd is not None:
        raise UserError(f"{at}: x holds {show(odd)} among {kind}")
    return texts, labels


def _targets(y: np.ndarray, test_y: np.ndarray, classes: int | None, folder: Path) -> tuple[Tensor, Tensor, int]:
    """Labels int64 and the number of classes, or float32 targets and 1."""
    both = np.concatenate([y, test_y])
    if classes == 1 or not (np.isfinite(both).all() and np.array_equal(both, np.rint(both))):
        if classes not in (None, 1):
            raise UserError(f"{folder}: y holds numbers that are not whole; with data.classes: {classes} they must be")
        targets, test_targets = (torch.from_numpy(each.astype(np.float32)) for each in (y, test_y))
        return finite(targets, "y of train/", folder), finite(test_targets, "y of test/", folder), 1
    low, high = int(both.min()), int(both.max())
    if low < 0 or high >= (classes or max(1000, 10 * len(both))):
        allowed = f"0 to {classes - 1} are allowed" if classes else "number them 0, 1, 2, ..."
        raise UserError(
            f"{folder}: y holds the labels {low} to {high}; {allowed}, or say data.classes: 1 (a regression)"
        )
    return torch.from_numpy(y.astype(np.int64)), torch.from_numpy(test_y.astype(np.int64)), classes or high + 1


def _arrays(
    train: list[np.ndarray], test: list[np.ndarray], shape: tuple[int, ...] | None, folder: Path
) -> tuple[Tensor | Pictures, Tensor | Pictures]:
    """The samples of both parts; as bytes where they are images of 256 shades."""
    given = train[0].shape[1:]
    odd = next((x.shape[1:] for x in (*train, *test) if x.shape[1:] != given), None)
    if odd is not None:
        raise UserError(f"{folder}: a sample is of shape {given} for one user and {odd} for another; they must agree")
    wanted = shape or (FEMNIST[1] if given == FEMNIST[:1] else given or (1,))
    if math.prod(wanted) != math.prod(given):
        has = f"a sample in {folder} has {math.prod(given)} numbers"
        raise UserError(f"data.shape: {list(wanted)} has {math.prod(wanted)}, but {has}")
    images = len(wanted) == 3 and all(x.dtype == np.uint8 for x in (*train, *test))
    found = []
    for name, part in (("train", train), ("test", test)):
        x = np.concatenate(part if images else [as_floats(x) for x in part])
        found.append(finite(torch.from_numpy(x.reshape(-1, *wanted)), f"x of {name}/", folder))
    first, last = found
    return (of_bytes(first, None, None, wanted[0]), of_bytes(last, None, None, wanted[0])) if images else (first, last)


def _strings(part: Part, users: Sequence[str]) -> np.ndarray:
    """(n, L + 1) code points, of one length."""
    found = part.inputs(users)
    widths = {x.shape[1] for x in found}
    if len(widths) > 1:
        low, high = min(widths) - 1, max(widths) - 1
        raise UserError(f"{part.folder}: the strings have {low} to {high} characters; they must have as many")
    return np.concatenate(found)


def _files(part: Part, users: Sequence[str], y: Tensor, folder: Path) -> Files:
    if not y.dtype == torch.int64:
        raise UserError(f"{folder}: images need classes as y, whole numbers")
    names = part.values(users)
    images = folder / CELEBA
    if not images.is_dir():
        raise MissingDataError(
            f"leaf: there is no folder {images}, and the samples are image files such as {names[0]}; unpack CelebA's "
            "img_align_celeba.zip there"
        )
    return Files([images / name for name in names], y.tolist(), [f"{part.folder}"] * len(names))
