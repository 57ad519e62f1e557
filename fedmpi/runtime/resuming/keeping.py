"""Sets up, on one rank, where a run's state is kept, and brings it to where it was."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmpi.common import places
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.config.schema import Settings
from fedmpi.engine.faults.losses import Losses, check
from fedmpi.engine.federation import Federation
from fedmpi.engine.pace import Pace, Row
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.record import preprocessing
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.record.timeline import TimelineFile
from fedmpi.runtime.resuming import resume
from fedmpi.runtime.resuming.checkpoints import Checkpoints, Rows

PLACED = "placement.jsonl"


def start(
    fed: Federation, made: Experiment, directory: RunDirectory | None, going_on: bool, say: Callable[[str], None]
) -> tuple[Checkpoints | None, int]:
    """This rank's checkpoints, None where there are none, and the round after which the run goes on (-1: anew).

    directory, going_on: rank 0's; the other ranks hear of them.
    """
    settings, comm = made.settings, fed.comm
    timeout_s, asked = settings.comm.start_timeout_s, settings.checkpoint
    about = {"job": round(time.time(), 3)}
    told = about | {"name": directory.path.name, "going_on": going_on, **_given(made, directory)} if directory else {}
    heard = comm.broadcast_json(told)
    fed.scheduler.losses, fed.scheduler.given = Losses(heard["losses"]), _of_same_ranks(heard["placement"], fed, made)
    path = places.fixed(settings.output / heard["name"]) if directory is None else directory.path
    if comm.audit is not None:  # here, if this host does not see rank 0's directory
        comm.audit.open(path / "audit" / f"rank-{comm.rank}.jsonl", settings.output_mode == "private")
    preprocessing.write_own(path, settings, made.data)
    if settings.timeline and path.is_dir():
        head = {"job": heard["job"], "rank": comm.rank, "of": comm.size, "host": socket.gethostname()}
        file = TimelineFile(path, head, settings.output_mode == "private")
        fed.timeline.to, fed.timeline.ended, fed.timeline.early = file.add, file.flush, comm.rank > 0  # it waits then
    if asked.every == 0:
        return None, -1
    stateful, silos = bool(made.messages.client_state.size), settings.data.silos
    seen = comm.allgather_bytes(b"seen" if (path / resume.IDENTITY).is_file() else b"", timeout_s)
    blind = [rank for rank, said in enumerate(seen) if said != b"seen"]
    if stateful and blind and not silos:
        where = f"rank {blind[0]} does not see {path}, where the clients' state would be kept"
        if heard["going_on"] or asked.resume == "must":
            raise UserError(f"checkpoint: {where}; put output on a file system that all ranks share")
        if comm.rank == 0:
            warnings.warn(f"checkpoint: {where}; this run cannot be gone on with", stacklevel=2)
        return None, -1
    rows = Rows(path / "state", silos, settings.output_mode == "private")
    if comm.rank == 0:
        (path / "checkpoints").mkdir(0o700 if settings.output_mode == "private" else 0o777, exist_ok=True)
    kept = Checkpoints(path / "checkpoints", rows, asked.every, asked.keep)
    if stateful:
        fed.states.shelf, fed.states.room = rows, made.room or made.data.clients
    fed.reporter.sink.keep = kept.save
    return kept, resume.go_on(fed, kept, timeout_s, say) if heard["going_on"] else -1


def _given(made: Experiment, directory: RunDirectory) -> dict[str, Any]:
    """Losses of the run to go on with, or of the one that is replayed; the placement of this one."""
    placed = made.settings.cohort.replay
    placement = [] if placed is None else _rows(placed, "cohort.replay", PLACED, _placed)
    return {"losses": losses_of(made.settings, directory), "placement": placement}


def losses_of(settings: Settings, directory: RunDirectory) -> list[dict[str, Any]]:
    """Rows of lost ranks: those of the run directory, or of the run that is replayed."""
    lost = settings.faults.replay
    return directory.losses() if lost is None else _rows(lost, "faults.replay", "faults.jsonl", check)


def _rows(path: Path, key: str, kind: str, look: Callable[[Row], object]) -> list[Row]:
    """The rows of a file that the config names. kind: whose form they have, at which `look` looks."""
    try:
        if not places.at(path).exists():
            raise UserError(f"{path} does not exist")
        rows = read_jsonl(places.at(path), strict=True).rows
    except UserError as error:
        raise UserError(f"{key}: {error}; the {kind} of a run is needed, or null") from error
    for number, row in enumerate(rows, 1):
        try:
            look(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{key}: {path}:{number} is no row of the {kind} of a run ({why}), which is needed, or null"
            ) from error
    return rows


def _placed(row: Row) -> None:
    Pace.of(row), int(row["round"])


def _of_same_ranks(rows: list[Row], fed: Federation, made: Experiment) -> list[Row]:
    """The placement that is given, if it is one of these ranks: on others it means nothing, and only clients that are
    trained together have other bits there."""
    same = all(set(map(int, row["pace"])) == set(fed.scheduler.ranks) for row in rows)
    if not same and made.pack > 1 and fed.comm.rank == 0:
        ranks = ", ".join(rows[0]["pace"])
        said = f"cohort.replay: those clients were trained by ranks {ranks}, others have other bits (compute.pack)"
        warnings.warn(said, stacklevel=2)
    return rows if same else []
