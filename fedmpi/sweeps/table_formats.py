"""Write the results table of a sweep as text, Markdown, LaTeX (booktabs) or CSV, or plot it."""

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
    CellKey,
    ResultsTable,
    TableCell,
    collect_results,
    compare_with_published,
    compute_paired_difference,
)

PART_TITLES = {
    "last": "after the last round",
    "mean_last_10": "mean of the last ten evaluations",
    "best": "best round",
    "selected": "after the round chosen on validation rows",
}
VERDICT_LEGEND = (
    "= within the published standard deviation (ours if none is published), ~ within two, ! outside, ? none known"
)
FILE_SUFFIXES = (".md", ".tex", ".csv", ".txt", ".png", ".svg", ".pdf")
LATEX_ESCAPES = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"},
}
Rows = list[list[str]]


def print_and_write_table(
    sweep: Sweep,
    metric: str | None,
    summary_part: str | None,
    rows: str | None,
    to: Path | None,
    print_line: Callable[[str], None],
) -> None:
    """Print the results table of a sweep and, if requested, write it to a file.

    Args:
        metric, summary_part, rows: as in `collect_results`.
        to: the file; its suffix selects the format: .md, .tex, .csv, .txt, or, for a plot, .png, .svg or .pdf. None: no
            file is written.
        print_line: prints a line of the table.

    Raises:
        UserError: if the results cannot be collected, or the file cannot be written.
    """
    if to is not None and to.suffix not in FILE_SUFFIXES:
        raise UserError(f"--to: {to} is not allowed; must be a file name ending in {', '.join(FILE_SUFFIXES)}")
    table = collect_results(sweep, metric, summary_part, rows)
    lines = format_text(table)
    for line in lines:
        print_line(line)
    if to is None:
        return
    texts = {
        ".md": format_markdown(table),
        ".tex": format_latex(table),
        ".csv": format_csv(to_records(table)),
        ".txt": "\n".join(lines),
    }
    try:
        if to.suffix in texts:
            to.write_text(texts[to.suffix].rstrip() + "\n", encoding="utf-8")
        else:
            plot_table(table, to)
    except OSError as error:
        raise UserError(f"--to: cannot write {to}: {error.strerror}; choose another file") from error
    print_line(f"written: {to}")


def build_tables(table: ResultsTable) -> list[tuple[Rows, str]]:
    """Return the table of means and, if rows share seeds, the table of paired differences, each with a caption."""

    def format_rows(keys: Sequence[CellKey], write: Callable[[ResultsTable, CellKey], str]) -> Rows:
        return [[" ".join(row), *(write(table, (*row, *column)) for column in table.columns)] for row in keys]

    heading = [table.format_column_heading(column) for column in table.columns]
    first, *others = table.rows
    means = [[table.axes[0].name if table.axes else "", *heading], *format_rows(table.rows, _format_mean)]
    differences = format_rows(others, _format_difference)
    result = [(means, format_caption(table))]
    if any(cell != "-" for row in differences for cell in row[1:]):
        caption = (
            f"paired differences to {' '.join(first)} over the seeds that both have, ± standard error; * if 0 is "
            "outside the 95 % interval (Student's t) of that cell"
        )
        result.append(([[" ".join(first), *heading], *differences], caption))
    return result


def _format_mean(table: ResultsTable, key: CellKey) -> str:
    """Format a cell of the table of means, such as `52.00 ± 2.00 (2 of 3) [51.00 ± 1.00 =]`.

    The example shows our mean and standard deviation, that 2 of 3 seeds are finished, and in brackets the published
    mean and standard deviation with the verdict.
    """
    cell = table.cells.get(key)
    if cell is None:
        return ""
    num_finished, num_seeds = len(cell.values), len(cell.seeds)
    text = "nan" if cell.non_finite_seeds else "-"
    if num_finished:
        remark = (
            f" ({num_finished} of {num_seeds})" if num_finished < num_seeds else f" ({pluralize(num_seeds, 'seed')})"
        )
        text = _format_mean_and_std(table, cell.mean, cell.std) + ("" if num_finished == table.num_seeds else remark)
    if cell.published:
        text += f" [{_format_mean_and_std(table, *cell.published)} {compare_with_published(cell, table.decimals)}]"
    return text


