"""Preparations: the statistics that a data source fits to training rows, to turn new files into inputs of a model.

A source attaches a `Preparation` to its `Dataset` and prepares its own rows with it, so that training and prediction
share one code path. A run saves it with its model (runtime/record/data_files.py).
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
    "texts": "fedmpi.data.sources.texts:TextPreparation",
}
# Options of data sources that say how a file is read; they may differ between training files and new files.
READING_OPTIONS = (
    *("delimiter", "decimal", "folder", "image_column", "label_column", "author_column", "text_column"),
    "image_pattern",
)
TRAINING_ONLY = ("root", "download")  # options that concern the training files only


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows to predict, prepared like the training rows."""

    ids: Mapping[str, Any]  # columns (n,) that identify the rows, such as the line in a file
    x: Any  # samples (n, ...)
    y: Tensor | None = None  # targets (n, ...) if the file has them
    why_no_targets: str = ""  # why all or some rows have no targets, for messages
    sites: Sequence[str] = ()  # (n,) the site of each row; () if it is not known
    has_target: Tensor | None = None  # (n,) bool: rows whose targets count; None: all rows
    where: Callable[[int], str] | None = None  # name of row k in messages, such as file and line


@dataclass(frozen=True)
class PredictionRequest:
    """The rows that a user wants predictions for.

    Args:
        site: the site of the rows, if the user names one.
        ids: columns of the file to copy to the predictions.
    """

    rows: Any  # a file, or rows in memory
    site: str | None = None
    ids: tuple[str, ...] = ()


class Preparation(ABC):
    """The rules that turn new rows into inputs of a model. Subclasses are frozen dataclasses of JSON values."""

    kind: ClassVar[str]
    class_names: tuple[str, ...] = ()  # in the order of the class numbers; () if classes have no names

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the model's outputs; () if they are not known."""
        return self.class_names

    @property
    def site_names(self) -> tuple[str, ...]:
        """The sites by whose training rows new rows can be prepared; () if all rows are prepared alike."""
        return ()

    @abstractmethod
    def read(self, request: PredictionRequest) -> NewRows:
        """Return the prepared rows of a request. Raises UserError if they do not fit the training rows."""

    def to_dict(self) -> dict[str, Any]:
        """Return kind and fields as JSON values; `from_facts` is the inverse."""
        fields: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json")
        return {"kind": self.kind, **fields}

    def is_equal(self, other: Preparation | None) -> bool:
        """Return whether the other preparation prepares rows in the same way."""
        return other is not None and self.to_dict() == other.to_dict()


def preparation_from_dict(facts: Any) -> Preparation:
    """Return the preparation with the facts of `Preparation.facts`. Raises ValueError for other values."""
    kind = facts.get("kind") if isinstance(facts, dict) else None
    if kind not in PREPARATION_KINDS:
        raise ValueError(f"kind is {kind!r}; known: {', '.join(PREPARATION_KINDS)}")
    module, _, name = PREPARATION_KINDS[kind].partition(":")
    rest = {key: value for key, value in facts.items() if key != "kind"}
    try:
        preparation: Preparation = TypeAdapter(getattr(import_module(module), name)).validate_python(rest)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['input']!r}: {first['msg']}") from error
    return preparation


def apply_reading_options(preparation: Preparation, given: Mapping[str, Any], others: bool = False) -> Preparation:
    """Return the preparation with options of the data source that apply to new files.

    Args:
        given: options as in a config, without `data.`.
        others: ignore options that do not concern the new file.

    Raises:
        UserError: an option that new files of this run do not have, or a value that is not allowed.
    """
    facts = preparation.to_dict()
    known = [key for key in READING_OPTIONS if key in facts]
    for key, value in given.items():
        if key not in (*known, *TRAINING_ONLY) and not (others and key not in READING_OPTIONS):
            names = ", ".join(f"data.{key}" for key in known)
            remedy = f"of data, {names} can be given here, which say how FILE is read" if names else "leave it out"
            raise UserError(f"data.{key}: new rows are prepared as those of the training were; {remedy}")
        if key == "delimiter" and (not isinstance(value, str) or len(value) != 1):
            raise UserError(f"data.{key}: {value!r} is not allowed; must be one character")
    try:
        return preparation_from_dict(facts | {key: value for key, value in given.items() if key in known})
    except ValueError as error:
        raise UserError(f"data.{error}") from error


