"""What travelled: bytes that rank 0 sent and received, parameters of clients, and what a figure cost of them."""

from __future__ import annotations

from itertools import accumulate

from fedmpi.analysis.pages.grouping import Curve, figure, means, rounds_in, spoken
from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Figure, Lines, Section, Series, Value

MB = 1e6


def bytes_(runs: Runs) -> Section | None:
    """Sums up to each round, and the first figure of the evaluation over them."""
    if not any(_sums(run, "sent_bytes") for run in runs.all):
        return None
    note = "Sums up to a round, of all that rank 0 has sent to and received from all ranks, itself among them."
    parts: list[Figure | None] = []
    if len(runs.groups) == 1:
        same = runs.groups[0].runs
        up, down = (means(_megabytes(run, key) for run in same) for key in ("received_bytes", "sent_bytes"))
        series = [
            Series(said, list(v), [m for m, _, _ in v.values()]) for said, v in (("received", up), ("sent", down))
        ]
        data: list[list[Value]] = [[t, up[t][0], down[t][0]] for t in up if t in down]
        chart = Lines(series, "round", "megabytes", from_zero=True)
        parts.append(Figure("bytes", "bytes", chart, ("round", "received_mb", "sent_mb"), data, note))
    else:
        parts.append(figure(runs, "bytes", "bytes", "megabytes, both ways", _both, "megabytes", note))
    parts.append(_cost(runs))
    return Section("traffic", "Traffic", [each for each in parts if each is not None])


def _sums(run: Run, key: str) -> Curve:
    found = rounds_in(run, key)
    return dict(zip(found, accumulate(found.values()), strict=True))


def _megabytes(run: Run, key: str) -> Curve:
    return {t: total / MB for t, total in _sums(run, key).items()}


def _both(run: Run) -> Curve:
    up, down = _sums(run, "received_bytes"), _sums(run, "sent_bytes")
    return {t: (up[t] + down[t]) / MB for t in up if t in down}


def _cost(runs: Runs) -> Figure | None:
    """The first figure over the parameters that clients have sent and received by then."""
    name = next((each for each in runs.figures() if not each.startswith("train_")), None)
    if name is None:
        return None
    series, data = list[Series](), list[list[Value]]()
    for group in runs.groups:
        x = means(_parameters(run) for run in group.runs)
        y = means(rounds_in(run, name) for run in group.runs)
        rounds = [t for t in y if t in x]
        if rounds:
            series.append(Series(group.name(), [x[t][0] for t in rounds], [y[t][0] for t in rounds]))
            data += [[group.name(), t, x[t][0], y[t][0]] for t in rounds]
    chart = Lines(series, "parameters sent and received, all clients", spoken(name), whole_x=False)
    head = ("settings", "round", "parameters", name)
    title = f"{name.replace('_', ' ')} by what travelled"
    return Figure("cost", title, chart, head, data) if any(len(each.x) > 1 for each in series) else None


def _parameters(run: Run) -> Curve:
    up, down = _sums(run, "up_parameters"), _sums(run, "down_parameters")
    return {t: up[t] + down[t] for t in up if t in down}
