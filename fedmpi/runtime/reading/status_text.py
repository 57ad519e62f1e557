"""What `fedmpi status` shows of a run: a line a thing, none longer than a narrow terminal needs."""

from __future__ import annotations

import time
from typing import Any

from fedmpi.common.formatting import duration
from fedmpi.common.host_memory import size_text
from fedmpi.common.text import count, figure
from fedmpi.runtime.reading.status import FINISHED, NEVER, RUNNING

SHOWN = 4  # figures
Facts = dict[str, Any]


def lines(facts: Facts) -> list[str]:
    rows = [
        ("run", facts["directory"]),
        ("state", state(facts)),
        ("round", rounds(facts)),
        ("left", left(facts)),
        ("ranks", ranks(facts)),
        ("slowest", slowest(facts["slowest"])),
        ("figures", figures(facts)),
        ("bytes", traffic(facts)),
        ("faults", faults(facts)),
        ("checkpoint", checkpoint(facts)),
        ("next", _next(facts)),
    ]
    return [f"{name:<10}  {text}" for name, text in rows if text]


def state(facts: Facts) -> str:
    why = f": {facts['why']}" if facts["why"] else ""
    who, since = facts["holder"], facts["since_s"]
    if facts["state"] == RUNNING and who and "host" in who:
        why += f" (process {who.get('pid')} on {who['host']})"
    ago = f", last written {duration(since)} ago" if since is not None and facts["state"] != FINISHED else ""
    return f"{facts['state']}{why}{ago}"


def rounds(facts: Facts) -> str:
    if facts["state"] == NEVER:
        return ""
    of = f" of {facts['rounds']:,}" if facts["rounds"] is not None else ""
    pace = f", {seconds(facts['round_s'])} a round" if facts["round_s"] is not None else ""
    return f"{facts['rounds_done']:,}{of}{pace}"


def left(facts: Facts) -> str:
    if facts["eta_s"] is None:
        return ""
    end = time.localtime(time.time() + facts["eta_s"])
    day = "" if facts["eta_s"] < 12 * 3600 else "%Y-%m-%d "
    rough = " (by one round)" if facts["rounds_done"] == 1 else ""
    return f"{duration(facts['eta_s'])}{rough}, until {time.strftime(f'{day}%H:%M', end)}"


def ranks(facts: Facts) -> str:
    if facts["ranks"] is None:
        return ""
    lost = ", ".join(f"rank {rank} lost in round {t}" for rank, t in facts["lost"].items())
    alive = f"{facts['alive']} of {facts['ranks']} alive" if facts["state"] == RUNNING else f"{facts['ranks']}"
    where = f" on {count(len(facts['hosts']), 'host')}" if facts["hosts"] else ""
    job = f", Slurm job {facts['job']}" if facts["job"] else ""
    return f"{alive}{where}{job}{f'; {lost}' if lost else ''}"


def slowest(found: Facts) -> str:
    said = []
    if "client" in found:
        one = found["client"]
        said.append(f"client {one['client']}, {seconds(one['seconds'])} on rank {one['rank']}")
    if "rank" in found:
        one = found["rank"]
        how = f"busy {100 * one['busy']:.0f} % of the time" if "busy" in one else f"{one['pace']:.2f} x the fastest"
        said.append(f"rank {one['rank']}, {how}")
    return "; ".join(said)


def figures(facts: Facts) -> str:
    found = facts["figures"]
    if not found:
        return ""
    first = [name for name in found if name.endswith(("accuracy", "loss")) or name == "train_loss"]
    names = list(dict.fromkeys([*(n for n in ("loss", "accuracy", "train_loss") if n in found), *first, *found]))
    said = ", ".join(f"{name} {figure(name, found[name], 4)}" for name in names[:SHOWN])
    return f"{said} (round {facts['figures_round'] + 1})"


def traffic(facts: Facts) -> str:
    up, down = facts["received_bytes"], facts["sent_bytes"]
    return f"{size_text(up)} up, {size_text(down)} down (rank 0's connection)" if up or down else ""


def faults(facts: Facts) -> str:
    found, said = facts["faults"], []
    if found["losses"]:
        said.append(f"{found['losses']} x ranks lost (faults.jsonl)")
    for key, what in (("rounds_with_refused", "refused"), ("rounds_with_clipped", "clipped")):
        if found[key]:
            said.append(f"uploads {what} in {count(found[key], 'round')}")
    if found["diverged"] is not None:
        said.append(f"training came apart from round {found['diverged']} on")
    if facts["unreadable"]:
        said.append(f"{count(facts['unreadable'], 'line')} of metrics.jsonl cannot be read")
    return "; ".join(said) or "none"


def checkpoint(facts: Facts) -> str:
    kept = facts["checkpoint"]
    if kept is None:
        return "none"
    age = f", {duration(kept['age_s'])} old" if kept["age_s"] is not None else ""
    return f"after round {kept['round'] + 1}{age}"


def _next(facts: Facts) -> str:
    return f"fedmpi resume {facts['directory']}" if facts["resume"] else ""


def seconds(value: float) -> str:
    """A round's seconds.

    >>> seconds(0.0321), seconds(12.34), seconds(600.0)
    ('0.032 s', '12 s', '10 min')
    """
    return f"{value:.2g} s" if value < 100 else duration(value)
