"""Write checkpoints, and resume a run from the newest complete one.

A checkpoint contains the state of the server and, as one row (a flat vector) per client, the state of the clients:

    checkpoints/000012.safetensors     server after round 12: weights, buffers, state, optimiser, other values of rank 0
    state/000003.000012.safetensors    state row of client 3 after round 12, in which it trained

A client's row is written only if the client has trained since its last row. A checkpoint is complete if the server's
file and the newest row of every client up to that round are intact; the cohorts determine the rounds of these rows.
Rank 0 writes the server's file, and each rank writes the rows of the clients that it trained; with silos each site has
its own folder. The state is copied at the end of a round, and a thread writes it to disk during the next round.

Ranks write at their own speed, but at each checkpoint a rank waits until its previous one is on disk. A rank
without clients in the cohort acknowledges the round (engine/transport/gather.py), and rank 0 waits for the
acknowledgement. A rank deletes old files just before it writes new ones. Thus at most checkpoint.keep + 1 checkpoints
are on disk, and at least one of them is complete. With checkpoint.keep: 1, ranks wait until each checkpoint is on disk.

A run can be resumed with any number of ranks and any launcher. Rank 0 proposes checkpoints, the newest first, and each
rank checks the rows of its clients. The first checkpoint that all ranks find complete is used; damaged files are
reported.
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
from fedmpi.common.type_descriptions import describe_stored_value
from fedmpi.config import Settings
from fedmpi.config.resume_rules import may_change_on_resume, normalize_identity, why_rounds_are_fixed
from fedmpi.engine.faults.lost_ranks import Row, check_row
from fedmpi.engine.faults.recovery import rejoin_sites
from fedmpi.engine.federation import Federation
from fedmpi.runtime.inspection.run_files import check_written_by_this_version, read_json_object
from fedmpi.runtime.record import lock
from fedmpi.runtime.record.atomic_files import (
    CorruptFileError,
    read_tensors,
    serialize_tensors,
    sync_to_disk,
    write_atomically,
)
from fedmpi.runtime.record.run_dir import RunDirectory

IDENTITY = "identity.json"
Key = tuple[int, int]  # client, and the round in which its row was made


class ClientStateFiles:
    """The `StateStore` that keeps clients' states in files, one for each round in which a client trained.

    With silos each site has its own folder.
    """

    def __init__(self, folder: Path, sites: Sequence[str] | None = None) -> None:
        self.folder, self.sites = folder, sites
        self.unwritten: dict[Key, Tensor] = {}  # rows that are copied, but not written yet
        self.written: set[Key] = set()  # rows on disk that this rank removes when they are no longer needed

    def path(self, client: int, t: int) -> Path:
        folder = self.folder if self.sites is None else self.folder / self.sites[client]
        return folder / f"{client:06}.{t:06}.safetensors"

    def put(self, client: int, t: int, row: Tensor) -> None:
        path = self.path(client, t)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, serialize_tensors({"row": row}, {"client": client, "round": t}))
        self.written.add((client, t))

    def get(self, client: int, t: int) -> Tensor:
        """Read the state row of a client from round t. Raises CorruptFileError if its file is missing or damaged."""
        unwritten = self.unwritten.get((client, t))
        if unwritten is not None:
            return unwritten.clone()
        path = self.path(client, t)
        tensors, facts = read_tensors(path)
        if facts != {"client": client, "round": t}:
            raise CorruptFileError(f"{path} contains client {facts['client']} after round {facts['round']}")
        return tensors["row"]

    def is_intact(self, client: int, t: int) -> bool:
        try:
            self.get(client, t)
        except CorruptFileError:
            return False
        return True

    def take_over(self, keys: Iterable[Key]) -> None:
        """Make this rank responsible for deleting state files of a failed rank when they are no longer needed.

        keys: the (client, round) of each file.
        """
        self.written.update(keys)

    def remove(self, client: int, t: int) -> None:
        self.path(client, t).unlink(missing_ok=True)
        self.written.discard((client, t))

    def list_keys(self) -> list[Key]:
        """Return (client, round) for every state file in the folder."""
        names = (path.name.split(".") for path in self.folder.rglob("[0-9]*.*.safetensors"))
        return [(int(client), int(t)) for client, t, _ in names]


class CheckpointWriter:
    """Writes this rank's part of the checkpoints of a run. The engine calls `save` after each round."""

    def __init__(self, folder: Path, rows: ClientStateFiles, every: int, keep: int) -> None:
        self.folder, self.rows, self.every, self.keep = folder, rows, every, keep
        self.needed: dict[int, dict[int, int]] = {}  # round of a checkpoint -> client -> round of its row
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None  # the write in progress

    def path(self, t: int) -> Path:
        return self.folder / f"{t:06}.safetensors"

    def save(self, fed: Federation, t: int, memory: dict[str, Any], last: bool) -> None:
        """Copy the state that has changed since the last checkpoint, and start writing it to disk in another thread.

        Does nothing if no checkpoint is due after round t.

        Args:
            memory: The values, apart from tensors, that rank 0 needs to resume; they must be JSON values.
            last: Whether the run ends with this round; if so, the call waits until everything is written.

        Raises:
            UserError: The previous checkpoint could not be written.
        """
        if not ((t + 1) % self.every == 0 or last):
            return
        self.wait()
        if t in self.needed:
            return
        if fed.trainer.messages.client_state.size:
            self.rows.unwritten = {
                (k, fed.states.last_trained[k]): row for k, row in fed.states.take_unsaved_rows().items()
            }
        server = None if fed.server is None else (fed.server.snapshot(), json.dumps(memory))
        self._pending = self._writer.submit(self._write, t, server, dict(fed.states.last_trained))
        if last or self.keep == 1:
            self.wait()
        if last:
            self._writer.shutdown()

    def remove_unneeded_files(self, t: int, fed: Federation) -> None:
        """Remove this rank's files that are not needed to continue from the checkpoint of round t.

        If t is -1, the run continues from its start, which needs no file.
        """
        trained, owner, rank = fed.states.last_trained, fed.states.owners, fed.comm.rank
        self.needed = {t: dict(trained)} if t >= 0 else {}
        if rank == 0:
            for path in self.folder.glob("*.safetensors*"):  # matches temporary files .NAME.PID.tmp, too
                if path != self.path(t):
                    path.unlink()
        for path in self.rows.folder.rglob(".*.tmp"):  # left behind by a process that was killed while it wrote
            if owner[int(path.name[1:].split(".")[0])] == rank:
                path.unlink()
        written = {(client, label) for client, label in self.rows.list_keys() if owner[client] == rank}
        self.rows.written = written & trained.items()
        for client, label in written - self.rows.written:
            self.rows.remove(client, label)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises UserError if it could not be written."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except OSError as error:
            raise UserError(
                f"checkpoint: cannot write {error.filename or self.folder}: {error.strerror or error}; earlier "
                "checkpoints are intact. Free some disk space, then continue with `fedmpi resume`"
            ) from error

    def _write(self, t: int, server: tuple[Mapping[str, Tensor], str] | None, trained: Mapping[int, int]) -> None:
        """Write the new files of the checkpoint of round t, and delete old checkpoints.

        The writer calls this function in its thread.

        Args:
            server: On rank 0, the server's tensors, and other values as a JSON string; None on the other ranks.
            trained: A dict from client to the last round in which it trained.
        """
        # Old files are removed first, so that the disk never has more than keep + 1 checkpoints.
        for old in sorted(self.needed)[: -self.keep]:
            del self.needed[old]
            if server is not None:
                self.path(old).unlink(missing_ok=True)
        needed = [*self.needed.values(), trained]
        for client, label in list(self.rows.written):  # a copy, as the engine's thread may add rows of round t + 1
            if label <= t and not any(each.get(client) == label for each in needed):
                self.rows.remove(client, label)
        for key, row in list(self.rows.unwritten.items()):
            self.rows.put(*key, row)
            del self.rows.unwritten[key]
        if server is not None:
            tensors, memory = server
            for path in self.folder.parent.glob("*.jsonl"):  # a resumed run keeps their rows of rounds before t
                sync_to_disk(path)
            write_atomically(self.path(t), serialize_tensors(tensors, {"round": t, "memory": json.loads(memory)}))
        self.needed[t] = dict(trained)


