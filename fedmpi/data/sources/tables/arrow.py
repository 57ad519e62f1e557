"""Read Apache Arrow files with pyarrow, if it is installed: Parquet, and data sets saved by Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError


def _require_pyarrow(path: Path) -> None:
    if find_spec("pyarrow") is None:
        raise UserError(f"{path} is read by pyarrow, which is not installed; pip install 'fedmpi[parquet]'")


def read_parquet(path: Path) -> dict[str, np.ndarray]:
    """Read the columns of a Parquet file, each converted by `cells`."""
    _require_pyarrow(path)
    from pyarrow import parquet  # imported here, because that takes half a second

    try:
        table = parquet.read_table(path)
    except Exception as error:  # a damaged file can raise many errors
        raise UserError(f"{path} cannot be read as Parquet: {error}") from error
    return {name: convert_cells(table.column(name)) for name in table.column_names}


def read_arrow_streams(paths: Sequence[Path]) -> Any:
    """Read files in Arrow's streaming format as one table."""
    _require_pyarrow(paths[0])
    import pyarrow

    try:
        tables = []
        for path in paths:
            with pyarrow.memory_map(str(path)) as file:
                tables.append(pyarrow.ipc.open_stream(file).read_all())
        return pyarrow.concat_tables(tables)
    except Exception as error:
        raise UserError(f"{paths[0].parent}: its arrow files cannot be read: {error}; save it anew") from error


def convert_cells(column: Any) -> np.ndarray:
    """Return a column as (n,) float64 with NaN for nulls, or as (n,) text with "" for nulls.

    Dates, decimal numbers, lists and other types become the text that Python's `str` gives.
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
        except pyarrow.ArrowInvalid:  # as floats, identifiers beyond 2^53 could become equal
            column = column.cast(pyarrow.string())
    if kind.is_floating(column.type):
        return column.cast(pyarrow.float64(), safe=False).to_numpy().astype(np.float64)
    return np.array(["" if cell is None else str(cell) for cell in column.to_pylist()], dtype=object)


def convert_inputs(column: Any, name: str, path: Path) -> Any:
    """Convert a column of an Arrow table to inputs of a model.

    Returns:
        (n, 1) numbers; (n, length) or (n, length, ...) for lists, or nested lists, of one length; for images a list
        with the bytes of each, or with its file if the column has only paths.

    Raises:
        UserError: the first row that is null, or has another length than row 0.
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
        odd = np.flatnonzero((lengths != lengths[0]) | (lengths < 1))
        if len(odd):
            row, length = odd[0] // int(np.prod(shape[1:])), max(int(lengths[odd[0]]), 0)
            remedy = f"{lengths[0]} in row 0: pad or cut the rows to one length"
            raise UserError(f"{path}, row {row}: column {name!r} holds {length} values, {remedy}")
        shape.append(int(lengths[0]))
        values = values.flatten()
    if kind.is_boolean(values.type):
        values = values.cast(pyarrow.int8())
    if not (kind.is_integer(values.type) or kind.is_floating(values.type)):
        raise UserError(f"{path}: column {name!r} is {column.type}; numbers, lists of them, or pictures are understood")
    return values.to_numpy(zero_copy_only=False).reshape(shape if len(shape) > 1 else (-1, 1))


def _read_image_cell(cell: Mapping[str, Any], row: int, name: str, path: Path) -> bytes | Path:
    """Return the bytes, or the file, of the image in a cell of the type Image of `datasets`."""
    if cell.get("bytes"):
        return bytes(cell["bytes"])
    if not cell.get("path"):
        raise UserError(f"{path}, row {row}: column {name!r} holds no picture; drop the row")
    return path / cell["path"]
