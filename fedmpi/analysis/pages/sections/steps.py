"""What local steps do to the proximal loss, and which layers they move: analysis.jsonl (engine/probes)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fedmpi.analysis.pages.grouping import Curve, figure
from fedmpi.analysis.pages.run import Row, Run, number
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Bars, Figure, Lines, Section, Series, Value

ROUNDS = 4  # with a line each
LOSS, COSINE = "proximal loss of local models", "cosine of the step and the proximal gradient"
L_P = "KL(global || local) at temperature 3, mean over the local models after their training."
BELOW = "Below 0 a step raises the proximal loss; 0: orthogonal."


def measured(runs: Runs) -> Section | None:
    """FedSOL's Figures 3 and 5b; of several runs a line each, Figure 5b as the run's last measured round has it."""
    found = [figure(runs, "steps-loss", LOSS, "KL", partial(_curve, key="loss"), "loss", L_P)]
    if runs.alone is not None:
        found += [_cosines(runs.alone), _by_step(runs.alone), _layers(runs.alone)]
    else:
        for key, of in (("cosine", "all weights"), ("head", "the head's weights")):
            note = f"Mean over local steps and clients, {of}. {BELOW}"
            said = f"{COSINE}, {of}"
            found.append(figure(runs, f"steps-{key}", said, "cosine", partial(_curve, key=key), key, note))
    parts = [part for part in found if part is not None]
    return Section("steps", "Local steps", parts) if parts else None


def _rows(run: Run, probe: str) -> Iterator[tuple[int, Row]]:
    for row in run.analysis:
        if isinstance(row.get("round"), int) and isinstance(row.get(probe), dict):
            yield row["round"], row[probe]


def _curve(run: Run, key: str) -> Curve:
    return {t: v for t, row in _rows(run, "orthogonality") if (v := number(row.get(key))) is not None}


def _cosines(run: Run) -> Figure | None:
    whole, head = _curve(run, "cosine"), _curve(run, "head")
    t = sorted({*whole, *head})
    if not t:
        return None
    lines = {"all weights": [whole.get(at) for at in t], "the head's": [head.get(at) for at in t]}
    chart = Lines([Series(name, t, y) for name, y in lines.items()], "round", "cosine")
    data: list[list[Value]] = [[at, whole.get(at), head.get(at)] for at in t]
    return Figure("steps-cosine", COSINE, chart, ("round", "cosine", "head"), data, f"Mean over steps. {BELOW}")


def _by_step(run: Run) -> Figure | None:
    """Of a few rounds, the last one among them."""
    found = {t: [number(v) for v in row.get("step_cosines") or ()] for t, row in _rows(run, "orthogonality")}
    found = {t: values for t, values in sorted(found.items()) if any(v is not None for v in values)}
    if not found:
        return None
    kept = list(found)[:: -1 * max(1, -(-len(found) // ROUNDS))][::-1]
    chart = Lines([Series(f"round {t}", range(1, len(found[t]) + 1), found[t]) for t in kept], "local step", "cosine")
    data: list[list[Value]] = [[t, i + 1, v] for t, values in found.items() for i, v in enumerate(values)]
    note = f"Mean over the clients that make the step; in the first one nothing has moved yet. {BELOW}"
    return Figure("steps-first", f"{COSINE}, step by step", chart, ("round", "step", "cosine"), data, note)


def _layers(run: Run) -> Figure | None:
    told = [(t, row) for t, row in _rows(run, "layers") if isinstance(row.get("layers"), list)]
    keys = ("strength", "evenness", "columns", "norm", "entries")
    data: list[list[Value]] = [
        [t, str(name), *map(number, values)]
        for t, row in told
        for name, *values in zip(row["layers"], *(row.get(key) or () for key in keys), strict=False)
    ]
    if not data:
        return None
    t = data[-1][0]
    last = {str(row[1]): row[2] for row in data if row[0] == t}
    lengths = [v if isinstance(v, float) else 0.0 for v in last.values()]
    chart = Bars(list(last), {"strength": lengths}, "mean of Lambda")
    note = (
        f"Mean of |w - w0| / ||w - w0|| over a layer's weights and the local models, round {t}. Of n weights it is at "
        "most 1/sqrt(n): small layers have larger ones. Among the numbers: evenness, that times sqrt(n); columns, with "
        "norms along the first dimension of each tensor, as in the authors' code."
    )
    return Figure("steps-layers", "Lambda, mean over a layer's weights", chart, ("round", "layer", *keys), data, note)
