"""The data source `leaf`: data sets of the LEAF benchmark, in the format that its preprocess.sh writes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.text import shorten_repr, sort_naturally
from fedmpi.data.dataset import Dataset
from fedmpi.data.lazy_images import LazyImages, make_lazy_images
from fedmpi.data.sources.images.class_images import make_labelled_image_reader
from fedmpi.data.sources.images.decode import DecodeOptions, is_image_file
from fedmpi.data.sources.labelled_files import LabelledFile, dataset_from_files
from fedmpi.data.sources.source_utils import check_finite, to_float32, to_uint8_if_exact, with_clients_as_sites
from fedmpi.data.sources.texts import (
    IGNORE_INDEX,
    TextPreparation,
    check_characters,
    encode_characters,
    make_alphabet,
    to_code_points,
)

SampleKind = Literal["numbers", "characters", "texts", "image files"]
UserSamples = dict[str, tuple[Any, np.ndarray]]  # user -> samples of one kind, and y (n,)

OPTIONS_BY_KIND: dict[SampleKind, tuple[str, ...]] = {
    "numbers": ("classes",),
    "characters": ("alphabet",),
    "texts": ("classes", "vocabulary"),
    "image files": ("classes", "size"),
}
CELEBA_FOLDER = "raw/img_align_celeba"  # folder next to train/ and test/ in which LEAF's scripts expect the images
FEMNIST_PIXELS = 784  # pixels of an image of 28 x 28
TWEET_COLUMN = 4  # index of the text in a row of Sent140
WORD = re.compile(r"[\w']+|[.,!?;]")  # LEAF, models/utils/language_utils.py
EXPECTED_FORMAT = "LEAF's preprocess.sh writes {'users': [...], 'user_data': {USER: {'x': [...], 'y': [...]}}}"


def leaf(
    root: Path,
    *,
    path: Annotated[str, Field(min_length=1)],
    classes: Annotated[int, Field(ge=2, le=1_000_000)] | None = None,
    alphabet: Annotated[str, Field(min_length=2)] | None = None,
    vocabulary: Annotated[int, Field(ge=1, le=1_000_000)] | None = None,
    size: Annotated[int, Field(ge=1, le=4096)] | None = None,
) -> Dataset:
    """A data set of the LEAF benchmark: the JSON files in root/path/train and root/path/test; each user is a site.

    Users are sorted by name; names that are numbers are sorted by value. If x contains numbers (FEMNIST,
    Synthetic), samples are images (1, 28, 28) if they have 784 numbers, otherwise vectors. If x contains strings and y
    their next characters (Shakespeare), samples are symbols (n, L) for `task: {name: next_symbol}`; as in LEAF, only
    the character after the string is a target. If x contains texts (Sent140), samples are counts of `vocabulary` words,
    (n, vocabulary) float32. If x contains names of image files (CelebA), the images are read from
    root/path/raw/img_align_celeba.

    path: the folder that contains train/ and test/, relative to data.root.
    classes: the number of classes, by default the largest label + 1.
    alphabet: the characters, ordered by index; by default those of the training part, sorted, and a symbol
    for unknown characters if the test part contains any.
    vocabulary: how many of the most frequent words of the training part are counted; default 1000. As in LEAF, a word
    consists of letters, digits, _ and ', or is one of . , ! ? ;
    size: image files are scaled and centre-cropped to size x size; default 84.
    """
    folder = root / path
    (kind, train), (test_kind, test) = _read_part(folder / "train"), _read_part(folder / "test")
    if kind != test_kind:
        raise UserError(
            f"{folder}: x contains {kind} in train/ and {test_kind} in test/; both must contain the same kind"
        )
    options = {"classes": classes, "alphabet": alphabet, "vocabulary": vocabulary, "size": size}
    for key, value in options.items():
        if value is not None and key not in OPTIONS_BY_KIND[kind]:
            raise UserError(f"data.{key} has no effect, because x in {folder} contains {kind}; remove data.{key}")
    users = sort_naturally([*train, *test])
    train, test = ({user: part[user] for user in users if user in part} for part in (train, test))
    if kind == "characters":
        data = _next_character_dataset(train, test, alphabet, folder)
    else:
        (y, test_y), outputs = _convert_labels(train, test, classes, folder)
        if kind == "image files":
            samples = _list_image_files(folder, "train", train, y) + _list_image_files(folder, "test", test, test_y)
            read = make_labelled_image_reader(
                [str(k) for k in range(outputs)], DecodeOptions(size or 84, 3, (0.5,), (0.5,))
            )
            data = dataset_from_files(samples, read, "leaf")
        else:
            x, test_x = (
                _concatenate_users(train, test, folder)
                if kind == "numbers"
                else _count_words(train, test, vocabulary or 1000)
            )
            data = Dataset(x, y, test_x, test_y, outputs)
    owner, test_owner = (
        np.repeat(np.arange(len(users)), [len(part[user][1]) if user in part else 0 for user in users])
        for part in (train, test)
    )
    return with_clients_as_sites(data, users, owner, test_owner)


# ---- files ----
def _read_part(folder: Path) -> tuple[SampleKind, UserSamples]:
    """Read all files of one part; return the kind of the samples, and the samples of each user."""
    files = sorted(folder.glob("*.json"))
    if not files:
        remedy = "correct data.root or data.path, or run LEAF's preprocess.sh with `-t sample`"
        raise MissingDataError(f"leaf: no file {folder}/*.json found; {remedy}")
    users: UserSamples = {}
    kinds: set[SampleKind] = set()
    for file in files:
        try:
            content = json.loads(file.read_bytes())["user_data"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = "the key user_data is missing" if isinstance(error, KeyError) else error
            raise UserError(f"{file} cannot be read as LEAF's JSON: {problem}; {EXPECTED_FORMAT}") from error
        for user, entry in content:
            location = f"{file}, user {user!r}"
            x, y = (entry.get(key) if isinstance(entry, dict) else None for key in ("x", "y"))
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise UserError(
                    f"{location}: {shorten_repr(entry)} has no lists x and y of equal length; {EXPECTED_FORMAT}"
                )
            if user in users:
                raise UserError(f"{location}: the user appears twice in {folder}; each user must appear once")
            if x:
                kind = _detect_kind(x[0], y[0], location)
                if kinds - {kind}:
                    raise UserError(
                        f"{location}: x contains {kind}, but x of previous users contains {next(iter(kinds))}; all "
                        "users must have the same kind of samples"
                    )
                kinds.add(kind)
                users[user] = _convert_user(kind, x, y, location)
    if not users:
        raise UserError(f"{folder}: no user has samples; {EXPECTED_FORMAT}")
    return next(iter(kinds)), users


def _detect_kind(x: Any, y: Any, location: str) -> SampleKind:
    """Return the kind of a user's samples, determined from the first sample x and its label y."""
    first = x
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, (int, float)):
        return "numbers"
    if isinstance(x, str) and isinstance(y, str) and len(y) == 1:
        return "characters"
    if isinstance(x, str):
        return "image files" if is_image_file(Path(x)) else "texts"
    if isinstance(x, list) and len(x) > TWEET_COLUMN and all(isinstance(cell, str) for cell in x):
        return "texts"
    raise UserError(
        f"{location}: x = {shorten_repr(x)}, y = {shorten_repr(y)} is not a sample of a known kind (numbers, "
        "strings with the next character, texts, names of image files); for other kinds, write your own data source"
    )