def _format_difference(table: ResultsTable, key: CellKey) -> str:
    """Format a paired difference, its standard error and its verdict, if it has one, such as `+3 ± 0.58 * better`."""
    compared = compute_paired_difference(table, key)
    if compared is None:
        return "-"
    mean, error, word = compared
    return f"{mean:+.4g} ± {error:.2g}" + (f" * {word}" if word else "")


def _format_mean_and_std(table: ResultsTable, mean: float, spread: float) -> str:
    return f"{mean:.{table.decimals}f}" + ("" if math.isnan(spread) else f" ± {spread:.{table.decimals}f}")


def format_caption(table: ResultsTable) -> str:
    """Return the caption of the table of means: its metric, the chosen candidates, and the command that creates it."""
    what = f"{table.metric.replace('_', ' ')}, {PART_TITLES[table.summary_part]}"
    text = f"{what}, mean and sample standard deviation (n - 1) over {pluralize(table.num_seeds, 'seed')}"
    if table.source:
        text += f"; in brackets: {table.source}: {VERDICT_LEGEND}"
    if plan := table.sweep.tuning:
        seeds = f", seed {', '.join(plan.using[SEED])}" if SEED in plan.using else ""
        metric = f"{plan.metric_name.replace('_', ' ')} {PART_TITLES[plan.summary_part]}{seeds}"
        text += f"; candidates chosen by {metric}: {'; '.join(map(str, table.sweep.tuning_choices().values()))}"
    command = [
        "fedmpi",
        "table",
        str(table.sweep.path),
        *map(redact_override, table.sweep.all_overrides),
        *table.command_options,
    ]
    return f"{text}. Created by: {shlex.join(command)}"


def format_notes(table: ResultsTable) -> list[str]:
    """Return the notes below the table, which name the cells and seeds whose results are missing or not a number."""
    missing = {key: cell.missing_seeds for key, cell in table.cells.items() if cell.missing_seeds}
    bad = {key: cell.non_finite_seeds for key, cell in table.cells.items() if cell.non_finite_seeds}
    lines = list(table.notes)
    for what, seeds_of in (("missing", missing), ("not a number", bad)):
        parts = [
            " ".join(key) + (f" (seed {', '.join(seeds)})" if any(seeds) else "") for key, seeds in seeds_of.items()
        ]
        if parts:
            lines.append(f"{what}: {shorten('; '.join(parts), 400)}")
    return [*lines, f"to train what is missing: {table.sweep.command}"] if missing else lines


def format_text(table: ResultsTable) -> list[str]:
    """Return the table as lines of text for the console."""
    blocks = [[caption, "", *formatting.format_table(rows, "left")] for rows, caption in build_tables(table)]
    lines = [line.replace("±", "+-") for block in blocks for line in (*block, "")]
    return [*lines, *format_notes(table)] if format_notes(table) else lines[:-1]


def format_markdown(table: ResultsTable) -> str:
    """Return the table in Markdown, with its caption and notes."""
    blocks = [
        block
        for rows, caption in build_tables(table)
        for block in (_format_markdown_table(rows), _escape_markdown(caption))
    ]
    return "\n\n".join([*blocks, *map(_escape_markdown, format_notes(table))]) + "\n"


