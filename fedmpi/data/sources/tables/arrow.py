"""Read Apache Arrow files with pyarrow: Parquet files, and data sets saved by Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError


def _require_pyarrow(path: Path) -> None:
    """Raise UserError if pyarrow, which reads the file, is not installed."""
    if find_spec("pyarrow") is None:
        raise UserError(f"{path} cannot be read, because pyarrow is not installed; pip install 'fedmpi[parquet]'")


def read_parquet(path: Path) -> dict[str, np.ndarray]:
    """Read a Parquet file, and return its columns, each converted by `convert_cells`."""
    _require_pyarrow(path)
    from pyarrow import parquet  # imported here, because the import takes half a second

    try:
        table = parquet.read_table(path)
    except Exception as error:  # a damaged file can raise many errors
        raise UserError(f"{path} cannot be read as Parquet: {error}; save it again") from error
    return {name: convert_cells(table.column(name)) for name in table.column_names}


def read_arrow_streams(paths: Sequence[Path]) -> Any:
    """Read files in Arrow's streaming format as one pyarrow table."""
    _require_pyarrow(paths[0])
    import pyarrow

    try:
        tables = []
        for path in paths:
            with pyarrow.memory_map(str(path)) as file:
                tables.append(pyarrow.ipc.open_stream(file).read_all())
        return pyarrow.concat_tables(tables)
    except Exception as error:
        raise UserError(
            f"{paths[0].parent}: the .arrow files cannot be read: {error}; save the data set again"
        ) from error


def convert_cells(column: Any) -> np.ndarray:
    """Convert a column of an Arrow table to float64, (n,), with NaN for nulls, or to strings, (n,), with "" for nulls.

    Dates, decimal numbers, lists and other types are converted by Python's `str`.
    """
    import pyarrow

    kind = pyarrow.types
    if kind.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if kind.is_boolean(column.type):
        column = column.cast(pyarrow.int8())
    if kind.is_integer(column.type):
        try:
            column = column.cast(pyarrow.float64())
        except pyarrow.ArrowInvalid:  # as floats, distinct identifiers beyond 2^53 could become equal
            column = column.cast(pyarrow.string())
    if kind.is_floating(column.type):
        return column.cast(pyarrow.float64(), safe=False).to_numpy().astype(np.float64)
    return np.array(["" if cell is None else str(cell) for cell in column.to_pylist()], dtype=object)


def convert_inputs(column: Any, name: str, path: Path) -> Any:
    """Convert a column of an Arrow table to inputs of a model.

    Args:
        name: the name of the column, for messages.
        path: the folder of the data set, for messages; image paths are relative to it.

    Returns:
        (n, 1) for numbers; (n, length) or (n, length, ...) for lists or nested lists of equal length; for images, a
        list of their encoded bytes, or of their file paths if the column contains only paths.

    Raises:
        UserError: a row is null or differs in length from row 0, or the type of the column is not supported.
    """
    import pyarrow
    from pyarrow import compute

    kind, values, shape = pyarrow.types, column.combine_chunks(), [len(column)]
    if kind.is_struct(column.type):
        return [_read_image_cell(cell or {}, row, name, path) for row, cell in enumerate(column.to_pylist())]
    values = values.chunk(0) if isinstance(values, pyarrow.ChunkedArray) else values
    if isinstance(values, pyarrow.ExtensionArray):  # the types Array2D, Array3D, ... of `datasets`
        values = values.storage
    while kind.is_list(values.type) or kind.is_large_list(values.type) or kind.is_fixed_size_list(values.type):
        lengths = compute.list_value_length(values).fill_null(-1).to_numpy(zero_copy_only=False)
        deviating = np.flatnonzero((lengths != lengths[0]) | (lengths < 1))
        if len(deviating):
            row, length = deviating[0] // int(np.prod(shape[1:])), max(int(lengths[deviating[0]]), 0)
            remedy = f"but {lengths[0]} in row 0; pad or truncate the rows to the same length"
            raise UserError(f"{path}, row {row}: column {name!r} contains {length} values, {remedy}")
        shape.append(int(lengths[0]))
        values = values.flatten()
    if kind.is_boolean(values.type):
        values = values.cast(pyarrow.int8())
    if not (kind.is_integer(values.type) or kind.is_floating(values.type)):
        raise UserError(f"{path}: column {name!r} is {column.type}; must contain numbers, lists of numbers, or images")
    return values.to_numpy(zero_copy_only=False).reshape(shape if len(shape) > 1 else (-1, 1))


def _read_image_cell(cell: Mapping[str, Any], row: int, name: str, path: Path) -> bytes | Path:
    """Return the encoded bytes or the file path of an image from a cell of the `Image` type of `datasets`."""
    if cell.get("bytes"):
        return bytes(cell["bytes"])
    if not cell.get("path"):
        raise UserError(f"{path}, row {row}: column {name!r} contains no image; drop the row")
    return path / cell["path"]
