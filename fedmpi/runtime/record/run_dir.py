"""The run directory: everything needed to read, plot and repeat a run. docs/runs.md lists its files.

Only rank 0 writes; of timeline, state and audit each rank its own files. A file that is written once is written whole
or not at all; lines are flushed as they come. JSON has no NaN: numbers that are not finite are written as null. Secrets
are left out (common/redaction.py). A run that was killed has no summary.json; all else in its directory can be read.
"""

import hashlib
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.jsonl import parse_jsonl, read_jsonl, to_jsonable
from fedmpi.runtime.record import durable

MODEL, BEST, INITIAL = "model.safetensors", "model-best.safetensors", "initial.safetensors"
REPORT, SEAL = "report.html", "seal.json"
SEALED_BY_ROUND = ("metrics.jsonl", "clients.jsonl", "updates.jsonl", "analysis.jsonl")
SEALED = (  # and plugins/; what other ranks write, or what is written later, is not among them
    *("config.yaml", "identity.json", "environment.json", "partition.json", "partition.npz", "preprocessing.json"),
    *(*SEALED_BY_ROUND, "faults.jsonl"),
    *(INITIAL, "accepted.jsonl", MODEL, BEST, "summary.json"),
)
SYNCED = ("faults.jsonl", "accepted.jsonl")  # a resumed run depends on every line of these
END_S = 5.0  # allowed for a write in progress where a run is ended
TIMELINE, FLUSH_S, MOST_LINES = "timeline", 5.0, 1000


