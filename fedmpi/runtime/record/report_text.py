"""The texts that a run prints before and after training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from fedmpi.comm import Job
from fedmpi.comm.base import ranks as numbers
from fedmpi.common.formatting import table
from fedmpi.common.host_memory import size_text
from fedmpi.common.text import count, format_metric
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.schema import Settings
from fedmpi.config.sections import OPTIONS
from fedmpi.engine import scheduler
from fedmpi.engine.local.local_training_config import learning_rate
from fedmpi.engine.messages import ENGINE_DOWN, ENGINE_UP, Messages
from fedmpi.runtime import build_data
from fedmpi.runtime.build import Experiment


def headlines(experiment: Experiment, job: Job, backend: str, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines that a run prints first. ranks: facts about each rank, with its host and device."""
    s, data, messages = experiment.settings, experiment.data, experiment.messages
    sizes, silos = data.train_sizes, s.data.silos or ()
    where = "one process" if job.size == 1 else f"{job.size} ranks ({job.launcher}, {backend})"
    classes = f", {data.classes} classes" if getattr(experiment.task, "classification", False) else ""
    sites = [f"this process opens the files of all {len(silos)} sites: {', '.join(silos)}"] if silos else []
    if silos and len(ranks) > 1:
        owner, width = build_data.site_ranks(s, len(ranks)), max(map(len, silos))
        where_opened = (f"rank {owner[k]} on {ranks[owner[k]]['host']}" for k in range(len(silos)))
        sites = [f"site {name:<{width}}  {rank}" for name, rank in zip(silos, where_opened, strict=True)]
    return [
        f"{s.name}: {describe_experiment(experiment)}",
        f"{count(data.clients, 'client')} with {sizes.min()} to {sizes.max()} samples{classes}; {where}, "
        f"{describe_devices(ranks)}, {count(s.compute.threads, 'thread')} a rank",
        *sites,
        f"{count(s.rounds, 'round')} with {describe_training(s, data.clients, messages.method.own_length)}",
        *(f"from {file}: {text}" for file, text in fragments(s, ("rounds", "train.", "cohort."))),
        describe_traffic(messages, s.rounds, experiment.itemsize),
        *describe_wire(experiment, job.size),
        *(experiment.initial.lines if experiment.initial is not None else ()),
    ]


def describe_experiment(experiment: Experiment) -> str:
    """Name method, data and model; a plug-in by its file's name."""
    s = experiment.settings
    method, source, model = (Path(name).name for name in (s.method.name, s.data.source, s.model.name))
    untrained = sum(p.numel() for p in experiment.model.frozen.values())
    frozen = f" and {untrained:,} frozen ones" if untrained else ""
    return f"{method} on {source}, {model} with {experiment.model.layout.size:,} parameters{frozen}"


def describe_training(s: Settings, clients: int, own_length: bool = False) -> str:
    """Describe who trains in a round, how long (unless the method has options for that), and with which optimiser."""
    train, members = s.train, scheduler.cohort_size(clients, s.cohort.fraction, s.cohort.size)
    who = f"{members} of {count(clients, 'client')}"
    who += " in turn" if s.cohort.draw == "cycles" else " each" if s.rounds > 1 else ""
    amount = count(train.steps, "step") if train.steps is not None else f"{train.epochs:g} epoch"
    amount += "s" if train.steps is None and train.epochs != 1 else ""
    batches = "full batches" if train.batch_size == "full" else f"batches of {train.batch_size}"
    last = learning_rate(train.lr, train.schedule, max(s.rounds - 1, 0), max(s.rounds, 1), train.decay)
    lr = f"lr {train.lr:g}, {train.schedule}" + ("" if train.schedule == "constant" else f", {last:.3g} at last")
    lr += f", after a warm-up of {count(train.warmup_rounds, 'round')}" if train.warmup_rounds else ""
    rule: list[str] = [] if train.optim == "sgd" else [train.optim]
    if "momentum" in OPTIONS[train.optim]:
        rule += [f"{'nesterov ' if train.nesterov else ''}momentum {train.momentum:g}"]
    rule += [f"gradients' norm at most {train.clip_norm:g}"] if train.clip_norm is not None else []
    rule += [f"their entries at most {train.clip_value:g}"] if train.clip_value is not None else []
    rule += ["kept from round to round"] if train.keep_optim else []
    return f"{who}, {'' if own_length else f'{amount} '}in {batches}; {lr}; {', '.join(rule)}"


