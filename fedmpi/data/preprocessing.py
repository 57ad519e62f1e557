"""Preparations: the conversion of rows to inputs of a model, with statistics fitted to the training rows.

A source attaches a `Preparation` to its `Dataset` and prepares its own rows with it, so that training and prediction
use the same code. A run saves the preparation with its model (runtime/record/data_files.py).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, Shape, Type, decode_format, describe_samples, encode_format, get_sample_shape

PREPARATION_KINDS = {
    "arrays": "fedmpi.data.sources.named_arrays:ArrayPreparation",
    "images": "fedmpi.data.sources.images.image_preprocessing:ImagePreparation",
    "ready": "fedmpi.data.preprocessing:ReadyInputs",
    "table": "fedmpi.data.sources.tables.table_preprocessing:TablePreparation",
    "volumes": "fedmpi.data.sources.nifti:VolumePreparation",
    "tokenized_text": "fedmpi.data.sources.tables.tokenized_text:TokenizedTextPreparation",
    "texts": "fedmpi.data.sources.texts:TextPreparation",
}
# Options of data sources that describe the format of a file; they may differ between training files and new files
READING_OPTIONS = (
    *("delimiter", "decimal", "folder", "image_column", "label_column", "author_column", "text_column"),
    "image_pattern",
)
# Options that name files which the preparation of training rows and of new rows share; the files may have moved
SHARED_FILES = ("tokenizer",)
TRAINING_ONLY = ("root", "download")  # options that apply to training files only


@dataclass(frozen=True, eq=False)
class NewRows:
    """New rows for prediction, prepared like the training rows."""

    ids: Mapping[str, Any]  # columns (n,) that identify the rows, such as line numbers
    x: Any  # samples (n, ...)
    y: Tensor | None = None  # targets (n, ...) if the file has them
    why_no_targets: str = ""  # why all or some rows have no targets, for messages
    sites: Sequence[str] = ()  # (n,) the site of each row; () if it is not known
    has_target: Tensor | None = None  # (n,) bool, which rows have a target; None: all
    where: Callable[[int], str] | None = None  # returns the name of row k for messages


@dataclass(frozen=True)
class PredictionRequest:
    """A user's request to predict the targets of new rows.

    Args:
        rows: a file, or rows in memory.
        site: the site of the rows; None if the user did not name one.
        ids: the names of the columns to copy to the table of predictions.
    """

    rows: Any  # a file, or rows in memory
    site: str | None = None
    ids: tuple[str, ...] = ()


class Preparation(ABC):
    """The base class of preparations, which convert new rows to inputs of a model.

    Subclasses are frozen dataclasses whose fields can be written as JSON.
    """

    kind: ClassVar[str]
    class_names: tuple[str, ...] = ()  # in the order of the class numbers; () if classes have no names

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the model's outputs; () if they are not known."""
        return self.class_names

    @property
    def site_names(self) -> tuple[str, ...]:
        """The names of the sites with statistics of their own; () if rows of all sites are prepared in the same way."""
        return ()

    @property
    def files_digest(self) -> str:
        """A digest of other files that are needed to prepare rows, such as a tokenizer's; "" if there are none.

        It must be equal at all sites.
        """
        return ""

    @abstractmethod
    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        """Read and prepare the rows of a request; raise UserError if they do not match the training rows."""

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and the fields of this preparation as JSON values; `preparation_from_dict` is the inverse."""
        fields: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json")
        return {"kind": self.kind, **fields}

    def is_equal(self, other: Preparation | None) -> bool:
        """Return whether `other` prepares rows in the same way as this preparation."""
        return other is not None and self.to_dict() == other.to_dict()


def preparation_from_dict(fields: Any) -> Preparation:
    """Rebuild a preparation from the result of `to_dict`; raise ValueError if a value is invalid."""
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if kind not in PREPARATION_KINDS:
        raise ValueError(f"kind: {kind!r} is not allowed; must be one of {', '.join(PREPARATION_KINDS)}")
    module, _, name = PREPARATION_KINDS[kind].partition(":")
    rest = {key: value for key, value in fields.items() if key != "kind"}
    try:
        preparation: Preparation = TypeAdapter(getattr(import_module(module), name)).validate_python(rest)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['input']!r}: {first['msg']}") from error
    return preparation


def apply_reading_options(
    preparation: Preparation, options: Mapping[str, Any], ignore_others: bool = False
) -> Preparation:
    """Return a copy of a preparation with other options for reading new files.

    Args:
        preparation: the preparation of the training rows.
        options: new values of options of the data source, by name without the prefix `data.`.
        ignore_others: whether options that do not describe the format of a file are ignored; if false, UserError is
            raised for them.

    Raises:
        UserError: an option does not apply to new files of this run, or its value is not allowed.
    """
    fields = preparation.to_dict()
    known = [key for key in (*READING_OPTIONS, *SHARED_FILES) if key in fields]
    for key, value in options.items():
        if key not in (*known, *TRAINING_ONLY) and not (ignore_others and key not in READING_OPTIONS):
            names = ", ".join(f"data.{key}" for key in known)
            remedy = f"only {names} may be set, to describe the format of FILE" if names else f"remove data.{key}"
            raise UserError(
                f"data.{key} cannot be changed, because new rows are prepared like the training rows; {remedy}"
            )
        if key == "delimiter" and (not isinstance(value, str) or len(value) != 1):
            raise UserError(f"data.{key}: {value!r} is not allowed; must be one character")
    try:
        return preparation_from_dict(fields | {key: value for key, value in options.items() if key in known})
    except ValueError as error:
        raise UserError(f"data.{error}") from error


def find_common_preparation(parts: Sequence[Preparation | None]) -> Preparation | None:
    """Return the preparation that all parts of a data set share; None if the parts differ or have none."""
    first = parts[0]
    return first if first is not None and all(first.is_equal(each) for each in parts[1:]) else None


@dataclass(frozen=True)
class ReadyInputs(Preparation):
    """The preparation for a data source that defines none: new rows must already be inputs of the model.

    Args:
        sample: the shape and type of a sample as a string (`encode_format` in common/inputs.py).
    """

    sample: str

    kind: ClassVar[str] = "ready"

    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        shape, dtype = decode_format(self.sample)
        arrays, where = load_arrays(
            request, "an .npz file with inputs of the model, prepared like those of the training"
        )
        names = list(shape) if isinstance(shape, dict) else ["x"]
        tensors = {}
        for name in names:
            expected = dtype[name] if isinstance(dtype, dict) else dtype
            if name not in arrays:
                raise UserError(f"{where} has no array {name!r}; its arrays: {', '.join(arrays) or 'none'}")
            x = torch.from_numpy(np.ascontiguousarray(arrays[name]))
            if x.is_floating_point() > expected.is_floating_point or (
                x.dtype == torch.uint8 and expected.is_floating_point
            ):
                needed = str(expected).removeprefix("torch.")
                raise UserError(f"{where}: {name} is {arrays[name].dtype}; must be {needed}")
            tensors[name] = x.to(expected)
        inputs = Inputs(tensors) if isinstance(shape, dict) else tensors["x"]
        check_sample(inputs, shape, where)
        reason = "because the data source of this run does not define how it prepares rows (Dataset.preparation)"
        warnings.warn(f"{where}: the rows are passed to the model unprepared, {reason}", stacklevel=2)
        return NewRows({"row": np.arange(len(inputs))}, inputs)


def check_sample(x: Any, shape: Shape, where: str) -> None:
    """Raise UserError if x (n, ...) has no rows, or its rows do not have the shape of the training samples."""
    if not len(x) or get_sample_shape(x) != shape:
        raise UserError(
            f"{where}: rows are {describe_samples(x[:1])}; must have the shape of a training sample, {shape}"
        )


def make_ready_inputs(shape: Shape, dtype: Type) -> ReadyInputs:
    """Return the preparation for new rows that are already inputs of the model, each of this shape and type."""
    return ReadyInputs(encode_format(shape, dtype))


def load_arrays(request: PredictionRequest, what: str) -> tuple[dict[str, np.ndarray], str]:
    """Load named arrays from an .npz file or from memory; return them and their origin for error messages.

    Args:
        request: the request, whose rows are a file, an array, or a dict of named arrays.
        what: a description of the file that this run needs, for error messages.

    Raises:
        UserError: the file cannot be read, or an array does not contain rows of numbers.
    """
    rows = request.rows
    if isinstance(rows, (np.ndarray, Tensor)):
        rows = {"x": rows}
    if isinstance(rows, Mapping):
        arrays = {str(name): np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x) for name, x in rows.items()}
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf" or array.ndim == 0:
                raise UserError(
                    f"rows: {name} has dtype {array.dtype} and shape {array.shape}; must contain numbers, one row for "
                    "each sample"
                )
        return arrays, "rows"
    path = check_path(request, takes="an .npz file, an array (n, ...), or a mapping of names to arrays")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive), str(path)
    except Exception as error:  # zip, zlib and numpy's header may raise anything for a damaged file
        needed = f"this run needs {what}, written by numpy.savez(FILE, x=...)"
        raise UserError(f"{path} cannot be read as an .npz file of numeric arrays: {error}; {needed}") from error


def to_paths(rows: Sequence[Any], takes: str) -> list[Path]:
    """Convert a list of file names to paths.

    Args:
        rows: the list.
        takes: a description of the rows that are allowed, for the message.

    Raises:
        UserError: the list is empty, or an item is not a file name.
    """
    if not rows or not all(isinstance(row, (str, Path)) for row in rows):
        types = ", ".join({type(row).__name__ for row in rows})
        what = f"a list of {types}" if types else "an empty list"
        raise UserError(f"rows: {what} is not allowed for this run; must be {takes}")
    return [Path(row) for row in rows]


def check_path(request: PredictionRequest, folder: bool = False, takes: str = "a file") -> Path:
    """Return the path of the requested file, after checking that it exists.

    Args:
        request: the request, whose rows are a file.
        folder: whether the path may be a folder.
        takes: a description of the rows that are allowed, for error messages.

    Raises:
        UserError: the request contains no path, or the path does not exist.
    """
    if not isinstance(request.rows, (str, Path)):
        raise UserError(f"rows: {type(request.rows).__name__} is not allowed for this run; must be {takes}")
    path = Path(request.rows)
    if not (path.is_file() or (folder and path.is_dir())):
        raise UserError(f"{path} {'is a folder, but must be a file' if path.is_dir() else 'does not exist'}")
    return path
