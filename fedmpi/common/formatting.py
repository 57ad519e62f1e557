"""Format numbers, durations and tables for the output of all commands."""

from __future__ import annotations

from collections.abc import Sequence


def format_number(value: object) -> str:
    """Format a number: integers with commas, floats with four significant digits, NaN as "-".

    >>> format_number(12345678), format_number(0.123456), format_number(float("nan")), format_number("runs/a")
    ('12,345,678', '0.1235', '-', 'runs/a')
    """
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_duration(seconds: float) -> str:
    """Format a duration in seconds with about two digits and a suitable unit.

    >>> format_duration(0.0321), format_duration(12.34), format_duration(75), format_duration(9000)
    ('32 ms', '12 s', '1 min', '2.5 h')
    """
    if seconds < 59.5:
        return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def format_table(rows: Sequence[Sequence[object]], align: str = "right") -> list[str]:
    """Format rows of values as the lines of a table.

    Args:
        rows: the values of each row, which are formatted by `format_number`.
        align: "right" or "left", the alignment of all columns but the first, which is left-aligned.

    >>> format_table([("run", "up"), ("a", 1000)])
    ['run     up', 'a    1,000']
    >>> format_table([("round", "ratio"), ("10", 0.5)], "left")
    ['round  ratio', '10     0.5']
    """
    cells = [[format_number(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    signs = "<" + (">" if align == "right" else "<") * (len(widths) - 1)
    return ["  ".join(f"{x:{s}{w}}" for x, s, w in zip(row, signs, widths, strict=True)).rstrip() for row in cells]