# ---- resuming: open the run directory ----
def open_run_directory(
    settings: Settings, identity: Mapping[str, str], exit_stack: ExitStack
) -> tuple[RunDirectory, bool, list[str]]:
    """Open and lock a new run directory, or that of a run to resume (checkpoint.resume). Only rank 0 calls this.

    Args:
        identity: The settings that define the experiment, and digests of code and data, by name.
        exit_stack: The context that holds the lock of the directory until the run ends.

    Returns:
        The directory; whether a run in it is resumed; and descriptions of the changes that checkpoint.changes accepts.

    Raises:
        UserError: There is no run to resume, another process uses the directory, an earlier version of fedmpi wrote it,
            or the experiment has changed.
    """
    path, how = Path(settings.output) / settings.name, settings.checkpoint.resume
    place = settings.working_dir / path
    if how != "never" and ((place / IDENTITY).is_file() or (place / lock.LOCK_FILE).is_file()):
        check_written_by_this_version(path, read_json_object(place / IDENTITY) or {})  # before the lock file is written
        exit_stack.enter_context(lock.hold_lock(place))
        if (place / IDENTITY).is_file():
            return RunDirectory(path, settings.working_dir), True, _check_changes(path, identity, settings)
        if how == "auto":  # an earlier job ended before it wrote the identity file
            return RunDirectory(path, settings.working_dir), False, []
    if how == "must":
        raise UserError(
            f"{path} contains no run to resume ({IDENTITY} is missing), but checkpoint.resume is must; correct output "
            "or name, or set checkpoint.resume: auto to start a new run"
        )
    directory = RunDirectory.create(settings.output, settings.name, settings.working_dir)
    exit_stack.enter_context(lock.hold_lock(directory.path))
    return directory, False, []


