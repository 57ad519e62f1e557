"""Drift and conflict of updates over the rounds: updates.jsonl (aggregation/update_stats.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

from fedmpi.analysis.pages.grouping import Curve, figure
from fedmpi.analysis.pages.run import Row, Run, number
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Figure, Grid, Lines, Section, Series, Text, Value

NAMED = 7  # clients with a line each
LEADING = 5  # eigenvalues with a line each
CLIENTS, ROUNDS = 60, 60  # of a map
MORE = (
    "Cosines and the spectrum are recorded where the server's rule forms the updates' Gram matrix, and with "
    "record.updates: gram for any rule."
)


def agreement(runs: Runs) -> Section | None:
    """How long updates are, how far they agree with each other and with what the server makes of them."""
    if not any(run.updates for run in runs.all):
        return None
    parts: list[Figure | Text | None] = [
        *([_by_client(runs.alone)] if runs.alone else []),
        _curve(
            runs, "norms", "length of the updates", "mean norm", lambda row: _mean(row.get("norms")),
            "Mean over the clients of a round."
        ) if runs.alone is None else None,
        _curve(
            runs, "kept", "what is left of them in the aggregate", "norm / mean norm", _kept,
            "The norm of the server's direction over the updates' mean norm: 1 where all clients agree, "
            "1/sqrt(m) where m updates of one length have nothing in common, 0 where they cancel."
        ),
        *_cosines(runs),
        _curve(
            runs, "negative-pairs", "pairs of clients in conflict", "share of pairs",
            lambda row: number(row.get("negative_pairs")), "Pairs whose updates have a cosine below 0."
        ),
        _spectrum(runs.alone) if runs.alone else _curve(
            runs, "spectrum", "share of the leading direction", "largest eigenvalue / sum", lambda row: _share(row, 0)
        ),
        _towards(runs.alone) if runs.alone else None,
    ]  # fmt: skip
    if not any("eigenvalues" in row for run in runs.all for row in run.updates):
        parts.append(Text(MORE))
    return Section("updates", "Updates: drift and conflict", [part for part in parts if part is not None])


def _curve(
    runs: Runs, name: str, title: str, y_label: str, value: Callable[[Row], float | None], note: str = ""
) -> Figure | None:
    def of(run: Run) -> Curve:
        return {row["round"]: v for row in _rows(run) if (v := value(row)) is not None}

    return figure(runs, f"updates-{name}", title, y_label, of, name.replace("-", "_"), note)


def _rows(run: Run) -> Iterator[Row]:
    return (row for row in run.updates if isinstance(row.get("round"), int))


def _mean(values: object) -> float | None:
    found = [v for each in values if (v := number(each)) is not None] if isinstance(values, list) else []
    return fmean(found) if found else None


def _kept(row: Row) -> float | None:
    whole, direction = _mean(row.get("norms")), number(row.get("direction"))
    return direction / whole if whole and direction is not None else None


def _share(row: Row, j: int) -> float | None:
    values = [number(v) or 0.0 for v in row.get("eigenvalues") or ()]
    return values[j] / sum(values) if len(values) > j and sum(values) > 0 else None


def _pairs(run: Run, name: str) -> dict[str, Curve]:
    """Of each client, by its name: round -> its number in the list `name`."""
    found: dict[int, Curve] = {}
    for row in _rows(run):
        for k, value in zip(row.get("clients") or (), row.get(name) or (), strict=False):
            if (v := number(value)) is not None:
                found.setdefault(int(k), {})[row["round"]] = v
    return {run.client_name(k): found[k] for k in sorted(found)}


def _by_client(run: Run) -> Figure | None:
    """Of a few clients a line each; of many the mean, and a band from the shortest to the longest."""
    of = _pairs(run, "norms")
    data: list[list[Value]] = [[t, name, value] for name, curve in of.items() for t, value in curve.items()]
    if len(of) <= NAMED:
        series = [Series(name, list(curve), list(curve.values())) for name, curve in of.items()]
        note = "The norm of each client's change of the weights, as much of it as travels."
    else:
        at: dict[int, list[float]] = {}
        for curve in of.values():
            for t, value in curve.items():
                at.setdefault(t, []).append(value)
        held = dict(sorted(at.items()))
        means, low, high = ([f(v) for v in held.values()] for f in (fmean, min, max))
        series = [Series("mean", list(held), means, low, high)]
        note = "Mean over the clients of a round; the band is from the shortest to the longest."
    chart = Lines(series, "round", "norm", from_zero=True)
    return Figure("updates-norms", "length of the updates", chart, ("round", "client", "norm"), data, note)


def _cosines(runs: Runs) -> list[Figure]:
    """Mean and least cosine of pairs: of one run in one figure."""
    names = {"cosine_mean": "mean over pairs", "cosine_min": "least of all pairs"}
    if runs.alone is None:
        made = [
            _curve(
                runs,
                name.replace("_", "-"),
                f"cosine of two clients' updates, {said}",
                "cosine",
                lambda row, name=name: number(row.get(name)),  # type: ignore[misc]
            )
            for name, said in names.items()
        ]
        return [each for each in made if each is not None]
    rows = [row for row in _rows(runs.alone) if number(row.get("cosine_mean")) is not None]
    if not rows:
        return []
    t = [row["round"] for row in rows]
    series = [Series(said, t, [number(row.get(name)) for row in rows]) for name, said in names.items()]
    data: list[list[Value]] = [[row["round"], *(number(row.get(name)) for name in names)] for row in rows]
    chart = Lines(series, "round", "cosine")
    note = "1: both go the same way; 0: nothing in common; below 0: one undoes what the other does."
    return [Figure("updates-cosines", "cosine of two clients' updates", chart, ("round", *names), data, note)]


def _spectrum(run: Run) -> Figure | None:
    rows = [row for row in _rows(run) if _share(row, 0) is not None]
    if not rows:
        return None
    many = min(LEADING, max(len(row["eigenvalues"]) for row in rows))
    names = [f"direction {j + 1}" for j in range(many)]
    t = [row["round"] for row in rows]
    series = [Series(name, t, [_share(row, j) for row in rows]) for j, name in enumerate(names)]
    data: list[list[Value]] = [
        [row["round"], j + 1, number(value), _share(row, j)]
        for row in rows
        for j, value in enumerate(row["eigenvalues"])
    ]
    note = "Eigenvalues of the updates' Gram matrix over their sum. One near 1: all updates lie along one line."
    chart = Lines(series, "round", "share of the sum", from_zero=True)
    return Figure(
        "updates-spectrum", "spectrum of the updates", chart, ("round", "number", "eigenvalue", "share"), data, note
    )


def _towards(run: Run) -> Figure | None:
    """Cosine of each client's update with the server's direction: a map of clients by rounds."""
    of = _pairs(run, "to_direction")
    if not of:
        return None
    rounds = sorted({t for curve in of.values() for t in curve})
    shown, kept = rounds[:: -(-len(rounds) // ROUNDS)], list(of)[:: -(-len(of) // CLIENTS)]
    values = [[of[name].get(t) for t in shown] for name in kept]
    chart = Grid(kept, [str(t) for t in shown], values, "client", "round", "cosine", signed=True)
    data: list[list[Value]] = [[t, name, value] for name, curve in of.items() for t, value in curve.items()]
    note = "Below 0: the step of that round went against what the client had learned."
    note += f" Of {len(of)} clients and {len(rounds)} rounds every {-(-len(of) // CLIENTS)}th and every "
    note += f"{-(-len(rounds) // ROUNDS)}th is drawn." if len(kept) < len(of) or len(shown) < len(rounds) else ""
    note = note if len(kept) < len(of) or len(shown) < len(rounds) else note.partition(" Of ")[0]
    title = "cosine of each update with the server's direction"
    return Figure("updates-direction", title, chart, ("round", "client", "cosine"), data, note)
