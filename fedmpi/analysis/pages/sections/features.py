"""What features, heads and outputs of the models are like: probes `features` and `similarity` of analysis.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from fedmpi.analysis.pages.grouping import Curve, figure
from fedmpi.analysis.pages.run import Row, Run, number
from fedmpi.analysis.pages.runs import Group, Runs
from fedmpi.analysis.pages.section import Figure, Grid, Lines, Section, Series, Value

CLIENTS = 60  # of a map
GLOBAL, LOCAL = "global model", "local models, mean"
CURVES = (  # probe; its numbers, of a list the mean, and what they are of; title; y axis; note
    ("features", {"deviation": GLOBAL, "deviation_local": LOCAL}, "classifier variance",
     "standard deviation of a probability",
     "Standard deviation of a class's probability over the samples, mean over classes (FedUV)."),
    ("features", {"classifier": GLOBAL, "classifier_local": LOCAL}, "mean singular value of the classifier",
     "singular value", "Of the weights of the last layer; of the 32 largest, where there are more."),
    ("features", {"energy": GLOBAL, "energy_local": LOCAL}, "hyperspherical energy of features", "energy",
     "Mean of exp(-2 |u_i - u_j|²) over pairs of unit features: 1 where all of them have one direction."),
    ("features", {"uniformity": GLOBAL, "uniformity_local": LOCAL}, "FedUV's U of features", "U",
     "Mean of exp(-d / median d) over pairs of features, d squared distances."),
    ("features", {"rank": GLOBAL, "rank_local": LOCAL}, "effective rank of features", "directions",
     "Entropy of the singular values, as a number of directions."),
    ("similarity", {"after_mean": "with the new global model", "before_mean": "with the old global model",
     "pairs_mean": "with each other"}, "similarity of local models' features", "linear CKA",
     "1 for features that differ by a rotation and a scale. Means over the clients of a round, or over pairs."),
)  # fmt: skip
SPECTRA = {"spectrum": "singular values of features", "classifier": "singular values of the classifier"}
ABOUT = {
    "spectrum": "Standard deviations along the principal directions of the head's input.",
    "classifier": "Of the weights of the last layer.",
}


def seen(runs: Runs) -> Section | None:
    """Of one run global and local models beside each other, and maps; of several a line a group."""
    parts: list[Figure | None] = []
    for probe, shown, title, label, note in CURVES:
        name = f"{probe}-{next(iter(shown)).removesuffix('_mean')}-by-round"
        if runs.alone is not None:
            parts.append(_lines(runs.alone, probe, shown, name, title, label, note))
            continue
        for key, whose in list(shown.items())[::-1]:
            curve, ending = _of(probe, key), "" if key == next(iter(shown)) else f"-{key}"
            parts.append(figure(runs, name + ending, f"{title}: {whose}", label, curve, key, note))
    parts += [_spectrum(runs, key, title) for key, title in SPECTRA.items()]
    if runs.alone is not None:
        parts += [_predicted(runs.alone), _by_class(runs.alone), _matrix(runs.alone)]
    found = [part for part in parts if part is not None]
    return Section("features", "Features and outputs", found) if found else None


def _rows(run: Run, probe: str) -> list[tuple[int, Row]]:
    told = [(row.get("round"), row.get(probe)) for row in run.analysis]
    return [(t, row) for t, row in told if isinstance(t, int) and isinstance(row, dict)]


def _of(probe: str, name: str) -> Callable[[Run], Curve]:
    def curve(run: Run) -> Curve:
        return {t: v for t, row in _rows(run, probe) if (v := _mean(row.get(name))) is not None}

    return curve


def _lines(run: Run, probe: str, shown: dict[str, str], name: str, title: str, label: str, note: str) -> Figure | None:
    rows = [(t, [_mean(row.get(key)) for key in shown]) for t, row in _rows(run, probe)]
    if not any(v is not None for _, values in rows for v in values):
        return None
    t = [at for at, _ in rows]
    series = [Series(said, t, [values[i] for _, values in rows]) for i, said in enumerate(shown.values())]
    data: list[list[Value]] = [[at, *values] for at, values in rows]
    return Figure(name, title, Lines(series, "round", label), ("round", *shown), data, note)


def _spectrum(runs: Runs, key: str, title: str) -> Figure | None:
    """One run: the global model in the first and last round measured, and the local ones; several: by group, last."""
    if runs.alone is not None:
        rows = _rows(runs.alone, "features")
        ends = dict((*rows[:1], *rows[-1:]))
        found = {f"{GLOBAL}, round {t}": _numbers(row.get(key)) for t, row in ends.items()}
        found |= {f"{LOCAL}, round {t}": _numbers(row.get(f"{key}_local")) for t, row in rows[-1:]}
    else:
        found = {group.name(): _at_last(group, key) for group in runs.groups}
    found = {name: values for name, values in found.items() if values}
    if not found:
        return None
    series = [Series(name, list(range(1, len(values) + 1)), values) for name, values in found.items()]
    data: list[list[Value]] = [[name, i + 1, v] for name, values in found.items() for i, v in enumerate(values)]
    chart = Lines(series, "number of the singular value", "singular value", from_zero=True)
    which = "" if runs.alone is not None else " Of the global model in the last round measured, mean over the runs."
    return Figure(f"features-{key}", title, chart, ("of", "number", key), data, ABOUT[key] + which)


def _numbers(values: object) -> list[float]:
    found = [number(v) for v in values] if isinstance(values, list) else []
    return [v for v in found if v is not None] if None not in found else []


def _mean(value: object) -> float | None:
    """A number, or the mean of a list of them."""
    if isinstance(value, list):
        return fmean(values) if (values := _numbers(value)) else None
    return number(value)


def _at_last(group: Group, key: str) -> list[float]:
    ends = [_numbers(rows[-1][1].get(key)) for run in group.runs if (rows := _rows(run, "features"))]
    return [fmean(column) for column in zip(*filter(None, ends), strict=False)]


def _table(run: Run, probe: str, key: str) -> tuple[int, list[str], list[list[float | None]]] | None:
    """(the last round that has it, its clients' names, rows of numbers)"""
    for line in reversed(run.analysis):
        row, t, members = line.get(probe), line.get("round"), line.get("clients")
        values = row.get(key) if isinstance(row, dict) else None
        if isinstance(values, list) and values and isinstance(t, int) and isinstance(members, list):
            cells = [[number(v) for v in each] if isinstance(each, list) else [] for each in values]
            return t, [run.client_name(int(k)) for k in members], cells
    return None


def _map(
    name: str, title: str, sides: tuple[list[str], list[str]], values: list[list[float | None]],
    labels: tuple[str, str], unit: str, note: str,
) -> Figure:  # fmt: skip
    rows, columns = sides
    head = (labels[0], labels[1] if labels[1] != labels[0] else f"other {labels[1]}", unit)
    data: list[list[Value]] = [[rows[i], columns[j], v] for i, row in enumerate(values) for j, v in enumerate(row)]
    every, across = -(-len(rows) // CLIENTS) or 1, -(-len(columns) // CLIENTS) or 1
    cells = [[None if v is None else round(v, 3) for v in row[::across]] for row in values[::every]]
    chart = Grid(rows[::every], columns[::across], cells, *labels, unit, written=len(cells) <= 24)
    return Figure(name, title, chart, head, data, note)


def _predicted(run: Run) -> Figure | None:
    if (found := _table(run, "features", "predicted")) is None:
        return None
    t, clients, values = found
    note = "Mean probability that a local model gives to each class, on the same samples of the global test set."
    sides = clients, [str(c) for c in range(len(values[0]))]
    return _map("features-predicted", f"what local models predict, round {t}", sides, values, ("client", "class"),
                "probability", note)  # fmt: skip


def _by_class(run: Run) -> Figure | None:
    if (found := _table(run, "features", "by_class")) is None:
        return None
    t, _, values = found
    names = [str(c) for c in range(len(values))]
    note = "Mean probability that the global model gives to each class, by the class that samples are of."
    return _map("features-by-class", f"what the global model predicts, round {t}", (names, names), values,
                ("class", "predicted class"), "probability", note)  # fmt: skip


def _matrix(run: Run) -> Figure | None:
    if (found := _table(run, "similarity", "matrix")) is None:
        return None
    t, clients, values = found
    note = "Linear CKA of two local models' features on the same samples of the global test set."
    return _map("similarity-matrix", f"similarity of local models' features, round {t}", (clients, clients), values,
                ("client", "client"), "CKA", note)  # fmt: skip
