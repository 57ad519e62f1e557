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

A run is resumed on any number of ranks, with any launcher: rank 0 proposes its newest whole checkpoint, each rank looks
at the client rows that it answers for; the first one that all find whole is taken, and every refused file is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.config import Settings
from fedmpi.config.resume_rules import comparable, depends_on_rounds, may_change
from fedmpi.engine.faults.lost_ranks import Row, check
from fedmpi.engine.faults.policy import rejoin_sites
from fedmpi.engine.federation import Federation
from fedmpi.runtime.reading.files import json_of
from fedmpi.runtime.record import lock
from fedmpi.runtime.record.durable import CorruptFileError, read_tensors, serialize_tensors, sync, write
from fedmpi.runtime.record.run_dir import RunDirectory

IDENTITY = "identity.json"
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


# ---- resuming: whose directory it is ----
def open_directory(
    settings: Settings, identity: Mapping[str, str], until_end: ExitStack
) -> tuple[RunDirectory, bool, list[str]]:
    """Open the run directory (rank 0). Returns it, whether it is that of a run to resume, and the changes it accepts.

    identity: what makes this experiment: settings, digests of code and data. until_end: holds the directory's lock.
    Raises UserError where there must be a run and is none, where another process has it, or where it was another
    experiment.
    """
    path, how = Path(settings.output) / settings.name, settings.checkpoint.resume
    place = settings.working_dir / path
    if how != "never" and ((place / IDENTITY).is_file() or (place / lock.NAME).is_file()):
        until_end.enter_context(lock.hold(place))
        if (place / IDENTITY).is_file():
            return RunDirectory(path, settings.working_dir), True, _accepted_changes(path, identity, settings)
        if how == "auto":  # a job ended before it had said what it is
            return RunDirectory(path, settings.working_dir), False, []
    if how == "must":
        raise UserError(f"checkpoint.resume is must, but {path} holds no run to go on with (no {IDENTITY})")
    directory = RunDirectory.create(settings.output, settings.name, settings.working_dir)
    until_end.enter_context(lock.hold(directory.path))
    return directory, False, []


def _accepted_changes(path: Path, identity: Mapping[str, str], settings: Settings) -> list[str]:
    """Say what differs from the start of the run. Raises UserError for changes that are not accepted."""
    if settings.checkpoint.every == 0:
        raise UserError(
            f"checkpoint.every: 0 keeps nothing to go on from, and {path} holds a run to go on with; allowed there: 1 "
            "or more"
        )
    recorded = json_of(settings.working_dir / path / IDENTITY)
    if recorded is None:
        raise UserError(f"{path / IDENTITY} cannot be read; start a new run under another name")
    now, before = comparable(identity), comparable(recorded)
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and not may_change(key, settings)]
    if "data.silos" in changed:
        _only_joined(path, before.get("data.silos", ""), now.get("data.silos", ""))
    differences = [_difference(key, before, now, settings) for key in changed]
    if differences and settings.checkpoint.changes != "accept":
        raise UserError(
            f"{path} cannot go on as this experiment: {'; '.join(differences)}. Undo the change, or start a new run "
            "(another name), or go on all the same with checkpoint.changes=accept"
        )
    return differences


def _only_joined(path: Path, before: str, now: str) -> None:
    """Check that sites were only added at the end of data.silos.

    Clients are numbered by this list: if a site left, another one would get its number, its state and its rounds.
    """
    if not (before.startswith("[") and now.startswith(f"{before.rstrip(']')}, ")):  # lists as Python writes them
        raise UserError(
            f"{path} cannot go on with data.silos {now or 'unset'}, was {before or 'unset'}: its clients are numbered "
            "by this list, in which a site may be added at the end and none left out or moved. To go on without a site "
            f"start a new run from the model: name=NEW init.from={path / 'model.safetensors'}"
        )


