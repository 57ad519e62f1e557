"""The data source `tokenized_text`: texts in a table, as token numbers for a classifier or a language model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs
from fedmpi.common.text import pluralize
from fedmpi.data.csv_file import decode_cells
from fedmpi.data.dataset import Dataset
from fedmpi.data.preprocessing import NewRows, PredictionRequest, Preparation
from fedmpi.data.sources.source_utils import (
    encode_groups,
    find_file,
    missing_targets_allowed,
    resolve_file_name,
    resolve_test_fraction,
)
from fedmpi.data.sources.tables.read_table import (
    Table,
    TableTargets,
    check_no_missing_cells,
    normalize_word,
    read_table,
    read_targets,
)
from fedmpi.data.sources.tables.saved_dataset import concatenate_cells, parts_of_rows, read_splits
from fedmpi.data.sources.tables.table_preprocessing import add_targets, identify_rows, read_new_rows
from fedmpi.data.sources.tables.table_source import Name, Value, read_parts, select_training_rows
from fedmpi.data.sources.tokenizer import TextTokenizer, load_tokenizer

Arrays = dict[str, np.ndarray]


def tokenized_text(
    root: Path,
    *,
    site: str | None = None,
    path: str | None = None,
    tokenizer: Path,
    text_column: Name | Annotated[list[Name], Field(min_length=2, max_length=2)] = "text",
    label_column: Name | None = None,
    site_column: Name | None = None,
    split_column: Name | None = None,
    group_column: Name | None = None,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
    max_length: Annotated[int, Field(ge=1)] = 128,
    pack: bool | None = None,
    target: Literal["auto", "class", "number"] = "auto",
    class_names: Annotated[list[Value], Field(min_length=2)] | None = None,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
) -> Dataset:
    """Texts as token numbers, with labels or for a language model: root/path is a CSV or Parquet file or a folder.

    A folder is a data set that Hugging Face `datasets` has saved with `save_to_disk`; its splits train and validation
    form the training part, and its split test the test part. A sample consists of the tensors `input_ids` and
    `attention_mask`, and for pairs of texts also `token_type_ids` if the tokenizer distinguishes them. Needs
    transformers; folders and Parquet files also need pyarrow.

    path: the file or folder, relative to data.root; for silos it may contain {site}, which is replaced by the name of
    the silo. Without path, the name of the silo is the file name.
    tokenizer: the folder of the model's tokenizer, relative to the working directory. Nothing is downloaded.
    text_column: the column with the texts; a list of two columns gives pairs of texts.
    label_column: the column to predict; without it, the task is to predict the next token (language modelling).
    site_column: the column with the site of each row.
    split_column: the column with train, val or test for each row; val is added to the training part.
    group_column: the column with groups, such as patients, whose rows are never split between the training part, the
    test part and the rows that data.validation holds out.
    test_fraction: without split_column and without a split `test`, the fraction of each class at each site that is held
    out as the test part, with the same rows for every seed; default 0.2.
    max_length: the maximum number of tokens in a sample; longer texts are truncated. Samples are padded to it, or to
    the longest text if that is shorter and there are no silos.
    pack: without label_column, whether the texts of a site are joined, each followed by the tokenizer's eos token, and
    cut into samples of max_length tokens (true, the default), or each text is one sample (false).
    target: class, number (regression), or auto, which is class if the labels are words or integers.
    class_names: the labels, ordered by class number; by default in natural order.
    delimiter: the character that separates the cells of a CSV file.
    """
    if site is not None and site_column is not None:
        raise UserError(
            f"tokenized_text: data.site_column ({site_column}) needs the rows of all sites, but with data.silos each "
            "site reads only its own rows; remove data.site_column"
        )
    is_packed = label_column is None and pack is not False
    if label_column is None:
        _check_language_model_options(text_column, group_column, is_packed, class_names, target)
    elif pack is not None:
        raise UserError("tokenized_text: data.pack is for language models without data.label_column; remove data.pack")
    columns = (text_column,) if isinstance(text_column, str) else tuple(text_column)
    keys = {site_column: "site_column", split_column: "split_column", group_column: "group_column"}
    keys |= {label_column: "label_column"}
    named = {name: key for name, key in keys.items() if name is not None}
    name = resolve_file_name("tokenized_text", site, path)
    rows, parts = _read_rows(root, name, columns, named, label_column, delimiter, class_names)
    if split_column is not None:
        if parts is not None:
            raise UserError(f"{rows.path} has a split test; remove data.split_column, or save it without this split")
        parts = read_parts(rows, split_column)
    defined_by = f"data.split_column ({split_column!r})" if split_column else f"the split test of {rows.path}"
    test_fraction = resolve_test_fraction(test_fraction, defined_by if parts is not None else "")
    texts = [_read_texts(rows, column) for column in columns]
    loaded = load_tokenizer(tokenizer)
    loaded.check_max_length(max_length, pairs=len(columns) == 2)

    targets = TableTargets(torch.zeros(len(rows)))
    if label_column is not None:
        names = class_names or (list(rows.valid_words.get(label_column, ())) or None)
        targets = read_targets(rows, [label_column], target, names)
    owner, site_names = rows.encode_sites(site_column)
    site_names = [site] if site else site_names
    groups = rows.parse_words(group_column, "group_column") if group_column else np.zeros(0, dtype=str)
    train = select_training_rows(rows, targets.strata, owner, site_names, groups, parts, test_fraction)

    if label_column is None:
        arrays, owner, train = _make_language_samples(loaded, texts[0], owner, train, max_length, is_packed)
        y, classes = torch.from_numpy(arrays.pop("y")), len(loaded)
    else:
        arrays, truncated = loaded.encode(texts, max_length)
        _warn_about_lengths(rows, truncated, arrays["attention_mask"], "data.max_length")
        y, classes = targets.y, len(targets.names) or targets.outputs
    if site is None:
        arrays = _cut_padding(arrays)
        y = y[:, : arrays["input_ids"].shape[1]] if label_column is None else y
    preparation = TokenizedTextPreparation(
        tokenizer=str(tokenizer),
        tokenizer_digest=loaded.digest,
        length=arrays["input_ids"].shape[1],
        text_column=columns[0] if len(columns) == 1 else (columns[0], columns[1]),
        label_column=label_column,
        class_names=targets.names,
        delimiter=delimiter,
    )
    x = Inputs({name: torch.from_numpy(array) for name, array in arrays.items()})
    is_train, site_of = torch.from_numpy(train), torch.from_numpy(owner) if site_names else None
    return Dataset(
        *(x[is_train], y[is_train], x[~is_train], y[~is_train], classes),
        site=None if site_of is None else site_of[is_train],
        test_site=None if site_of is None else site_of[~is_train],
        site_names=tuple(site_names),
        input_and_class_names=targets.names,
        group=encode_groups(groups[train]) if group_column else None,
        preparation=preparation,
    )


def _check_language_model_options(
    text_column: str | list[str], group_column: str | None, pack: bool, class_names: Any, target: str
) -> None:
    """Raise UserError if an option is set that cannot be used without data.label_column."""
    problems = {
        "class_names": class_names is not None,
        f"target: {target}": target != "auto",
        "text_column with two columns": not isinstance(text_column, str),
    }
    wrong = next((key for key, is_set in problems.items() if is_set), None)
    if wrong is not None:
        raise UserError(
            f"tokenized_text: data.{wrong} needs labels, but data.label_column is not set (the task is to predict the "
            "next token); set data.label_column, or remove the option"
        )
    if group_column is not None and pack:
        raise UserError(
            f"tokenized_text: data.group_column ({group_column}) cannot be combined with data.pack: true, because a "
            "sample may then contain texts of several groups; set data.pack: false"
        )


# ---- rows ----
def _read_rows(
    root: Path,
    name: str,
    texts: Sequence[str],
    keys: dict[str, str],
    label_column: str | None,
    delimiter: str,
    class_names: Sequence[Value] | None,
) -> tuple[Table, np.ndarray | None]:
    """Read a table, or a data set saved by `datasets`, and check that all columns exist and no label is missing.

    Args:
        texts: the text columns.
        keys: a dict from each other column to the option that names it.

    Returns:
        The rows; and the part of each row, (n,), if the file is a saved data set with a split `test`, otherwise None.
    """
    columns = dict.fromkeys(texts, "text_column") | keys
    if (root / name).is_dir():
        splits = read_splits(root / name, columns, label_column, texts=texts)
        parts = parts_of_rows(splits)
        return concatenate_cells(splits, root / name), parts if (parts == "test").any() else None
    file = find_file(root, (name,), "tokenized_text", "correct data.root or data.path")
    rows = read_table(file, delimiter)
    for column, key in columns.items():
        rows.column(column, key)
    if label_column is not None:
        rows = replace(rows, valid_words={label_column: list(map(normalize_word, class_names or ()))})
    may_lack = label_column if missing_targets_allowed() and class_names is None else None
    check_no_missing_cells(rows, [column for column in keys if column != may_lack])
    return rows, None


def _read_texts(rows: Table, column: str) -> list[str]:
    """Return the texts of a column."""
    cells = rows.column(column, "text_column")
    if cells.dtype == np.float64:
        raise UserError(
            f"{rows.path}: column {column!r} (data.text_column) contains numbers, not texts; name the column of texts"
        )
    texts: list[str] = decode_cells(cells).tolist()
    return texts


# ---- samples ----
def _make_language_samples(
    tokenizer: TextTokenizer, texts: Sequence[str], owner: np.ndarray, train: np.ndarray, length: int, pack: bool
) -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Return samples of L tokens, with the next token after each of them as targets.

    Args:
        texts: (n,) the texts.
        owner: (n,) the index of each text's site.
        train: (n,) whether each text belongs to the training part.
        length: the number L of tokens in a sample.
        pack: see `tokenized_text`. A sample never combines texts of different sites or parts.

    Returns:
        The arrays input_ids, attention_mask and y, (samples, L); the site of each sample; and whether it belongs to the
        training part.
    """
    tokens = tokenizer.encode_for_next_token(texts)
    if pack:
        if tokenizer.backend.eos_token_id is None:
            raise UserError(
                f"data.pack: true joins texts with the eos token, but the tokenizer in {tokenizer.folder} has none; "
                "set eos_token in its tokenizer_config.json, or set data.pack: false"
            )
        order = [(k, part) for part in (True, False) for k in np.unique(owner)]
        chosen = [np.flatnonzero((owner == k) & (train == part)) for k, part in order]
        streams = [np.concatenate([tokens[row] for row in rows]) for rows in chosen if len(rows)]
        firsts = np.array([rows[0] for rows in chosen if len(rows)])
    else:
        too_long = sum(len(each) > length + 1 for each in tokens)
        if too_long:
            _warn_truncated(too_long, len(tokens), length + 1, "data.max_length")
        streams, firsts = [each[: length + 1] for each in tokens], np.arange(len(tokens))
    blocks = [tokenizer.cut_blocks(stream, length) for stream in streams]
    row_of_block = np.repeat(firsts, [len(each["y"]) for each in blocks])
    arrays = {name: np.concatenate([each[name] for each in blocks]) for name in blocks[0]}
    return arrays, owner[row_of_block], train[row_of_block]


