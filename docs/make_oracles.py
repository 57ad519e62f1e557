"""The tables of docs/oracles.md from benchmarks/results/oracles.csv.   python docs/make_oracles.py

What stands between <!-- table --> and <!-- end --> is written anew; the rest of the page is written by hand.
"""

import csv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "oracles.md", ROOT / "benchmarks" / "results" / "oracles.csv"
BEGIN, END = "<!-- table -->\n", "<!-- end -->"
NAMES = {
    "fluke": "fluke",
    "pfl": "pfl-research",
    "fedlab": "FedLab",
    "flower": "Flower",
    "pfllib": "PFLlib",
    "flgo": "flgo",
}
SAID = {
    "agrees": "agree",
    "explained": "differ by an equation that is known",
    "differs": "differ",
    "does not run": "cannot run",
}
WHAT = ("loss, round 1", "loss, round 3", "model, round 1", "model, round 3", "own models, round 3")


def rows():
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def cell(row):
    """The relative difference; where there is one, also what is left of it with the other program's equation."""
    if row is None:
        return ""
    return f"{row['relative']} → {row['with_reading']}" if row["with_reading"] else row["relative"]


def verdict(of_method):
    said = {row["verdict"] for row in of_method}
    why = {row["why"] for row in of_method} - {""}
    word = next(word for word in reversed(SAID) if word in said)
    return f"[{word}](#{why.pop()})" if why else word


def tables(found):
    """Markdown: a count, then a line a program and method."""
    methods = {}
    for row in found:
        methods.setdefault((row["peer"], row["version"], row["method"]), []).append(row)
    of_methods = Counter(verdict(lines).split("]")[0].strip("[") for lines in methods.values())
    of_numbers = Counter(row["verdict"] for row in found)
    counted = [
        f"Of {sum(counts.values())} {what} "
        + ", ".join(f"{counts[word]} {SAID[word]}" for word in SAID if counts[word])
        for what, counts in (("methods", of_methods), ("numbers", of_numbers))
    ]
    out = [". ".join(counted) + ".", "", f"| program | method | {' | '.join(WHAT)} | verdict |", "| --- " * 8 + "|"]
    for (peer, version, method), lines in methods.items():
        by = {row["what"]: row for row in lines}
        cells = [f"{NAMES[peer]} {version}", method, *(cell(by.get(what)) for what in WHAT), verdict(lines)]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def page(text, found):
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables(found) + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), rows()))
