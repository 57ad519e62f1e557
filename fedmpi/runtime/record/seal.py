"""seal.json: what a run directory held when its run ended, so that whoever changes a digit later must change this, too.

    {"files": {name: SHA-256}, "rounds": {"metrics.jsonl": {round: SHA-256 of its lines, 16 digits}, ...}, "seal": ...}

`seal` is the SHA-256 of the rest: it stands for the whole directory, and can be written beside a table. It is no
signature. What is written by other ranks, or later (log.txt, timeline, state, audit), is not in it; checkpoints and
states hold a SHA-256 of their own (durable.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fedmpi.common.jsonl import parse_jsonl

NAME = "seal.json"
FILES = (
    *("config.yaml", "identity.json", "environment.json", "partition.json", "partition.npz", "preprocessing.json"),
    *("metrics.jsonl", "clients.jsonl", "updates.jsonl", "analysis.jsonl", "faults.jsonl", "placement.jsonl"),
    *("initial.safetensors", "accepted.jsonl", "model.safetensors", "model-best.safetensors", "summary.json"),
)
BY_ROUND = ("metrics.jsonl", "clients.jsonl", "updates.jsonl", "analysis.jsonl")
CHUNK = 1 << 24


def of(run: Path) -> dict[str, Any]:
    """The seal of a run directory as it is now."""
    facts = {"files": files(run), "rounds": {name: rounds(run / name) for name in BY_ROUND if (run / name).exists()}}
    return {**facts, "seal": stamp(facts)}


def files(run: Path) -> dict[str, str]:
    """File -> SHA-256, of those that are there."""
    names = [name for name in FILES if (run / name).is_file()]
    names += sorted(f"plugins/{path.name}" for path in run.glob("plugins/*") if path.is_file())
    return {name: digest(run / name) for name in names}


def rounds(path: Path) -> dict[str, str]:
    """Round -> digest of its lines, in their order. A line that is none counts to round "?"."""
    found: dict[str, Any] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        rows = parse_jsonl(line, rounds=True).rows
        found.setdefault(str(rows[0]["round"]) if rows else "?", hashlib.sha256()).update(line)
    return {t: lines.hexdigest()[:16] for t, lines in found.items()}


def stamp(facts: dict[str, Any]) -> str:
    """The SHA-256 of a seal's facts."""
    rest = {key: value for key, value in facts.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            found.update(piece)
    return found.hexdigest()