def _difference(key: str, before: Mapping[str, str], now: Mapping[str, str], settings: Settings) -> str:
    if key.startswith("("):  # a digest says nothing to anybody
        how = "changed" if key in before and key in now else "is new" if key in now else "is no longer used"
        copy = f" (as it was: plugins/{key[9:-1]} there)" if key.startswith("(plug-in ") else ""
        of_data = f" ({settings.data.source}, below {settings.data.root})" if key.endswith(" data)") else ""
        return f"{key[1:-1]} {how}{copy}{of_data}"
    why = f" ({depends_on_rounds(settings)}, and those that are done would have been others)" * (key == "rounds")
    return f"{key} is {now.get(key, 'unset')}, was {before.get(key, 'unset')}{why}"


# ---- resuming: the checkpoint to go on from ----
def go_on(fed: Federation, checkpoints: Checkpoints, timeout_s: float, say: Callable[[str], None]) -> int:
    """Bring all ranks to the newest checkpoint that is whole; returns its round, -1 where there is none.

    Of the losses that the run knows those of later rounds than the next are forgotten. Raises UserError where more
    rounds are done than are asked for, and where no checkpoint is whole of a run that has finished.
    """
    comm, proposals = fed.comm, _proposals(checkpoints, say) if fed.comm.rank == 0 else iter(())
    losses, harm = fed.scheduler.lost_ranks, "not looked at"
    while harm:
        t, server, memory = next(proposals, (-1, {}, {}))
        t = int(comm.allgather_bytes(str(t).encode(), timeout_s)[0])
        fed.scheduler.lost_ranks = (losses if fed.config.replays_failures else losses.until(t + 1)).known(t + 1)
        answers = comm.allgather_bytes(_harm(fed, checkpoints, t).encode()[:4000], timeout_s) if t >= 0 else []
        harm = next((answer.decode() for answer in answers if answer), "")
        if harm:
            say(f"checkpoint of round {t}: {harm}; trying the one before")
    if t >= fed.config.rounds:
        raise UserError(
            f"rounds: {fed.config.rounds}, but this run has completed {t + 1} of them, and goes on after those; ask "
            f"for {t + 1} or more, or start a new run (another name)"
        )
    if t >= 0:
        fed.restore(t, memory, server)
    rejoin_sites(t + 1, fed.control)
    checkpoints.begin_after(t, fed)
    return t


def _proposals(
    checkpoints: Checkpoints, say: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Any]]]:
    """Yield (round, server's tensors, rank 0's memory) of checkpoints with a readable server part, newest first.

    Raises UserError where none is left of a run that has finished, whose results would be lost.
    """
    for path in sorted(checkpoints.folder.glob("[0-9]*.safetensors"), reverse=True):
        try:
            tensors, facts = read_tensors(path)
        except CorruptFileError as error:
            say(f"{error}; trying the checkpoint before")
            continue
        yield facts["round"], tensors, facts["memory"]
    run_dir = checkpoints.folder.parent
    if str((json_of(run_dir / "summary.json") or {}).get("exit_reason")).startswith(("finished", "early stopped")):
        raise UserError(
            f"{run_dir} is a run that has come to its end, and no checkpoint of it is whole: going on would begin at "
            "round 0 and write over its results. A new run (another name) can begin with its model, "
            f"init.from={run_dir}, or from the start"
        )


def _harm(fed: Federation, checkpoints: Checkpoints, t: int) -> str:
    """Say what is wrong with the client rows that this rank checks; "" if nothing is."""
    if not fed.trainer.messages.client_state.size:
        return ""
    gone = fed.scheduler.lost_ranks.gone(t + 1)
    try:
        for client, last in sorted(fed.scheduler.last_rounds(t).items()):
            if fed.states.owner[client] == fed.comm.rank and client not in gone:
                checkpoints.rows.get(client, last)
    except CorruptFileError as error:
        return str(error)
    return ""


# ---- resuming: rows of an earlier run ----
def earlier_losses(settings: Settings, directory: RunDirectory) -> list[Row]:
    """Return the rows of rank failures with which a run begins: of the run that is replayed, else its own."""
    faults = settings.faults.replay
    if faults is None:
        return directory.rows("faults.jsonl")
    try:
        if not (settings.working_dir / faults).exists():
            raise UserError(f"{faults} does not exist")
        rows = read_jsonl(settings.working_dir / faults, strict=True).rows
        for row in rows:
            check(row)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"a row of {faults} has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"faults.replay: {why}; the faults.jsonl of a run is needed, or null") from error
    return rows