def _format_markdown_table(rows: Rows) -> str:
    """Format rows as a Markdown table; the first row is the header."""
    head, *body = ([_escape_markdown(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _escape_markdown(cell: str) -> str:
    return re.sub(r"([\\|*_<`])", r"\\\1", cell)


def format_latex(table: ResultsTable) -> str:
    """Return the table of means and, if there is one, the table of paired differences in LaTeX with booktabs."""
    (means, caption), *paired = build_tables(table)
    blocks = [
        _format_latex_table(means, " ".join([caption, *format_notes(table)])),
        *(_format_latex_table(rows, caption_of_pairs) for rows, caption_of_pairs in paired),
    ]
    return r"% \usepackage{booktabs}" + "\n" + "\n".join(blocks)


def _format_latex_table(rows: Rows, notes: str) -> str:
    """Format rows as a LaTeX table with `notes` as its caption; the first row is the header."""
    head, *body = (_format_latex_row(row) for row in rows)
    top = [r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(notes)}}}"]
    top += [rf"\begin{{tabular}}{{l{'c' * (len(rows[0]) - 1)}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _format_latex_row(row: Sequence[str]) -> str:
    r"""Format a row in LaTeX. A {} before a bracket keeps LaTeX from reading it as an option of the preceding \\."""
    return " & ".join(f"{{}}{escape_latex(c)}" if c.startswith("[") else escape_latex(c) for c in row) + r" \\"


def escape_latex(cell: str) -> str:
    r"""Escape LaTeX's special characters in a string, and replace line breaks with spaces.

    >>> print(escape_latex("a_b 5%"))
    a\_b 5\%
    """
    return "".join(LATEX_ESCAPES.get(c, c) for c in " ".join(cell.split()))


def to_records(table: ResultsTable) -> list[dict[str, Any]]:
    """Return a list with one dict per cell: labels, mean, standard deviation, paired difference, published value.

    Missing numbers are None.
    """
    rows = []
    for key, cell in table.cells.items():
        numbers: dict[str, Any] = {"mean": cell.mean, "std": cell.std}
        numbers |= {"seeds": len(cell.values), "seeds_asked": len(cell.seeds)}
        numbers["difference"], numbers["standard_error"], numbers["stands_out"] = (
            compute_paired_difference(table, key) or [None] * 3
        )
        numbers["published"], numbers["published_std"] = cell.published or (None, None)
        rows.append(
            {
                "labels": {axis.name: label for axis, label in zip(table.axes, key, strict=True)},
                "metric": table.metric,
                "of": table.summary_part,
                **{name: None if value != value else value for name, value in numbers.items()},
                "verdict": compare_with_published(cell, table.decimals) if cell.published else None,
            }
        )
    return rows


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the result of `to_records` as CSV, with one column per axis."""
    out = io.StringIO()
    flat = [{**row["labels"], **{name: value for name, value in row.items() if name != "labels"}} for row in rows]
    writer = csv.DictWriter(out, flat[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def plot_table(table: ResultsTable, to: Path) -> None:
    """Plot one line per column, with the row labels on the x axis and a band of ± one standard deviation.

    Cells with missing seeds are omitted, with a warning, because their mean would be taken over different seeds than
    that of the other cells.
    """
    from fedmpi.analysis import charts

    labels = [" ".join(row) for row in table.rows]
    numeric = all(re.fullmatch(r"\d+\.?\d*(e[+-]?\d+)?", label) for label in labels)
    x = [float(label) for label in labels] if numeric else [float(i) for i in range(len(labels))]
    series = []
    for column in table.columns:
        every = [table.cells.get((*row, *column), TableCell()) for row in table.rows]
        means = [math.nan if cell.missing_seeds or cell.non_finite_seeds else cell.mean for cell in every]
        low, high = ([m + sign * cell.std for m, cell in zip(means, every, strict=True)] for sign in (-1, 1))
        series.append(charts.Series(table.format_column_heading(column), x, means, low, high))
    if incomplete := [
        " ".join(key) for key, cell in table.cells.items() if cell.missing_seeds or cell.non_finite_seeds
    ]:
        warnings.warn(f"not plotted, because seeds are missing: {', '.join(incomplete)}", stacklevel=2)
    x_label = table.axes[0].name.rpartition(".")[2] if table.axes else ""
    log_x = numeric and min(x) > 0 and max(x) >= 30 * min(x)
    chart = charts.LineChart(series, x_label, format_metric_title(table.metric), log_x=log_x, ticks=labels)
    charts.write_chart(chart, to, f"{format_metric_title(table.metric)}, {PART_TITLES[table.summary_part]}")
