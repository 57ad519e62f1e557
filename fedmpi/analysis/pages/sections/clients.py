"""How evenly clients are served: the spread over clients round by round, and each one after the last round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

import numpy as np

from fedmpi.analysis.pages.grouping import Curve, figure, means, spoken
from fedmpi.analysis.pages.run import Run, number
from fedmpi.analysis.pages.runs import Group, Runs
from fedmpi.analysis.pages.section import Bars, Figure, Lines, Section, Series, Table, Value
from fedmpi.common.metrics_row import CLIENT_NAMES

QUANTILES = {"10th percentile": 0.1, "median": 0.5, "90th percentile": 0.9}
PARTS = ("worst", *QUANTILES)
NAMED = 40  # clients that have a bar each; more are a curve
FAIRNESS_HEAD = ("mean", "std", "worst 10 %", "best 10 %", "Jain's index")
FAIRNESS_NOTE = (
    "Over clients: population standard deviation, means of the worst and the best tenth, at least one client (q-FFL), "
    "and Jain's index, (sum x)² / (N sum x²): 1 where all clients have the same, 1/N where one has everything."
)


def spread(runs: Runs) -> Section | None:
    """Worst client, 10th, 50th and 90th percentile of what clients.jsonl tells of each."""
    parts = list[Figure | Table]()
    kinds = dict.fromkeys(kind for run in runs.all for kind in _kinds(run))
    for protocol, name in kinds:
        parts += _curves(runs, protocol, name)
        parts += _last(runs, protocol, name)
        parts += _fairness(runs, protocol, name)
    return Section("clients", "Clients", parts) if parts else None


def _kinds(run: Run) -> Iterator[tuple[str, str]]:
    """(protocol, figure) of a run's lines, without the loss where there is another figure."""
    found: dict[str, dict[str, None]] = {}
    for line in run.clients:
        found.setdefault(str(line.get("protocol")), {}).update(dict.fromkeys(k for k in line if k not in CLIENT_NAMES))
    for protocol, names in found.items():
        yield from ((protocol, name) for name in names if name != "loss" or len(names) == 1)


def _rounds(run: Run, protocol: str, name: str) -> dict[int, dict[str, float]]:
    """round -> client's name -> value."""
    found: dict[int, dict[str, float]] = {}
    for line in run.clients:
        value = number(line.get(name))
        if value is not None and str(line.get("protocol")) == protocol and isinstance(line.get("round"), int):
            found.setdefault(line["round"], {})[run.client_name(line.get("client", -1))] = value
    return found


def _at_end(run: Run, protocol: str, name: str) -> dict[str, float]:
    """Client's name -> value after the last round that was evaluated so: an earlier one does not stand for it."""
    judged = [line.get("round") for line in run.clients if str(line.get("protocol")) == protocol]
    last = max((t for t in judged if isinstance(t, int)), default=-1)
    return _rounds(run, protocol, name).get(last, {})


def _curve(run: Run, protocol: str, name: str, part: str) -> Curve:
    return {t: _part(run, values, name, part) for t, values in _rounds(run, protocol, name).items()}


def _part(run: Run, values: Mapping[str, float], name: str, part: str) -> float:
    worst = max if run.falls(name) else min
    return worst(values.values()) if part == "worst" else float(np.quantile(list(values.values()), QUANTILES[part]))


def _curves(runs: Runs, protocol: str, name: str) -> list[Figure]:
    slug = f"clients-{protocol}-{name}"
    title, note = _title(protocol, name), "Over all clients that were evaluated."
    if len(runs.groups) > 1:
        each = [
            figure(
                runs, f"{slug}-{part.split()[0]}", f"{title}: {part} client".replace("percentile client", "percentile"),
                spoken(name), partial(_curve, protocol=protocol, name=name, part=part), name, note,
            )
            for part in ("worst", "10th percentile")
        ]  # fmt: skip
        return [made for made in each if made is not None]
    series, data = list[Series](), list[list[Value]]()
    same = runs.groups[0].runs
    found = {part: means(_curve(run, protocol, name, part) for run in same) for part in PARTS}
    for part, curve in found.items():
        series.append(Series(part, list(curve), [mean for mean, _, _ in curve.values()]))
    for t in found["worst"]:
        data.append([t, *(found[part][t][0] for part in PARTS)])
    more = f" Means over {len(same)} runs." if len(same) > 1 else ""
    chart = Lines(series, "round", spoken(name))
    return [Figure(slug, f"{title} over clients", chart, ("round", *PARTS), data, note + more)] if data else []


