"""Train rounds of a run again: all of them (`fedmpi replay`), or some of them (`fedmpi verify`).

The replay does not repeat the rank failures of the run. It leaves out the clients and states that were lost in these
failures, so that the weights after every round are bitwise identical to those of the run.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from random import SystemRandom

from fedmpi.common.errors import UserError
from fedmpi.common.signals import ProcessStartState
from fedmpi.common.text import pluralize
from fedmpi.config.schema import Settings
from fedmpi.runtime import code_trust
from fedmpi.runtime.checkpoints import IDENTITY
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.inspection.compare import WEIGHTS_HASH, RunRecord
from fedmpi.runtime.record.atomic_files import CorruptFileError, read_tensors

MAX_ROUNDS_TO_LAST = 10  # the last round is always replayed if there is a checkpoint at most this many rounds before it


def replay_run(
    run: Path, settings: Settings, trusted: bool, print_line: Callable[[str], None], process: ProcessStartState
) -> int:
    """Train all rounds of a run again, and compare the hashes of the global model.

    Returns the exit code: 0 if the hashes of all rounds are equal, else 1. Ranks other than 0, and rank 0 if training
    fails before a round is complete, return the exit code of the training.
    """
    process.stop.max_rounds = len(_read_hashes(run))
    with code_trust.forbid_external_code(trusted):
        result, code = execute_run(settings, process)
    if "directory" not in result or (code and not process.stop.rounds_done):  # ranks other than 0 have no results
        return code
    message, is_same = compare_hashes(run, Path(result["directory"]))
    print_line(message)
    return 0 if is_same else 1


def compare_hashes(run: Path, again: Path) -> tuple[str, bool]:
    """Compare the hashes of a run with those of its replay; return a line for the user, and whether all are equal."""
    before, now = _read_hashes(run), _read_hashes(again)
    different = [t for t in sorted(before) if before[t] != now.get(t)]
    if not different:
        return f"{pluralize(len(before), 'round')} of {run}: the same bits in {again}", True
    t = different[0]
    message = f"{len(different)} of {pluralize(len(before), 'round')} differ, the first is round {t}: {run} has "
    return f"{message}{before[t][:12]}, {again} {now.get(t, 'no such round')[:13]}", False


def _read_hashes(run: Path) -> dict[int, str]:
    """Return a dict from round to the SHA-256 of the global model after this round."""
    path = run / "metrics.jsonl"
    if not path.exists() or not path.stat().st_size:
        raise UserError(f"{path} is {'empty' if path.exists() else 'missing'}: this run has recorded no round")
    return {t: str(row.get(WEIGHTS_HASH)) for t, row in RunRecord(run).rounds.items()}


# ---- replay of some rounds in a temporary directory, from the checkpoint before them or from the start ----
def find_intact_checkpoints(run: Path) -> list[int]:
    """Return the rounds of all intact checkpoints in ascending order."""
    rounds = []
    for path in sorted(run.glob("checkpoints/[0-9]*.safetensors")):
        try:
            rounds.append(int(read_tensors(path)[1]["round"]))
        except CorruptFileError:
            continue
    return rounds


def choose_segments(
    rounds: Sequence[int], number: int | None, suspects: Collection[int], checkpoints: Sequence[int]
) -> list[tuple[int, int]]:
    """Choose rounds to replay, and return the shortest segments of training that contain them.

    Args:
        rounds: all rounds of the run, ascending.
        number: the number of rounds to choose at random; None: all. Suspects are added, and also the last round if
            there is a checkpoint at most ten rounds before it.
        suspects: rounds with records that were changed after the run.
        checkpoints: the rounds of intact checkpoints, from which training can start.

    Returns:
        For each segment, the round of the checkpoint to start from (-1: the start of the run), and the last round.

    >>> choose_segments([3, 11, 12, 19], None, [], [9, 18]), choose_segments([3, 11], None, [], [])
    ([(-1, 3), (9, 12), (18, 19)], [(-1, 11)])
    """
    chosen = {*rounds}
    if number is not None and number < len(rounds):
        last = [rounds[-1]] if any(0 < rounds[-1] - t <= MAX_ROUNDS_TO_LAST for t in checkpoints) else []
        chosen = {*SystemRandom().sample(list(rounds), number), *last, *suspects} & chosen
    last_rounds = {max((c for c in checkpoints if c < t), default=-1): t for t in sorted(chosen)}
    return sorted(last_rounds.items())


@contextmanager
def replay_rounds(
    run: Path, trusted: bool, overrides: Sequence[str], start: int, last: int, total: int
) -> Iterator[tuple[Path, bool]]:
    """Train the rounds after checkpoint `start` up to round `last` again, in a temporary directory.

    A round is evaluated while the next round is trained, so round `last + 1` is also trained if the run has it.

    Args:
        start: the round of the checkpoint to start from; -1: the start of the run.
        last: the last round to train.
        total: the number of rounds of the run.

    Yields:
        The directory of the replay, and whether the evaluation of its last round is missing.

    Raises:
        KeyboardInterrupt: a signal has stopped the replay.
    """
    with tempfile.TemporaryDirectory(prefix="fedmpi-verify-") as place:
        own = [f"output={json.dumps(place)}", "name=again", "trace=false", "report=false"]
        own += ["checkpoint.every=1000000"]
        own += ["checkpoint.resume=must", "checkpoint.changes=accept"] if start >= 0 else []
        settings = code_trust.load_replay_settings(run, trusted, overrides, own)
        if start >= 0:  # the job resumes from this checkpoint in a directory of symbolic links
            checkpoint, states = run / "checkpoints" / f"{start:06}.safetensors", run.glob("state/**/*.safetensors")
            for path in (run / IDENTITY, checkpoint, *states):
                link = Path(place) / settings.name / path.relative_to(run)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())
        process = ProcessStartState()
        process.stop.max_rounds = min(last + 2, total)
        with code_trust.forbid_external_code(trusted), redirect_stdout(io.StringIO()):
            result, _ = execute_run(settings, process)
        if process.stop.signal:
            raise KeyboardInterrupt
        yield Path(result["directory"]), result["exit_reason"] == "stopped"