class RunDirectory:
    """One run's directory. `path` exists and is absolute; messages have it as `shown`, as it was given.

    A relative path is one below `working_dir`.
    """

    def __init__(self, path: Path, working_dir: Path = Path()) -> None:
        self.path, self.shown = (working_dir / path).absolute(), path
        self._lock = threading.RLock()  # of the one thread that writes: the main one, or one that ends the run

    @classmethod
    def create(cls, output: str | Path, name: str, working_dir: Path = Path()) -> "RunDirectory":
        """Create a new directory output/name, or name-2, name-3, ...: never one that exists, even if two runs start at
        once."""
        for number in itertools.count(1):
            path = Path(output) / (name if number == 1 else f"{name}-{number}")
            try:
                (working_dir / output).mkdir(parents=True, exist_ok=True)
                (working_dir / path).mkdir()
            except OSError as error:
                if isinstance(error, FileExistsError) and (working_dir / output).is_dir():
                    continue
                raise UserError(f"output: cannot create {path}: {error.strerror}; choose another output") from error
            break
        return cls(path, working_dir)

    # ---- reading and writing ----
    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a .jsonl file of rounds; none where it is missing. Raises UserError for a damaged one."""
        return read_jsonl(self.path / name, rounds=True, strict=True).rows

    def append(self, name: str, *lines: Mapping[str, Any] | str) -> None:
        """Append lines to a file in one write: texts as they are, objects as JSON."""
        content = "".join(f"{each if isinstance(each, str) else _json(each)}\n" for each in lines).encode()
        with self._writing(name) as path, open(path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                while content:  # a disk that fills up takes a part
                    content = content[file.write(content) :]
                if name in SYNCED:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise

    def write(self, name: str, content: bytes) -> None:
        """Write a file under a temporary name, then rename it: a reader sees the whole file or none."""
        with self._writing(name) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write(path, content)

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write a file that holds one JSON object."""
        self.write(name, f"{_json(facts, indent=2)}\n".encode())

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a whole .jsonl file."""
        self.write(name, "".join(f"{_json(row)}\n" for row in rows).encode())

    def write_model(
        self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any] | None = None, name: str = MODEL
    ) -> None:
        """Write a model; `serialize_model` says how."""
        self.write(name, serialize_model(tensors, facts or {}))

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """Give the path of a file that is written to within this, by one thread at a time."""
        try:
            with self._lock:
                yield self.path / name
        except OSError as error:
            raise UserError(
                f"run directory: cannot write {self.shown / name}: {error.strerror or error}; what is there stays "
                "readable. Free some space, or choose another output"
            ) from error

    # ---- a run that goes on, or ends ----
    def accepted_changes(self) -> list[str]:
        """Return what was changed under way (checkpoint.changes=accept), in words."""
        rows = self.rows("accepted.jsonl")
        return [f"from round {row['round']} on {change}" for row in rows for change in row.get("changes", ())]

    def truncate_after(self, t: int, analysed: bool = True) -> int:
        """Keep the rows of the rounds before t, for a run that resumes after round t and writes that row again.

        analysed: whether the analysis of round t stays: if it was the last round, it may have been an extra one.
        Returns how many rows metrics.jsonl had.
        """
        ends = {**dict.fromkeys(SEALED_BY_ROUND, t), "analysis.jsonl": t + analysed}
        rows_before = len(read_jsonl(self.path / "metrics.jsonl", rounds=True).rows)
        for name, end in ends.items():
            if (self.path / name).exists():
                rows = read_jsonl(self.path / name, rounds=True, strict=name in SYNCED).rows
                self.write_rows(name, [row for row in rows if row["round"] < end])
        for name in ("summary.json", SEAL, REPORT, MODEL, BEST, *(path.name for path in self.path.glob(".*.tmp"))):
            with self._writing(name) as path:
                path.unlink(missing_ok=True)
        return rows_before

    def close_failed(self) -> bool:
        """Close the directory of a run that has failed: from now on only the calling thread can write to it.

        A line that is only half written is cut off. Returns False if the run was finished before, or if a write of
        another thread does not end within END_S.
        """
        if not self._lock.acquire(timeout=END_S) or (self.path / "summary.json").exists():
            return False
        for path in self.path.glob("*.jsonl"):
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        return True


def serialize_model(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> bytes:
    """Serialise row-major copies under state_dict names, and as metadata `facts`, which serve to rebuild the module.

    All facts are under one key: the format keeps several in no fixed order, but equal runs must give equal files.
    """
    dense = torch.contiguous_format
    copies = {name: tensor.detach().cpu().clone(memory_format=dense) for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, {"fedmpi": json.dumps(dict(facts))})


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(to_jsonable(value), indent=indent, allow_nan=False)


# ---- the seal ----
def seal(run: Path) -> dict[str, Any]:
    """Return the content of seal.json for a run directory as it is now: checksums by which `fedmpi verify` finds out
    what was changed after the run.

    Returns:
        files    name -> SHA-256 of each file of SEALED and of plugins/. Checkpoints and states hold one of their own.
        rounds   file -> round -> SHA-256 of its lines, 16 digits; lines that are no row count to round "?"
        seal     SHA-256 of the rest. It stands for the whole directory, and can be noted elsewhere. It is no signature.
    """
    paths = [path for path in (*(run / name for name in SEALED), *sorted(run.glob("plugins/*"))) if path.is_file()]
    files = {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    rounds: dict[str, dict[str, str]] = {}
    for name in (name for name in SEALED_BY_ROUND if name in files):
        digests: dict[str, Any] = {}
        for line in (run / name).read_bytes().splitlines(keepends=True):
            rows = parse_jsonl(line, rounds=True).rows
            digests.setdefault(str(rows[0]["round"]) if rows else "?", hashlib.sha256()).update(line)
        rounds[name] = {t: digest.hexdigest()[:16] for t, digest in digests.items()}
    return {"files": files, "rounds": rounds, "seal": seal_digest({"files": files, "rounds": rounds})}


def seal_digest(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a seal's facts, which stands for all of them."""
    rest = {key: value for key, value in facts.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---- timelines ----
class TimelineFile:
    """The timeline of one rank (engine/timeline.py) as a file: timeline/rank-0003.jsonl.

    A job begins with `head`: {"job": seconds since 1970, the same on all ranks, "rank": 3, "of": 8, "host": "node5"}. A
    run that is gone on with has several. Lines are written every FLUSH_S seconds at most, so a kill costs the last
    ones. A rank that cannot write keeps no timeline.
    """

    def __init__(self, run: Path, head: Mapping[str, Any]) -> None:
        self.path = run / TIMELINE / f"rank-{head['rank']:04}.jsonl"
        cut_line = [""] if self.path.exists() else []  # here ends a line that a kill has cut
        self.waiting, self.is_writable = [*cut_line, json.dumps(head)], True
        self.flush()

    def add(self, line: Mapping[str, Any]) -> None:
        self.waiting.append(json.dumps(line))
        if time.monotonic() - self.written > FLUSH_S or len(self.waiting) >= MOST_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        lines, self.waiting, self.written = self.waiting, [], time.monotonic()
        if not self.is_writable or not lines:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            self.is_writable = False
            message = f"timeline: cannot write {self.path}: {error.strerror or error}; this rank keeps none"
            warnings.warn(RankWarning(f"{message} (timeline: false)"), stacklevel=2)


def read_timelines(run: Path) -> list[dict[str, Any]]:
    """Read the jobs of a run, the oldest first: {"job": ..., "ranks": {rank: {"host": ..., "rounds": [lines]}}}.

    Lines that cannot be read are left out.
    """
    jobs: dict[float, dict[str, Any]] = {}
    for path in sorted((run / TIMELINE).glob("rank-*.jsonl")):
        rounds: list[dict[str, Any]] | None = None
        for line in read_jsonl(path).rows:
            if "job" in line:
                job = jobs.setdefault(line["job"], {"job": line["job"], "ranks": {}})
                rounds = job["ranks"].setdefault(line["rank"], {"host": line["host"], "rounds": []})["rounds"]
            elif rounds is not None:
                rounds.append(line)
    return [jobs[began] for began in sorted(jobs)]
