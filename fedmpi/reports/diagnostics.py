"""Sections of a report on measurements within rounds, recorded in update_stats.jsonl and analysis.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedmpi.analysis.charts import HeatMap, stack_bars
from fedmpi.reports.page import Figure, Part, Text, Value
from fedmpi.reports.run_groups import (
    Curve,
    Row,
    Run,
    RunCollection,
    extract_curve,
    finite_number,
    finite_numbers,
    plot_by_group,
    plot_curves,
    subsample,
)

MAX_HEAT_MAP_SIDE = 60  # rows and columns of a heat map, at most
GLOBAL_LABEL, LOCAL_LABEL = "global model", "local models, mean"


class RoundsFigure(NamedTuple):
    """Definition of a figure of values over rounds.

    For one run it has a line for each of `keys`. For several runs there is a figure for each of `keys`, with a line for
    each group of runs.

    Attributes:
        keys: label of a line -> path of its number in a row, such as `drift.divergence`, or `shares.0` in a list.
    """

    name: str
    title: str
    y_label: str
    keys: Mapping[str, str]
    note: str = ""
    from_zero: bool = False


UPDATE_FIGURES = (
    RoundsFigure("norms", "length of the updates", "mean norm", {"": "norms"}, "Mean over the clients of a round.",
               from_zero=True),
    RoundsFigure("kept", "what is left of them in the aggregate", "norm / mean norm", {"": "kept"},
               "The norm of the server's direction over the updates' mean norm: 1 where all clients agree, 1/sqrt(m) "
               "where m updates of one length have nothing in common, 0 where they cancel."),
    RoundsFigure("cosine", "cosine of two clients' updates", "cosine",
               {"mean over pairs": "cosine_mean", "least of all pairs": "cosine_min"},
               "1: both go the same way; 0: nothing in common; below 0: one undoes what the other does."),
    RoundsFigure("negative-pairs", "pairs of clients in conflict", "share of pairs", {"": "negative_pairs"},
               "Pairs whose updates have a cosine below 0."),
    RoundsFigure("spectrum", "spectrum of the updates", "share of the sum",
               {"leading direction": "shares.0", "second direction": "shares.1"},
               "Eigenvalues of the updates' Gram matrix over their sum. One near 1: all updates lie along one line.",
               from_zero=True),
)  # fmt: skip
ANALYSIS_FIGURES = (
    RoundsFigure("losses", "what the loss is made of", "loss",
               {"the global model": "losses.total", "of clients at home": "losses.local",
                "of other clients' data": "losses.shift", "of averaging": "losses.aggregation"},
               "On the clients' training samples. The parts, L_j(w_i) - L_i(w_i) of other clients' data among them, "
               "add up to the loss of the global model."),
    RoundsFigure("drift", "how far local models move", "norm",
               {"from the global model": "drift.divergence", "from each other": "drift.consistency"},
               "Mean distance of the local models after their training.", from_zero=True),
    RoundsFigure("knowledge", "accuracy on the global test set", "accuracy (%)",
               {"global model after the round": "knowledge.after", "before it": "knowledge.before",
                "local models, mean": "knowledge.local_mean"},
               "What the local models are below the global model of before, local training has forgotten."),
)  # fmt: skip
FEATURE_FIGURES = (
    *(
        RoundsFigure(key, title, label, {GLOBAL_LABEL: f"features.{key}", LOCAL_LABEL: f"features.{key}_local"}, note)
        for key, title, label, note in (
            ("deviation", "classifier variance", "standard deviation of a probability",
             "Standard deviation of a class's probability over the samples, mean over classes (FedUV)."),
            ("classifier", "mean singular value of the classifier", "singular value",
             "Of the weights of the last layer."),
            ("uniformity", "FedUV's U of features", "U",
             "Mean of exp(-d / median d) over pairs of features, d squared distances."),
            ("rank", "effective rank of features", "directions",
             "Entropy of the singular values, as a number of directions."),
        )
    ),
)  # fmt: skip
LOCAL_STEP_FIGURES = (
    RoundsFigure("loss", "proximal loss of local models", "KL", {"": "orthogonality.loss"},
               "KL(global || local) at temperature 3, mean over the local models after their training."),
    RoundsFigure("cosine", "cosine of the step and the proximal gradient", "cosine",
               {"all weights": "orthogonality.cosine", "the head's weights": "orthogonality.head"},
               "Mean over local steps and clients. Below 0 a step raises the proximal loss; 0: orthogonal."),
)  # fmt: skip


def build_updates_section(runs: RunCollection) -> list[Part | None]:
    """Draw norms of the clients' updates, and their cosines with each other and with the server's direction."""
    rows: dict[Path, list[Row]] = {run.path: [] for run in runs.all}
    for path, row in [(run.path, row) for run in runs.all for row in run.updates]:
        # Add two values: the norm of the server's direction over the mean norm, and the eigenvalues over their sum.
        values = [finite_number(v) or 0.0 for v in row.get("eigenvalues") or ()]
        norms, length = finite_numbers(row.get("norms")), finite_number(row.get("direction"))
        shares = [v / sum(values) for v in values] if sum(values) > 0 else []
        remaining_share = length / fmean(norms) if length is not None and any(norms) else None
        rows[path].append({**row, "shares": shares, "kept": remaining_share})
    parts = _plot_over_rounds(runs, "updates", UPDATE_FIGURES, rows)
    if runs.single is not None:
        lengths, cosines = (
            _curves_by_client(runs.single, runs.single.updates, key) for key in ("norms", "to_direction")
        )
        note = "The norm of each client's change of the weights, as much of it as travels."
        parts.insert(
            1, _plot_client_heat_map("updates-by-client", "length of each update", lengths, "norm", note, signed=False)
        )
        title = "cosine of each update with the server's direction"
        note = "Below 0: the step of that round went against what the client had learned."
        parts.append(_plot_client_heat_map("updates-direction", title, cosines, "cosine", note))
    if not any("eigenvalues" in row for run in runs.all for row in run.updates):
        more = "Cosines and the spectrum are recorded where the server's rule forms the updates' Gram matrix, and with "
        parts.append(Text(f"{more}record.updates: gram for any rule."))
    return parts


def build_analysis_section(runs: RunCollection) -> list[Part | None]:
    """Draw the measurements of the config's key `analysis` over rounds: parts of the loss, drift, forgetting.

    The report of a single run also shows what each client contributes to the global model.
    """
    parts = _plot_over_rounds(runs, "analysis", ANALYSIS_FIGURES, _analysis_rows(runs))
    if runs.single is not None:
        gains = _curves_by_client(runs.single, runs.single.analysis, "contribution", "gain")
        note = "How much higher the loss is of the average of all the others; below 0: they do better without it."
        parts.append(_plot_client_heat_map("analysis-gain", "what each client gives", gains, "loss", note))
    return parts


def build_features_section(runs: RunCollection) -> list[Part | None]:
    """Draw statistics of the features, classifier heads and outputs of global and local models."""
    return _plot_over_rounds(runs, "features", FEATURE_FIGURES, _analysis_rows(runs))


def build_local_steps_section(runs: RunCollection) -> list[Part | None]:
    """Draw FedSOL's Figures 3 and 5b: how local steps change the proximal loss, and which layers they move."""
    parts = _plot_over_rounds(runs, "steps", LOCAL_STEP_FIGURES, _analysis_rows(runs))
    return parts if runs.single is None else [*parts, _plot_layers(runs.single)]


