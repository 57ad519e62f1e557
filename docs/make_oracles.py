"""Write the table of docs/oracles.md from benchmarks/results/oracles.csv.   python docs/make_oracles.py

The text between <!-- table --> and <!-- end --> is replaced; the rest of the page is written by hand.
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
VERDICTS = {
    "agrees": "agree",
    "explained": "differ by a known equation",
    "differs": "differ",
    "does not run": "cannot be run",
}
WHAT = ("loss, round 1", "loss, round 3", "model, round 1", "model, round 3", "own models, round 3")


def rows():
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def cell(row):
    """Return the relative difference, and the one that remains with the other program's equation, if it was run."""
    if row is None:
        return ""
    return f"{row['relative']} → {row['with_reading']}" if row["with_reading"] else row["relative"]


def verdict(of_method):
    verdicts = {row["verdict"] for row in of_method}
    why = {row["why"] for row in of_method} - {""}
    word = next(word for word in reversed(VERDICTS) if word in verdicts)
    return f"[{word}](#{why.pop()})" if why else word


def tables(found):
    """Return Markdown: the number of methods by verdict, then a row for each program and method."""
    methods = {}
    for row in found:
        methods.setdefault((row["peer"], row["version"], row["method"]), []).append(row)
    of_methods = Counter(verdict(lines).split("]")[0].strip("[") for lines in methods.values())
    of_numbers = Counter(row["verdict"] for row in found)
    counted = [
        f"Of {sum(counts.values())} {what} "
        + ", ".join(f"{counts[word]} {VERDICTS[word]}" for word in VERDICTS if counts[word])
        for what, counts in (("methods", of_methods), ("numbers", of_numbers))
    ]
    out = [". ".join(counted) + ".", "", f"| program | method | {' | '.join(WHAT)} | verdict |", "| --- " * 8 + "|"]
    for (peer, version, method), lines in methods.items():
        by = {row["what"]: row for row in lines}
        cells = [f"{NAMES[peer]} {version}", method, *(cell(by.get(what)) for what in WHAT), verdict(lines)]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, ""])


def page(text, found):
    """Return the page with a new table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables(found) + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), rows()))