def _convert_user(kind: SampleKind, x: list[Any], y: list[Any], location: str) -> tuple[Any, np.ndarray]:
    """Convert a user's x and y to arrays.

    Strings in x with the next character in y become code points (n, L + 1). Texts and file names remain lists.
    """
    if kind == "characters":
        if any(not isinstance(c, str) or len(c) != 1 or not isinstance(s, str) for s, c in zip(x, y, strict=True)):
            raise UserError(f"{location}: x must contain strings, and y the one character after each of them")
        rows = [text + after for text, after in zip(x, y, strict=True)]
        if len({*map(len, rows)}) > 1:
            raise UserError(f"{location}: the strings in x have different lengths; they must have the same length")
        return to_code_points("".join(rows)).reshape(len(rows), -1), np.zeros(len(y))
    try:
        labels = np.array(y, dtype=np.float64).reshape(len(x))
    except (TypeError, ValueError) as error:
        raise UserError(f"{location}: y contains {shorten_repr(y[0])}; must be one number per sample") from error
    if kind == "numbers":
        try:
            with np.errstate(over="ignore"):  # values beyond float32 are reported with their row
                numbers = np.array(x, dtype=np.float64).astype(np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{location}: the samples in x do not all have the same number of values ({error})"
            ) from error
        return to_uint8_if_exact(numbers), labels
    texts = [row[TWEET_COLUMN] if isinstance(row, list) and len(row) > TWEET_COLUMN else row for row in x]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{location}: x contains other values besides {kind}; all samples must be of one kind")
    return texts, labels