def _check_changes(path: Path, identity: Mapping[str, str], settings: Settings) -> list[str]:
    """Return descriptions of what has changed since the run began; raise UserError unless they are accepted."""
    if settings.checkpoint.every == 0:
        raise UserError(
            f"checkpoint.every: 0 is not allowed if a run is resumed ({path}), as it would write no checkpoints; must "
            "be >= 1"
        )
    recorded = read_json_object(settings.working_dir / path / IDENTITY)
    if recorded is None:
        raise UserError(
            f"{path / IDENTITY} cannot be read, but is needed to resume; start a new run under another name"
        )
    now, before = normalize_identity(identity), normalize_identity(recorded)
    changed = [
        key for key in {**before, **now} if before.get(key) != now.get(key) and not may_change_on_resume(key, settings)
    ]
    if "data.silos" in changed:
        _check_sites_appended(path, before.get("data.silos", ""), now.get("data.silos", ""))
    differences = [_describe_change(key, before, now, settings) for key in changed]
    if differences and settings.checkpoint.changes != "accept":
        raise UserError(
            f"{path} cannot be resumed, as the experiment has changed: {'; '.join(differences)}. Undo the change, or "
            "start a new run under another name, or accept the change with checkpoint.changes=accept"
        )
    return differences


def _check_sites_appended(path: Path, before: str, now: str) -> None:
    """Check that sites were only added at the end of data.silos; raise UserError if not.

    A client's number is its site's position in the list. If a site were removed, the next site would get its number
    and state.
    """
    if not (before.startswith("[") and now.startswith(f"{before.rstrip(']')}, ")):  # lists as printed by Python
        raise UserError(
            f"{path} cannot be resumed with data.silos: {describe_stored_value(now or 'unset')} (was "
            f"{describe_stored_value(before or 'unset')}), because clients are numbered by their position in this "
            "list; add sites only at its end. To continue without a site, start a new run from the model: name=NEW "
            f"init.from={path / 'model.safetensors'}"
        )


def _describe_change(key: str, before: Mapping[str, str], now: Mapping[str, str], settings: Settings) -> str:
    if key.startswith("("):  # the values are digests, which a reader cannot interpret
        how = "changed" if key in before and key in now else "is new" if key in now else "is no longer used"
        copy = f" (the run used plugins/{key[9:-1]} in its directory)" if key.startswith("(plug-in ") else ""
        of_data = f" ({settings.data.source}, in {settings.data.root})" if key.endswith(" data)") else ""
        return f"{key[1:-1]} {how}{copy}{of_data}"
    why = f" ({why_rounds_are_fixed(settings)}, so the completed rounds would have been different)" * (key == "rounds")
    new, old = (describe_stored_value(values.get(key, "unset")) for values in (now, before))
    return f"{key} is {new}, was {old}{why}"


