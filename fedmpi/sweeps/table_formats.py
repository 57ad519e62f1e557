"""Write the table of a sweep as text, Markdown, LaTeX (booktabs) or CSV, or draw it as a figure."""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.common.text import count, metric_title, shorten
from fedmpi.config.loading import shown
from fedmpi.sweeps.axes import SEED
from fedmpi.sweeps.expand import Sweep
from fedmpi.sweeps.results_table import Cell, Cells, Key, collect, difference, verdict

WHAT = {
    "last": "after the last round",
    "mean_last_10": "mean of the last ten evaluations",
    "best": "best round",
    "selected": "after the round that validation rows chose",
}
SIGNS = "= within their standard deviation (ours where they give none), ~ within two, ! beyond, ? none is known"
ENDINGS = (".md", ".tex", ".csv", ".txt", ".png", ".svg", ".pdf")
LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"},
}
Rows = list[list[str]]


def show(
    sweep: Sweep, metric: str | None, of: str | None, rows: str | None, to: Path | None, say: Callable[[str], None]
) -> None:
    """Show the table of a sweep, and write it to a file if one is given. Other arguments are those of `table.collect`.

    Args:
        to: a file, whose suffix is the format: .md, .tex, .csv, .txt, or for a figure .png, .svg, .pdf.
    """
    if to is not None and to.suffix not in ENDINGS:
        raise UserError(f"--to: {to}: a name that ends in {', '.join(ENDINGS)} is needed")
    cells = collect(sweep, metric, of, rows)
    lines = text(cells)
    for line in lines:
        say(line)
    if to is None:
        return
    texts = {".md": markdown(cells), ".tex": latex(cells), ".csv": as_csv(records(cells)), ".txt": "\n".join(lines)}
    try:
        if to.suffix in texts:
            to.write_text(texts[to.suffix].rstrip() + "\n", encoding="utf-8")
        else:
            draw(cells, to)
    except OSError as error:
        raise UserError(f"--to: {to}: {error.strerror}; choose another file") from error
    say(f"written: {to}")


def tables(cells: Cells) -> list[tuple[Rows, str]]:
    """Return the table of means and, if rows can be paired, the table of differences, each with its caption."""

    def rows(keys: Sequence[Key], write: Callable[[Cells, Key], str]) -> Rows:
        return [[" ".join(row), *(write(cells, (*row, *column)) for column in cells.columns)] for row in keys]

    heading = [cells.heading(column) for column in cells.columns]
    first, *others = cells.rows
    means = [[cells.axes[0].name if cells.axes else "", *heading], *rows(cells.rows, _mean_cell)]
    differences = rows(others, _difference_cell)
    result = [(means, caption(cells))]
    if any(cell != "-" for row in differences for cell in row[1:]):
        about = (
            f"paired differences to {' '.join(first)} over seeds that both have, ± standard error; * where 0 is "
            "outside the 95 % interval (Student's t), cell by cell"
        )
        result.append(([[" ".join(first), *heading], *differences], about))
    return result


def _mean_cell(cells: Cells, key: Key) -> str:
    """Format a cell as `52.00 ± 2.00 (2 of 3) [51.00 ± 1.00 =]`.

    The parts are our mean and standard deviation, how many of its seeds are done, and the published value.
    """
    cell = cells.cells.get(key)
    if cell is None:
        return ""
    seeds, asked = len(cell.values), len(cell.asked)
    text = "nan" if cell.bad else "-"
    if seeds:
        few = f" ({seeds} of {asked})" if seeds < asked else f" ({count(asked, 'seed')})"
        text = _pair(cells, cell.mean, cell.std) + ("" if seeds == cells.seeds else few)
    if cell.published:
        text += f" [{_pair(cells, *cell.published)} {verdict(cell, cells.decimals)}]"
    return text


def _difference_cell(cells: Cells, key: Key) -> str:
    compared = difference(cells, key)
    if compared is None:
        return "-"
    mean, error, word = compared
    return f"{mean:+.4g} ± {error:.2g}" + (f" * {word}" if word else "")


def _pair(cells: Cells, mean: float, spread: float) -> str:
    return f"{mean:.{cells.decimals}f}" + ("" if math.isnan(spread) else f" ± {spread:.{cells.decimals}f}")


def caption(cells: Cells) -> str:
    """Return the caption of the table of means, with the metric, the choice of `best`, and the command that made it."""
    what = f"{cells.metric.replace('_', ' ')}, {WHAT[cells.of]}"
    text = f"{what}, mean and sample standard deviation (n - 1) over {count(cells.seeds, 'seed')}"
    if cells.source:
        text += f"; in brackets: {cells.source}: {SIGNS}"
    if best := cells.sweep.best:
        over = f", seed {', '.join(best.using[SEED])}" if SEED in best.using else ""
        chosen = "; ".join(map(str, cells.sweep.choices().values()))
        text += f"; chosen by {best.figure.replace('_', ' ')} {WHAT[best.of]}{over}: {chosen}"
    command = ["fedmpi", "table", str(cells.sweep.path), *map(shown, cells.sweep.given), *cells.options]
    return f"{text}. Made by: {shlex.join(command)}"


