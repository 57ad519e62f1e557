"""The timelines of ranks (engine/timeline.py) as files: timeline/rank-0003.jsonl, one for each rank.

A job begins with {"job": seconds since 1970, the same on all ranks, "rank": 3, "of": 8, "host": "node5"}; a run that is
gone on with has several. Lines are written every FLUSH_S seconds at most, so a kill costs the last ones and may cut
one. A rank that does not see the run directory, or cannot write there, keeps none.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.common.errors import RankWarning
from fedmpi.common.jsonl import read_jsonl

FOLDER, FLUSH_S, MOST = "timeline", 5.0, 1000


class TimelineFile:
    """One rank's file."""

    def __init__(self, run: Path, head: Mapping[str, Any], private: bool) -> None:
        self.path, self.private = run / FOLDER / f"rank-{head['rank']:04}.jsonl", private
        begun = [""] if os.path.exists(self.path) else []  # here ends a line that a kill has cut
        self.waiting, self.is_writable = [*begun, json.dumps(head)], True
        self.flush()

    def add(self, line: Mapping[str, Any]) -> None:
        self.waiting.append(json.dumps(line))
        if time.monotonic() - self.written > FLUSH_S or len(self.waiting) >= MOST:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait. Where that fails this rank keeps no timeline; training does not end for it."""
        lines, self.waiting, self.written = self.waiting, [], time.monotonic()
        if not self.is_writable or not lines:
            return
        try:
            if not self.path.parent.exists():
                self.path.parent.mkdir(0o700 if self.private else 0o777, exist_ok=True)
            mode = 0o600 if self.private else 0o666
            with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "w") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            self.is_writable = False
            message = f"timeline: cannot write {self.path}: {error.strerror or error}; this rank keeps none"
            warnings.warn(RankWarning(f"{message} (timeline: false)"), stacklevel=2)


def read(run: Path) -> list[dict[str, Any]]:
    """Read the jobs of a run, the oldest first: {"job": ..., "ranks": {rank: {"host": ..., "rounds": [lines]}}}.

    Lines that cannot be read are left out.
    """
    jobs: dict[float, dict[str, Any]] = {}
    for path in sorted((run / FOLDER).glob("rank-*.jsonl")):
        rounds: list[dict[str, Any]] | None = None
        for line in read_jsonl(path).rows:
            if "job" in line:
                job = jobs.setdefault(line["job"], {"job": line["job"], "ranks": {}})
                rounds = job["ranks"].setdefault(line["rank"], {"host": line["host"], "rounds": []})["rounds"]
            elif rounds is not None:
                rounds.append(line)
    return [jobs[began] for began in sorted(jobs)]
