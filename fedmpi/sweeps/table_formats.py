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
from fedmpi.common.text import format_metric_title, pluralize, shorten
from fedmpi.config.loading import redact_override
from fedmpi.sweeps.axes import SEED
from fedmpi.sweeps.expand import Sweep
from fedmpi.sweeps.results_table import (
    Cell,
    CellKey,
    ResultsTable,
    collect_results,
    compare_with_published,
    paired_difference,
)

PART_TITLES = {
    "last": "after the last round",
    "mean_last_10": "mean of the last ten evaluations",
    "best": "best round",
    "selected": "after the round that validation rows chose",
}
VERDICT_LEGEND = (
    "= within their standard deviation (ours where they give none), ~ within two, ! beyond, ? none is known"
)
FILE_SUFFIXES = (".md", ".tex", ".csv", ".txt", ".png", ".svg", ".pdf")
LATEX_ESCAPES = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"},
}
Rows = list[list[str]]


def show_table(
    sweep: Sweep, metric: str | None, of: str | None, rows: str | None, to: Path | None, say: Callable[[str], None]
) -> None:
    """Show the table of a sweep, and write it to a file if one is given. Other arguments are those of `table.collect`.

    Args:
        to: a file, whose suffix is the format: .md, .tex, .csv, .txt, or for a figure .png, .svg, .pdf.
    """
    if to is not None and to.suffix not in FILE_SUFFIXES:
        raise UserError(f"--to: {to}: a name that ends in {', '.join(FILE_SUFFIXES)} is needed")
    cells = collect_results(sweep, metric, of, rows)
    lines = format_text(cells)
    for line in lines:
        say(line)
    if to is None:
        return
    texts = {
        ".md": format_markdown(cells),
        ".tex": format_latex(cells),
        ".csv": format_csv(to_records(cells)),
        ".txt": "\n".join(lines),
    }
    try:
        if to.suffix in texts:
            to.write_text(texts[to.suffix].rstrip() + "\n", encoding="utf-8")
        else:
            plot_table(cells, to)
    except OSError as error:
        raise UserError(f"--to: {to}: {error.strerror}; choose another file") from error
    say(f"written: {to}")


def build_tables(cells: ResultsTable) -> list[tuple[Rows, str]]:
    """Return the table of means and, if rows can be paired, the table of differences, each with its caption."""

    def rows(keys: Sequence[CellKey], write: Callable[[ResultsTable, CellKey], str]) -> Rows:
        return [[" ".join(row), *(write(cells, (*row, *column)) for column in cells.columns)] for row in keys]

    heading = [cells.column_heading(column) for column in cells.columns]
    first, *others = cells.rows
    means = [[cells.axes[0].name if cells.axes else "", *heading], *rows(cells.rows, _format_mean)]
    differences = rows(others, _format_difference)
    result = [(means, table_caption(cells))]
    if any(cell != "-" for row in differences for cell in row[1:]):
        about = (
            f"paired differences to {' '.join(first)} over seeds that both have, ± standard error; * where 0 is "
            "outside the 95 % interval (Student's t), cell by cell"
        )
        result.append(([[" ".join(first), *heading], *differences], about))
    return result


def _format_mean(cells: ResultsTable, key: CellKey) -> str:
    """Format a cell as `52.00 ± 2.00 (2 of 3) [51.00 ± 1.00 =]`.

    The parts are our mean and standard deviation, how many of its seeds are done, and the published value.
    """
    cell = cells.cells.get(key)
    if cell is None:
        return ""
    seeds, asked = len(cell.values), len(cell.seeds)
    text = "nan" if cell.non_finite_seeds else "-"
    if seeds:
        few = f" ({seeds} of {asked})" if seeds < asked else f" ({pluralize(asked, 'seed')})"
        text = _format_mean_and_std(cells, cell.mean, cell.std) + ("" if seeds == cells.num_seeds else few)
    if cell.published:
        text += f" [{_format_mean_and_std(cells, *cell.published)} {compare_with_published(cell, cells.decimals)}]"
    return text


def _format_difference(cells: ResultsTable, key: CellKey) -> str:
    compared = paired_difference(cells, key)
    if compared is None:
        return "-"
    mean, error, word = compared
    return f"{mean:+.4g} ± {error:.2g}" + (f" * {word}" if word else "")


def _format_mean_and_std(cells: ResultsTable, mean: float, spread: float) -> str:
    return f"{mean:.{cells.decimals}f}" + ("" if math.isnan(spread) else f" ± {spread:.{cells.decimals}f}")


def table_caption(cells: ResultsTable) -> str:
    """Return the caption of the table of means, with the metric, the choice of `tune`, and the command that made it."""
    what = f"{cells.metric.replace('_', ' ')}, {PART_TITLES[cells.summary_part]}"
    text = f"{what}, mean and sample standard deviation (n - 1) over {pluralize(cells.num_seeds, 'seed')}"
    if cells.source:
        text += f"; in brackets: {cells.source}: {VERDICT_LEGEND}"
    if best := cells.sweep.tuning:
        over = f", seed {', '.join(best.using[SEED])}" if SEED in best.using else ""
        chosen = "; ".join(map(str, cells.sweep.tuning_choices().values()))
        text += f"; chosen by {best.metric_name.replace('_', ' ')} {PART_TITLES[best.summary_part]}{over}: {chosen}"
    command = [
        "fedmpi",
        "table",
        str(cells.sweep.path),
        *map(redact_override, cells.sweep.all_overrides),
        *cells.command_options,
    ]
    return f"{text}. Made by: {shlex.join(command)}"