def gaps(cells: Cells) -> list[str]:
    """Return the notes below the table, including which cells and seeds are missing or not a number."""
    missing = {key: cell.missing for key, cell in cells.cells.items() if cell.missing}
    bad = {key: cell.bad for key, cell in cells.cells.items() if cell.bad}
    lines = list(cells.notes)
    for what, seeds_of in (("missing", missing), ("not a number", bad)):
        parts = [
            " ".join(key) + (f" (seed {', '.join(seeds)})" if any(seeds) else "") for key, seeds in seeds_of.items()
        ]
        if parts:
            lines.append(f"{what}: {shorten('; '.join(parts), 400)}")
    return [*lines, f"to train what is missing: {cells.sweep.command}"] if missing else lines


def text(cells: Cells) -> list[str]:
    """Return the table as lines for the console."""
    blocks = [[about, "", *formatting.table(rows, "left")] for rows, about in tables(cells)]
    lines = [line.replace("±", "+-") for block in blocks for line in (*block, "")]
    return [*lines, *gaps(cells)] if gaps(cells) else lines[:-1]


def markdown(cells: Cells) -> str:
    blocks = [block for rows, about in tables(cells) for block in (_pipes(rows), _plain(about))]
    return "\n\n".join([*blocks, *map(_plain, gaps(cells))]) + "\n"


def _pipes(rows: Rows) -> str:
    head, *body = ([_plain(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _plain(cell: str) -> str:
    return re.sub(r"([\\|*_<`])", r"\\\1", cell)


def latex(cells: Cells) -> str:
    """Return the table in LaTeX (booktabs), and the table of paired differences if there is one."""
    (means, about), *paired = tables(cells)
    blocks = [_tabular(means, " ".join([about, *gaps(cells)])), *(_tabular(rows, words) for rows, words in paired)]
    return r"% \usepackage{booktabs}" + "\n" + "\n".join(blocks)


def _tabular(rows: Rows, notes: str) -> str:
    head, *body = (_latex_row(row) for row in rows)
    top = [r"\begin{table}", r"\centering", rf"\caption{{{escaped(notes)}}}"]
    top += [rf"\begin{{tabular}}{{l{'c' * (len(rows[0]) - 1)}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _latex_row(row: Sequence[str]) -> str:
    """Join the cells of a row; {} before a bracket keeps LaTeX from reading it as an option of the last line break."""
    return " & ".join(f"{{}}{escaped(c)}" if c.startswith("[") else escaped(c) for c in row) + r" \\"


def escaped(cell: str) -> str:
    r"""Escape a text for LaTeX.

    >>> print(escaped("a_b 5%"))
    a\_b 5\%
    """
    return "".join(LATEX.get(c, c) for c in " ".join(cell.split()))


def records(cells: Cells) -> list[dict[str, Any]]:
    """Return a dict for each cell with labels, mean, standard deviation, paired difference and published value.

    Unknown numbers are None.
    """
    rows = []
    for key, cell in cells.cells.items():
        numbers: dict[str, Any] = {"mean": cell.mean, "std": cell.std}
        numbers |= {"seeds": len(cell.values), "seeds_asked": len(cell.asked)}
        numbers["difference"], numbers["standard_error"], numbers["stands_out"] = difference(cells, key) or [None] * 3
        numbers["published"], numbers["published_std"] = cell.published or (None, None)
        rows.append(
            {
                "labels": {axis.name: label for axis, label in zip(cells.axes, key, strict=True)},
                "metric": cells.metric,
                "of": cells.of,
                **{name: None if value != value else value for name, value in numbers.items()},
                "verdict": verdict(cell, cells.decimals) if cell.published else None,
            }
        )
    return rows


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `records` as CSV, with a column for each axis."""
    out = io.StringIO()
    flat = [{**row["labels"], **{name: value for name, value in row.items() if name != "labels"}} for row in rows]
    writer = csv.DictWriter(out, flat[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def draw(cells: Cells, to: Path) -> None:
    """Draw the table as a figure with one line per column over the labels of the rows.

    The lines are means with bands of one standard deviation. Cells that lack seeds are left out with a warning, because
    their mean would be over other seeds.
    """
    from fedmpi.analysis import charts

    labels = [" ".join(row) for row in cells.rows]
    numeric = all(re.fullmatch(r"\d+\.?\d*(e[+-]?\d+)?", label) for label in labels)
    x = [float(label) for label in labels] if numeric else [float(i) for i in range(len(labels))]
    series = []
    for column in cells.columns:
        every = [cells.cells.get((*row, *column), Cell()) for row in cells.rows]
        means = [math.nan if cell.missing or cell.bad else cell.mean for cell in every]
        low, high = ([m + sign * cell.std for m, cell in zip(means, every, strict=True)] for sign in (-1, 1))
        series.append(charts.Series(cells.heading(column), x, means, low, high))
    if incomplete := [" ".join(key) for key, cell in cells.cells.items() if cell.missing or cell.bad]:
        warnings.warn(f"left out of the picture, as seeds are missing: {', '.join(incomplete)}", stacklevel=2)
    x_label = cells.axes[0].name.rpartition(".")[2] if cells.axes else ""
    log_x = numeric and min(x) > 0 and max(x) >= 30 * min(x)
    chart = charts.Lines(series, x_label, metric_title(cells.metric), log_x=log_x, ticks=labels)
    charts.write(chart, to, f"{metric_title(cells.metric)}, {WHAT[cells.of]}")