# ---- samples ----
def _convert_labels(
    train: UserSamples, test: UserSamples, classes: int | None, folder: Path
) -> tuple[list[Tensor], int]:
    """Return the labels of both parts as int64, and the number of classes."""
    parts = [np.concatenate([y for _, y in users.values()]) for users in (train, test)]
    labels = np.concatenate(parts)
    low, high = labels.min(), labels.max()
    if not np.array_equal(labels, np.rint(labels)) or low < 0 or high >= (classes or max(1000, 10 * len(labels))):
        allowed = f"they must be integers from 0 to {classes - 1}" if classes else "number the classes 0, 1, 2, ..."
        raise UserError(f"{folder}: y contains labels from {low:g} to {high:g}; {allowed}")
    return [torch.from_numpy(y.astype(np.int64)) for y in parts], classes or int(high) + 1


def _list_samples_by_user(
    train: UserSamples, test: UserSamples, folder: Path
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return each user's samples in the training part and in the test part; raise UserError if shapes differ."""
    arrays = [x for users in (train, test) for x, _ in users.values()]
    other = next((x.shape[1:] for x in arrays if x.shape[1:] != arrays[0].shape[1:]), None)
    if other is not None:
        shapes = f"{arrays[0].shape[1:]} for one user and {other} for another"
        raise UserError(f"{folder}: the shape of a sample is {shapes}; all samples must have the same shape")
    return arrays[: len(train)], arrays[len(train) :]


def _concatenate_users(train: UserSamples, test: UserSamples, folder: Path) -> list[Tensor | LazyImages]:
    """Concatenate the samples of all users in each part; images with 256 grey levels are stored as bytes."""
    arrays_by_part = _list_samples_by_user(train, test, folder)
    size = arrays_by_part[0][0].shape[1:]
    shape = (1, 28, 28) if size == (FEMNIST_PIXELS,) else size or (1,)
    is_images = len(shape) == 3 and all(x.dtype == np.uint8 for arrays in arrays_by_part for x in arrays)
    parts: list[Tensor | LazyImages] = []
    for name, arrays in zip(("train", "test"), arrays_by_part, strict=True):
        rows = np.concatenate(arrays if is_images else [to_float32(x) for x in arrays])
        x = check_finite(torch.from_numpy(rows.reshape(-1, *shape)), f"x of {name}/", folder)
        parts.append(make_lazy_images(x, None, None, shape[0]) if is_images else x)
    return parts


def _list_image_files(folder: Path, part: str, users: UserSamples, y: Tensor) -> list[LabelledFile]:
    """Return the image files of one part (train or test), with their classes."""
    names = [name for x, _ in users.values() for name in x]
    images = folder / CELEBA_FOLDER
    if not images.is_dir():
        remedy = "unpack CelebA's img_align_celeba.zip there"
        raise MissingDataError(f"leaf: folder {images} with the image files, such as {names[0]}, not found; {remedy}")
    pairs = zip(names, map(str, y.tolist()), strict=True)
    return [LabelledFile(images / file, label, location=str(folder / part), part=part) for file, label in pairs]


def _next_character_dataset(train: UserSamples, test: UserSamples, alphabet: str | None, folder: Path) -> Dataset:
    """Return a data set for the task next_symbol: the last code point of each row, (n, L + 1), is its target."""
    rows, test_rows = map(np.concatenate, _list_samples_by_user(train, test, folder))
    characters, test_characters = ({chr(code) for code in np.unique(part)} for part in (rows, test_rows))
    if alphabet is not None:
        check_characters("".join(characters | test_characters), alphabet, str(folder))
    symbols = tuple(alphabet or make_alphabet(characters, test_characters))
    x, test_x = (encode_characters(part, symbols) for part in (rows, test_rows))
    y, test_y = x[:, 1:].clone(), test_x[:, 1:].clone()
    y[:, :-1] = test_y[:, :-1] = IGNORE_INDEX
    preparation = TextPreparation(symbols, x.shape[1] - 1, closed=alphabet is not None, last=True)
    return Dataset(
        x[:, :-1], y, test_x[:, :-1], test_y, len(symbols), input_and_class_names=symbols, preparation=preparation
    )


def _count_words(train: UserSamples, test: UserSamples, vocabulary: int) -> list[Tensor]:
    """Count how often the most frequent words of the training part occur in each text of both parts."""
    parts = [[text for x, _ in users.values() for text in x] for users in (train, test)]
    counts = Counter(word for text in parts[0] for word in WORD.findall(text))
    column = {word: k for k, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary])}
    occurrences = [np.zeros((len(texts), vocabulary), np.float32) for texts in parts]
    for texts, out in zip(parts, occurrences, strict=True):
        for row, text in zip(out, texts, strict=True):
            np.add.at(row, [column[word] for word in WORD.findall(text) if word in column], 1)
    return list(map(torch.from_numpy, occurrences))
