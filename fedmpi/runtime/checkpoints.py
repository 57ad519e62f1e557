"""What a run needs to go on, on disk: the server's part once a round, a client's row when the client has trained.

    checkpoints/000012.safetensors     server: w, b, state, optimizer; facts: round, what rank 0 remembers
    state/000003.000012.safetensors    client 3's row as round 12 made it

So a checkpoint costs what changed. It is whole if the server's file is and every client's newest row up to that round
is; which rows these are follows from the cohorts. Rows are written by the rank that trained the client, in silo mode
into a folder of its own; the server's file by rank 0. They are copied when a round ends, and written during the next.
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
from fedmpi.runtime.durable import Damaged, read_tensors, write_tensors

Key = tuple[int, int]  # client, the round that made its row


class Rows:
    """The rows of one run; in silo mode each site's in a folder of its name. An engine's shelf has `put` and `get`."""

    def __init__(self, folder: Path, sites: Sequence[str] | None = None, private: bool = False) -> None:
        self.folder, self.sites, self.private = folder, sites, private
        self.waiting: dict[Key, Tensor] = {}  # copied, not written yet

    def path(self, client: int, t: int) -> Path:
        folder = self.folder if self.sites is None else self.folder / self.sites[client]
        return folder / f"{client:06}.{t:06}.safetensors"

    def put(self, client: int, t: int, row: Tensor) -> None:
        path = self.path(client, t)
        if not path.parent.exists():
            path.parent.mkdir(0o700 if self.private else 0o777, parents=True, exist_ok=True)
        write_tensors(path, {"row": row}, {"client": client, "round": t}, self.private)

    def get(self, client: int, t: int) -> Tensor:
        """Raises Damaged."""
        held = self.waiting.get((client, t))
        if held is not None:
            return held.clone()
        tensors, facts = read_tensors(self.path(client, t))
        if facts != {"client": client, "round": t}:
            raise Damaged(f"{self.path(client, t)} holds client {facts['client']} after round {facts['round']}")
        return tensors["row"]

    def put_waiting(self) -> None:
        for client, t in list(self.waiting):
            self.put(client, t, self.waiting[client, t])
            del self.waiting[client, t]

    def remove(self, client: int, t: int) -> None:
        self.path(client, t).unlink(missing_ok=True)

    def found(self) -> list[Key]:
        """(client, round) of all rows in the folder."""
        names = (path.name.split(".") for path in self.folder.rglob("*.*.safetensors"))
        return [(int(client), int(t)) for client, t, _ in names]


class Checkpoints:
    """One rank's part of the checkpoints of a run. `save` is what the engine calls after a round."""

    def __init__(self, folder: Path, rows: Rows, every: int, keep: int) -> None:
        self.folder, self.rows, self.every, self.keep = folder, rows, every, keep
        self.kept: list[int] = []  # rounds, ascending
        self.labels: dict[int, list[int]] = {}  # client -> rounds whose row of it some kept checkpoint needs, ascending
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def path(self, t: int) -> Path:
        return self.folder / f"{t:06}.safetensors"

    def save(self, fed: Federation, t: int, line: dict[str, Any] | None, last: bool) -> None:
        """Round t is over: copy what is new, and let it be written. Raises what the last writing raised."""
        if not ((t + 1) % self.every == 0 or last) or t in self.kept:
            return
        self.wait()
        if fed.worker.messages.client_state.size:
            self.rows.waiting = {(k, fed.states.trained[k]): row for k, row in fed.states.news().items()}
        server = None if fed.server is None else (fed.server.snapshot(), json.dumps(fed.memory(line)))
        mine = [k for k in fed.states.trained if fed.states.owner[k] == fed.comm.rank]
        self._written = self._writer.submit(self._write, t, server, dict(fed.states.trained), mine)
        if last:
            self.wait()

    def begin_after(self, t: int, fed: Federation) -> None:
        """Going on after the checkpoint of round t: what it does not need, left by rounds lost since, is removed."""
        self.kept, self.labels = [t], {client: [label] for client, label in fed.states.trained.items()}
        if fed.comm.rank == 0:
            for path in self.folder.glob("*.safetensors"):
                if path != self.path(t):
                    path.unlink()
        for client, label in self.rows.found():
            if fed.states.owner.get(client) == fed.comm.rank and fed.states.trained.get(client) != label:
                self.rows.remove(client, label)

    def wait(self) -> None:
        """Until all that was copied is on disk."""
        if self._written is not None:
            written, self._written = self._written, None
            try:
                written.result()
            except OSError as error:
                raise UserError(
                    f"checkpoint: cannot write {error.filename or self.folder}: {error.strerror or error}; the ones "
                    "before are whole. Free some space, or choose another output, then go on with `fedmpi resume`"
                ) from error

    def _write(
        self,
        t: int,
        server: tuple[Mapping[str, Tensor], str] | None,
        trained: Mapping[int, int],
        mine: Iterable[int],
    ) -> None:
        self.rows.put_waiting()
        if server is not None:
            tensors, memory = server
            write_tensors(self.path(t), tensors, {"round": t, "memory": json.loads(memory)}, self.rows.private)
        self.kept.append(t)
        for client, label in trained.items():
            labels = self.labels.setdefault(client, [])
            if label not in labels[-1:]:
                labels.append(label)
        if len(self.kept) > self.keep:
            self._prune(frozenset(mine), server is not None)

    def _prune(self, mine: frozenset[int], root: bool) -> None:
        """Leave the last `keep` checkpoints and the rows that they need: a client's newest up to each of them."""
        gone, self.kept = self.kept[: -self.keep], self.kept[-self.keep :]
        if root:
            for t in gone:
                self.path(t).unlink(missing_ok=True)
        for client, labels in self.labels.items():
            while len(labels) > 1 and labels[1] <= self.kept[0]:
                old = labels.pop(0)
                if client in mine:
                    self.rows.remove(client, old)