def fragments(s: Settings, starts: tuple[str, ...] = ("",)) -> list[tuple[str, str]]:
    """Return (file, text of its keys and values) for each file under `base` from which settings came.

    starts: only keys that begin with one of these are listed.
    """
    listed = {
        file: ", ".join(f"{key} {describe_value(value)}" for key, value in keys.items() if key.startswith(starts))
        for file, keys in s.fragments().items()
    }
    return [(file, text) for file, text in listed.items() if text]


def describe_traffic(messages: Messages, rounds: int, itemsize: int) -> str:
    """Say how much a client sends and receives in a round; if some rounds send less, also how much on average."""
    up = [messages.upload(t).size for t in range(max(rounds, 1))]
    full = max(up), messages.announcement().size + messages.per_client.size
    sends, receives = (size_text(size * itemsize) for size in full)
    if min(up) == full[0]:
        return f"a client sends {sends} and receives {receives} a round"
    fast, mean = size_text(min(up) * itemsize), sum(up) / len(up) / full[0]
    return (
        f"a client sends {sends} in full rounds, {fast} in fast ones, {mean:.3f} on average; it gets up to {receives}"
    )


def describe_wire(experiment: Experiment, ranks: int) -> list[str]:
    """Say which messages travel in another format than the model's own, and what that costs the clients."""
    messages, wire_ = experiment.messages, experiment.messages.wire
    directions = []
    if wire_.up:
        uploads = [messages.upload(t).coding for t in range(max(messages.rounds, 1))]
        coded = dict.fromkeys(name for coding in uploads if coding for name in coding.formats)
        uncoded = [name for name, slot in experiment.method.sends.items() if messages.large(slot) and name not in coded]
        directions = [
            f"up {wire_.up} ({', '.join(coded) or 'nothing'}{'; whole: ' if uncoded else ''}{', '.join(uncoded)})"
        ]
    if wire_.down:
        directions.append(f"down {wire_.down} of the model")
    row = size_text(experiment.itemsize * sum(map(prod, messages.unsent.values())))
    lines = [f"wire: {', '.join(directions)}"] if directions else []
    if messages.unsent:
        moves = ranks > 1 and experiment.settings.cohort.placement == "balanced" and not experiment.settings.data.silos
        more = ", and moves it between ranks (cohort.placement: pinned does not)" if moves else ""
        lines.append(f"what a format leaves out of an upload, {row}, a client keeps for its next{more}")
    return lines


def describe_devices(facts: Sequence[Mapping[str, Any]]) -> str:
    """Name the devices of all ranks: `cpu (x86_64)`, `4 x NVIDIA H100, rank 0 on cpu`. facts: about each rank."""
    gpus = {each["gpu"]: each["device"] for each in facts if each.get("gpu")}  # several ranks may share one
    on_cpu = [rank for rank, each in enumerate(facts) if not each.get("gpu")]
    if not gpus:
        return ", ".join(dict.fromkeys(each["device"] for each in facts))
    named = [f"{n} x {name}" if len(facts) > 1 else name for name, n in Counter(gpus.values()).items()]
    return ", ".join([*named, *([f"{numbers(on_cpu)} on cpu"] if on_cpu else [])])


def slow_ranks_warning(facts: Sequence[Mapping[str, Any]], trains: Sequence[int]) -> str:
    """A warning of ranks that train on their CPUs while others have GPUs (compute.device: auto); "" without such.

    Args:
        facts: about each rank; `no_gpu` says why it has none, "" if it was to have none.
        trains: the ranks that train.
    """
    slow = [rank for rank in trains if facts[rank]["no_gpu"]]
    if not slow:
        return ""
    return (
        f"compute.device: auto: {numbers(slow)} train{'s' * (len(slow) == 1)} on the CPU while others have GPUs, and "
        f"NCCL cannot be used: {facts[slow[0]]['no_gpu']}. Mend that host or leave it out; with compute.device: "
        "cuda a run refuses to start so"
    )


