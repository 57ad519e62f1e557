"""Numbers as spreadsheets write them: decimal commas, marks between thousands, truth values, and their one spelling."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

WHOLE = re.compile(r"[-+]?[0-9]{1,99}")
DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)")
COMMA = re.compile(r"\s*[-+]?[0-9]+,[0-9]+([eE][-+]?[0-9]+)?\s*")  # a number with a decimal comma
DATE = re.compile(
    r"\s*([0-9]{4}([-./])[0-9]{1,2}\2[0-9]{1,2}|[0-9]{1,2}([-./])[0-9]{1,2}\3[0-9]{2}([0-9]{2})?)([T ].*)?\s*"
)
MARKS = {".": r"\.", ",": ",", "'": "['\u2019]", " ": "[ \u00a0\u202f]"}  # between thousands
TRUTH = {"true": "1", "false": "0", "yes": "1", "no": "0", "t": "1", "f": "0", "y": "1", "n": "0"}


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


def is_grouped(cell: str, mark: str, decimal: str) -> bool:
    """Return whether the cell is a number with `mark` before each group of three digits: 27,822 or 1,234,567.50."""
    pattern = rf"\s*[-+]?[0-9]{{1,3}}({MARKS[mark]}[0-9]{{3}})+([{decimal}][0-9]*)?\s*"
    return re.fullmatch(pattern, cell) is not None


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


def plain(cell: str, decimal: str, thousands: str | None) -> str:
    """Write a number as Python does; other cells stay as they are.

    >>> plain("1.234,5", ",", "."), plain("27,822", ".", ","), plain("Ulm", ",", "."), plain("1,5", ".", ",")
    ('1234.5', '27822', 'Ulm', '1,5')
    """
    if thousands is not None and is_grouped(cell, thousands, decimal):
        cell = re.sub(MARKS[thousands], "", cell.strip())
        return cell.replace(decimal, ".")
    return cell.replace(",", ".") if decimal == "," and COMMA.fullmatch(cell) else cell


def is_written_number(cell: str) -> bool:
    """Return whether the cell is a number in any of the spellings."""
    return is_number(cell) or COMMA.fullmatch(cell) is not None or is_grouped(cell, ",", ".")


def truth_as_digits(cells: np.ndarray) -> np.ndarray:
    """Replace True, yes, t, y, in any case of letters, by 1, and False, no, f, n by 0, in (n,) objects."""
    out = np.empty(len(cells), dtype=object)
    out[:] = [TRUTH.get(cell.strip().casefold(), cell) for cell in cells.tolist()]
    return out


def advice(cell: str, column: Sequence[str], decimal: str, thousands: str | None) -> str:
    """Return the remedy for a cell that is a date, or no number because of its commas or points; "" for other cells.

    Args:
        column: all cells of its column: if three digits follow every comma, commas separate thousands.
        decimal, thousands: the marks that the config names.
    """
    if DATE.fullmatch(cell):
        return (
            "if it is a date, leave the column out (data.drop), or replace it by a number beforehand, such as the days "
            "between two dates"
        )
    other = "," if decimal == "." else "."
    if thousands is not None:
        if thousands in cell and is_number(re.sub(MARKS[thousands], "", cell).replace(decimal, ".")):
            return f"data.thousands: {thousands!r} separates groups of three digits; correct the cell, or leave it out"
        return ""
    for mark in (other, "'", " "):
        if is_grouped(cell, mark, decimal):
            with_mark = [each for each in column if re.search(rf"[0-9]{MARKS[mark]}[0-9]", each)]
            if all(is_grouped(each, mark, decimal) for each in with_mark):
                certain = mark != "," or any(each.count(",") > 1 or "." in each for each in with_mark)
                doubt = "" if certain else '; say data.decimal: "," only if commas are decimal'
                name = {",": "comma", ".": "point", "'": "apostrophe", " ": "space"}[mark]
                return (
                    f'three digits follow every {name}: say data.thousands: "{mark}" if it separates thousands{doubt}'
                )
    if decimal == "." and is_grouped(cell, ".", ","):
        return 'say data.decimal: "," and data.thousands: "." if commas are decimal'
    if decimal == "." and COMMA.fullmatch(cell):
        return 'say data.decimal: "," if commas are decimal'
    return ""
