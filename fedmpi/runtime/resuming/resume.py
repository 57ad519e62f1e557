"""Going on with a run that ended early, or that is to have more rounds: on any number of ranks, by any launcher.

Rank 0 looks into the run directory and proposes its newest whole checkpoint; each rank looks at the client rows that it
answers for; the first checkpoint that all find whole is taken, and every refused file is named.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl
from fedmpi.config import Settings
from fedmpi.config.resume_rules import comparable, depends_on_rounds, may_change
from fedmpi.engine.cost_model import CostModel, Row
from fedmpi.engine.faults.lost_ranks import check
from fedmpi.engine.faults.policy import rejoin_sites
from fedmpi.engine.federation import Federation
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.record import lock
from fedmpi.runtime.record.durable import CorruptFileError, read_tensors
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.resuming.checkpoints import Checkpoints

IDENTITY = "identity.json"
LOST = -2  # no checkpoint is whole, of a run that has come to its end


def directory(
    settings: Settings, identity: Mapping[str, str], until_end: ExitStack
) -> tuple[RunDirectory, bool, list[str]]:
    """The run directory, whether it is that of a run to go on with, and which changes that one accepts (rank 0).

    identity: what makes this experiment: settings, digests of code and data. until_end: holds the directory's lock.
    Raises UserError where there must be a run and is none, where another process has it, or where it was another
    experiment.
    """
    path, how = Path(settings.output) / settings.name, settings.checkpoint.resume
    private, place = settings.output_mode == "private", settings.working_dir / path
    if how != "never" and ((place / IDENTITY).is_file() or (place / lock.NAME).is_file()):
        until_end.enter_context(lock.hold(place, private))
        if (place / IDENTITY).is_file():
            if settings.checkpoint.every == 0:
                raise UserError(
                    f"checkpoint.every: 0 keeps nothing to go on from, and {path} holds a run to go on with; "
                    "allowed there: 1 or more"
                )
            return RunDirectory(path, private, settings.working_dir), True, _accepted(path, identity, settings)
        if how == "auto":  # a job ended before it had said what it is
            return RunDirectory(path, private, settings.working_dir), False, []
    if how == "must":
        raise UserError(f"checkpoint.resume is must, but {path} holds no run to go on with (no {IDENTITY})")
    made = RunDirectory.create(settings.output, settings.name, private, settings.working_dir)
    until_end.enter_context(lock.hold(made.path, private))
    return made, False, []


def _accepted(path: Path, now: Mapping[str, str], settings: Settings) -> list[str]:
    """What differs from the start of the run, in words. Raises UserError where that is not to be."""
    try:
        before = json.loads((settings.working_dir / path / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path / IDENTITY} cannot be read ({error}); start a new run under another name") from error
    if not isinstance(before, dict):
        raise UserError(f"{path / IDENTITY} holds no settings; start a new run under another name")
    now = comparable(now)
    before = _with_new_names(comparable(before), now)
    found = [key for key in {**before, **now} if before.get(key) != now.get(key) and not may_change(key, settings)]
    if "data.silos" in found:
        _only_joined(path, before.get("data.silos", ""), now.get("data.silos", ""))
    kept = [key for key in found if key.startswith("comm.wire.") and key in before]
    if kept:
        told = "; ".join(_difference(key, before, now, settings) for key in kept)
        raise UserError(
            f"{path} cannot go on with another comm.wire: {told}. What clients and server have kept belongs to it; "
            "undo the change, or start a new run (another name)"
        )
    differences = [_difference(key, before, now, settings) for key in found]
    if differences and settings.checkpoint.changes != "accept":
        raise UserError(
            f"{path} cannot go on as this experiment: {'; '.join(differences)}. Undo the change, start a new run "
            "(another name), or go on all the same with checkpoint.changes=accept"
        )
    return differences


def _with_new_names(before: Mapping[str, Any], now: Mapping[str, str]) -> dict[str, Any]:
    """The identity of the start, in which plug-ins that were only renamed since have the names that they have now."""
    new = {digest: key for key, digest in now.items() if key.startswith("(plug-in ") and key not in before}
    names = {
        key[9:-1]: new[digest][9:-1]
        for key, digest in before.items()
        if key.startswith("(plug-in ") and key not in now and digest in new
    }
    found = dict(before)
    for old, name in names.items():
        found = {
            key.replace(f"plug-in {old})", f"plug-in {name})"): str(text).replace(f"{old}:", f"{name}:")
            for key, text in found.items()
        }
    return found


def _only_joined(path: Path, before: str, now: str) -> None:
    """Clients are numbered as the sites stand in the list: one that has left would hand its number, its state and its
    rounds to another."""
    if not (before.startswith("[") and now.startswith(f"{before.rstrip(']')}, ")):  # lists as Python writes them
        raise UserError(
            f"{path} cannot go on with data.silos {now or 'unset'}, was {before or 'unset'}: its clients are numbered "
            "by this list, in which a site may be added at the end and none left out or moved. To go on without a site "
            f"start a new run from the model: name=NEW init.from={path / 'model.safetensors'}"
        )


WHICH = ("path", "set", "split", "variant")  # options that tell which data of a source are meant


def _difference(key: str, before: Mapping[str, str], now: Mapping[str, str], settings: Settings) -> str:
    if key.startswith("("):  # a digest says nothing to anybody
        how = "changed" if key in before and key in now else "is new" if key in now else "is no longer used"
        of, data = "", settings.data
        if key.startswith("(plug-in "):
            of = f" (as it was: plugins/{key[9:-1]} there)"
        elif key.endswith(" data)"):
            said = [data.options[key] for key in WHICH if isinstance(data.options.get(key), str)]
            of = f" ({' '.join((data.source, *said))}, below {data.root})"
        return f"{key[1:-1]} {how}{of}"
    if key == "rounds":
        why = f"{depends_on_rounds(settings)}, and those that are done would have been others"
        return f"rounds is {now.get(key)}, was {before.get(key)} ({why})"
    return f"{key} is {now.get(key, 'unset')}, was {before.get(key, 'unset')}"


def go_on(fed: Federation, kept: Checkpoints, timeout_s: float, say: Callable[[str], None]) -> int:
    """Bring all ranks to the newest checkpoint that is whole; returns its round, -1 where there is none.

    Of the losses that the run knows those of later rounds than the next are forgotten. Raises UserError where more
    rounds are done than are asked for.
    """
    comm, found = fed.comm, _proposals(kept, say) if fed.comm.rank == 0 else iter(())
    losses = fed.scheduler.lost_ranks
    while True:
        t, server, memory = next(found, (LOST if _ended(kept.folder.parent) else -1, {}, {}))
        t = int(comm.allgather_bytes(str(t).encode(), timeout_s)[0])
        if t == LOST:
            raise UserError(
                f"{kept.folder.parent} is a run that has come to its end, and no checkpoint of it is whole: going on "
                "would begin at round 0 and write over its results. A new run (another name) can begin with its model, "
                f"init.from={kept.folder.parent}, or from the start"
            )
        fed.scheduler.lost_ranks = (losses if fed.config.replays_failures else losses.until(t + 1)).known(t + 1)
        if t < 0:
            rejoin_sites(0, fed.control)
            kept.begin_after(t, fed)
            return t
        answers = [said.decode() for said in comm.allgather_bytes(_harm(fed, kept, t).encode()[:4000], timeout_s)]
        harm = next(filter(None, answers), None)
        if harm is None:
            if t >= fed.config.rounds:
                raise UserError(
                    f"rounds: {fed.config.rounds}, but this run has completed {t + 1} of them, and goes on after "
                    f"those; ask for {t + 1} or more, or start a new run (another name)"
                )
            fed.restore(t, memory, server)
            rejoin_sites(t + 1, fed.control)
            kept.begin_after(t, fed)
            return t
        say(f"checkpoint of round {t}: {harm}; trying the one before")


def _ended(run_dir: Path) -> bool:
    """Whether there is a result to be lost."""
    try:
        reason = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["exit_reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return str(reason).startswith(("finished", "enough"))


def _proposals(
    kept: Checkpoints, say: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Any]]]:
    """(round, server's tensors, rank 0's memory) of the checkpoints whose server's part is whole, the newest first."""
    for path in sorted(kept.folder.glob("[0-9]*.safetensors"), reverse=True):
        try:
            tensors, facts = read_tensors(path)
        except CorruptFileError as error:
            say(f"{error}; trying the checkpoint before")
            continue
        yield facts["round"], tensors, facts["memory"]


