"""Data sets of the LEAF benchmark, as its preprocess.sh writes them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
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
from fedmpi.data.sources.by_client import as_floats, image_bytes, with_sites
from fedmpi.data.sources.common import finite
from fedmpi.data.sources.labelled_files import Sample, dataset_of
from fedmpi.data.sources.pictures.class_pictures import read_classes
from fedmpi.data.sources.pictures.decode import DecodeOptions, is_picture
from fedmpi.data.sources.text import (
    SKIP,
    TextPreparation,
    check_characters,
    code_points,
    make_alphabet,
    number_characters,
)

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
WORD = re.compile(r"[\w']+|[.,!?;]")  # LEAF, models/utils/language_utils.py
END, OTHER, FIRST = 0, 1, 2  # numbers of words in a sequence
REMEDY = "LEAF's preprocess.sh writes {'users': [...], 'user_data': {USER: {'x': [...], 'y': [...]}}}"


@dataclass
class Part:
    """The training or test part by user: samples of one kind, and numbers as y (n,)."""

    folder: Path
    kind: Kind | None = None
    x: dict[str, Any] = field(default_factory=dict)
    y: dict[str, np.ndarray] = field(default_factory=dict)

    def owner(self, users: Sequence[str]) -> np.ndarray:
        """(n,) the number of each sample's user."""
        return np.repeat(np.arange(len(users)), [len(self.y.get(user, ())) for user in users])

    def labels(self, users: Sequence[str]) -> np.ndarray:
        """(n,) y of all samples."""
        return np.concatenate([self.y[user] for user in users if user in self.y])

    def arrays(self, users: Sequence[str]) -> list[np.ndarray]:
        """The samples of each user, which are rows of one shape."""
        arrays = [self.x[user] for user in users if user in self.x]
        other = next((x.shape[1:] for x in arrays if x.shape[1:] != arrays[0].shape[1:]), None)
        if other is not None:
            shapes = f"of shape {arrays[0].shape[1:]} for one user and {other} for another"
            raise UserError(f"{self.folder}: a sample is {shapes}; they must agree")
        return arrays

    def values(self, users: Sequence[str]) -> list[str]:
        """Texts, or names of files, of all samples."""
        return [value for user in users for value in self.x.get(user, ())]


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
    options = {"shape": shape, "classes": classes, "alphabet": alphabet, "words": words, "vocabulary": vocabulary}
    options |= {"length": length, "size": size}
    for key, value in options.items():
        if value is not None and (key not in OPTIONS[train.kind] or (key == "length" and words != "sequence")):
            raise UserError(f"data.{key} changes nothing, for x in {folder} is {train.kind}; leave it out")
    users = natural_order([*train.y, *test.y])
    if train.kind == "characters":
        data = _next_characters(train.arrays(users), test.arrays(users), alphabet, folder)
    else:
        y, test_y, outputs = _targets(train.labels(users), test.labels(users), classes, folder)
        if train.kind == "image files":
            samples = _files(train, "train", users, y, folder) + _files(test, "test", users, test_y, folder)
            read = read_classes([str(k) for k in range(outputs)], DecodeOptions(size or 84, 3, (0.5,), (0.5,)))
            data = dataset_of(samples, read, "leaf")
        else:
            if train.kind == "numbers":
                x, test_x = _numbers(train.arrays(users), test.arrays(users), shape, folder)
            else:
                texts = train.values(users), test.values(users)
                x, test_x = _encode(*texts, words == "sequence", vocabulary or 1000, length or 25)
            data = Dataset(x, y, test_x, test_y, outputs)
    return with_sites(data, users, train.owner(users), test.owner(users))


def _read(folder: Path) -> Part:
    """Read all files of one part; each user is in one of them."""
    files = sorted(folder.glob("*.json"))
    if not files:
        remedy = "correct data.root or data.path, or run LEAF's preprocess.sh with `-t sample`"
        raise MissingDataError(f"leaf: there is no file {folder}/*.json; {remedy}")
    part = Part(folder)
    for file in files:
        try:
            users = json.loads(file.read_bytes())["user_data"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} cannot be read as LEAF's JSON: {error!r}; {REMEDY}") from error
        for user, entry in users:
            _add_user(part, user, entry, f"{file}, user {user!r}")
    if part.kind is None:
        raise UserError(f"{folder}: no user has a sample; {REMEDY}")
    return part


def _add_user(part: Part, user: str, entry: Any, at: str) -> None:
    x, y = (entry.get(key) if isinstance(entry, dict) else None for key in ("x", "y"))
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise UserError(f"{at}: {show(entry)} has no lists x and y of one length; {REMEDY}")
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
    """What the first sample of a user is."""
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
        f"{at}: a sample is x = {show(x)}, y = {show(y)}; numbers, strings with the next character, texts and names of "
        "image files can be read; for others write a source of your own"
    )


def _convert(kind: Kind, x: list[Any], y: list[Any], at: str) -> tuple[Any, np.ndarray]:
    """x and y of a user as arrays, and lists of texts; of characters x is (n, L + 1) code points with y behind."""
    if kind == "characters":
        if any(not isinstance(c, str) or len(c) != 1 or not isinstance(s, str) for s, c in zip(x, y, strict=True)):
            raise UserError(f"{at}: strings x, and as y the one character after each, are needed")
        rows = [text + after for text, after in zip(x, y, strict=True)]
        if len({*map(len, rows)}) > 1:
            raise UserError(f"{at}: the strings in x have different lengths; they must have as many characters")
        return code_points("".join(rows)).reshape(len(rows), -1), np.zeros(len(y))
    try:
        labels = np.array(y, dtype=np.float64).reshape(len(x))
    except (TypeError, ValueError) as error:
        raise UserError(f"{at}: y holds {show(y[0])}; one number for each sample is needed") from error
    if kind == "numbers":
        try:
            with np.errstate(over="ignore"):  # values beyond float32 are reported with their row
                numbers = np.array(x, dtype=np.float64).astype(np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"{at}: x does not have as many numbers in each sample ({error})") from error
        stored = image_bytes(numbers)
        return numbers if stored is None else stored, labels
    texts = [row[TWEET] if isinstance(row, list) and len(row) > TWEET else row for row in x]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{at}: x holds other things among {kind}")
    return texts, labels


