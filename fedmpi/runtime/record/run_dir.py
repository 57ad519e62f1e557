"""Write the run directory: all files that are needed to read, plot and repeat a run. docs/runs.md lists them.

Rank 0 writes all files, except that each rank writes its own trace, state and audit files. Complete files are written
atomically; lines are appended and flushed one by one. Numbers that are not finite are written as null, because JSON has
no NaN. Secrets are hidden (common/redaction.py). The directory of a run that was killed has no summary.json, but all
its other files can be read.
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
from fedmpi.runtime.record import atomic_files

MODEL, BEST, INITIAL = "model.safetensors", "model-best.safetensors", "initial.safetensors"
PRIVACY, RELEASES = "privacy.json", "releases.jsonl"
REPORT, CHECKSUMS = "report.html", "checksums.json"
ROUND_FILES = ("metrics.jsonl", "clients.jsonl", "update_stats.jsonl", "analysis.jsonl")
# Files with checksums in checksums.json, besides plugins/. Files of other ranks and of later commands have none.
CHECKED_FILES = (
    *("config.yaml", "identity.json", "environment.json", "partition.json", "partition.npz", "preprocessing.json"),
    *(*ROUND_FILES, "faults.jsonl", PRIVACY, RELEASES),
    *(INITIAL, "accepted_changes.jsonl", MODEL, BEST, "summary.json"),
)
SYNCED = (
    "faults.jsonl",
    "accepted_changes.jsonl",
    RELEASES,
)  # synchronised to disk, as a resumed run depends on every line
CLOSE_TIMEOUT_S = 5.0  # seconds to wait for a write in progress when a run fails
TRACE, FLUSH_S, MAX_WAITING_LINES = "trace", 5.0, 1000


class RunDirectory:
    """The directory of one run.

    Attributes:
        path: the absolute path.
        display_path: the path as the user gave it (relative to `working_dir`), for messages.
    """

    def __init__(self, path: Path, working_dir: Path = Path()) -> None:
        self.path, self.display_path = (working_dir / path).absolute(), path
        self._lock = threading.RLock()  # only one thread writes: the main thread, or a thread that ends the run

    @classmethod
    def create(cls, output: str | Path, name: str, working_dir: Path = Path()) -> "RunDirectory":
        """Create a new run directory output/name, or output/name-2, output/name-3, and so on if the name is taken.

        Two runs that start at the same time get different directories. Raises UserError if creation fails.
        """
        for number in itertools.count(1):
            path = Path(output) / (name if number == 1 else f"{name}-{number}")
            try:
                (working_dir / output).mkdir(parents=True, exist_ok=True)
                (working_dir / path).mkdir()
            except OSError as error:
                if isinstance(error, FileExistsError) and (working_dir / output).is_dir():
                    continue
                message = f"output: cannot create {path}: {error.strerror}"
                raise UserError(f"{message}; set output to another directory") from error
            break
        return cls(path, working_dir)

    # ---- reading and writing ----
    def read_rows(self, name: str) -> list[dict[str, Any]]:
        """Read the rows of a .jsonl file with one or more rows per round; return [] if the file is missing.

        Raises UserError if a line is damaged.
        """
        return read_jsonl(self.path / name, need_round=True, strict=True).rows

    def append(self, name: str, *lines: Mapping[str, Any] | str) -> None:
        """Append lines to a file. Strings are written unchanged, mappings as JSON.

        If writing fails, none of the lines is appended.
        """
        content = "".join(f"{each if isinstance(each, str) else _to_json(each)}\n" for each in lines).encode()
        with self._lock_for_writing(name) as path, open(path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                while content:  # a write to a disk that is almost full may be partial
                    content = content[file.write(content) :]
                if name in SYNCED:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically: a reader sees the complete file or the previous one."""
        with self._lock_for_writing(name) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_atomically(path, content)

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write the mapping `facts` as a JSON file."""
        self.write(name, f"{_to_json(facts, indent=2)}\n".encode())

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write or replace a .jsonl file, with one line per row."""
        self.write(name, "".join(f"{_to_json(row)}\n" for row in rows).encode())

    def write_model(
        self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any] | None = None, name: str = MODEL
    ) -> None:
        """Write a model file with tensors and metadata (see `serialize_model`)."""
        self.write(name, serialize_model(tensors, facts or {}))

    @contextmanager
    def _lock_for_writing(self, name: str) -> Iterator[Path]:
        """Yield the path of a file, so that the caller can write it; other threads cannot write within this context.

        Raises:
            UserError: the file could not be written.
        """
        try:
            with self._lock:
                yield self.path / name
        except OSError as error:
            raise UserError(
                f"run directory: cannot write {self.display_path / name}: {error.strerror or error}; files that are "
                "already written stay readable. Free some disk space, or set output to another directory"
            ) from error

    # ---- resumed and failed runs ----
    def read_accepted_changes(self) -> list[str]:
        """Return descriptions of changes that were accepted when the run was resumed (checkpoint.changes=accept)."""
        rows = self.read_rows("accepted_changes.jsonl")
        return [f"from round {row['round']} on {change}" for row in rows for change in row.get("changes", ())]

    def delete_rows_from(self, t: int, analysed: bool = True) -> int:
        """Delete the rows of round t and later from the .jsonl files, and the files that a run writes at its end.

        A run that is resumed after round t writes the rows of round t again.

        Args:
            t: The last round that is complete.
            analysed: Whether to keep the analysis of round t. Use False if round t was analysed only because the run
                ended with it, and the resumed run is longer.

        Returns:
            The number of rows in metrics.jsonl before the deletion.
        """
        ends = {**dict.fromkeys(ROUND_FILES, t), "analysis.jsonl": t + analysed}
        rows_before = len(read_jsonl(self.path / "metrics.jsonl", need_round=True).rows)
        for name, end in ends.items():
            if (self.path / name).exists():
                rows = read_jsonl(self.path / name, need_round=True, strict=name in SYNCED).rows
                self.write_rows(name, [row for row in rows if row["round"] < end])
        for name in ("summary.json", CHECKSUMS, REPORT, MODEL, BEST, *(path.name for path in self.path.glob(".*.tmp"))):
            with self._lock_for_writing(name) as path:
                path.unlink(missing_ok=True)
        return rows_before

    def close_failed(self) -> bool:
        """Close the directory of a failed run: remove incomplete lines, and keep other threads from writing.

        Returns:
            False if the run had already finished, or another thread still wrote after CLOSE_TIMEOUT_S seconds.
        """
        if not self._lock.acquire(timeout=CLOSE_TIMEOUT_S) or (self.path / "summary.json").exists():
            return False
        for path in self.path.glob("*.jsonl"):
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        return True