def find_common_preparation(parts: Sequence[Preparation | None]) -> Preparation | None:
    """Return the preparation that all parts of a data set have in common, or None if there is none."""
    first = parts[0]
    return first if first is not None and all(first.is_equal(each) for each in parts[1:]) else None


@dataclass(frozen=True)
class ReadyInputs(Preparation):
    """The preparation of a source without one, such as a user's own: new rows are inputs of the model, as arrays.

    sample: the shape and type of a sample as text (common/inputs.py).
    """

    sample: str

    kind: ClassVar[str] = "ready"

    def read(self, request: PredictionRequest) -> NewRows:
        shape, dtype = decode_format(self.sample)
        arrays, where = load_arrays(request, "the model's inputs, prepared as the data source of the training does it")
        names = list(shape) if isinstance(shape, dict) else ["x"]
        tensors = {}
        for name in names:
            wanted = dtype[name] if isinstance(dtype, dict) else dtype
            if name not in arrays:
                raise UserError(f"{where} has no array {name!r}; it holds {', '.join(arrays) or 'none'}")
            x = torch.from_numpy(np.ascontiguousarray(arrays[name]))
            if x.is_floating_point() > wanted.is_floating_point or (
                x.dtype == torch.uint8 and wanted.is_floating_point
            ):
                needed = str(wanted).removeprefix("torch.")
                raise UserError(f"{where}: {name} is {arrays[name].dtype}; {needed} is needed")
            tensors[name] = x.to(wanted)
        inputs = Inputs(tensors) if isinstance(shape, dict) else tensors["x"]
        check_sample(inputs, shape, where)
        reason = "the data source of this run does not say how it prepares rows"
        warnings.warn(f"{where} is taken as ready inputs of the model: {reason}", stacklevel=2)
        return NewRows({"row": np.arange(len(inputs))}, inputs)


def check_sample(x: Any, shape: Shape, where: str) -> None:
    """Raise UserError if rows do not have the shape of the training samples."""
    if not len(x) or get_sample_shape(x) != shape:
        raise UserError(
            f"{where} holds rows of {describe_samples(x[:1])}; a sample of the training has the shape {shape}"
        )


def make_ready_inputs(shape: Shape, dtype: Type) -> ReadyInputs:
    """Return the preparation of ready inputs for samples of this shape and type."""
    return ReadyInputs(encode_format(shape, dtype))


def load_arrays(request: PredictionRequest, what: str) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays of an .npz file or in memory by name, and their origin for error messages.

    Args:
        what: a description of the arrays that are needed, for error messages.
    """
    rows = request.rows
    if isinstance(rows, (np.ndarray, Tensor)):
        rows = {"x": rows}
    if isinstance(rows, Mapping):
        arrays = {str(name): np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x) for name, x in rows.items()}
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf" or array.ndim == 0:
                raise UserError(f"rows: {name} is {array.dtype} of shape {array.shape}; rows of numbers are needed")
        return arrays, "rows"
    path = check_path(request, takes="an .npz file, an array (n, ...), or a mapping of names to arrays")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive), str(path)
    except Exception as error:  # zip, zlib and numpy's header may raise anything for a damaged file
        needed = f"this run takes {what}: numpy.savez(FILE, x=...)"
        raise UserError(f"{path} is no readable .npz file of plain arrays: {error}; {needed}") from error


def to_paths(rows: Sequence[Any], takes: str) -> list[Path]:
    """Return a list of files as paths. Raises UserError for other lists.

    Args:
        takes: what may be given, for error messages.
    """
    if not rows or not all(isinstance(row, (str, Path)) for row in rows):
        types = ", ".join({type(row).__name__ for row in rows}) or "nothing"
        raise UserError(f"rows: a list of {types} is not understood by this run; give {takes}")
    return [Path(row) for row in rows]


def check_path(request: PredictionRequest, folder: bool = False, takes: str = "a file") -> Path:
    """Return the path of the file to read, or of the folder if that is allowed.

    Args:
        takes: what may be given, for error messages.

    Raises:
        UserError: there is no such file.
    """
    if not isinstance(request.rows, (str, Path)):
        raise UserError(f"rows: {type(request.rows).__name__} is not understood by this run; give {takes}")
    path = Path(request.rows)
    if not (path.is_file() or (folder and path.is_dir())):
        raise UserError(f"{path} {'is a folder; a file is needed' if path.is_dir() else 'is not there'}")
    return path
