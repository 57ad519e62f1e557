"""Parts of a report page, and a function that renders them to a self-contained HTML file.

All strings in these parts are plain text, not HTML; the templates escape them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from fedmpi.analysis import charts
from fedmpi.common.text import escape_unprintable

MAX_CSV_ROWS = 20_000  # maximum number of CSV rows of a figure; a page does not contain the CSV data of larger figures
Value = float | int | str | None  # content of a cell; None and nan are shown as empty


@dataclass(frozen=True)
class Figure:
    """A chart with the numbers that it shows.

    Attributes:
        name: base name of the figure's files, unique on the page.
        head: header of its CSV file.
        data: rows of its CSV file.
        note: text below the chart.
    """

    name: str
    title: str
    chart: charts.Chart
    head: Sequence[str]
    data: Sequence[Sequence[Value]]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table on a report page.

    Attributes:
        collapsed_title: the title under which the table is collapsed until the reader clicks on it; if "", the table is
            not collapsed.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Value]]
    title: str = ""
    note: str = ""
    collapsed_title: str = ""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text, such as a remark or a warning."""

    text: str
    warning: bool = False


Part = Figure | Table | Paragraph


@dataclass(frozen=True)
class Section:
    """A section of a report page; its `name` serves as its anchor and is unique on the page."""

    name: str
    title: str
    parts: Sequence[Part]


def render_page(template: str, title: str, lead: Sequence[str], **values: Any) -> str:
    """Render a page as HTML.

    Args:
        template: the name of a template in the folder templates: page, card or site.
        title: the title of the page.
        lead: lines of text below the title.
        values: the variables of the template.
    """
    loader = PackageLoader("fedmpi.reports")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=format_cell
    )
    environment.filters |= {"csv": format_csv, "base64": base64.b64encode, "columns": choose_css_classes}
    environment.globals |= {"draw": lambda each: Markup(charts.render_svg(each.chart, each.name, each.title))}
    environment.globals["max_csv_rows"] = MAX_CSV_ROWS
    script, style = (loader.get_source(environment, name)[0] for name in ("page.js", "page.css"))
    values |= {"title": title, "lead": lead, "script": Markup(script), "style": Markup(style)}
    # The page's security policy allows only the script with this digest.
    values["digest"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(f"{template}.html.j2").render(values)


def format_cell(value: Any) -> str:
    """Format a value for a page; templates apply this function to every value that they print.

    >>> [format_cell(value) for value in (1234567, 0.123456, float("nan"), None, 96.1002785)]
    ['1,234,567', '0.1235', '-', '-', '96.1']
    """
    if isinstance(value, Markup):
        return value
    if value is None or value != value:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape_unprintable(value)


def format_csv(figure: Figure) -> str:
    """Format the data of a figure as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(figure.head)
    writer.writerows([["" if v is None or v != v else v for v in row] for row in figure.data])
    return out.getvalue()


def choose_css_classes(table: Table) -> list[str]:
    """Return the CSS class of each column of a table: "n" for numbers, which are right-aligned, or "" for no class."""
    classes = []
    for column in zip(*table.rows, strict=True):
        values = [value for value in column if value is not None]
        numbers = [isinstance(v, (int, float)) or (v[:1].isdigit() and len(v) < 20) for v in values]
        classes.append("n" if numbers and all(numbers) else "")
    return classes
