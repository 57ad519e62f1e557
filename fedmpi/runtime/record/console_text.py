"""Format the lines that a run prints before, during and after training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmpi.aggregation.lora import RESIDUAL
from fedmpi.comm import Job
from fedmpi.comm.base import format_ranks as numbers
from fedmpi.common.formatting import format_duration, format_table
from fedmpi.common.host_memory import format_bytes
from fedmpi.common.text import format_metric, pluralize
from fedmpi.config.schema import Settings
from fedmpi.engine import scheduler
from fedmpi.engine.local.local_training_config import learning_rate
from fedmpi.engine.messages import MessageLayouts
from fedmpi.runtime import build_data, private_runs
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.record.summary import traffic_of_client

MAX_CLIENTS_SHOWN = 20  # up to this number of clients, each has its own line at the end


# ---- before ----
def describe_run(experiment: Experiment, job: Job, backend: str, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines that a run prints before training.

    Args:
        ranks: For each rank, in order, a dict with its `host`, `device` and `gpu`.
    """
    s, data, messages = experiment.settings, experiment.data, experiment.messages
    sizes, silos = data.train_sizes, s.data.silos or ()
    where = "one process" if job.size == 1 else f"{job.size} ranks ({job.launcher}, {backend})"
    classes = f", {data.classes} classes" if getattr(experiment.task, "classification", False) else ""
    sites = [f"this process opens the files of all {len(silos)} sites: {', '.join(silos)}"] if silos else []
    if silos and len(ranks) > 1:
        owner, width = build_data.assign_sites_to_ranks(s, len(ranks)), max(map(len, silos))
        sites = [f"site {name:<{width}}  rank {owner[k]} on {ranks[owner[k]]['host']}" for k, name in enumerate(silos)]
    return [
        f"{s.name}: {describe_experiment(experiment)}",
        f"{pluralize(data.clients, 'client')} with {sizes.min()} to {sizes.max()} samples{classes}; {where}, "
        f"{describe_devices(ranks)}, {pluralize(s.compute.threads, 'thread')} per rank",
        *sites,
        f"{pluralize(s.rounds, 'round')} with "
        f"{describe_training(s, data.clients, messages.method.sets_training_length)}",
        describe_message_sizes(messages, s.rounds, experiment.itemsize),
        *describe_base_changes(experiment),
        *([private_runs.describe_plan(s, data)] if private_runs.client_level_dp(s) else []),
        *experiment.initial_lines,
    ]


def describe_experiment(experiment: Experiment) -> str:
    """Return a line with method, data set, model and number of parameters; plug-ins are named without folders."""
    s = experiment.settings
    method, source, model = (Path(name).name for name in (s.method.name, s.data.source, s.model.name))
    untrained = sum(p.numel() for p in experiment.model.frozen.values())
    frozen = f" and {untrained:,} frozen ones" if untrained else ""
    return f"{method} on {source}, {model} with {experiment.model.layout.size:,} parameters{frozen}"


def describe_training(s: Settings, clients: int, sets_training_length: bool = False) -> str:
    """Describe local training: cohort size, epochs or steps, batch size, optimiser and learning rate.

    Args:
        s: The settings.
        clients: The number of clients.
        sets_training_length: Whether options of the method set the length of training; the epochs or steps of the
            section `train` are then omitted.
    """
    train, members = s.train, scheduler.cohort_size(clients, s.cohort.fraction, s.cohort.size)
    work = pluralize(train.steps or 0, "step") if train.epochs is None else pluralize(train.epochs, "epoch")
    amount = "" if sets_training_length else f"{work} "
    batches = "full batches" if train.batch_size == "full" else f"batches of {train.batch_size}"
    last = learning_rate(train.lr, train.schedule, max(s.rounds - 1, 0), max(s.rounds, 1), train.decay)
    end = "" if train.schedule == "constant" else f", {last:.3g} in the last round"
    warm_up = f", after a warm-up of {pluralize(train.warmup_rounds, 'round')}" if train.warmup_rounds else ""
    momentum = f", {'nesterov ' if train.nesterov else ''}momentum {train.momentum:g}" if train.momentum else ""
    who = f"{members} of {pluralize(clients, 'client')}"
    return f"{who}, {amount}in {batches}; {train.optim}{momentum}, lr {train.lr:g}, {train.schedule}{end}{warm_up}"


