"""Write docs/reproduced.md from recorded verdicts.   python docs/make_reproduction.py > docs/reproduced.md

Reads benchmarks/results/reproduction/TABLE.json, the verdict.json that `fedmpi reproduce TABLE` writes, and
draws docs/figures/reproduction.png (--no-figure: only the page).
"""

import argparse
import json
import math
import shlex
from pathlib import Path

from fedmpi.config.renamed import RENAMED_KEYS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "reproduction"
FIGURE = ROOT / "docs" / "figures" / "reproduction.png"
WORDS = {"within the published spread": "=", "within two": "~", "outside": "!"}
HEAD = """# Reproduced results

`python docs/make_reproduction.py > docs/reproduced.md` generates this page from the files in
benchmarks/results/reproduction. Each cell shows the mean ± sample standard deviation over seeds that fedmpi obtained,
and in brackets the published mean ± standard deviation with a verdict:

| verdict | meaning |
| --- | --- |
| `=` | the means differ by at most one published standard deviation |
| `~` | the means differ by at most two published standard deviations |
| **`!`** | the means differ by more; [reproduction.md](reproduction.md) discusses these cells |

If the published standard deviation is missing or 0, that of fedmpi is used for the verdict.
"""


def results(folder=RESULTS):
    """{table: verdict.json}, by name. Overrides that were recorded with old names of keys have the new names."""
    record = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: {**each, "overrides": [with_new_name(text) for text in each["overrides"]]}
        for name, each in record.items()
    }


def with_new_name(override):
    key, equals, value = override.partition("=")
    return f"{RENAMED_KEYS.get(key, key)}{equals}{value}"


def compared_cells(record):
    return [cell for cell in record["cells"] if cell["verdict"] in WORDS]


def counts(record):
    """Return sentences with the number of cells for each verdict."""
    verdicts = [cell["verdict"] for cell in compared_cells(record)]
    one, two, other = (verdicts.count(word) for word in WORDS)
    return (
        f"Of {len(verdicts)} means, {one} differ from the published ones by at most one published standard deviation, "
        f"{two} by at most two, and {other} by more. {100 * (one + two) / len(verdicts):.0f} % are thus within two."
    )


def format_mean(mean, std, digits):
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")


def position(cell):
    """Return (row, column) of a cell: its first label; its other labels and the metric."""
    first, *others = cell["labels"].values()
    return first, " ".join([*others, cell["metric"].replace("_", " ")])


def section(name, record):
    cells = {position(cell): cell for cell in compared_cells(record)}
    rows, columns = (list(dict.fromkeys(key[at] for key in cells)) for at in (0, 1))
    digits = 1 if max(abs(cell["published"]) for cell in cells.values()) >= 2 else 3
    digits += digits == 1 and min(cell["published_std"] or 1 for cell in cells.values()) < 0.1
    seeds = "-".join(map(str, sorted({cell["seeds"] for cell in cells.values()})))
    source = record["published"]
    words = shlex.join(["fedmpi", "reproduce", name, *record["overrides"]])
    yield f"## {name}\n\nThe published values are those of {source}. {counts(record)} Seeds per mean: {seeds}.\n"
    yield f"Command: `{words}`, run with fedmpi {record['fedmpi']} and torch {record['torch']}.\n"
    yield "| | " + " | ".join(columns) + " |"
    yield "| --- |" + " --- |" * len(columns)
    for row in rows:
        shown = []
        for column in columns:
            cell = cells.get((row, column))
            if cell is None:
                shown.append("")
                continue
            sign = WORDS[cell["verdict"]].replace("!", "**!**")
            theirs = format_mean(cell["published"], cell["published_std"], digits)
            shown.append(f"{format_mean(cell['mean'], cell['std'], digits)} [{theirs} {sign}]")
        yield f"| {row} | " + " | ".join(shown) + " |"
    yield ""


def draw(tables, path):
    """Draw a panel for each table: published means on x, ours on y, with error bars, coloured by verdict."""
    from matplotlib.figure import Figure

    from fedmpi.analysis.charts import BLUE, GREEN, RED, save_figure

    styles = {"within the published spread": (BLUE, "o"), "within two": (GREEN, "s"), "outside": (RED, "^")}
    across = min(len(tables), 3)
    down = math.ceil(len(tables) / across)
    canvas = Figure(figsize=(4.6 * across, 5 * down), layout="constrained")
    panels = list(canvas.subplots(down, across, squeeze=False).flat)
    for axes in panels:
        axes.set_visible(False)
    for axes, (name, record) in zip(panels, tables.items(), strict=False):
        axes.set_visible(True)
        cells = compared_cells(record)
        ends = [value for cell in cells for value in (cell["published"], cell["mean"])]
        margin = 0.04 * (max(ends) - min(ends)) or 1.0
        limits = min(ends) - margin, max(ends) + margin
        axes.plot(limits, limits, "-", color="0.6", linewidth=1)
        for word, (colour, marker) in styles.items():
            mine = [cell for cell in cells if cell["verdict"] == word]
            if mine:
                axes.errorbar(
                    [cell["published"] for cell in mine],
                    [cell["mean"] for cell in mine],
                    [cell["std"] or 0 for cell in mine],
                    [cell["published_std"] or 0 for cell in mine],
                    fmt=marker,
                    color=colour,
                    markersize=4,
                    elinewidth=0.6,
                    alpha=0.8,
                    label=f"{word} ({len(mine)})",
                )
        metric = cells[0]["metric"].partition("@")[0].replace("_", " ")
        unit = " (%)" if max(ends) > 2 else ""
        axes.set(xlim=limits, ylim=limits, xlabel=f"published {metric}{unit}", ylabel=f"fedmpi{unit}", title=name)
        axes.set_box_aspect(1)
        axes.legend(frameon=False, fontsize="small", loc="upper left")
        axes.grid(alpha=0.3)
    save_figure(canvas, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-figure", action="store_true")
    asked = parser.parse_args()
    tables = results()
    if not asked.no_figure:
        draw(tables, FIGURE)
    every = {"cells": [cell for record in tables.values() for cell in record["cells"]]}
    page = [
        HEAD,
        "![published against ours](figures/reproduction.png)\n",
        f"The following numbers refer to all tables together. {counts(every)}\n",
    ]
    page += [line for name, record in tables.items() for line in section(name, record)]
    print("\n".join(page).rstrip())


if __name__ == "__main__":
    main()
