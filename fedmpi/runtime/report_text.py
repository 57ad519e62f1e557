"""What fedmpi says before and after training, and what `fedmpi validate` says instead of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedmpi.comm import Job
from fedmpi.engine.federation import Federation
from fedmpi.engine.messages import ENGINE_DOWN, ENGINE_UP, Messages
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.memory import size_text
from fedmpi.runtime.progress import Console
from fedmpi.runtime.run_dir import RunDirectory


def headlines(made: Experiment, job: Job, backend: str) -> list[str]:
    """What is about to run, in three lines."""
    s, data, messages = made.settings, made.data, made.messages
    sizes = data.train_sizes
    ranks = "one process" if job.size == 1 else f"{job.size} ranks ({job.launcher}, {backend})"
    return [
        f"{s.name}: {s.method.name} on {s.data.source}, {s.model.name} with {made.model.layout.size:,} parameters",
        f"{data.clients} clients with {sizes.min()} to {sizes.max()} samples, {data.classes} classes; {ranks}, "
        f"{device_name(made.model.w.device)}, {s.compute.threads} thread(s) a rank",
        traffic(messages, s.rounds, made.itemsize),
    ]


def traffic(messages: Messages, rounds: int, itemsize: int) -> str:
    """What a client sends and receives in a round; if some rounds send less, also how much that is on average."""
    up = [messages.upload(t).packing.size for t in range(max(rounds, 1))]
    full = max(up), messages.announcement().packing.size + messages.per_client.size
    sends, receives = (size_text(size * itemsize) for size in full)
    if min(up) == full[0]:
        return f"a client sends {sends} and receives {receives} a round"
    fast, mean = size_text(min(up) * itemsize), sum(up) / len(up) / full[0]
    return (
        f"a client sends {sends} in full rounds, {fast} in fast ones, {mean:.3f} on average; it gets up to {receives}"
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def figures_in(rows: list[dict[str, Any]]) -> list[str]:
    """The metrics worth a summary: all numbers that are neither bookkeeping nor time."""
    other = {"round", "cohort", "sent_bytes", "received_bytes", "up_parameters", "down_parameters"}
    other |= {"diverged", "wall_s", "train_s", "wait_s", "server_s", "evaluate_s"}
    seen = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    return [name for name in seen if name not in other]


def farewell(
    console: Console,
    directory: RunDirectory,
    result: dict[str, Any],
    headline: str,
    clients: list[dict[str, Any]],
    made: Experiment,
) -> None:
    """Show the last figures of up to 20 clients, the headline metric, the traffic, and where the results are."""
    if clients and len(clients) <= 20:
        names = ("samples", "loss", *made.task.names)
        console.say("  ".join(["client".ljust(14), "protocol".ljust(10), *(n.rjust(9) for n in names)]))
        for row in clients:
            who = str(row.get("site", row["client"])).ljust(14)
            figures = (f"{row[n]:9.4g}" if row[n] == row[n] else "        -" for n in names)
            console.say("  ".join([who, row["protocol"].ljust(10), *figures]))
    if headline in result["last"]:
        last = result["last"]
        mean = result["mean_last_10"]
        console.say(
            f"{headline} {last[headline]:.2f} after the last round, {mean[headline]:.2f} on average over the last 10"
        )
    if result["diverged"] is not None:
        console.say(f"training came apart from round {result['diverged']} on (see the warning)")
    if result["refused_uploads"]:
        console.say(f"{result['refused_uploads']} uploads were refused (`refused` in metrics.jsonl)")
    console.say(sums(directory.metrics(), made.messages))
    if result["exit_reason"] != "finished":
        console.say(
            f"stopped early ({result['exit_reason']}): {result['rounds']} of {made.settings.rounds} rounds are complete"
        )
    console.say(f"run directory: {directory.path}")


def sums(rows: list[dict[str, Any]], messages: Messages) -> str:
    """What all clients sent and received in all rounds, and its share of what sending all in every round would take."""
    visits = sum(len(row["cohort"]) for row in rows)
    up, down = (sum(row[key] for row in rows) for key in ("up_parameters", "down_parameters"))
    most = messages.largest_upload() - ENGINE_UP
    least = messages.announcement().packing.size - ENGINE_DOWN + messages.per_client.size
    full = visits * most, visits * least
    text = f"clients sent {up:,} and received {down:,} parameters"
    if (up, down) == full:
        return text
    return f"{text}, {up / full[0]:.3f} and {down / full[1]:.3f} of sending all in every round"


def check_list(made: Experiment, fed: Federation, needed: Mapping[str, int]) -> list[tuple[str, str]]:
    """What `fedmpi validate` shows."""
    s, data, messages, entry = made.settings, made.data, made.messages, made.itemsize
    sizes, tests = data.train_sizes, data.test_sizes
    held = np.array([len(shard) for shard in data.validation.values()])
    shared = f"{len(data.global_test)} samples" if data.global_test else "none that a rank sees"
    state = size_text(messages.client_state.size * entry)
    root, trainer = size_text(needed["rank 0"]), size_text(needed["a training rank"])
    training = f"{sizes.min()} to {sizes.max()} training samples (median {np.median(sizes):.0f})"
    held_out = f", {held.min()} to {held.max()} more for validation" if len(held) else ""
    return [
        (s.name, f"{s.method.name} on {s.data.source}, {s.model.name} with {made.model.layout.size:,} parameters"),
        ("clients", f"{data.clients}, {training}{held_out}"),
        ("test", f"{shared}; {tests.min()} to {tests.max()} samples a client"),
        ("message", traffic(messages, s.rounds, entry)),
        ("state", f"{state} a client, {size_text(messages.server_state.size * entry)} on the server"),
        ("memory", f"about {root} on rank 0 and {trainer} on a training rank"),
        ("result", "ok"),
    ]