def table_notes(cells: ResultsTable) -> list[str]:
    """Return the notes below the table, including which cells and seeds are missing or not a number."""
    missing = {key: cell.missing_seeds for key, cell in cells.cells.items() if cell.missing_seeds}
    bad = {key: cell.non_finite_seeds for key, cell in cells.cells.items() if cell.non_finite_seeds}
    lines = list(cells.notes)
    for what, seeds_of in (("missing", missing), ("not a number", bad)):
        parts = [
            " ".join(key) + (f" (seed {', '.join(seeds)})" if any(seeds) else "") for key, seeds in seeds_of.items()
        ]
        if parts:
            lines.append(f"{what}: {shorten('; '.join(parts), 400)}")
    return [*lines, f"to train what is missing: {cells.sweep.command}"] if missing else lines


def format_text(cells: ResultsTable) -> list[str]:
    """Return the table as lines for the console."""
    blocks = [[about, "", *formatting.format_table(rows, "left")] for rows, about in build_tables(cells)]
    lines = [line.replace("±", "+-") for block in blocks for line in (*block, "")]
    return [*lines, *table_notes(cells)] if table_notes(cells) else lines[:-1]


def format_markdown(cells: ResultsTable) -> str:
    blocks = [
        block for rows, about in build_tables(cells) for block in (_markdown_table(rows), _escape_markdown(about))
    ]
    return "\n\n".join([*blocks, *map(_escape_markdown, table_notes(cells))]) + "\n"


def _markdown_table(rows: Rows) -> str:
    head, *body = ([_escape_markdown(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _escape_markdown(cell: str) -> str:
    return re.sub(r"([\\|*_<`])", r"\\\1", cell)


def format_latex(cells: ResultsTable) -> str:
    """Return the table in LaTeX (booktabs), and the table of paired differences if there is one."""
    (means, about), *paired = build_tables(cells)
    blocks = [
        _latex_table(means, " ".join([about, *table_notes(cells)])),
        *(_latex_table(rows, words) for rows, words in paired),
    ]
    return r"% \usepackage{booktabs}" + "\n" + "\n".join(blocks)


def _latex_table(rows: Rows, notes: str) -> str:
    head, *body = (_latex_row(row) for row in rows)
    top = [r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(notes)}}}"]
    top += [rf"\begin{{tabular}}{{l{'c' * (len(rows[0]) - 1)}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _latex_row(row: Sequence[str]) -> str:
    """Join the cells of a row; {} before a bracket keeps LaTeX from reading it as an option of the last line break."""
    return " & ".join(f"{{}}{escape_latex(c)}" if c.startswith("[") else escape_latex(c) for c in row) + r" \\"


def escape_latex(cell: str) -> str:
    r"""Escape a text for LaTeX.

    >>> print(escape_latex("a_b 5%"))
    a\_b 5\%
    """
    return "".join(LATEX_ESCAPES.get(c, c) for c in " ".join(cell.split()))


def to_records(cells: ResultsTable) -> list[dict[str, Any]]:
    """Return a dict for each cell with labels, mean, standard deviation, paired difference and published value.

    Unknown numbers are None.
    """
    rows = []
    for key, cell in cells.cells.items():
        numbers: dict[str, Any] = {"mean": cell.mean, "std": cell.std}
        numbers |= {"seeds": len(cell.values), "seeds_asked": len(cell.seeds)}
        numbers["difference"], numbers["standard_error"], numbers["stands_out"] = (
            paired_difference(cells, key) or [None] * 3
        )
        numbers["published"], numbers["published_std"] = cell.published or (None, None)
        rows.append(
            {
                "labels": {axis.name: label for axis, label in zip(cells.axes, key, strict=True)},
                "metric": cells.metric,
                "of": cells.summary_part,
                **{name: None if value != value else value for name, value in numbers.items()},
                "verdict": compare_with_published(cell, cells.decimals) if cell.published else None,
            }
        )
    return rows


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `records` as CSV, with a column for each axis."""
    out = io.StringIO()
    flat = [{**row["labels"], **{name: value for name, value in row.items() if name != "labels"}} for row in rows]
    writer = csv.DictWriter(out, flat[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def plot_table(cells: ResultsTable, to: Path) -> None:
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
        means = [math.nan if cell.missing_seeds or cell.non_finite_seeds else cell.mean for cell in every]
        low, high = ([m + sign * cell.std for m, cell in zip(means, every, strict=True)] for sign in (-1, 1))
        series.append(charts.Series(cells.column_heading(column), x, means, low, high))
    if incomplete := [
        " ".join(key) for key, cell in cells.cells.items() if cell.missing_seeds or cell.non_finite_seeds
    ]:
        warnings.warn(f"left out of the picture, as seeds are missing: {', '.join(incomplete)}", stacklevel=2)
    x_label = cells.axes[0].name.rpartition(".")[2] if cells.axes else ""
    log_x = numeric and min(x) > 0 and max(x) >= 30 * min(x)
    chart = charts.LineChart(series, x_label, format_metric_title(cells.metric), log_x=log_x, ticks=labels)
    charts.write_chart(chart, to, f"{format_metric_title(cells.metric)}, {PART_TITLES[cells.summary_part]}")
