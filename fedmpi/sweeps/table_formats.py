"""A sweep's table as text, Markdown, LaTeX (booktabs) or CSV, and as a picture."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.text import metric_title
from fedmpi.sweeps.expand import Sweep
from fedmpi.sweeps.table import (
    Cells,
    about_differences,
    caption,
    collect,
    difference,
    differences,
    gaps,
    grid,
    head,
    published_of,
    sides,
    text,
    verdict,
)

PICTURES = (".png", ".svg", ".pdf")
SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
}


def analyse(
    sweep: Sweep, metric: str | None, of: str | None, rows: str | None, to: Path | None, say: Callable[[str], None]
) -> None:
    """Show the table, and write it to a file: .md, .tex, .csv, .txt, or as a picture: .png, .svg, .pdf."""
    writers = {".md": markdown, ".tex": latex, ".csv": as_csv, ".txt": lambda cells: "\n".join(text(cells)) + "\n"}
    if to is not None and to.suffix not in (*writers, *PICTURES):
        raise UserError(f"--to: {to}: a name that ends in {', '.join((*writers, *PICTURES))} is needed")
    cells = collect(sweep, metric, of, rows)
    for line in text(cells):
        say(line)
    if to is not None:
        try:
            if to.suffix in PICTURES:
                picture(cells, to)
            else:
                to.write_text(writers[to.suffix](cells), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--to: {to}: {error.strerror}; choose another file") from error
        say(f"written: {to}")


def picture(cells: Cells, to: Path) -> Path:
    """Draw a line for each column over the labels of the rows: means over seeds with standard deviations as bars.

    A cell that lacks seeds is left out with a warning, as its mean would be over other seeds.
    """
    from fedmpi.analysis import figures

    if not cells.axes:
        raise UserError(f"--to: {to}: a picture needs an axis other than seed to be over, and this sweep has none")
    rows, columns = sides(cells)
    lines, lacks = {}, list[str]()
    for column in columns:
        points = []
        for row in rows:
            mean, std, seeds, asked = cells.statistics((*row, *column))
            complete = seeds == asked
            points.append((row[0], mean, std) if complete else (row[0], math.nan, math.nan))
            lacks += [" ".join((*row, *column))] if seeds and not complete else []
        if any(not math.isnan(mean) for _, mean, _ in points):
            lines[head(cells, column) if column else ""] = points
    if lacks:
        text = f"left out of the picture, as seeds are missing: {', '.join(lacks[:5])}"
        warnings.warn(f"{text}{', ...' if len(lacks) > 5 else ''}", stacklevel=2)
    x_label = cells.axes[0].name.rpartition(".")[2]
    return figures.save(figures.sweep(lines, x_label, metric_title(cells.metric)), to)


def markdown(cells: Cells) -> str:
    blocks = [_pipes(list(grid(cells, " ± "))), [_plain(caption(cells))]]
    paired = [[cell.replace("+-", "±") for cell in row] for row in differences(cells)]
    if len(paired) > 1:
        blocks += [_pipes(paired), [_plain(about_differences(paired[0][0]).replace("+-", "±"))]]
    blocks += [[_plain(line)] for line in gaps(cells)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _pipes(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ([_plain(cell) for cell in row] for row in rows)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _plain(cell: str) -> str:
    return re.sub(r"([\\|*_<`])", r"\\\1", cell)


def latex(cells: Cells) -> str:
    """Return a booktabs table; with several rows also one of paired differences."""
    notes = " ".join([caption(cells), *gaps(cells)])
    tables = [_tabular(list(grid(cells, " ± ")), notes)]
    paired = [[cell.replace("+-", "±") for cell in row] for row in differences(cells)]
    if len(paired) > 1:
        tables.append(_tabular(paired, about_differences(paired[0][0]).replace("+-", "±")))
    return r"% \usepackage{booktabs}" + "\n" + "\n".join(tables)


def _tabular(rows: Sequence[Sequence[str]], notes: str) -> str:
    head, *body = ([escaped(cell) for cell in row] for row in rows)
    top = [r"\begin{table}", r"\centering", rf"\caption{{{escaped(notes)}}}"]
    top += [rf"\begin{{tabular}}{{l{'c' * (len(head) - 1)}}}", r"\toprule", _line(head), r"\midrule"]
    return "\n".join([*top, *map(_line, body), r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _line(cells: Iterable[str]) -> str:
    """Join cells; {} stands before a bracket, which would be an option of the line break before it."""
    return " & ".join(f"{{}}{cell}" if cell.startswith("[") else cell for cell in cells) + r" \\"


def escaped(cell: str) -> str:
    """Escape a text for LaTeX.

    >>> print(escaped("a_b 5% α\\\\x"))
    a\\_b 5\\% $\\alpha$\\textbackslash{}x
    """
    return "".join(SPECIAL.get(c, c if ord(c) < 256 else _letter(c)) for c in " ".join(cell.split()))


def _letter(c: str) -> str:
    """Return a Greek letter in math mode, and any other letter that plain LaTeX lacks by its code point."""
    greek = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(c, ""))
    if greek is None:
        return f"U+{ord(c):04X}"
    name = re.sub("^la.*", "lambda", greek[2].lower())
    known = ["gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega"]
    if greek[1] == "SMALL":
        return "o" if name == "omicron" else rf"$\{name.replace('final ', '')}$"
    return rf"$\{name.title()}$" if name in known else name[0].upper()


def as_csv(cells: Cells) -> str:
    """Return the cells as CSV: labels, mean, standard deviation, seeds, paired difference, published value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [axis.name for axis in cells.axes]
    more = ["difference", "standard_error", "stands_out", "published", "published_std", "verdict"]
    writer.writerow([*names, cells.metric, "std", "seeds", "seeds_asked", *more])
    rows, columns = sides(cells)
    for at, column in product(range(len(rows)), columns):
        key = (*rows[at], *column)
        if key not in cells.keys:
            continue
        theirs = published_of(cells, key)
        paired = difference(cells, rows[at], column) if at else None
        reported = [*theirs, verdict(cells, key, theirs)] if theirs else ["", "", ""]
        row = [*cells.statistics(key), *(paired or ["", "", ""]), *reported]
        writer.writerow([*key, *("" if x != x else x for x in row)])
    return out.getvalue()
