"""Checkpoints: the server's state once a round, and a client's state row whenever the client has trained.

    checkpoints/000012.safetensors     server: w, b, state, optimizer; facts: round, what rank 0 remembers
    state/000003.000012.safetensors    client 3's row as round 12 made it

So a checkpoint costs what changed. It is whole if the server's file is and every client's newest row up to that round
is; which rows these are follows from the cohorts. Rows are written by the rank that trained the client, in silo mode
into a folder of its own; the server's file by rank 0. They are copied when a round ends, and written during the next.

Ranks write at their own speed, but none trains while the checkpoint before the last is not written; who has nobody to
train acknowledges the round (engine/transport/gather.py), which rank 0 waits for. So each removes what is too old only
before it writes the next, and of those left, keep + 1 at most, one is whole. Where a single one is to be kept
ranks wait for their disks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.engine.federation import Federation
from fedmpi.runtime.record.durable import CorruptFileError, read_tensors, serialize_tensors, sync, write

Key = tuple[int, int]  # client, the round that made its row


class Rows:
    """The state rows of a run's clients on disk, the engine's StateStore. With silos each site has a folder."""

    def __init__(self, folder: Path, sites: Sequence[str] | None = None) -> None:
        self.folder, self.sites = folder, sites
        self.waiting: dict[Key, Tensor] = {}  # copied, not written yet
        self.written: set[Key] = set()  # by this rank, and not removed

    def path(self, client: int, t: int) -> Path:
        folder = self.folder if self.sites is None else self.folder / self.sites[client]
        return folder / f"{client:06}.{t:06}.safetensors"

    def put(self, client: int, t: int, row: Tensor) -> None:
        path = self.path(client, t)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, serialize_tensors({"row": row}, {"client": client, "round": t}))
        self.written.add((client, t))

    def get(self, client: int, t: int) -> Tensor:
        """Return a client's row after round t. Raises CorruptFileError."""
        waiting = self.waiting.get((client, t))
        if waiting is not None:
            return waiting.clone()
        path = self.path(client, t)
        tensors, facts = read_tensors(path)
        if facts != {"client": client, "round": t}:
            raise CorruptFileError(f"{path} holds client {facts['client']} after round {facts['round']}")
        return tensors["row"]

    def whole(self, client: int, t: int) -> bool:
        try:
            self.get(client, t)
        except CorruptFileError:
            return False
        return True

    def take_over(self, keys: Iterable[Key]) -> None:
        """Own the rows that a lost rank wrote: from now on this rank removes them."""
        self.written.update(keys)

    def remove(self, client: int, t: int) -> None:
        self.path(client, t).unlink(missing_ok=True)
        self.written.discard((client, t))

    def found(self) -> list[Key]:
        """Return (client, round) of all rows in the folder."""
        names = (path.name.split(".") for path in self.folder.rglob("[0-9]*.*.safetensors"))
        return [(int(client), int(t)) for client, t, _ in names]


class Checkpoints:
    """One rank's part of the checkpoints of a run. `save` is what the engine calls after a round."""

    def __init__(self, folder: Path, rows: Rows, every: int, keep: int) -> None:
        self.folder, self.rows, self.every, self.keep = folder, rows, every, keep
        self.needed: dict[int, dict[int, int]] = {}  # round of a checkpoint -> client -> the round that made its row
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def path(self, t: int) -> Path:
        return self.folder / f"{t:06}.safetensors"

    def save(self, fed: Federation, t: int, memory: dict[str, Any], last: bool) -> None:
        """Copy what is new after round t, and write it in the background. Raises the error of the write before.

        memory: what rank 0 needs beside the server's tensors.
        """
        if not ((t + 1) % self.every == 0 or last):
            return
        self.wait()
        if t in self.needed:
            return
        if fed.trainer.messages.client_state.size:
            self.rows.waiting = {(k, fed.states.trained[k]): row for k, row in fed.states.take_unsaved_rows().items()}
        server = None if fed.server is None else (fed.server.snapshot(), json.dumps(memory))
        self._written = self._writer.submit(self._write, t, server, dict(fed.states.trained))
        if last or self.keep == 1:
            self.wait()
        if last:
            self._writer.shutdown()

    def begin_after(self, t: int, fed: Federation) -> None:
        """Remove all files that a run does not need which goes on after the checkpoint of round t (-1: starts anew)."""
        trained, owner, rank = fed.states.trained, fed.states.owner, fed.comm.rank
        self.needed = {t: dict(trained)} if t >= 0 else {}
        if rank == 0:
            for path in self.folder.glob("*.safetensors*"):  # .NAME.PID.tmp too
                if path != self.path(t):
                    path.unlink()
        for path in self.rows.folder.rglob(".*.tmp"):  # that a killed write has left
            if owner[int(path.name[1:].split(".")[0])] == rank:
                path.unlink()
        written = {(client, label) for client, label in self.rows.found() if owner[client] == rank}
        self.rows.written = written & trained.items()
        for client, label in written - self.rows.written:
            self.rows.remove(client, label)

    def wait(self) -> None:
        """Wait until all that was copied is on disk."""
        if self._written is None:
            return
        written, self._written = self._written, None
        try:
            written.result()
        except OSError as error:
            raise UserError(
                f"checkpoint: cannot write {error.filename or self.folder}: {error.strerror or error}; the ones "
                "before are whole. Free some space, or choose another output, then go on with `fedmpi resume`"
            ) from error

    def _write(self, t: int, server: tuple[Mapping[str, Tensor], str] | None, trained: Mapping[int, int]) -> None:
        """Write what is new of the checkpoint of round t (in the writer's thread). server: rank 0's tensors and memory;
        trained: client -> the round that made its row."""
        # What no checkpoint needs goes first, so that the disk never holds more than keep + 1 of them.
        for old in sorted(self.needed)[: -self.keep]:
            del self.needed[old]
            if server is not None:
                self.path(old).unlink(missing_ok=True)
        needed = [*self.needed.values(), trained]
        for client, label in list(self.rows.written):  # to which the engine's thread adds those of round t + 1
            if label <= t and not any(each.get(client) == label for each in needed):
                self.rows.remove(client, label)
        for key, row in list(self.rows.waiting.items()):
            self.rows.put(*key, row)
            del self.rows.waiting[key]
        if server is not None:
            tensors, memory = server
            for path in self.folder.parent.glob("*.jsonl"):  # rounds before t, which no resume tells again
                sync(path)
            write(self.path(t), serialize_tensors(tensors, {"round": t, "memory": json.loads(memory)}))
        self.needed[t] = dict(trained)
