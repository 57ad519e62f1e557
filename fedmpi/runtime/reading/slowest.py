"""Who holds a run up, by the last rounds: what ranks write of their laps, else by what clients were placed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from fedmpi.runtime.reading import files

ROUNDS, BYTES, MANY = 10, 1 << 22, 1 << 16  # the last ones; read of all ranks together; of one rank at most
FOLDER, WAITS = "timeline", ("word", "uploads")  # as engine/timeline.py, which is not imported from here, has them


def slowest(run: Path) -> dict[str, Any]:
    """{"client": {client, rank, seconds}, "rank": {rank, host, busy or pace}}, as far as it is known.

    A client's seconds are the median of its trainings; who trained with others at once is not known alone. The slowest
    rank is the one that waits least: `busy` is the share of its time in which it did not. pace: what a sample costs
    there, over what it costs on the fastest rank.
    """
    paths = sorted((run / FOLDER).glob("rank-*.jsonl"))
    size = min(max(BYTES // max(len(paths), 1), 1 << 12), MANY)
    clients: dict[tuple[int, int], list[float]] = {}
    ranks: list[dict[str, Any]] = []
    for path in paths:
        rank = path.stem.removeprefix("rank-")
        rows = [row for row in files.tail(path, size) if "spans" in row][-ROUNDS:]
        if not rank.isdigit() or not rows:
            continue
        try:
            busy = _busy(rows, clients, int(rank))
        except (KeyError, TypeError, ValueError):  # not as fedmpi writes them
            continue
        if busy is not None:
            ranks.append({"rank": int(rank), "busy": busy})
    found: dict[str, Any] = {}
    if clients:
        (client, rank_), seconds = max(clients.items(), key=lambda item: median(item[1]))
        found["client"] = {"client": client, "rank": rank_, "seconds": median(seconds)}
    if len(ranks) > 1:
        found["rank"] = max(ranks, key=lambda each: each["busy"])
    return found if "rank" in found else found | _by_pace(run)


def _busy(rows: list[dict[str, Any]], clients: dict[tuple[int, int], list[float]], rank: int) -> float | None:
    waited = whole = 0.0
    for row in rows:
        whole += row["s"]
        for what, _, ms, *who in row["spans"]:
            waited += ms / 1e3 if what in WAITS else 0.0
            if what == "train" and who and isinstance(who[0], int):
                clients.setdefault((who[0], rank), []).append(ms / 1e3)
        rest: Mapping[str, float] = row.get("rest", {})
        waited += sum(ms for what, ms in rest.items() if what in WAITS) / 1e3
    return max(1 - waited / whole, 0.0) if whole > 0 else None


def _by_pace(run: Path) -> dict[str, Any]:
    for row in reversed(files.tail(run / "placement.jsonl")):
        pace = row.get("pace")
        if isinstance(pace, dict) and len(pace) > 1 and all(isinstance(each, int) for each in pace.values()):
            rank = max(pace, key=lambda each: pace[each])
            return {"rank": {"rank": int(rank), "pace": pace[rank] / 100}} if rank.isdigit() else {}
    return {}
