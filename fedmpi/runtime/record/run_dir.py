"""The run directory: everything needed to read, plot and repeat a run.

    config.yaml         all settings, defaults included         environment.json   versions, hosts, devices, git, ...
    partition.npz       indices: client after client; offsets: N+1 (client k holds indices[offsets[k]:offsets[k+1]]);
                        validation_indices, validation_offsets: what is held out, if anything
    preprocessing.json  how rows were prepared, by which `fedmpi predict` prepares new ones, see preprocessing.py
    partition.json      scheme, seed, sizes, label counts; of many clients a summary, see partition_file.py
    metrics.jsonl       one object per round
    identity.json       settings, digests of code and data: what a resumed run must share
    checkpoints, state  see checkpoints.py                      plugins   copies of the user's own code, see plugins.py
    clients.jsonl       one object per client and evaluation    log.txt            what the console said, and warnings
    updates.jsonl       one object per round: how long the updates are, how far they agree (aggregation/update_stats.py)
    faults.jsonl        ranks that were lost, if any: who, in which round, what it means for the numbers (losses.py)
    placement.jsonl     by what clients are placed from a round on, pace 0: the rank is lost (engine/pace.py)
    analysis.jsonl      what `analysis` has measured of a round (engine/probes)
    timeline            what each rank did when, see timeline.py
    heard.json          which round each tracker and callback has heard of last, if there are any (tracking/hearing.py)
    initial.safetensors the file that init.from named           lock      who is at work here, see lock.py
    model.safetensors   final global model, state_dict names    summary.json       last, mean of last 10, best, ...
    seal.json           SHA-256 of these, see seal.py
    model-best.safetensors   the best one by evaluate.best, if that is asked for; written whenever there is a better one
    report.html         all this to be looked at, written when the run is over (analysis/pages)

summary.json says in `exit_reason` how the run ended: "finished", "enough: ..." (evaluate.best.patience), "stopped" or
"signal 15" on request, "diverged: ...", or "failed: ..." and of what. A run that was killed has no summary.json; all
else in its directory can be read.

Only rank 0 writes; of timeline, state and audit each rank its own files. A file that is written once is written whole
or not at all; lines are flushed as they come. JSON has no NaN: numbers that are not finite are written as null. Secrets
are left out (common/redaction.py).
"""

import hashlib
import io
import json
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.redaction import redacted
from fedmpi.config.yaml_source import text_for
from fedmpi.data.partitions.parts import Partition
from fedmpi.runtime.record import durable, partition_file, preprocessing, seal
from fedmpi.runtime.record.lines import as_line, plain

MODEL, BEST, REPORT = "model.safetensors", "model-best.safetensors", "report.html"
END_S = 5.0  # allowed for a write in progress where a run is ended