def describe_message_sizes(messages: MessageLayouts, rounds: int, itemsize: int) -> str:
    """Describe how many bytes a client sends and receives per round, and the format of uploads.

    If the size of uploads differs between rounds, the maximum and the mean are given.
    """
    sizes = traffic_of_client(messages, rounds, itemsize)
    mean, most = sizes["client_sent_bytes"], sizes["client_sent_bytes_max"]
    average = f" ({format_bytes(mean)} on average)" if mean < most else ""
    formats = f"; uploads in {messages.upload_format.name}" if messages.upload_format else ""
    receives = format_bytes(sizes["client_received_bytes"])
    return f"a client sends {format_bytes(most)}{average} and receives {receives} per round{formats}"


def describe_base_changes(experiment: Experiment) -> list[str]:
    """Return a line on the cost of changes to the base weights (server.lora: exact or stack); [] if there are none."""
    layers, rule = experiment.base_layers, experiment.settings.server.lora
    if not layers:
        return []
    size, lora = sum(experiment.messages.rule_state.shapes[RESIDUAL]), experiment.settings.model.lora
    rank = experiment.cohort_size * (lora.r if lora else 0)
    weights = sum(layer.base.nbytes for layer in layers)
    return [
        f"server.lora: {rule} changes the base weights of {pluralize(len(layers), 'layer')} by a matrix of rank at "
        f"most {rank} per round: {format_bytes(size * experiment.itemsize)} of each broadcast, and "
        f"{format_bytes(weights)} of each checkpoint"
    ]


def describe_devices(facts: Sequence[Mapping[str, Any]]) -> str:
    """Describe the devices of all ranks, for example `cpu (x86_64)` or `4 x NVIDIA H100, rank 0 on cpu`.

    facts: for each rank, in order, a dict with the name of its `device`, and the identifier `gpu` of its GPU ("" for
    a CPU).
    """
    gpus = {each["gpu"]: each["device"] for each in facts if each.get("gpu")}  # each GPU once; ranks may share it
    on_cpu = [rank for rank, each in enumerate(facts) if not each.get("gpu")]
    if not gpus:
        return ", ".join(dict.fromkeys(each["device"] for each in facts))
    named = [f"{n} x {name}" if len(facts) > 1 else name for name, n in Counter(gpus.values()).items()]
    return ", ".join([*named, *([f"{numbers(on_cpu)} on cpu"] if on_cpu else [])])


def format_resume(after: int, rounds: int, rows: int) -> str:
    """Return the line in which a resumed run states where training continues.

    Args:
        after: The round of the checkpoint that was restored; -1: none.
        rows: The number of rounds in metrics.jsonl.
    """
    if after >= 0:
        return f"resuming after round {after} ({after + 1} of {rounds} completed)"
    if rows:
        return f"no checkpoint is intact: starting again from round 0, {pluralize(rows, 'round')} are lost"
    return "no round was completed: starting from round 0"


# ---- during ----
def format_round(row: Mapping[str, Any], rounds: int, names: Sequence[str], mean_s: float) -> str:
    """Return the line that is printed after a round: its number, metrics, duration, and the estimated time left.

    Args:
        row: The round's row of metrics.jsonl.
        names: The metrics to show; those that the row does not contain are omitted.
        mean_s: The mean duration of a round in this job, in seconds.
    """
    done = int(row["round"]) + 1
    metrics = [f"{name} {format_metric(name, row[name])}" for name in names if row.get(name) is not None]
    left_s = max(rounds - done, 0) * mean_s
    left = [f"eta {format_duration(left_s)}"] if left_s > 0 else []
    return "  ".join([f"round {done}/{rounds}", *metrics, f"{row['wall_s']:.1f} s", *left])


