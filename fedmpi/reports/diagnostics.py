"""Report sections with measurements taken during rounds, which are read from update_stats.jsonl and analysis.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedmpi.analysis.charts import HeatMap, make_stacked_bar_chart
from fedmpi.reports.page import Figure, Paragraph, Part, Value
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

MAX_HEAT_MAP_SIDE = 60  # maximum number of rows and columns of a heat map
GLOBAL_LABEL, LOCAL_LABEL = "global model", "local models, mean"


class RoundsFigure(NamedTuple):
    """The definition of a figure that shows values over rounds.

    For one run, the figure has one line for each entry of `keys`. For several runs, there is one figure for each entry
    of `keys`, with one line for each group of runs.

    Attributes:
        keys: label of a line -> path of its value in a row, for example `drift.divergence`, or `shares.0` for the
            first entry of a list.
        note: text below the figure.
        from_zero: whether the y axis starts at 0.
    """

    name: str
    title: str
    y_label: str
    keys: Mapping[str, str]
    note: str = ""
    from_zero: bool = False


UPDATE_FIGURES = (
    RoundsFigure("norms", "norm of the updates", "mean norm", {"": "norms"}, "Mean over the clients of a round.",
                 from_zero=True),
    RoundsFigure("aggregate", "norm of the aggregate relative to the updates", "norm / mean norm",
                 {"": "relative_norm"},
                 "Norm of the server's update direction divided by the mean norm of the updates: 1 if all updates "
                 "agree, 1/sqrt(m) if m updates of equal norm are orthogonal, 0 if they cancel."),
    RoundsFigure("cosine", "cosine between the updates of two clients", "cosine",
                 {"mean over pairs": "cosine_mean", "minimum over pairs": "cosine_min"},
                 "1: same direction; 0: orthogonal; below 0: the updates partly cancel each other."),
    RoundsFigure("negative-pairs", "pairs of clients in conflict", "fraction of pairs", {"": "negative_pairs"},
                 "Pairs whose updates have a negative cosine."),
    RoundsFigure("spectrum", "spectrum of the updates", "fraction of the sum",
                 {"leading direction": "shares.0", "second direction": "shares.1"},
                 "The two largest eigenvalues of the Gram matrix of the updates, divided by the sum of all of "
                 "them. If the first is near 1, all updates lie along one line.",
                 from_zero=True),
)  # fmt: skip
ANALYSIS_FIGURES = (
    RoundsFigure("losses", "decomposition of the loss", "loss",
                 {"global model": "losses.total", "local models on their own data": "losses.local",
                  "increase on other clients' data": "losses.shift", "change by averaging": "losses.aggregation"},
                 "On the clients' training samples. The last three add up to the first. The increase on other clients' "
                 "data is the mean of L_j(w_i) - L_i(w_i)."),
    RoundsFigure("drift", "client drift", "norm",
                 {"from the global model": "drift.divergence", "from each other": "drift.consistency"},
                 "Mean distance of the local models after local training.", from_zero=True),
    RoundsFigure("knowledge", "accuracy on the global test set", "accuracy (%)",
                 {"global model after the round": "knowledge.after",
                  "global model before the round": "knowledge.before", "local models, mean": "knowledge.local_mean"},
                 "If local models are less accurate than the global model before the round, local training has "
                 "forgotten something."),
)  # fmt: skip
FEATURE_FIGURES = (
    *(
        RoundsFigure(key, title, label, {GLOBAL_LABEL: f"features.{key}", LOCAL_LABEL: f"features.{key}_local"}, note)
        for key, title, label, note in (
            ("deviation", "classifier variance", "standard deviation of a probability",
             "Standard deviation of a class's probability over the samples, mean over classes (FedUV)."),
            ("classifier", "mean singular value of the classifier", "singular value",
             "Singular values of the weights of the last layer."),
            ("uniformity", "uniformity U of the features (FedUV)", "U",
             "Mean of exp(-d / median d) over pairs of features, where d is their squared distance."),
            ("rank", "effective rank of the features", "effective rank",
             "Exponential of the entropy of the normalised singular values."),
        )
    ),
)  # fmt: skip
LOCAL_STEP_FIGURES = (
    RoundsFigure("loss", "proximal loss of local models", "KL", {"": "orthogonality.loss"},
                 "KL(global || local) at temperature 3, mean over the local models after their training."),
    RoundsFigure("cosine", "cosine between the local step and the proximal gradient", "cosine",
                 {"all weights": "orthogonality.cosine", "the head's weights": "orthogonality.head"},
                 "Mean over local steps and clients. Below 0: a step increases the proximal loss; 0: orthogonal."),
)  # fmt: skip


def build_updates_section(runs: RunCollection) -> list[Part | None]:
    """Plot the norms of the clients' updates, and their cosines with each other and with the server's direction."""
    rows: dict[Path, list[Row]] = {run.path: [] for run in runs.all}
    for path, row in [(run.path, row) for run in runs.all for row in run.updates]:
        # Add two values: the norm of the server's direction over the mean norm, and the eigenvalues over their sum.
        values = [finite_number(v) or 0.0 for v in row.get("eigenvalues") or ()]
        norms, length = finite_numbers(row.get("norms")), finite_number(row.get("direction"))
        shares = [v / sum(values) for v in values] if sum(values) > 0 else []
        relative_norm = length / fmean(norms) if length is not None and any(norms) else None
        rows[path].append({**row, "shares": shares, "relative_norm": relative_norm})
    parts = _plot_over_rounds(runs, "updates", UPDATE_FIGURES, rows)
    if runs.single is not None:
        lengths, cosines = (
            _curves_by_client(runs.single, runs.single.updates, key) for key in ("norms", "to_direction")
        )
        note = "Norm of the part of each client's update that is sent to the server."
        parts.insert(
            1, _plot_client_heat_map("updates-by-client", "norm of each update", lengths, "norm", note, signed=False)
        )
        title = "cosine of each update with the server's direction"
        note = "Below 0: the server step of that round opposed the client's update."
        parts.append(_plot_client_heat_map("updates-direction", title, cosines, "cosine", note))
    if not any("eigenvalues" in row for run in runs.all for row in run.updates):
        text = (
            "Cosines and the spectrum are recorded if the server's rule computes the Gram matrix of the updates; with "
        )
        parts.append(Paragraph(f"{text}record.updates: gram, they are recorded for every rule."))
    return parts


def build_analysis_section(runs: RunCollection) -> list[Part | None]:
    """Plot the measurements that the config key `analysis` enables: decomposition of the loss, drift and forgetting.

    For a single run, the contribution of each client to the global model is also plotted.
    """
    parts = _plot_over_rounds(runs, "analysis", ANALYSIS_FIGURES, _get_analysis_rows(runs))
    if runs.single is not None:
        gains = _curves_by_client(runs.single, runs.single.analysis, "contribution", "gain")
        note = (
            "Increase of the loss if the client is left out of the average; below 0: the others do better without it."
        )
        parts.append(_plot_client_heat_map("analysis-gain", "contribution of each client", gains, "loss", note))
    return parts


def build_features_section(runs: RunCollection) -> list[Part | None]:
    """Plot statistics of the features, classifier heads and outputs of global and local models over rounds."""
    return _plot_over_rounds(runs, "features", FEATURE_FIGURES, _get_analysis_rows(runs))


def build_local_steps_section(runs: RunCollection) -> list[Part | None]:
    """Plot how local steps change the proximal loss, and which layers they change (FedSOL, Figs. 3 and 5b)."""
    parts = _plot_over_rounds(runs, "steps", LOCAL_STEP_FIGURES, _get_analysis_rows(runs))
    return parts if runs.single is None else [*parts, _plot_layers(runs.single)]


def _get_analysis_rows(runs: RunCollection) -> dict[Path, list[Row]]:
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
    """Return a dict from the name of each client to its curve over rounds.

    Args:
        rows: the rows of a file such as update_stats.jsonl, whose key `clients` lists the clients of the cohort.
        *keys: the keys that lead to the list of values in a row: one value per client, in the order of `clients`.
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
    name: str, title: str, curves: Mapping[str, Curve], unit: str, note: str, signed: bool = True
) -> Figure | None:
    """Plot a heat map of values by client and round; return None if there are none."""
    if not curves:
        return None
    rows, columns = (
        subsample(list(curves), MAX_HEAT_MAP_SIDE),
        subsample(sorted({t for each in curves.values() for t in each}), MAX_HEAT_MAP_SIDE),
    )
    values = [[curves[k].get(t) for t in columns] for k in rows]
    chart = HeatMap(rows, [str(t) for t in columns], values, "client", "round", unit, signed)
    note += f" {len(rows)} of {len(curves)} clients are shown." if len(rows) < len(curves) else ""
    data: list[list[Value]] = [[t, client, value] for client, each in curves.items() for t, value in each.items()]
    return Figure(name, title, chart, ("round", "client", unit), data, note)