def _cut_padding(arrays: Arrays) -> Arrays:
    """Remove the positions that are padding in all samples, (n, L) -> (n, longest); at least one position remains."""
    used = np.flatnonzero(arrays["attention_mask"].any(0))
    first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    return {name: np.ascontiguousarray(array[:, first:end]) for name, array in arrays.items()}


def _warn_about_lengths(rows: Table, truncated: np.ndarray, mask: np.ndarray, limit: str) -> None:
    """Warn about texts that are truncated, and about texts without tokens. limit: what limits the length."""
    if truncated.any():
        _warn_truncated(int(truncated.sum()), len(truncated), mask.shape[1], limit)
    empty = ~mask.any(1)
    if empty.any():
        warnings.warn(
            f"data: {pluralize(int(empty.sum()), 'text')} of {rows.path} without tokens, the first one in "
            f"{rows.row_unit} {rows.row_numbers[empty.argmax()]}: the sample consists of padding only",
            stacklevel=3,
        )


def _warn_truncated(number: int, texts: int, length: int, limit: str) -> None:
    warnings.warn(
        f"{limit}: {number} of {texts} texts are truncated to {length} tokens",
        stacklevel=4,
    )


# ---- new rows ----
@dataclass(frozen=True)
class TokenizedTextPreparation(Preparation):
    """The conversion of new texts to token numbers.

    Attributes:
        tokenizer: the folder of the tokenizer, relative to the working directory.
        tokenizer_digest: the digest of its files.
        length: the number of tokens in a sample.
        text_column, label_column, delimiter: options of the source `tokenized_text`.
        class_names: the classes, ordered by class number; () if targets are numbers or tokens.
    """

    tokenizer: str
    tokenizer_digest: str
    length: int
    text_column: str | tuple[str, str] = "text"
    label_column: str | None = None
    class_names: tuple[str, ...] = ()
    delimiter: str = ","

    kind: ClassVar[str] = "tokenized_text"

    @property
    def files_digest(self) -> str:
        return self.tokenizer_digest

    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        """Return the tokens of new texts, with their targets if the rows have labels."""
        if self.label_column is None:
            raise UserError(
                "this run is a language model over tokens, for which there is no table of predictions; evaluate it on "
                "texts in the test part of a run (data.split_column), or load it with fedmpi.load(RUN_DIR)"
            )
        given = request.rows
        if isinstance(given, list) and isinstance(self.text_column, str) and all(isinstance(x, str) for x in given):
            request = replace(request, rows={self.text_column: given})
        rows = read_new_rows(request, self.delimiter)
        rows = replace(rows, valid_words={self.label_column: self.class_names})
        columns = (self.text_column,) if isinstance(self.text_column, str) else self.text_column
        texts = [_read_texts(rows, column) for column in columns]
        tokenizer = load_tokenizer(Path(self.tokenizer))
        if tokenizer.digest != self.tokenizer_digest:
            raise UserError(
                f"data.tokenizer: the files in {self.tokenizer} differ from those of the training (digest "
                f"{tokenizer.digest} instead of {self.tokenizer_digest}); set data.tokenizer to the folder of the "
                "tokenizer with which the model was trained"
            )
        arrays, truncated = tokenizer.encode(texts, self.length)
        _warn_about_lengths(rows, truncated, arrays["attention_mask"], "length of the training samples")
        x = Inputs({name: torch.from_numpy(array) for name, array in arrays.items()})
        new = NewRows(identify_rows(rows, request), x, where=rows.row_location)
        return add_targets(new, rows, [self.label_column], self.class_names)