def format_rank_failure(row: Mapping[str, Any], sites: Sequence[str] | None) -> str:
    """Return the line that is printed when ranks fail.

    Args:
        row: The row of faults.jsonl (engine/faults/lost_ranks.py).
        sites: The names of the sites in silo mode; otherwise clients are named by their numbers.
    """
    ranks = ", ".join(f"rank {rank} on {host}" if host else f"rank {rank}" for rank, host in row["ranks"].items())
    text = f"round {row['round']}: {ranks} is lost ({row['why']}); the run continues without it"
    for key, what in (("clients", "skips this round"), ("gone", "is unavailable")):
        names = [sites[k] if sites else str(k) for k in row[key]]
        text += f"; {'site' if sites else 'client'} {', '.join(names)} {what}" if names else ""
    if row["reverted"]:
        back = ", ".join(f"{k} ({'the start' if r < 0 else f'round {r}'})" for k, r in row["reverted"].items())
        text += f"; reverted to an earlier state: client {back}"
    return text


# ---- after ----
def format_results(
    rows: list[dict[str, Any]],
    result: Mapping[str, Any],
    headline: str,
    clients: list[dict[str, Any]],
    experiment: Experiment,
) -> list[str]:
    """Return the lines that a run prints after training: client metrics, the main metric, faults and traffic.

    Args:
        rows: The rows of metrics.jsonl.
        result: The content of summary.json.
        headline: The name of the main metric.
        clients: The rows of clients.jsonl of the last evaluation; not shown if there are too many.
    """
    names, lines = ("loss", *experiment.task.names), list[str]()
    if 0 < len(clients) <= MAX_CLIENTS_SHOWN:
        cells = [("client", "protocol", "samples", *names)]
        for row in clients:
            metrics = ["-" if row[name] is None else format_metric(name, row[name], 4) for name in names]
            cells.append((str(row.get("site", row["client"])), row["protocol"], str(row["samples"]), *metrics))
        lines += format_table(cells)
    gone = ", ".join(f"{rank} (round {t})" for rank, t in result["lost_ranks"].items())
    best, dp = result["best_model"], experiment.settings.privacy.dp
    # A value that JSON cannot represent is null in a row: epsilon is infinite if there is nearly no noise.
    epsilon = float("inf") if result.get("epsilon", 0.0) is None else result.get("epsilon")
    up, down = (result.get(f"{way}_parameters") for way in ("up", "down"))
    texts = [
        headline in result["last"] and _format_main_metric(rows, result, headline),
        result["diverged"] is not None and f"training diverged from round {result['diverged']} on (see the warning)",
        result["refused_uploads"]
        and f"{result['refused_uploads']} uploads were refused, {result['client_errors']} of them after an error while "
        "a client trained (`refused` in metrics.jsonl)",
        gone and f"lost ranks: {gone}; faults.jsonl lists the effects, and `fedmpi replay` checks the results",
        best
        and f"best model: {format_metric(best['metric'], best['value'], 4)} {best['metric']} in round {best['round']} "
        f"({best['file']})",
        up is not None and f"clients sent {up:,} and received {down:,} parameters",
        dp and epsilon is not None and f"privacy: epsilon {epsilon:.4g} at delta {dp.delta:g}",
        result["exit_reason"] != "finished"
        and f"stopped early ({result['exit_reason']}): {result['rounds']} of {experiment.settings.rounds} rounds are "
        "complete",
    ]
    return [*lines, *(text for text in texts if text)]


def _format_main_metric(rows: list[dict[str, Any]], result: Mapping[str, Any], name: str) -> str:
    """Return a line with the last value of a metric and its mean over the last ten evaluated rounds."""
    at, mean = result["last_round"][name] + 1, result["mean_last_10"].get(name)
    last = "the last round" if at == result["rounds"] else f"round {at}"
    line = f"{name} {format_metric(name, result['last'][name], 4)} {f'after {last}' if at else 'of the initial model'}"
    values = min(sum(row.get(name) is not None for row in rows), 10)
    if values < 2 or mean is None:
        return line
    return f"{line}, {format_metric(name, mean, 4)} on average over the last {values}"