def _analysis_rows(runs: RunCollection) -> dict[Path, list[Row]]:
    return {run.path: run.analysis for run in runs.all}


def _plot_over_rounds(
    runs: RunCollection, section: str, figures: Sequence[RoundsFigure], rows: Mapping[Path, list[Row]]
) -> list[Part | None]:
    parts = list[Part | None]()
    for each in figures:
        name = f"{section}-{each.name}"
        if runs.single is not None:
            own = rows[runs.single.path]
            lines = {label or "value": extract_curve(own, *key.split(".")) for label, key in each.keys.items()}
            head = [label if key[-1].isdigit() else key.rpartition(".")[2] for label, key in each.keys.items()]
            parts.append(plot_curves(name, each.title, each.y_label, lines, head, each.note, each.from_zero))
            continue
        for label, key in each.keys.items():
            curves, column = (
                {path: extract_curve(own, *key.split(".")) for path, own in rows.items()},
                key.split(".")[-1],
            )
            title, file = (f"{each.title}: {label}", f"{name}-{column}") if label else (each.title, name)
            parts.append(plot_by_group(runs, file, title, each.y_label, curves, column, each.note))
    return parts


def _curves_by_client(run: Run, rows: Sequence[Row], *keys: str) -> dict[str, Curve]:
    """Return a curve over rounds for each client, by the client's name.

    keys: path in a row of the list of values, which has the order of the row's list `clients`.
    """
    curves: dict[int, Curve] = {}
    for row in rows:
        values: Any = row
        for key in keys:
            values = values.get(key) if isinstance(values, dict) else None
        for k, value in zip(row.get("clients") or (), values or (), strict=False):
            if (v := finite_number(value)) is not None:
                curves.setdefault(int(k), {})[row["round"]] = v
    return {run.client_names.get(k, str(k)): curves[k] for k in sorted(curves)}


def _plot_client_heat_map(
    name: str, title: str, of: Mapping[str, Curve], unit: str, note: str, signed: bool = True
) -> Figure | None:
    """Draw a heat map of values by client and round."""
    if not of:
        return None
    rows, columns = (
        subsample(list(of), MAX_HEAT_MAP_SIDE),
        subsample(sorted({t for each in of.values() for t in each}), MAX_HEAT_MAP_SIDE),
    )
    values = [[of[k].get(t) for t in columns] for k in rows]
    chart = HeatMap(rows, [str(t) for t in columns], values, "client", "round", unit, signed)
    note += f" Of {len(of)} clients {len(rows)} are drawn." if len(rows) < len(of) else ""
    data: list[list[Value]] = [[t, client, value] for client, each in of.items() for t, value in each.items()]
    return Figure(name, title, chart, ("round", "client", unit), data, note)


def _plot_layers(run: Run) -> Figure | None:
    keys = ("strength", "evenness", "columns", "norm", "entries")
    data: list[list[Value]] = []
    for row in run.analysis:
        of = row.get("layers")
        if isinstance(of, dict) and isinstance(of.get("layers"), list):
            columns = [[finite_number(v) for v in of.get(key) or ()] for key in keys]
            data += [[row["round"], str(layer), *v] for layer, *v in zip(of["layers"], *columns, strict=False)]
    if not data:
        return None
    last = {str(row[1]): float(row[2] or 0.0) for row in data if row[0] == data[-1][0]}
    note = (
        f"Mean of |w - w0| / ||w - w0|| over a layer's weights and the local models, round {data[-1][0]}. Of n weights "
        "it is at most 1/sqrt(n): small layers have larger ones. Among the numbers: evenness, that times sqrt(n); "
        "columns, with norms along the first dimension of each tensor, as in the authors' code."
    )
    chart = stack_bars(list(last), {"strength": list(last.values())}, "mean of Lambda")
    return Figure("steps-layers", "Lambda, mean over a layer's weights", chart, ("round", "layer", *keys), data, note)
