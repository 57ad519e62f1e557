"""What `analysis` has measured of the rounds: analysis.jsonl (engine/probes)."""

from __future__ import annotations

from collections.abc import Callable

from fedmpi.analysis.pages.grouping import Curve, figure
from fedmpi.analysis.pages.run import Row, Run, number
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Figure, Grid, Lines, Section, Series, Value

PARTS = {"local": "of clients at home", "shift": "of other clients' data", "aggregation": "of averaging"}
CLIENTS, ROUNDS = 60, 60  # of a map
CURVES = (  # probe, figure, name of the figure's files, title, y axis, note
    ("losses", "shift", "what other clients' data cost", "loss", "L_j(w_i) - L_i(w_i), mean over pairs of clients."),
    ("losses", "aggregation", "what averaging costs", "loss", "Loss of the average over that of the local models."),
    ("drift", "divergence", "how far local models move", "norm", "Mean of |w_k - w| over the clients of a round."),
    ("drift", "consistency", "how far they end apart", "norm", "Mean of |w_i - w_k| over pairs of clients."),
    ("knowledge", "local_mean", "local models on the global test set", "accuracy (%)", "Mean over the clients."),
)


def measured(runs: Runs) -> Section | None:
    """One run: what its loss is made of, what local training forgets, what each client gives. Several: lines."""
    if not any(run.analysis for run in runs.all):
        return None
    parts: list[Figure | None] = []
    if runs.alone is not None:
        parts += [_losses(runs.alone), _moved(runs.alone), _known(runs.alone), _gains(runs.alone)]
    else:
        for probe, name, title, label, note in CURVES:
            parts.append(figure(runs, f"analysis-{name}", title, label, _of(probe, name), name, note))
    found = [part for part in parts if part is not None]
    return Section("analysis", "What lies behind", found) if found else None


def _of(probe: str, name: str) -> Callable[[Run], Curve]:
    def curve(run: Run) -> Curve:
        return {t: v for t, row in _rows(run, probe) if (v := number(row.get(name))) is not None}

    return curve


def _rows(run: Run, probe: str) -> list[tuple[int, Row]]:
    told = [(row.get("round"), row.get(probe)) for row in run.analysis]
    return [(t, row) for t, row in told if isinstance(t, int) and isinstance(row, dict)]


def _lines(
    run: Run, probe: str, shown: dict[str, str], name: str, title: str, label: str, note: str, from_zero: bool = False
) -> Figure | None:
    """Figures of a probe over the rounds, a line each."""
    rows = _rows(run, probe)
    if not rows:
        return None
    t = [at for at, _ in rows]
    values = {key: [number(row.get(key)) for _, row in rows] for key in shown}
    data: list[list[Value]] = [[at, *(values[key][i] for key in shown)] for i, at in enumerate(t)]
    chart = Lines([Series(said, t, values[key]) for key, said in shown.items()], "round", label, from_zero=from_zero)
    return Figure(f"analysis-{name}", title, chart, ("round", *shown), data, note)


def _losses(run: Run) -> Figure | None:
    note = "On the clients' training samples. The three add up to the loss of the global model."
    shown = {"total": "the global model", **PARTS}
    return _lines(run, "losses", shown, "losses", "what the loss is made of", "loss", note)


def _moved(run: Run) -> Figure | None:
    shown = {"divergence": "from the global model", "consistency": "from each other"}
    note = "Mean distance of the local models after their training."
    return _lines(run, "drift", shown, "drift", "how far local models move", "norm", note, from_zero=True)


def _known(run: Run) -> Figure | None:
    shown = {"after": "global model after the round", "before": "before it", "local_mean": "local models, mean"}
    note = "What the local models are below the global model of before, local training has forgotten."
    title = "accuracy on the global test set"
    return _lines(run, "knowledge", shown, "knowledge", title, "accuracy (%)", note)


def _gains(run: Run) -> Figure | None:
    """A map of clients by rounds."""
    at: dict[int, dict[int, float]] = {}
    told = [(row.get("round"), row.get("clients"), row.get("contribution")) for row in run.analysis]
    for t, members, row in told:
        if isinstance(t, int) and isinstance(row, dict):
            for k, gain in zip(members or (), row.get("gain") or (), strict=False):
                if (value := number(gain)) is not None:
                    at.setdefault(int(k), {})[t] = value
    if not at:
        return None
    rounds, kept = sorted({t for row in at.values() for t in row}), sorted(at)
    data: list[list[Value]] = [[t, run.client_name(k), at[k][t]] for k in kept for t in sorted(at[k])]
    rounds, kept = rounds[:: -(-len(rounds) // ROUNDS)], kept[:: -(-len(kept) // CLIENTS)]
    names, values = [run.client_name(k) for k in kept], [[at[k].get(t) for t in rounds] for k in kept]
    chart = Grid(names, [str(t) for t in rounds], values, "client", "round", "loss", signed=True)
    note = "How much higher the loss is of the average of all the others; below 0: they do better without it."
    return Figure("analysis-gain", "what each client gives", chart, ("round", "client", "gain"), data, note)
