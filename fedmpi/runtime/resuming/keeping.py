"""Sets up, on one rank, where a run's state is kept, and brings it to where it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.engine.faults import recovery
from fedmpi.engine.faults.losses import Losses
from fedmpi.engine.federation import Federation
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.record import run_dir
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.resuming import resume
from fedmpi.runtime.resuming.checkpoints import Checkpoints, Rows


def start(
    fed: Federation, made: Experiment, directory: RunDirectory | None, going_on: bool, say: Callable[[str], None]
) -> tuple[Checkpoints | None, int]:
    """This rank's checkpoints, None where there are none, and the round after which the run goes on (-1: anew).

    directory, going_on: rank 0's; the other ranks hear of them.
    """
    settings, comm = made.settings, fed.comm
    timeout_s, asked = settings.comm.start_timeout_s, settings.checkpoint
    told = {"name": directory.path.name, "going_on": going_on, **_losses(made, directory)} if directory else {}
    heard = recovery.told(comm, told)
    fed.roster.losses = Losses(heard["losses"])
    path = Path(settings.output) / heard["name"] if directory is None else directory.path
    if comm.audit is not None:  # here, if this host does not see rank 0's directory
        comm.audit.open(path / "audit" / f"rank-{comm.rank}.jsonl", settings.output_mode == "private")
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
    fed.sink.keep = kept.save
    return kept, resume.go_on(fed, kept, timeout_s, say) if heard["going_on"] else -1


def _losses(made: Experiment, directory: RunDirectory) -> dict[str, Any]:
    """Those of the run to go on with, or of the one that is replayed."""
    given = made.settings.faults.replay
    return {"losses": directory.losses() if given is None else run_dir.losses(Path(given))}
