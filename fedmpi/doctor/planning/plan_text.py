"""What `fedmpi plan` shows, and the line for Slurm."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from fedmpi.common.formatting import duration
from fedmpi.common.host_memory import size_text
from fedmpi.common.text import count

START_S, MARGIN, LEAVE_S, STEP_S = 30.0, 1.5, 180, 300  # of the time limit: start, factor, the warning, rounded to
MEMORY, MEMORY_STEP = 1.25, 64 << 20
Facts = dict[str, Any]


def lines(facts: Facts, words: Sequence[str]) -> list[str]:
    """words: the config and its overrides, for the sbatch line."""
    where = f"{count(facts['ranks'], 'rank')} on {count(facts['hosts'], 'host')}"
    found = [("plan", f"{facts['config']} with {where}, {facts['device']}")]
    for label, key, beside in (("memory", "memory", ""), ("gpu", "gpu_memory", ", and some hundred MiB of CUDA's own")):
        for who, parts in facts.get(key, {}).items():
            held = [f"{name} {size_text(size)}" for name, size in parts.items() if name != "all" and size >= 1 << 10]
            found += [(label, f"{who}: about {size_text(parts['all'])}{beside}"), ("", ", ".join(held))]
    found += [("", f"uploads travel {facts['uploads']}"), *_traffic(facts), *_seconds(facts)]
    found += [("sbatch", sbatch(facts, words))]
    return [f"{name:<8}  {text}" for name, text in found]


def _traffic(facts: Facts) -> list[tuple[str, str]]:
    usual, run = facts["bytes"]["round"], facts["bytes"]["run"]
    found = [("bytes", f"{_both(usual)} a round (rank 0's connection)")]
    found += [
        ("", f"{_both(kind)} in {count(kind['rounds'], 'round')} such as {kind['first'] + 1}")
        for kind in facts["bytes"]["kinds"]
        if (kind["up"], kind["down"]) != (usual["up"], usual["down"])
    ]
    return [*found, ("", f"{_both(run)} in {count(facts['rounds'], 'round')}")]


def _both(ways: Facts) -> str:
    return f"{size_text(ways['up'])} up, {size_text(ways['down'])} down"


def _seconds(facts: Facts) -> list[tuple[str, str]]:
    s = facts["seconds"]
    least, most = (s["round"] * (1 + sign * s["error"]) for sign in (-1, 1))
    parts = ", ".join(
        f"{name} {duration(s[name])}" for name in ("training", "evaluation", "server", "transfer") if s[name]
    )
    x = "step" if s["in_steps"] else "sample"
    found = [
        ("seconds", f"{duration(s['round'])} a round ({duration(least)} to {duration(most)}): {parts}"),
        ("", f"a client takes {duration(s['client_fixed'])} and {duration(s['client_more'])} a {x}, measured here"),
        ("run", f"{duration(s['run'])} for {count(facts['rounds'], 'round')}"),
    ]
    if s["crowded"] > 1:
        found.insert(1, ("", f"ranks share the cores of this machine: training takes {s['crowded']:.2g} x as long"))
    if facts["hosts"] > 1:
        found.insert(1, ("", "hosts are taken to be like this one, with 10 Gbit/s between them"))
    if facts["cuda"] and facts["device"] == "cpu":
        found.insert(
            1, ("", "measured on a CPU: ask on a node with a GPU for seconds and memory with compute.device: cuda")
        )
    return found


def sbatch(facts: Facts, words: Sequence[str]) -> str:
    """The words that start such a run in Slurm, with a margin in time and memory."""
    threads = facts["threads"]
    most = max(parts["all"] for parts in facts["memory"].values()) * MEMORY / threads
    megabytes = math.ceil(most / MEMORY_STEP) * MEMORY_STEP >> 20
    s = facts["seconds"]
    asked = (START_S + s["start"] + s["run"] * (1 + s["error"])) * MARGIN + LEAVE_S
    options = [f"--ntasks={facts['ranks']}", f"--cpus-per-task={threads}", f"--mem-per-cpu={megabytes}M"]
    options += [f"--nodes={facts['hosts']}"] if facts["hosts"] > 1 or facts["cuda"] else []
    here = -(-facts["ranks"] // facts["hosts"])
    # Not --gpus-per-task, which hides the GPU of each task from the others.
    options += [f"--ntasks-per-node={here}", f"--gpus-per-node={here}"] if facts["cuda"] else []
    return shlex.join(["sbatch", *options, f"--time={clock(asked)}", "slurm/srun.sbatch", *words])


def clock(seconds: float) -> str:
    """A time limit as Slurm reads it, to the next five minutes.

    >>> clock(61), clock(86400.0), clock(90_000.0)
    ('00:05:00', '1-00:00:00', '1-01:00:00')
    """
    whole = math.ceil(seconds / STEP_S) * STEP_S
    days, rest = divmod(whole, 86_400)
    said = f"{rest // 3600:02}:{rest % 3600 // 60:02}:00"
    return f"{days}-{said}" if days else said
