"""Small pieces of HTML. What comes from people and files goes through `text` alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedmpi.analysis.pages.section import Value

LONG = 24  # letters


def text(value: object) -> str:
    """Plain text as HTML: in elements and in quoted attributes. Characters that XML does not know are shown.

    >>> text('<b a="1">\\x00')
    '&lt;b a=&quot;1&quot;&gt;\\\\x00'
    """
    said = str(value)
    if not said.isprintable():
        said = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in said)
    return escape(said, quote=True)


def cell(value: Value) -> str:
    """A value for people.

    >>> cell(1234567), cell(0.123456), cell(float("nan")), cell(None), cell(96.1002785)
    ('1,234,567', '0.1235', '-', '-', '96.1')
    """
    if value is None or value != value:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    """A table; numbers are aligned right, and wide ones scroll by themselves."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
    right = [any(map(_figure, c)) and all(v is None or _figure(v) for v in c) for c in columns]
    marks = [' class="n"' if r else "" for r in right]
    top = "".join(f"<th{mark}>{text(name)}</th>" for mark, name in zip(marks, head, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{mark or _long(v)}>{text(cell(v))}</td>" for mark, v in zip(marks, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(value: Value) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and value[:1].isdigit() and len(value) < 20)


def _long(value: Value) -> str:
    """A word that a narrow screen may break, a path or a hash; or a sentence, which is not to become a pillar."""
    said = value if isinstance(value, str) else ""
    return ' class="b"' if max(map(len, said.split()), default=0) > LONG or len(said) > 2 * LONG else ""
