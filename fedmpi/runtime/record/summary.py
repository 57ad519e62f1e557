"""The figures of a run that are worth reporting: summary.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedmpi.common.metrics_row import NOT_METRICS, SUMMED
from fedmpi.common.text import lower_is_better


def summary(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    exit_reason: str,
    losses: Sequence[Mapping[str, Any]] = (),
    best_model: Mapping[str, Any] | None = None,
    falling: Collection[str] = (),
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        rows: those of metrics.jsonl, one per round; rounds without evaluation lack the metrics; None: no number.
        names: the metrics to sum up, such as ("accuracy", "loss").
        losses: the rows of faults.jsonl.
        falling: a task's metrics of which less is better.
        exit_reason: "finished", "stopped", "signal 15", "failed: rank 2 is dead: ...".
        best_model: what is known of model-best.safetensors, if there is one.

    Returns:
        rounds       rounds done
        last         the last value of each metric, with its round in last_round
        mean_last_10 the mean over the (up to) ten last evaluated rounds, as far as they are numbers
        best         the best value, with its round in best_round; being chosen on the test set, it is biased
        selected     the values of the round that validation rows chose (best_model), where there is one
        best_model   of evaluate.best: file, figure, its value, and the round; None where no model was chosen
        falling      of which metrics of the task's own less is better, where there are any
        diverged     the round since which a loss was far above its best (engine/faults/divergence.py), or None
        refused_uploads   how many did not count (faults.on_bad_update, faults.on_client_error: drop)
        client_errors     how many of these came of an error while the client trained
        lost_ranks   rank -> the round in which it was lost (the last time, of a run that went on with all)
        wall_s, sent_bytes, received_bytes, up_parameters, down_parameters   sums over the rounds
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
        sign = 1 if lower_is_better(name, falling) else -1
        facts["best"][name], facts["best_round"][name] = min(values, key=lambda pair: sign * pair[0])
    facts["best_model"] = dict(best_model) if best_model else None
    if best_model:
        row = next((row for row in rows if row["round"] == best_model["round"]), {})
        chosen = {name: row[name] for name in names if isinstance(row.get(name), (int, float))}
        facts["selected"] = {name: value for name, value in chosen.items() if value == value}
    if own := sorted(name for name in falling if not lower_is_better(name)):
        facts["falling"] = own
    facts["diverged"] = next((row["diverged"] for row in rows if "diverged" in row), None)
    facts["refused_uploads"] = sum(len(row.get("refused") or ()) for row in rows)
    facts["client_errors"] = sum("error" in each for row in rows for each in row.get("refused") or ())
    facts["lost_ranks"] = {rank: row["round"] for row in losses for rank in row["ranks"]}
    for name in SUMMED:
        facts[name] = sum(row.get(name) or 0 for row in rows)
    return facts


def metric_names(rows: Sequence[Mapping[str, Any]], judged: Sequence[str] = ()) -> list[str]:
    """Return the names of the metrics in these rows, all numbers that are neither counts nor times, in the order in
    which runs are compared by them.

    judged: what rounds are judged by, of which the first rounds may have nothing; it stands before what the method says
    of its own steps.

    >>> metric_names([{"round": 0, "server_step": 0.1}, {"accuracy": 9.0, "loss": 2.3}], ["loss", "accuracy"])
    ['loss', 'accuracy', 'server_step']
    """
    numbers = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    metrics = [name for name in numbers if name not in NOT_METRICS]
    return [*(name for name in judged if name in metrics), *(name for name in metrics if name not in judged)]
