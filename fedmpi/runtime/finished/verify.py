"""`fedmpi verify`: whether a run's metrics and models are what its config, data and code give.

First what can be seen without training (integrity.py); then some rounds are trained once more and compared. Where code,
torch or machine are others than the run's, last bits may differ by themselves: such a difference is not called altered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.cuda import is_available

from fedmpi.common.errors import UserError
from fedmpi.common.text import count, shorten
from fedmpi.config.schema import Settings
from fedmpi.engine.faults import lost_ranks
from fedmpi.runtime import trust
from fedmpi.runtime.finished import integrity, replay
from fedmpi.runtime.finished.integrity import ALTERED, UNKNOWN, VERIFIED, Findings
from fedmpi.runtime.reading.compare import MISSING, MODEL, RunRecord, made_with, row_differences
from fedmpi.runtime.reading.files import json_of, no_run
from fedmpi.runtime.record.data_files import PREPROCESSING
from fedmpi.runtime.record.run_dir import BEST, SEAL, SEALED_BY_ROUND, RunDirectory

Say = Callable[[str], None]
SHOWN = 6  # differences of a row


@dataclass(frozen=True)
class Options:
    """How a run is verified.

    Attributes:
        number: rounds to replay; None: all.
        trusted: whether code of others that the config names may run.
        overrides: of the run's settings.
        tolerance: compare numbers within it; None: bits.
        noted: the seal that was published with the run.
    """

    number: int | None = 3
    trusted: bool = False
    overrides: Sequence[str] = ()
    tolerance: float | None = None
    noted: str | None = None


def verify_all(place: Path, say: Say, options: Options) -> int:
    """Verify a run directory, or each in the directory of a sweep; 1 if any was altered, else 2 if any is unknown."""
    is_run, working_dir = (place / "config.yaml").is_file(), Path.cwd()
    runs = [place] if is_run else sorted(path.parent for path in place.glob("*/config.yaml"))
    if not runs:
        raise no_run(place, "config.yaml, and no directory that does")
    codes: dict[str, int] = {}
    for run in runs:
        try:
            codes[run.name] = verify(run, say, options, working_dir)
        except UserError as error:
            if len(runs) == 1:
                raise
            say(f"  cannot tell: {error}")
            codes[run.name] = UNKNOWN
    if len(runs) > 1:
        named = {ALTERED: "altered", UNKNOWN: "cannot be told"}
        parts = [f"{list(codes.values()).count(VERIFIED)} verified"]
        for code, word in named.items():
            names = [name for name in codes if codes[name] == code]
            parts += [f"{len(names)} {word} ({', '.join(names)})"] if names else []
        say(f"{count(len(runs), 'run')}: {'; '.join(parts)}")
    return next((code for code in (ALTERED, UNKNOWN) if code in codes.values()), VERIFIED)


def verify(run: Path, say: Say, options: Options, working_dir: Path) -> int:
    """Check one run directory and print the findings. Returns 0: verified, 1: altered, 2: it cannot be told.

    working_dir: where relative paths start; a plug-in may change that of the process. Raises UserError where the
    directory is none, or not trusted.
    """
    say(f"{run}")
    findings, run = Findings(say), working_dir / run
    is_sealed, replayed = integrity.check_seal(run, options.noted, findings), set[int]()
    try:
        settings = trust.run_settings(run, options.trusted, options.overrides).begun_in(working_dir)
    except UserError as error:
        if not findings.altered:
            raise
        findings.add_unsure(str(error))
        rows = []
    else:
        rows = integrity.read_rows(run / "metrics.jsonl", findings)
        reason = str((json_of(run / "summary.json") or {}).get("exit_reason", ""))
        with trust.guard(options.trusted):
            integrity.check_files(run, settings, rows, reason, findings)
        replayed = _replay(run, settings, sorted({row["round"] for row in rows}), reason, options, findings)
    rest = len(rows) - len(replayed)
    if findings.code == VERIFIED and not (rows and (is_sealed or not rest)):
        findings.add_unsure(
            f"there is no {SEAL}: the run was killed, or has not ended; --rounds all replays all rounds"
            if rows
            else "no round of this run was written"
        )
    by_seal = f"; the other {rest} by the seal, which is no proof against who rewrites it, too" if rest else ""
    verdicts = {ALTERED: f"ALTERED: {count(len(findings.altered), 'finding')}", UNKNOWN: "CANNOT TELL"}
    say(verdicts.get(findings.code, f"verified{by_seal}"))
    return findings.code


def _replay(
    run: Path, settings: Settings, rounds: list[int], reason: str, options: Options, findings: Findings
) -> set[int]:
    """Replay rounds and compare; returns those that were."""
    record, done = RunRecord(run, strict=False), set[int]()
    # A run that goes on evaluates the round of its checkpoint once more, and knows then of ranks lost after it was.
    late = {row["round"] for row in record.rows("faults.jsonl").values() if lost_ranks.late(row)}
    checkpoints = [t for t in replay.checkpoints(run) if t in rounds and t + 1 not in late]
    chosen = replay.choose_rounds(rounds, options.number, findings.suspects, checkpoints)
    reasons = dict[str, None]()
    for start, last in replay.segments(chosen, checkpoints):
        begin = f"after checkpoint {start}" if start >= 0 else "from the start"
        findings.say(f"  replaying to round {last}, {begin}")
        which = (start, last, len(rounds))
        with replay.replay_rounds(run, options.trusted, options.overrides, *which) as (path, stopped):
            replayed = RunRecord(path, strict=False)
            changes = made_with(record, replayed)
            if other_data := [name for name in ("partition", "training data", "test data") if name in changes["data"]]:
                where = f"below {settings.data.root} are not those of the run; data.root=DIR says where they are"
                findings.add_unsure(f"{' and '.join(other_data)} {where}")
                return done
            reasons |= dict.fromkeys(_reasons_for_other_bits(run, settings, changes))
            differences = _row_differences(record, replayed, (start, last), stopped, options.tolerance)
            if last == rounds[-1] and reason and options.tolerance is None:
                names = (MODEL, BEST, "partition.npz", PREPROCESSING)
                pairs = ((name, record.digest(name), replayed.digest(name)) for name in names)
                differences += [f"{name}: replaying gives other bytes" for name, a, b in pairs if a and b and a != b]
            done |= {t for t in replayed.rounds if t <= last}
        for text in differences:
            if reasons and options.tolerance is None:
                why = f"This may come of where it was replayed: {'; '.join(reasons)}. --tolerance 1e-3 compares numbers"
                findings.add_unsure(f"{text}. {why}")
            else:
                findings.add_altered(text)
    if done and findings.code == VERIFIED:
        same = "the same bits and figures" if options.tolerance is None else f"figures within {options.tolerance:g}"
        findings.say(f"  ok {count(len(done), 'round')} replayed: {same}")
    return done


def _row_differences(
    record: RunRecord, replayed: RunRecord, span: tuple[int, int], stopped: bool, tolerance: float | None
) -> list[str]:
    """Return in what the rows of a run and of its replay differ, a line each.

    span: the round after whose checkpoint the replay begins, which is evaluated again, but not analysed; its last one.
    """
    start, last = span
    end = max(replayed.rounds, default=-1) if stopped else None  # not evaluated
    texts = []
    for name in SEALED_BY_ROUND:
        rows, again = record.rows(name), replayed.rows(name)
        for key in {**rows, **again}:
            t, is_metrics = key[0], name == "metrics.jsonl"
            if t not in replayed.rounds or t > last or (t == end and not is_metrics):
                continue
            if name == "analysis.jsonl" and t == start:
                continue
            partial = is_metrics and t == end
            differences = row_differences(rows.get(key, {}), again.get(key, {}), tolerance, partial=partial)
            each = [f"{what} is {_short(a)}, replaying gives {_short(b)}" for what, a, b in differences[:SHOWN]]
            who = "".join(f", {'client ' * (k == 0)}{part}" for k, part in enumerate(key[1:]) if part is not None)
            texts += [f"{name}, round {t}{who}: {'; '.join(each)}"] if each else []
    return texts


def _short(value: Any) -> str:
    return "missing" if value is MISSING else shorten(str(value), 24)


def _reasons_for_other_bits(run: Path, settings: Settings, changes: dict[str, Any]) -> list[str]:
    """Say what differs from where the run was made: code, versions, devices. Last bits may differ for these reasons."""
    machine = {key: pair for key, pair in changes["environment"].items() if key in ("devices", "cpu")}
    code = {key: pair for key, pair in changes["code"].items() if not key.startswith("plug-in ")}
    reasons = [f"{name} was {was}, here it is {now}" for name, (was, now) in {**code, **machine}.items()]
    ranks = len((json_of(run / "environment.json") or {}).get("ranks") or [1])
    if settings.compute.device != "cpu" and not (settings.compute.deterministic and ranks == 1):
        reasons += ["GPUs give the same bits to one process with compute.deterministic"] if is_available() else []
    reasons += RunDirectory(run).accepted_changes()
    if settings.compute.pack != 1 and ranks > 1:
        reasons.append(
            f"{count(ranks, 'rank')} trained clients in other groups (compute.pack: {settings.compute.pack})"
        )
    return reasons