def _harm(fed: Federation, kept: Checkpoints, t: int) -> str:
    """What is wrong with the rows that this rank answers for; "" where nothing is."""
    if not fed.trainer.messages.client_state.size:
        return ""
    last, gone = fed.scheduler.last_rounds(t), fed.scheduler.lost_ranks.gone(t + 1)
    for client in sorted(last):
        if fed.states.owner[client] == fed.comm.rank and client not in gone:
            try:
                kept.rows.get(client, last[client])
            except CorruptFileError as error:
                return str(error)
    return ""


def earlier_records(settings: Settings, directory: RunDirectory) -> dict[str, list[Row]]:
    """Return rows of rank failures ("losses") and of the placement of clients ("placement") with which a run begins.

    They are those of the run that is replayed, as far as the config names files of one; else the failures in the run
    directory.
    """
    found, faults, placement = dict[str, list[Row]](), settings.faults.replay, settings.cohort.replay
    if faults is None:
        found["losses"] = directory.rows("faults.jsonl")
    else:
        found["losses"] = _rows(settings, faults, "faults.replay", "faults.jsonl", check)
    found["placement"] = []
    if placement is not None:
        found["placement"] = _rows(settings, placement, "cohort.replay", "placement.jsonl", _check_placement)
    return found


def _rows(settings: Settings, path: Path, key: str, kind: str, check: Callable[[Row], object]) -> list[Row]:
    """Return the rows of a file that the config names. kind: the file of a run whose form they have; check: raises
    where a row has another one."""
    try:
        if not (settings.working_dir / path).exists():
            raise UserError(f"{path} does not exist")
        rows = read_jsonl(settings.working_dir / path, strict=True).rows
    except UserError as error:
        raise UserError(f"{key}: {error}; the {kind} of a run is needed, or null") from error
    for number, row in enumerate(rows, 1):
        try:
            check(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{key}: {path}:{number} is no row of the {kind} of a run ({why}), which is needed, or null"
            ) from error
    return rows


def _check_placement(row: Row) -> None:
    CostModel.from_row(row), int(row["round"])


def of_same_ranks(rows: list[Row], fed: Federation, made: Experiment) -> list[Row]:
    """Return a placement if it is one of these ranks, else [].

    On other ranks it means nothing, and only clients that are trained together have other bits there.
    """
    same = all(set(map(int, row["pace"])) == set(fed.scheduler.ranks) for row in rows)
    if not same and made.pack > 1 and fed.comm.rank == 0:
        ranks = ", ".join(rows[0]["pace"])
        said = f"cohort.replay: those clients were trained by ranks {ranks}, others have other bits (compute.pack)"
        warnings.warn(said, stacklevel=2)
    return rows if same else []
