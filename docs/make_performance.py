"""Write docs/performance.md from the recorded benchmarks.   python docs/make_performance.py > docs/performance.md

Reads the files benchmarks/results/PART.json, which benchmarks/suite.py writes, and draws docs/figures/performance_*.png
(--no-figures: only the page). Parts without a file are listed as not measured.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measure import parse_result, parse_results  # noqa: E402
from suite import PARTS, RESULTS  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
HEAD = """# Performance

`python docs/make_performance.py > docs/performance.md` generates this page from the files in benchmarks/results. `make
bench` repeats all measurements, and `python benchmarks/suite.py PART` repeats those of one part. `python
benchmarks/PART.py --help` describes a part and its options.

A ratio is fedmpi's time divided by the time of a reference implementation of the same work; if it is below 1, fedmpi is
faster. Most reference implementations are handwritten PyTorch programs that are part of the benchmarks. Both programs
are run alternately, and all numbers are medians. The times hold for the named machine only, while the ratios depend
less on the machine.
"""


def results(folder=RESULTS):
    """Return {part: content of its file}, in the order of the suite."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def elsewhere(name, folder=RESULTS):
    """Return the results of a part on other machines: benchmarks/results/MACHINE/PART.json (`suite.py --results`)."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"*/{name}.json"))]


def number(side):
    value = side[1]
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def section(name, found):
    lines = [f"## {PARTS[name].title}", ""]
    if found is None:
        return [*lines, f"Not measured yet: `python benchmarks/suite.py {name}`.", ""]
    return [
        *lines,
        *measured(found),
        *(
            line
            for other in elsewhere(name)
            for line in ["This part was also measured on another machine:", "", *measured(other)]
        ),
    ]


def measured(found):
    machine = found["machine"]
    versions = ", ".join(
        f"{key} {machine[key]}" for key in ("python", "torch", "mpi4py", "openmpi") if machine.get(key)
    )
    lines = [
        f"Measured on {machine['date']} at commit {machine['commit']}. Machine: {machine['processor']}, "
        f"{machine['memory_gib']} GiB of memory; load average before the run: {machine['load_before']}. "
        f"Versions: {versions}.",
        "",
    ]
    for command in found["commands"]:
        parsed = [(text, parse_results(text)) for text in command["lines"] if text.strip()]
        lines += [f"`{command['command']}`, {command['seconds']} s", ""]
        tabled = [row for _, several in parsed for row in several]
        if tabled:
            lines += ["| what | | | ratio | |", "| --- | --- | --- | --- | --- |"]
            for row in tabled:
                sides = [f"{row[side][0]} {number(row[side])} {row['unit']}" for side in ("ours", "theirs")]
                lines.append(f"| {row['what']} | {' | '.join(sides)} | {row['ratio']:.2f} | {row['note']} |")
            lines.append("")
        rest = [text for text, several in parsed if not several]
        if rest:
            lines += ["```text", *rest, "```", ""]
    return lines


def points(found):
    """Yield (kind, d, ranks, seconds, training, extrapolated) for each line about scaling."""
    for text in found["commands"][0]["lines"] if found else ():
        row = parse_result(text)
        match = row and re.match(r"(strong|weak), (\d+) ranks, \d+ clients, d=([\d,]+)$", row["what"])
        if match:
            kind, ranks, d = match.groups()
            yield kind, d, int(ranks), row["ours"][1], row["theirs"][1], row["ours"][0] == "fit"


def draw_scaling(found, path):
    from matplotlib.figure import Figure

    from fedmpi.analysis.charts import COLOURS, MARKERS, save_figure

    all_points = list(points(found))
    figure = Figure(figsize=(9, 4), layout="constrained")
    kinds = list(dict.fromkeys(point[0] for point in all_points))
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for i, d in enumerate(dict.fromkeys(point[1] for point in all_points)):
            mine = sorted(point for point in all_points if point[:2] == (kind, d))
            style = {"color": COLOURS[i], "marker": MARKERS[i], "markersize": 4}
            measured, fitted = ([point for point in mine if point[5] == is_fit] for is_fit in (False, True))
            axes.plot([p[2] for p in measured], [p[3] for p in measured], "-", label=f"d = {d}", **style)
            if fitted:
                style["markerfacecolor"] = "white"
                axes.plot([p[2] for p in fitted], [p[3] for p in fitted], "--", label=f"d = {d}, by the fit", **style)
        alone = sorted({(point[2], point[4]) for point in all_points if point[0] == kind})
        axes.plot([p[0] for p in alone], [p[1] for p in alone], ":", color="0.4", label="training alone")
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds per round", title=f"{kind} scaling")
        axes.set_xticks(sorted({point[2] for point in all_points if point[0] == kind}), minor=False)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize="small")
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def draw_ratios(found, path):
    """Draw the ratios of all parts to their reference implementations, as bars."""
    from matplotlib.figure import Figure

    from fedmpi.analysis.charts import BLACK, COLOURS, save_figure

    bars = []
    for i, name in enumerate(each for each in found if each not in ("scaling", "peers", "rules")):
        lines = [text for command in found[name]["commands"] for text in command["lines"]]
        mine = [row for text in lines for row in parse_results(text)]
        bars += [(f"{row['what']}: {row['theirs'][0]}", row["ratio"], COLOURS[i % len(COLOURS)]) for row in mine]
    figure = Figure(figsize=(9, 0.8 + 0.24 * len(bars)), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars))
    ratios, colours = [ratio for _, ratio, _ in bars], [colour for *_, colour in bars]
    drawn = axes.barh(places, [ratio - 1 for ratio in ratios], left=1, color=colours, height=0.7)
    axes.bar_label(drawn, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize="x-small")
    axes.set_yticks(places, [what for what, *_ in bars], fontsize="x-small")
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set(
        xscale="log",
        xlabel="fedmpi's time divided by that of the reference (below 1: fedmpi is faster)",
        ylim=(len(bars), -1),
    )
    axes.set_xlim(0.5 * min(ratios, default=1), 2 * max(ratios, default=1))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "235" else "")
    axes.grid(alpha=0.3, axis="x")
    save_figure(figure, path)
    return bars


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-figures", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    asked = parser.parse_args()
    found = results(asked.results)
    page = [HEAD]
    if set(found) - {"scaling", "peers", "rules"}:
        page += ["![ratios of all parts](figures/performance_ratios.png)", ""]
        if not asked.no_figures:
            draw_ratios(found, asked.figures / "performance_ratios.png")
    for name in PARTS:
        page += section(name, found.get(name))
        if name == "scaling" and name in found:
            page += ["![seconds per round by number of ranks](figures/performance_scaling.png)", ""]
            if not asked.no_figures:
                draw_scaling(found[name], asked.figures / "performance_scaling.png")
    print("\n".join(page).rstrip())


if __name__ == "__main__":
    main()