def _targets(y: np.ndarray, test_y: np.ndarray, classes: int | None, folder: Path) -> tuple[Tensor, Tensor, int]:
    """Labels int64 and the number of classes, or float32 targets and 1."""
    both = np.concatenate([y, test_y])
    is_whole = bool(np.isfinite(both).all() and np.array_equal(both, np.rint(both)))
    if classes == 1 or (classes is None and not is_whole):
        targets, test_targets = (torch.from_numpy(each.astype(np.float32)) for each in (y, test_y))
        return finite(targets, "y of train/", folder), finite(test_targets, "y of test/", folder), 1
    low, high = both.min(), both.max()
    if not is_whole or low < 0 or high >= (classes or max(1000, 10 * len(both))):
        allowed = f"whole numbers from 0 to {classes - 1} are allowed" if classes else "number them 0, 1, 2, ..."
        raise UserError(
            f"{folder}: y holds the labels {low:g} to {high:g}; {allowed}, or say data.classes: 1 (a regression)"
        )
    return torch.from_numpy(y.astype(np.int64)), torch.from_numpy(test_y.astype(np.int64)), classes or int(high) + 1


def _numbers(
    train: list[np.ndarray], test: list[np.ndarray], shape: tuple[int, ...] | None, folder: Path
) -> tuple[Tensor | Pictures, Tensor | Pictures]:
    """The samples of both parts; as bytes where they are images of 256 shades."""
    stored = train[0].shape[1:]
    wanted = shape or (FEMNIST[1] if stored == FEMNIST[:1] else stored or (1,))
    if any(math.prod(wanted) != math.prod(x.shape[1:]) for x in (train[0], test[0])):
        sizes = f"{math.prod(wanted)}, but a sample in {folder} has {math.prod(stored)} numbers"
        raise UserError(f"data.shape: {list(wanted)} has {sizes}, and in test/ {math.prod(test[0].shape[1:])}")
    is_images = len(wanted) == 3 and all(x.dtype == np.uint8 for x in (*train, *test))
    parts: list[Tensor | Pictures] = []
    for name, arrays in (("train", train), ("test", test)):
        rows = np.concatenate(arrays if is_images else [as_floats(x) for x in arrays])
        x = finite(torch.from_numpy(rows.reshape(-1, *wanted)), f"x of {name}/", folder)
        parts.append(of_bytes(x, None, None, wanted[0]) if is_images else x)
    return parts[0], parts[1]


def _files(part: Part, name: str, users: Sequence[str], y: Tensor, folder: Path) -> list[Sample]:
    if y.dtype != torch.int64:
        raise UserError(f"{folder}: images need classes as y, whole numbers")
    names = part.values(users)
    images = folder / CELEBA
    if not images.is_dir():
        remedy = "unpack CelebA's img_align_celeba.zip there"
        raise MissingDataError(f"leaf: there is no folder {images} of the image files, such as {names[0]}; {remedy}")
    labels = map(str, y.tolist())
    return [
        Sample(images / file, label, at=f"{part.folder}", part=name) for file, label in zip(names, labels, strict=True)
    ]


def _next_characters(
    train: Sequence[np.ndarray], test: Sequence[np.ndarray], alphabet: str | None, folder: Path
) -> Dataset:
    """The data set of the last character of each row of code points (n, L + 1), for the task next_symbol."""
    if train[0].shape[1] != test[0].shape[1]:
        raise UserError(f"{folder}: the strings in train/ and test/ have different lengths; they must have one")
    rows, test_rows = np.concatenate(train), np.concatenate(test)
    characters, test_characters = ({chr(code) for code in np.unique(part)} for part in (rows, test_rows))
    if alphabet is not None:
        check_characters("".join(characters | test_characters), alphabet, str(folder))
    symbols = tuple(alphabet or make_alphabet(characters, test_characters))
    x, test_x = (number_characters(part, symbols) for part in (rows, test_rows))
    y, test_y = x[:, 1:].clone(), test_x[:, 1:].clone()
    y[:, :-1] = test_y[:, :-1] = SKIP
    preparation = TextPreparation(symbols, x.shape[1] - 1, closed=alphabet is not None, last=True)
    return Dataset(x[:, :-1], y, test_x[:, :-1], test_y, len(symbols), meaning=symbols, preparation=preparation)


def _encode(train: Sequence[str], test: Sequence[str], sequence: bool, vocabulary: int, length: int) -> list[Tensor]:
    """The texts of both parts as the most frequent words of the training part, counted or as a sequence; see `leaf`."""
    counts = Counter(word for text in train for word in WORD.findall(text))
    place = {word: k for k, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary])}
    parts = []
    for texts in (train, test):
        out = np.full((len(texts), length), END) if sequence else np.zeros((len(texts), vocabulary), np.float32)
        for row, text in zip(out, texts, strict=True):
            words = WORD.findall(text)
            if sequence:
                row[: len(words)] = [place[word] + FIRST if word in place else OTHER for word in words[:length]]
            else:
                np.add.at(row, [place[word] for word in words if word in place], 1)
        parts.append(torch.from_numpy(out))
    return parts