def result_lines(
    rows: list[dict[str, Any]],
    result: Mapping[str, Any],
    headline: str,
    clients: list[dict[str, Any]],
    experiment: Experiment,
) -> list[str]:
    """Return the lines that a run prints last: metrics of up to 20 clients, the headline metric, faults, traffic.

    Args:
        rows: those of metrics.jsonl.
        result: the content of summary.json.
        clients: rows of clients.jsonl of the last evaluation.
    """
    lines = []
    if clients and len(clients) <= 20:
        names, cells = (
            ("loss", *experiment.task.names),
            [("client", "protocol", "samples", "loss", *experiment.task.names)],
        )
        for row in clients:
            figures = ("-" if row[n] is None else format_metric(n, row[n], 4) for n in names)
            cells.append((str(row.get("site", row["client"])), row["protocol"], str(row["samples"]), *figures))
        lines += table(cells)
    if headline in result["last"]:
        at, mean = result["last_round"][headline] + 1, result["mean_last_10"].get(headline)
        values = min(sum(row.get(headline) is not None for row in rows), 10)
        when = (
            "of the initial model"
            if not at
            else f"after {'the last round' if at == result['rounds'] else f'round {at}'}"
        )
        average = (
            f", {format_metric(headline, mean, 4)} on average over the last {values}"
            if values > 1 and mean is not None
            else ""
        )
        lines.append(f"{headline} {format_metric(headline, result['last'][headline], 4)} {when}{average}")
    if result["diverged"] is not None:
        lines.append(f"training came apart from round {result['diverged']} on (see the warning)")
    if result["refused_uploads"]:
        lines.append(f"{result['refused_uploads']} uploads were refused (`refused` in metrics.jsonl)")
    if result["client_errors"]:
        lines.append(f"{result['client_errors']} of them came of errors while a client trained")
    if result["lost_ranks"]:
        gone = ", ".join(f"{rank} (round {t})" for rank, t in result["lost_ranks"].items())
        lines.append(f"ranks lost on the way: {gone}; faults.jsonl says what that means, `fedmpi replay` checks it")
    if result["clipped_uploads"]:
        lines.append(f"{result['clipped_uploads']} uploads were taken at the bound (`clipped` in metrics.jsonl)")
    if best := result["best_model"]:
        value = format_metric(best["figure"], best["value"], 4)
        lines.append(f"best model: {value} {best['figure']} in round {best['round']} ({best['file']})")
    lines.append(total_traffic(rows, experiment.messages))
    if result["exit_reason"] != "finished":
        done = f"{result['rounds']} of {experiment.settings.rounds} rounds are complete"
        lines.append(f"stopped early ({result['exit_reason']}): {done}")
    return lines


def total_traffic(rows: list[dict[str, Any]], messages: Messages) -> str:
    """Say what all clients sent and received in all rounds, and its share of full messages in every round."""
    visits = sum(len(row["cohort"]) for row in rows)
    up, down = (sum(row[key] for row in rows) for key in ("up_parameters", "down_parameters"))
    most = messages.largest_upload() - ENGINE_UP
    least = messages.announcement().packing.size - ENGINE_DOWN + messages.per_client.size
    full = visits * most, visits * least
    text = f"clients sent {up:,} and received {down:,} parameters"
    if (up, down) == full or not all(full):  # of nothing there is no share
        return text
    return f"{text}, {up / full[0]:.3f} and {down / full[1]:.3f} of sending all in every round"


def resume_line(after: int, rounds: int, rows: int) -> str:
    """Say where a resumed run goes on.

    Args:
        after: the last complete round, -1: none.
        rounds: of the whole run.
        rows: rounds that metrics.jsonl has.
    """
    if after >= 0:
        return f"going on after round {after} ({after + 1} of {rounds} done)"
    anew = f"no checkpoint is whole, {count(rows, 'round')} to be trained anew" if rows else "no round was complete"
    return f"{anew}: from the start"


def rank_failure_line(row: Mapping[str, Any], sites: Sequence[str] | None) -> str:
    """Return the line on a row of faults.jsonl (engine/faults/lost_ranks.py)."""
    ranks = ", ".join(f"rank {rank} on {host}" if host else f"rank {rank}" for rank, host in row["ranks"].items())
    text = f"round {row['round']}: {ranks} is lost ({row['why']}); going on without"
    for key, what in (("clients", "sits this round out"), ("gone", "is gone")):
        names = [sites[k] if sites else str(k) for k in row[key]]
        text += f"; {'site' if sites else 'client'} {', '.join(names)} {what}" if names else ""
    if row["reverted"]:
        back = ", ".join(f"{k} ({'the start' if r < 0 else f'round {r}'})" for k, r in row["reverted"].items())
        text += f"; back to an earlier state: client {back}"
    return text