class RunDirectory:
    """One run's directory; `path` exists, and is absolute; messages have it as `shown`, as it was given. Files have the
    modes that the umask leaves, or are the user's alone. A relative path is one below `working_dir`."""

    def __init__(self, path: Path, private: bool = False, working_dir: Path = Path()) -> None:
        self.path, self.shown, self.private = (working_dir / path).absolute(), path, private
        self._lock = threading.RLock()  # of the one thread that writes: the main one, or one that ends the run

    @classmethod
    def create(cls, output: str | Path, name: str, private: bool = False, working_dir: Path = Path()) -> "RunDirectory":
        """A new directory output/name, or name-2, name-3, ...: never an existing one, even if two runs start at once.

        private: mode 0700, whatever the umask; files 0600.

        Raises:
            UserError: `output` cannot be written to.
        """
        number = 1
        while True:
            path = Path(output) / (name if number == 1 else f"{name}-{number}")
            try:
                (working_dir / output).mkdir(parents=True, exist_ok=True)
                (working_dir / path).mkdir(mode=0o700 if private else 0o777)
                return cls(path, private, working_dir)
            except FileExistsError:
                if not (working_dir / output).is_dir():
                    raise UserError(f"output: {output} is a file; it must be a directory") from None
                number += 1
            except OSError as error:
                raise UserError(f"output: cannot create {path}: {error.strerror}; choose another output") from error

    def begin_after(self, t: int, analysed: bool = True, whole: bool = True) -> int:
        """Going on after round t, whose line is told again: leave the lines of the rounds before it. Returns how many
        lines metrics.jsonl had. analysed: whether round t stays so: one that was because no round followed may not.
        whole: whether the rounds before are to be there."""
        known = 0
        kept = {"metrics.jsonl": t, "clients.jsonl": t, "updates.jsonl": t, "analysis.jsonl": t + analysed}
        for name, end in kept.items():
            if (self.path / name).exists():
                had = read_jsonl(self.path / name, rounds=True).rows
                self._write_rows(name, [row for row in had if row["round"] < end])
                known = len(had) if name == "metrics.jsonl" else known
        if whole and (here := len(self.metrics())) < t:
            shown = self.shown / "metrics.jsonl"
            warnings.warn(f"{shown} was changed or cut: of rounds 0 to {t - 1} it has {here}", stacklevel=2)
        rows = [row for row in self.placement() if row["round"] <= t + 1]
        if (self.path / "placement.jsonl").exists():  # else a cut line would have the next one behind it
            self._write_rows("placement.jsonl", rows)
        for name in ("summary.json", seal.NAME, REPORT, MODEL, BEST, *(path.name for path in self.path.glob(".*.tmp"))):
            with self._writing(name) as path:
                path.unlink(missing_ok=True)
        return known

    def write_identity(self, identity: Mapping[str, str]) -> None:
        self._write_json("identity.json", identity)

    def write_config(self, resolved: Mapping[str, Any]) -> None:
        """All settings but secrets: with the mark of common/redaction.py in their place."""
        self._write("config.yaml", text_for(redacted(dict(resolved))).encode())

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        self._write_json("environment.json", environment)

    def write_partition(
        self,
        scheme: str,
        seed: int,
        sizes: np.ndarray,
        label_counts: np.ndarray | None,
        parts: Partition | None = None,
        validation: Partition | None = None,
    ) -> None:
        """Write which client holds which samples: `partition_file.contents` says of what."""
        facts, arrays = partition_file.contents(sizes, label_counts, parts, validation)
        self._write_json("partition.json", {"scheme": scheme, "seed": seed, **facts})
        if arrays:
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub takes allow_pickle for the first one
            self._write("partition.npz", buffer.getvalue())

    def write_preprocessing(self, content: bytes) -> None:
        self._write(preprocessing.NAME, content)

    def write_initial(self, content: bytes) -> None:
        self._write("initial.safetensors", content)

    def write_plugins(self, files: Mapping[str, bytes], origins: Sequence[Path]) -> list[dict[str, str]]:
        """Copies of the user's own code; returns what environment.json says of each. origins: where they lie."""
        for name, content in files.items():
            with self._writing(f"plugins/{name}") as path:
                path.parent.mkdir(0o700 if self.private else 0o777, exist_ok=True)
                if path.exists() and (before := path.read_bytes()) != content:  # checkpoint.changes=accept
                    path.rename(path.with_name(f"{path.stem}.{hashlib.sha256(before).hexdigest()[:8]}{path.suffix}"))
                durable.write(path, content, self.private)
        return [
            {"copy": f"plugins/{name}", "file": str(path), "sha256": hashlib.sha256(content).hexdigest()}
            for (name, content), path in zip(files.items(), origins, strict=True)
        ]

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", as_line(row))

    def add_clients(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of one evaluation, in one write."""
        if lines := [as_line(row) for row in rows]:
            self._append("clients.jsonl", "\n".join(lines))

    def add_analysis(self, row: Mapping[str, Any]) -> None:
        self._append("analysis.jsonl", as_line(row))

    def add_updates(self, row: Mapping[str, Any]) -> None:
        self._append("updates.jsonl", as_line(row))

    def add_loss(self, row: Mapping[str, Any]) -> None:
        self._append("faults.jsonl", as_line(row), sync=True)

    def add_accepted(self, from_round: int, changes: Sequence[str]) -> None:
        self._append("accepted.jsonl", as_line({"round": from_round, "changes": list(changes)}), sync=True)

    def accepted(self) -> list[str]:
        """What was changed under way (checkpoint.changes=accept), in words."""
        rows = read_jsonl(self.path / "accepted.jsonl", rounds=True, strict=True).rows
        return [f"from round {row['round']} on {change}" for row in rows for change in row.get("changes", ())]

    def add_placement(self, row: Mapping[str, Any]) -> None:
        self._append("placement.jsonl", as_line(row), sync=True)

    def placement(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "placement.jsonl", rounds=True, strict=True).rows

    def losses(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "faults.jsonl", rounds=True, strict=True).rows

    def write_losses(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._write_rows("faults.jsonl", rows)

    def log(self, text: str) -> None:
        self._append("log.txt", text)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; none before the first round."""
        return read_jsonl(self.path / "metrics.jsonl", rounds=True, strict=True).rows

    def write_model(
        self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any] | None = None, name: str = MODEL
    ) -> None:
        """Write row-major copies under state_dict names, and as metadata `facts`, which serve to rebuild the module.

        All facts are under one key: the format keeps several in no fixed order, but equal runs must give equal files.
        """
        dense = torch.contiguous_format
        copies = {name: tensor.detach().cpu().clone(memory_format=dense) for name, tensor in tensors.items()}
        self._write(name, safetensors.torch.save(copies, {"fedmpi": json.dumps(dict(facts or {}))}))

    def best_model(self) -> dict[str, Any] | None:
        """What model-best.safetensors says of itself: its figure, round and value; None where there is none."""
        path = self.path / BEST
        if not path.exists():
            return None
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["fedmpi"])
        return {"file": BEST, **{key: facts[key] for key in ("figure", "round", "value")}}

    def write_heard(self, facts: Mapping[str, Any]) -> None:
        self._write_json("heard.json", facts)

    def write_summary(self, facts: Mapping[str, Any]) -> None:
        """The last thing of a run; then what is there is sealed."""
        self._write_json("summary.json", facts)
        self._write_json(seal.NAME, seal.of(self.path))

    def end(self) -> bool:
        """Close the directory of a run that has failed: from now on only the calling thread can write to it.

        A line that is only half written is cut off.

        Returns:
            False if the run was finished before, or if a write of another thread does not end within END_S.
        """
        if not self._lock.acquire(timeout=END_S) or (self.path / "summary.json").exists():
            return False
        for path in self.path.glob("*.jsonl"):
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def _append(self, name: str, line: str, sync: bool = False) -> None:
        # flushed line by line
        with self._writing(name) as path, open(path, "ab", buffering=0, opener=self._open) as file:
            before, content = file.tell(), f"{line}\n".encode()
            try:
                while content:  # a disk that fills up takes a part
                    content = content[file.write(content) :]
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise

    def _write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._write(name, "".join(f"{as_line(row)}\n" for row in rows).encode())

    def _write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(plain(facts), indent=2, allow_nan=False) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        """Write under a temporary name, then rename: a reader sees the whole file or none."""
        with self._writing(name) as path:
            durable.write(path, content, self.private)

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        try:
            with self._lock:
                yield self.path / name
        except OSError as error:
            raise UserError(
                f"run directory: cannot write {self.shown / name}: {error.strerror or error}; what is there stays "
                "readable. Free some space, or choose another output"
            ) from error

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o600 if self.private else 0o666)