def _plot_layers(run: Run) -> Figure | None:
    """Plot how strongly local steps change each layer (Lambda in FedSOL, Fig. 5b) in the last measured round."""
    keys = ("strength", "evenness", "columns", "norm", "entries")
    data: list[list[Value]] = []
    for row in run.analysis:
        layers = row.get("layers")
        if isinstance(layers, dict) and isinstance(layers.get("layers"), list):
            columns = [[finite_number(v) for v in layers.get(key) or ()] for key in keys]
            data += [[row["round"], str(layer), *v] for layer, *v in zip(layers["layers"], *columns, strict=False)]
    if not data:
        return None
    last = {str(row[1]): float(row[2] or 0.0) for row in data if row[0] == data[-1][0]}
    note = (
        f"Mean of |w - w0| / ||w - w0|| over a layer's weights and the local models, round {data[-1][0]}. For n "
        "weights it is at most 1/sqrt(n), so small layers have larger values. The CSV data also contain evenness, "
        "which is this value times sqrt(n), and columns, computed with norms along the first dimension of each tensor, "
        "as in the authors' code."
    )
    chart = make_stacked_bar_chart(list(last), {"strength": list(last.values())}, "mean of Lambda")
    return Figure("steps-layers", "Lambda, mean over a layer's weights", chart, ("round", "layer", *keys), data, note)