def _at_last(group: Group, protocol: str, name: str) -> list[float]:
    """The parts in each run's last evaluated round, mean over the group's runs; [] where no run has any."""
    every = [(run, values) for run in group.runs if (values := _at_end(run, protocol, name))]
    ends = [[_part(run, values, name, part) for part in PARTS] for run, values in every]
    return [fmean(column) for column in zip(*ends, strict=True)]


def _last(runs: Runs, protocol: str, name: str) -> list[Figure | Table]:
    """After the last evaluated round: of one run each client, of several the spread by group."""
    title = f"{_title(protocol, name)}, last round"
    if runs.alone is None:
        rows: list[list[Value]] = [[group.name(), *_at_last(group, protocol, name)] for group in runs.groups]
        rows = [row for row in rows if len(row) > 1]
        more = "Means over the runs." if any(len(group.runs) > 1 for group in runs.groups) else ""
        return [Table(("settings", *PARTS), rows, title, more)] if rows else []
    last = _at_end(runs.alone, protocol, name)
    if not last:
        return []
    order = sorted(last.items(), key=lambda pair: pair[1])
    data: list[list[Value]] = [[client, value] for client, value in order]
    slug, values = f"clients-{protocol}-{name}-last", [value for _, value in order]
    if len(order) <= NAMED and values[0] >= 0:
        chart: Bars | Lines = Bars([client for client, _ in order], {name: values}, spoken(name))
    else:
        chart = Lines([Series(name, list(range(1, len(order) + 1)), values)], "clients, the lowest first", spoken(name))
    return [Figure(slug, title, chart, ("client", name), data)]


def _fairness(runs: Runs, protocol: str, name: str) -> list[Figure | Table]:
    """A row a group: means over its runs, of each run's last evaluated round. Several groups: Jain's index by round."""
    rows = list[list[Value]]()
    for group in runs.groups:
        every = [(_at_end(run, protocol, name), run.falls(name)) for run in group.runs]
        ends = [over_clients(list(at.values()), falls) for at, falls in every if at]
        known = [[v for v in column if v is not None] for column in zip(*ends, strict=True)]
        if ends:
            rows.append([group.name(), *(fmean(values) if values else None for values in known)])
    title = _title(protocol, name)
    said = figure(runs, f"clients-{protocol}-{name}-jain", f"{title}: Jain's index over clients", "Jain's index",
                  partial(_jain, protocol=protocol, name=name), "jain", FAIRNESS_NOTE)  # fmt: skip
    table = Table(("settings", *FAIRNESS_HEAD), rows, f"{title}: fairness, last round", FAIRNESS_NOTE)
    return [*([table] if rows else []), *([said] if said is not None and len(runs.groups) > 1 else [])]


def _jain(run: Run, protocol: str, name: str) -> Curve:
    found = {t: jain(list(at.values())) for t, at in _rounds(run, protocol, name).items()}
    return {t: value for t, value in found.items() if value is not None}


def _title(protocol: str, name: str) -> str:
    return f"{protocol} {name}".replace("_", " ")


def jain(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (N sum x^2) of figures that are nowhere below 0; None of others, and where all are 0.

    >>> jain([2.0, 2.0, 2.0]), jain([1.0, 0.0, 0.0, 0.0]), jain([1.0, -1.0])
    (1.0, 0.25, None)
    """
    x = np.asarray(values, dtype=np.float64)
    if not len(x) or x.min() < 0 or not x.max():
        return None
    x = x / x.max()  # squares of large losses stay numbers
    return float(x.sum() ** 2 / (len(x) * (x**2).sum()))


def over_clients(values: Sequence[float], falling: bool) -> list[float | None]:
    """The numbers of FAIRNESS_HEAD; falling: less is better.

    >>> over_clients([90.0, 70.0, 80.0], falling=False)[:4]
    [80.0, 8.16496580927726, 70.0, 90.0]
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    tenth = max(len(x) // 10, 1)
    low, high = float(x[:tenth].mean()), float(x[-tenth:].mean())
    ends = (high, low) if falling else (low, high)
    return [float(x.mean()), float(x.std()), *ends, jain(values)]
