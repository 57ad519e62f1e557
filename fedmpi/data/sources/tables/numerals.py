"""Numbers as spreadsheets write them, and the one spelling of a number that is a word."""

from __future__ import annotations

import re

import numpy as np

WHOLE = re.compile(r"[-+]?[0-9]{1,99}")
DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)")
MARKS = {".": r"\.", ",": ",", "'": "['\u2019]", " ": "[ \u00a0\u202f]"}  # between thousands
EXCHANGE = str.maketrans({",": ".", ".": ","})


def is_number(cell: str) -> bool:
    """Return whether Python reads the cell as a number; 1_0, which it reads as 10, is none."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def parsed(cells: np.ndarray) -> np.ndarray | None:
    """Return cells (n,), bytes or objects, as (n,) float64; None where one of them is no number (`is_number`)."""
    try:
        values = cells.astype(np.float64)
    except ValueError:
        return None
    odd = b"_" in cells.tobytes() if cells.dtype != object else any("_" in cell for cell in cells)
    return None if odd else values


def spelling(cell: str | int | float) -> str:
    """Write a cell as a word, a number in one spelling: 3.0 is 3.

    Whole numbers keep all their digits. Text with an exponent, as identifiers may have by chance (1e5, 10e4), is a word
    like others.
    """
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else repr(cell)
    if isinstance(cell, int):
        return str(cell)
    word = cell.strip()
    if WHOLE.fullmatch(word):
        return str(int(word))
    return spelling(float(word)) if DECIMAL.fullmatch(word) else word


def to_python(cell: str, decimal: str, thousands: str | None) -> str:
    """Write a number as Python does; a number with other marks than these becomes none.

    >>> to_python("1.234,5", ",", "."), to_python("27,822", ".", ","), to_python("1.5", ",", None)
    ('1234.5', '27822', '1,5')
    """
    if thousands is not None:
        mark = MARKS[thousands]
        if re.fullmatch(rf"\s*[-+]?[0-9]{{1,3}}({mark}[0-9]{{3}})+([{decimal}][0-9]*)?\s*", cell):
            cell = re.sub(mark, "", cell.strip())
    return cell.translate(EXCHANGE) if decimal == "," else cell
