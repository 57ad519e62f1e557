"""Sections as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedmpi.analysis.pages.html import table, text
from fedmpi.analysis.pages.section import Figure, Section, Table, Text
from fedmpi.analysis.pages.style import SCRIPT, STYLE

BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what odd contents of files lead to
Draw = Callable[[Figure], str]  # the SVG of a figure


def page(title: str, lead: Sequence[str], sections: Sequence[Section], draw: Draw) -> str:
    """The whole page. lead: lines below the title."""
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'sha256-{_digest()}'"
    links = "".join(f'<a href="#{text(s.name)}">{text(s.title)}</a>' for s in sections)
    parts = "\n".join(_told(each, draw) for each in sections)
    said = "".join(f"<p>{text(line)}</p>" for line in lead)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{text(title)}</h1>{said}<nav>{links}</nav></header>
<main>
{parts}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def as_csv(figure: Figure) -> str:
    """The numbers behind a figure, in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(figure.head)
    writer.writerows([["" if v is None or v != v else v for v in row] for row in figure.data])
    return out.getvalue()


def damaged(error: Exception) -> Text:
    """What stands in place of what cannot be told."""
    why = f"This part cannot be made: a file of the run directory is not as fedmpi writes it ({error!r})."
    return Text(why, warning=True)


def _told(section: Section, draw: Draw) -> str:
    """Numbers that are none may only be noticed where they are drawn."""
    try:
        return _section(section, draw)
    except BROKEN as error:
        return _section(replace(section, parts=(damaged(error),)), draw)


def _section(section: Section, draw: Draw) -> str:
    body = "\n".join(_part(part, draw) for part in section.parts)
    return f'<section id="{text(section.name)}"><h2>{text(section.title)}</h2>\n{body}\n</section>'


def _part(part: Figure | Table | Text, draw: Draw) -> str:
    if isinstance(part, Text):
        return f'<p class="{"warn" if part.warning else "main" if part.main else "say"}">{text(part.text)}</p>'
    if isinstance(part, Table):
        head = f"<h3>{text(part.title)}</h3>" if part.title else ""
        note = f'<p class="note">{text(part.note)}</p>' if part.note else ""
        body = table(part.head, part.rows)
        body = f"<details><summary>{text(part.folded)}</summary>{body}</details>" if part.folded else body
        return f"{head}{note}{body}"
    name, data = text(part.name), base64.b64encode(as_csv(part).encode()).decode()
    save = f'<a download="{name}.csv" href="data:text/csv;base64,{data}">CSV</a>' if part.data else ""
    note = f'<p class="note">{text(part.note)}</p>' if part.note else ""
    return (
        f'<figure id="figure-{name}"><figcaption><h3>{text(part.title)}</h3>'
        f'<span class="save" data-name="{name}">{save}</span></figcaption>{draw(part)}{note}</figure>'
    )


def _digest() -> str:
    """By which the browser knows the page's only script, and runs no other."""
    return base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