def serialize_model(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> bytes:
    """Return the content of a model file in safetensors format.

    Args:
        tensors: A dict from state_dict name to tensor; contiguous copies are stored.
        facts: Metadata, from which the module can be rebuilt. They are stored under a single key, because safetensors
            does not fix the order of keys, and equal runs must give equal files.
    """
    dense = torch.contiguous_format
    copies = {name: tensor.detach().cpu().clone(memory_format=dense) for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, {"fedmpi": json.dumps(dict(facts))})


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(to_jsonable(value), indent=indent, allow_nan=False)


# ---- checksums ----
def compute_checksums(run: Path) -> dict[str, Any]:
    """Return the content of checksums.json, with which `fedmpi verify` detects later changes to the run's files.

    Returns:
        files    file name -> SHA-256, for the main files of the run and those in plugins/. Checkpoints and state files
                 contain their own checksums
        rounds   file name -> round -> first 16 hex digits of the SHA-256 of the round's lines; lines that are not valid
                 rows are under round "?"
        checksum SHA-256 of `files` and `rounds`: a single checksum of the whole run, which can be published. It is not
                 a signature
    """
    paths = [
        path for path in (*(run / name for name in CHECKED_FILES), *sorted(run.glob("plugins/*"))) if path.is_file()
    ]
    files = {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    rounds: dict[str, dict[str, str]] = {}
    for name in (name for name in ROUND_FILES if name in files):
        digests: dict[str, Any] = {}
        for line in (run / name).read_bytes().splitlines(keepends=True):
            rows = parse_jsonl(line, need_round=True).rows
            digests.setdefault(str(rows[0]["round"]) if rows else "?", hashlib.sha256()).update(line)
        rounds[name] = {t: digest.hexdigest()[:16] for t, digest in digests.items()}
    return {"files": files, "rounds": rounds, "checksum": compute_total_checksum({"files": files, "rounds": rounds})}


def compute_total_checksum(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content of checksums.json without its key `checksum`."""
    rest = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---- timelines ----
class TimelineFile:
    """The timeline of one rank (durations of the parts of its rounds), as a file such as trace/rank-0003.jsonl.

    The lines of each job of a run begin with `head`: {"job": Unix time of the start in seconds, equal on all ranks,
    "rank": 3, "of": 8, "host": "node5"}. engine/tracing.py describes the other lines. Lines are written to disk every
    few seconds, so a process that is killed loses the newest ones. If the file cannot be written, a warning is given,
    and this rank records no more lines.
    """

    def __init__(self, run: Path, head: Mapping[str, Any]) -> None:
        self.path = run / TRACE / f"rank-{head['rank']:04}.jsonl"
        cut_line = [""] if self.path.exists() else []  # a line break, as a kill may have cut the last line
        self.waiting, self.is_writable = [*cut_line, json.dumps(head)], True
        self.flush()

    def add(self, line: Mapping[str, Any]) -> None:
        self.waiting.append(json.dumps(line))
        if time.monotonic() - self.written > FLUSH_S or len(self.waiting) >= MAX_WAITING_LINES:
            self.flush()

    def flush(self) -> None:
        """Write all lines that were added since the last write."""
        lines, self.waiting, self.written = self.waiting, [], time.monotonic()
        if not self.is_writable or not lines:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            self.is_writable = False
            message = f"trace: cannot write {self.path}: {error.strerror or error}; this rank records no trace"
            warnings.warn(RankWarning(f"{message} (as with trace: false)"), stacklevel=2)


def read_timelines(run: Path) -> list[dict[str, Any]]:
    """Read the timelines that all ranks have recorded, for each job (start or resumption) of the run, oldest first.

    Each job is {"job": start time, "ranks": {rank: {"host": ..., "rounds": [lines]}}}; damaged lines are skipped.
    """
    jobs: dict[float, dict[str, Any]] = {}
    for path in sorted((run / TRACE).glob("rank-*.jsonl")):
        rounds: list[dict[str, Any]] | None = None
        for line in read_jsonl(path).rows:
            if "job" in line:
                job = jobs.setdefault(line["job"], {"job": line["job"], "ranks": {}})
                rounds = job["ranks"].setdefault(line["rank"], {"host": line["host"], "rounds": []})["rounds"]
            elif rounds is not None:
                rounds.append(line)
    return [jobs[began] for began in sorted(jobs)]