# ---- resuming: restore a checkpoint ----
def restore_newest_checkpoint(
    fed: Federation, checkpoints: CheckpointWriter, timeout_s: float, print_line: Callable[[str], None]
) -> int:
    """Restore the newest complete checkpoint on all ranks, and return its round; -1 if there is none.

    After the checkpoint of round t, training continues with round t + 1. Recorded rank failures of later rounds are
    discarded, unless the run replays the failures of another run.

    Args:
        timeout_s: Maximum time in seconds to wait for other ranks.
        print_line: Function that prints a message about a damaged file.

    Raises:
        UserError: The run has already completed more rounds than the setting `rounds`; or it has finished, but none of
            its checkpoints is complete.
    """
    comm, proposals = fed.comm, _iter_intact_checkpoints(checkpoints, print_line) if fed.comm.rank == 0 else iter(())
    losses, damage = fed.scheduler.lost_ranks, "not checked yet"
    while damage:
        t, server, memory = next(proposals, (-1, {}, {}))
        t = int(comm.allgather_bytes(str(t).encode(), timeout_s)[0])
        fed.scheduler.lost_ranks = (losses if fed.config.replays_failures else losses.up_to_round(t + 1)).for_resume(
            t + 1
        )
        answers = comm.allgather_bytes(_find_damage(fed, checkpoints, t).encode()[:4000], timeout_s) if t >= 0 else []
        damage = next((answer.decode() for answer in answers if answer), "")
        if damage:
            print_line(f"checkpoint of round {t}: {damage}; trying the previous one")
    if t >= fed.config.rounds:
        raise UserError(
            f"rounds: {fed.config.rounds}, but this run has already completed {t + 1}; set rounds to {t + 1} or more, "
            "or start a new run under another name"
        )
    if t >= 0:
        fed.restore(t, memory, server)
    rejoin_sites(t + 1, fed.control)
    checkpoints.remove_unneeded_files(t, fed)
    return t


def _iter_intact_checkpoints(
    checkpoints: CheckpointWriter, print_line: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Any]]]:
    """Yield (round, tensors, other values) from the server file of each checkpoint, newest first.

    Checkpoints with a damaged server file are skipped. After the oldest one, UserError is raised if the run has
    already finished, because starting from scratch would overwrite its results.
    """
    for path in sorted(checkpoints.folder.glob("[0-9]*.safetensors"), reverse=True):
        try:
            tensors, facts = read_tensors(path)
        except CorruptFileError as error:
            print_line(f"{error}; trying the previous checkpoint")
            continue
        yield facts["round"], tensors, facts["memory"]
    run_dir = checkpoints.folder.parent
    if str((read_json_object(run_dir / "summary.json") or {}).get("exit_reason")).startswith(
        ("finished", "early_stopped", "budget_spent")
    ):
        raise UserError(
            f"{run_dir}: this run has finished, but none of its checkpoints is intact; resuming would start at round 0 "
            f"and overwrite its results. Start a new run under another name, from its model (init.from={run_dir}) or "
            "from random weights"
        )


def _find_damage(fed: Federation, checkpoints: CheckpointWriter, t: int) -> str:
    """Return an error message if the checkpoint of round t has a damaged client state of this rank; otherwise ""."""
    if not fed.trainer.messages.client_state.size:
        return ""
    gone = fed.scheduler.lost_ranks.unavailable_clients(t + 1)
    try:
        for client, last in sorted(fed.scheduler.last_trained_rounds(t).items()):
            if fed.states.owners[client] == fed.comm.rank and client not in gone:
                checkpoints.rows.get(client, last)
    except CorruptFileError as error:
        return str(error)
    return ""


# ---- resuming: rank failures of an earlier run ----
def load_rank_failures(settings: Settings, directory: RunDirectory) -> list[Row]:
    """Return the rows of the rank failures in faults.replay or, if it is not set, in earlier jobs of the run."""
    faults = settings.faults.replay
    if faults is None:
        return directory.read_rows("faults.jsonl")
    try:
        if not (settings.working_dir / faults).exists():
            raise UserError(f"{faults} does not exist")
        rows = read_jsonl(settings.working_dir / faults, strict=True).rows
        for row in rows:
            check_row(row)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"a row of {faults} has no key {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"faults.replay: {why}; must be the faults.jsonl of a run, or null") from error
    return rows
