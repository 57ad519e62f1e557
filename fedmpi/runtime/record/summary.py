"""Compute the content of summary.json: the main results of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedmpi.common.metrics_row import NON_METRIC_NAMES, SUMMED_NAMES
from fedmpi.common.text import is_lower_better

if TYPE_CHECKING:
    from fedmpi.engine.messages import MessageLayouts


def summarize_run(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    exit_reason: str,
    rank_failures: Sequence[Mapping[str, Any]] = (),
    best_model: Mapping[str, Any] | None = None,
    lower_is_better: Collection[str] = (),
) -> dict[str, Any]:
    """Return the content of summary.json, computed from the rows of a run.

    Args:
        rows: The rows of metrics.jsonl, one per round. Rounds without evaluation have no metrics; None stands for a
            value that was not finite.
        names: The metrics to include, such as ("accuracy", "loss").
        exit_reason: Why the run ended: "finished", "stopped", "signal 15", "failed: rank 2 is dead: ...".
        rank_failures: The rows of faults.jsonl.
        best_model: File name, metric, value and round of the best model, if there is one.
        lower_is_better: The metrics of the task for which lower is better.

    Returns:
        rounds       number of completed rounds
        last         last value of each metric; its round is in last_round
        mean_last_10 mean of each metric over the last ten evaluated rounds (or fewer); values that are not finite
                     are left out
        best         best value of each metric; its round is in best_round. This value is too optimistic, because it is
                     selected on test samples
        selected     metrics of the round that was selected on validation samples, if best_model is given
        best_model   file, metric, value and round of the best model (evaluate.best); None if none was selected
        lower_is_better   metrics of the task for which lower is better, except metrics such as `loss`, whose names
                     already say so; absent if there are none
        diverged     round from which a loss was far above its best value (engine/faults/divergence.py), or None
        refused_uploads   number of uploads left out (faults.on_bad_update, faults.on_client_error: drop)
        client_errors     number of refused uploads caused by an error while the client trained
        lost_ranks   rank -> round of its last failure
        epsilon      epsilon of differential privacy after the last round; absent without it
        wall_s, sent_bytes, received_bytes, up_parameters, down_parameters   sums over the rounds; only
                     wall_s if the others would reveal which clients took part (privacy.dp)

    The file also contains the result of `traffic_of_client`, which does not depend on the rows.
    """
    facts: dict[str, Any] = {"exit_reason": exit_reason, "rounds": sum(row["round"] >= 0 for row in rows)}
    for part in ("last", "last_round", "mean_last_10", "best", "best_round"):
        facts[part] = {}
    for name in names:
        evaluated = [(row[name], row["round"]) for row in rows if name in row]
        values = [pair for pair in evaluated if isinstance(pair[0], (int, float)) and pair[0] == pair[0]]  # not NaN
        if not values:
            continue
        facts["last"][name], facts["last_round"][name] = values[-1]
        if numbers := [value for value, t in values if t >= evaluated[-10:][0][1]]:
            facts["mean_last_10"][name] = fmean(numbers)
        sign = 1 if is_lower_better(name, lower_is_better) else -1
        facts["best"][name], facts["best_round"][name] = min(values, key=lambda pair: sign * pair[0])
    facts["best_model"] = dict(best_model) if best_model else None
    if best_model:
        row = next((row for row in rows if row["round"] == best_model["round"]), {})
        chosen = {name: row[name] for name in names if isinstance(row.get(name), (int, float))}
        facts["selected"] = {name: value for name, value in chosen.items() if value == value}
    if own := sorted(name for name in lower_is_better if not is_lower_better(name)):
        facts["lower_is_better"] = own
    facts["diverged"] = next((row["diverged"] for row in rows if "diverged" in row), None)
    facts["refused_uploads"] = sum(len(row.get("refused") or ()) for row in rows)
    facts["client_errors"] = sum("error" in each for row in rows for each in row.get("refused") or ())
    facts["lost_ranks"] = {rank: row["round"] for row in rank_failures for rank in row["ranks"]}
    if rows and "epsilon" in rows[-1]:
        facts["epsilon"] = rows[-1]["epsilon"]
    for name in SUMMED_NAMES:
        if "epsilon" not in facts or name in rows[-1]:  # otherwise withheld, because it depends on who took part
            facts[name] = sum(row.get(name) or 0 for row in rows)
    return facts


def traffic_of_client(messages: MessageLayouts, rounds: int, itemsize: int) -> dict[str, int]:
    """Return how many bytes a client sends and receives in a round in which it takes part.

    Args:
        messages: The layouts of the messages.
        rounds: The number of rounds of the run.
        itemsize: The number of bytes of one model parameter.

    Returns:
        client_sent_bytes       mean size of an upload over the rounds, which may have uploads of different sizes
        client_sent_bytes_max   largest size of an upload
        client_received_bytes   size of the model with everything else that a client receives
    """
    sent = [messages.upload_layout(t).size * itemsize for t in range(max(rounds, 1))]
    received = (messages.broadcast_layout().packing.size + messages.per_client_download.size) * itemsize
    return {
        "client_sent_bytes": int(fmean(sent)),
        "client_sent_bytes_max": max(sent),
        "client_received_bytes": received,
    }


def metric_names(rows: Sequence[Mapping[str, Any]], evaluation_metrics: Sequence[str] = ()) -> list[str]:
    """Return the names of the metrics in rows of metrics.jsonl: the names of all numbers except counts and times.

    Args:
        rows: The rows of metrics.jsonl.
        evaluation_metrics: The metrics of the evaluation; they come first, in this order.

    >>> metric_names([{"round": 0, "server_step": 0.1}, {"accuracy": 9.0, "loss": 2.3}], ["loss", "accuracy"])
    ['loss', 'accuracy', 'server_step']
    """
    numbers = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    metrics = [name for name in numbers if name not in NON_METRIC_NAMES]
    first = [name for name in evaluation_metrics if name in metrics]
    return [*first, *(name for name in metrics if name not in first)]
