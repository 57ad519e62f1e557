"""`fedmpi verify`: whether a run's figures and models are what its config, data and code give.

First what can be seen without training (integrity.py); then some rounds are trained once more and compared: hash of
the model, figures, each client's own. Where code, torch or machine are others than the run's, last bits may differ
without anybody's doing: that is told, and not called altered.
"""

from __future__ import annotations

import filecmp
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.config.schema import Settings
from fedmpi.engine.faults import lost_ranks
from fedmpi.runtime import rank_agreement, trust
from fedmpi.runtime.finished import integrity, replay
from fedmpi.runtime.finished.integrity import Findings
from fedmpi.runtime.reading.compare import MISSING, Difference, keyed_rows, row_differences
from fedmpi.runtime.reading.files import json_of, no_run
from fedmpi.runtime.record.data_files import PREPROCESSING
from fedmpi.runtime.record.metadata import installed_version
from fedmpi.runtime.record.run_dir import SEAL, RunDirectory

Say = Callable[[str], None]
SHOWN = 6  # differences of a round
DATA = ("(training data)", "(test data)", "(partition)")


def verify(
    run: Path,
    say: Say,
    *,
    number: int | None = 3,
    trusted: bool = False,
    overrides: Sequence[str] = (),
    tolerance: float | None = None,
    asked: str | None = None,
    working_dir: Path | None = None,
) -> int:
    """Check one run directory and tell what was found. Returns 0: verified, 1: altered, 2: it cannot be told.

    number: rounds to replay; None: all. tolerance: compare figures within it, not bits. asked: the seal that somebody
    has noted. working_dir: where relative paths start; a plug-in may change that of the process. Raises UserError where
    the directory is none, or not trusted.
    """
    say(f"{run}")
    working_dir, findings = working_dir or Path.cwd(), Findings(say)
    run = working_dir / run
    sealed = integrity.check_seal(run, asked, findings)
    try:
        settings = trust.run_settings(run, trusted, overrides).begun_in(working_dir)
    except UserError as error:
        if not findings.altered:
            raise
        findings.add_unsure(str(error))
        return _verdict(findings, 0)
    rows = integrity.rows_of(run / "metrics.jsonl", findings)
    is_closed = (run / "summary.json").exists()
    reason = str(integrity.json_of(run / "summary.json", findings).get("exit_reason", "")) if is_closed else ""
    integrity.check_rounds(rows, settings, reason, findings)
    integrity.check_config(run, findings)
    lost = integrity.rows_of(run / "faults.jsonl", findings)
    with trust.guard(trusted):
        if reason:
            integrity.check_summary(run, rows, settings, lost, findings)
        integrity.check_models(run, settings, rows, findings)
    before = len(findings.altered)
    done = _replayed(run, settings, rows, number, (trusted, overrides, tolerance, reason), findings)
    own = [key[1:-1] for key in json_of(run / "identity.json") or {} if key.startswith("(plug-in ")]
    if own and len(findings.altered) > before:
        findings.say(f"     or a plug-in is not repeatable (chance without a seed, the time, files): {', '.join(own)}")
    all_replayed = len(done) == len(rows) > 0
    if not rows and not findings.altered:
        findings.add_unsure("no round of this run was written")
    elif not sealed and not all_replayed:
        findings.add_unsure(
            f"there is no {SEAL} (the run was killed, has not ended, or is of an earlier version), so rounds that "
            "were not replayed may say anything; --rounds all replays all of them"
        )
    return _verdict(findings, len(rows) - len(done))


def _verdict(findings: Findings, rest: int) -> int:
    """Print the last line, and return the exit code. rest: how many rounds were not replayed."""
    if findings.altered:
        findings.say(f"ALTERED: {count(len(findings.altered), 'finding')}")
    elif findings.unsure:
        findings.say("CANNOT TELL")
    else:
        by_seal = f"; the other {rest} by the seal, which is no proof against who rewrites it, too" if rest else ""
        findings.say(f"verified{by_seal}")
    return findings.code


def _replayed(
    run: Path, settings: Settings, rows: integrity.Rows, number: int | None, how: tuple[Any, ...], findings: Findings
) -> set[int]:
    """Replay rounds and compare; returns those that were."""
    every = sorted({row["round"] for row in rows})
    if not every:
        return set()
    trusted, overrides, tolerance, reason = how
    # A run that goes on evaluates the round of its checkpoint once more, and knows then of ranks lost after it was.
    late = {row.get("round") for row in _rows(run / "faults.jsonl") if lost_ranks.late(row)}
    checkpoints = [t for t in replay.checkpoints(run) if t in every and t + 1 not in late]
    chosen = replay.choose_rounds(every, number, findings.suspects, checkpoints)
    other = reasons_for_other_bits(run, settings)
    done: set[int] = set()
    for start, last in replay.segments(chosen, checkpoints):
        begin = f"after checkpoint {start}" if start >= 0 else "from the start"
        findings.say(f"  replaying to round {last}, {begin}")
        with replay.replay_rounds(run, trusted, overrides, start, last, len(every)) as again:
            if differing := _other_data(run, again.path):
                named = f"{' and '.join(differing)} below {settings.data.root}"
                findings.add_unsure(f"{named} are not those of the run; data.root=DIR says where")
                return done
            other += [each for each in _other_modules(run, again.path) if each not in other]
            met = _compare(run, again, start, last, tolerance, other, findings)
            if last == every[-1] and reason and tolerance is None:
                _compare_models(run, again.path, other, findings)
        done |= met
    if not findings.altered and not findings.unsure:
        same = "the same bits and figures" if tolerance is None else f"figures within {tolerance:g}"
        findings.report_ok(f"{_named(sorted(done))} replayed: {same}")
        for each in other if tolerance is None else ():
            findings.say(f"     although {each}")
    return done


def _compare(
    run: Path,
    again: replay.ReplayedRun,
    start: int,
    last: int,
    tolerance: float | None,
    other: list[str],
    findings: Findings,
) -> set[int]:
    """Compare the rows of the run with those of the replay, to round `last`. Returns the rounds that both have.

    Round `start`, after whose checkpoint the replay begins, is evaluated again, but not analysed.
    """
    now = {row["round"]: row for row in _rows(again.path / "metrics.jsonl") if row["round"] <= last}
    ends = max(now, default=-1) if again.stopped else None
    written = _rows(run / "metrics.jsonl")
    for row in written:
        t = row["round"]
        if t not in now:
            continue
        differences = row_differences(row, now[t], tolerance, partial=t == ends)
        _tell(f"metrics.jsonl, round {t}", differences, other, tolerance, findings)
        if not differences and t in findings.suspects:
            findings.say(
                f"     round {t}: what can be recomputed is right, so times, bytes or the writing were changed"
            )
    for name in ("clients.jsonl", "updates.jsonl", "analysis.jsonl"):
        lines, again_lines = (keyed_rows(_rows(path / name)) for path in (run, again.path))
        for key in {**lines, **again_lines}:
            if key[0] in now and key[0] != ends and not (name == "analysis.jsonl" and key[0] == start):
                differences = row_differences(lines.get(key, {}), again_lines.get(key, {}), tolerance)
                client = "" if key[1] is None else f", client {key[1]}"
                protocol = ", ".join(str(part) for part in ("", *key[2:]) if part is not None)
                _tell(f"{name}, round {key[0]}{client}{protocol}", differences, other, tolerance, findings)
    return set(now)


def _tell(
    where: str, differences: list[Difference], other: list[str], tolerance: float | None, findings: Findings
) -> None:
    if not differences:
        return
    each = [f"{key} is {_short(was)}, replaying gives {_short(now)}" for key, was, now in differences[:SHOWN]]
    message = f"{where}: {'; '.join(each)}{' ...' if len(differences) > SHOWN else ''}"
    if other and tolerance is None:
        findings.add_unsure(
            f"{message}. This may come of where it was replayed: {'; '.join(other)}. --tolerance 1e-3 compares figures"
        )
    else:
        findings.add_altered(message)


def _short(value: Any) -> str:
    text = "missing" if value is MISSING else str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


def _compare_models(run: Path, again: Path, other: list[str], findings: Findings) -> None:
    """Compare models and partitions byte by byte: hashes leave out statistics of batch normalisation, for example."""
    for name in ("model.safetensors", "model-best.safetensors", "partition.npz", "partition.json", PREPROCESSING):
        both = run / name, again / name
        if all(path.exists() for path in both) and not filecmp.cmp(*both, shallow=False):
            if name == "partition.json" and len({_plain(path) for path in both}) == 1:
                continue
            message = f"{name}: replaying gives other bytes"
            (findings.add_unsure if other else findings.add_altered)(message)


def _plain(path: Path) -> str:
    """Return partition.json as text, without the folder of a scheme's file."""
    facts = json_of(path) or {}
    scheme = str(facts.get("scheme"))
    return json.dumps({**facts, "scheme": scheme.rpartition("/")[2] if ":" in scheme else scheme}, sort_keys=True)


def _other_data(run: Path, again: Path) -> list[str]:
    was, now = ((json_of(path / "identity.json") or {}) for path in (run, again))
    return [key[1:-1] for key in DATA if key in was and key in now and was[key] != now[key]]


def _other_modules(run: Path, again: Path) -> list[str]:
    """Name the modules imported by plug-ins, of which there are no copies, that have changed or are missing."""
    was, now = ((json_of(path / "identity.json") or {}) for path in (run, again))
    changed = [key for key in was if key.startswith("(module ") and was[key] != now.get(key)]
    return [f"{key[1:-1]} {'has changed' if key in now else 'is not there'}" for key in changed]


def reasons_for_other_bits(run: Path, settings: Settings) -> list[str]:
    """Say what differs from where the run was made: code, versions, devices. Last bits may differ for these reasons."""
    was, then = (json_of(run / "identity.json") or {}), (json_of(run / "environment.json") or {})
    code, packages = rank_agreement.code_digests(), then.get("packages") or {}
    reasons = []
    pairs = [
        ("fedmpi", packages.get("fedmpi"), installed_version("fedmpi"), "(code of fedmpi)"),
        ("torch", packages.get("torch"), torch.__version__, "(torch version)"),
    ]
    for name, before, now, key in pairs:
        if key in was and was[key] != code[key]:
            reasons.append(f"{name} was {before}, here it is {now if now != before else 'other code of that version'}")
    ranks = then.get("ranks") or []
    cpu, gpu = f"cpu ({platform.machine()})", settings.compute.device != "cpu" and torch.cuda.is_available()
    here = torch.cuda.get_device_name() if gpu else cpu
    devices = sorted({str(rank.get("device")) for rank in ranks}) or [cpu]
    if devices != [here]:
        reasons.append(f"it ran on {', '.join(devices)}, here is {here}")
    elif gpu and (len(ranks) > 1 or not settings.compute.deterministic):  # with gloo the server is on a CPU
        reasons.append(f"GPUs ({here}) give the same bits to one process with compute.deterministic: true, if at all")
    capability = torch.backends.cpu.get_cpu_capability()
    if then.get("cpu") not in (None, capability):
        reasons.append(f"its CPU had {then['cpu']}, this one has {capability}")
    reasons += RunDirectory(run).accepted_changes()
    placed = _rows(run / "placement.jsonl")  # of earlier starts, too
    most = max([len(ranks), *(len(row.get("pace") or ()) for row in placed)])
    if settings.compute.pack != 1 and most > 1:
        reasons.append(f"{count(most, 'rank')} trained clients in other groups (compute.pack: {settings.compute.pack})")
    return reasons


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file; lines that cannot be read were reported before."""
    return integrity.rows_of(path, Findings(lambda text: None))


def _named(done: Sequence[int]) -> str:
    """Name rounds, consecutive ones as ranges.

    >>> _named([3]), _named([0, 1, 2, 7])
    ('round 3', 'rounds 0-2, 7')
    """
    parts: list[list[int]] = []
    for t in done:
        if parts and parts[-1][-1] == t - 1:
            parts[-1].append(t)
        else:
            parts.append([t])
    ranges = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"round{'s' if len(done) > 1 else ''} {ranges}"


def run_directories(place: Path) -> list[Path]:
    """Return the run directory itself, or those in the directory of a sweep. Raises UserError if there is none."""
    if (place / "config.yaml").is_file():
        return [place]
    runs = sorted(path.parent for path in place.glob("*/config.yaml")) if place.is_dir() else []
    if not runs:
        raise no_run(place, "config.yaml, and no directory that does")
    return runs


def verify_all(place: Path, say: Say, **options: Any) -> int:
    """`verify` of each run in a directory; 1 if any was altered, else 2 if any cannot be told."""
    runs = run_directories(place)
    codes: dict[Path, int] = {}
    options["working_dir"] = Path.cwd()
    if len(runs) == 1:
        return verify(runs[0], say, **options)
    for run in runs:
        try:
            codes[run] = verify(run, say, **options)
        except UserError as error:
            say(f"  cannot tell: {error}")
            codes[run] = 2
    words = {0: "verified", 1: "altered", 2: "cannot be told"}
    by_code = {code: [run.name for run in runs if codes[run] == code] for code in words}
    named = {code: "" if code == 0 else f" ({', '.join(names)})" for code, names in by_code.items()}
    parts = [f"{len(names)} {words[code]}{named[code]}" for code, names in by_code.items() if names]
    say(f"{count(len(runs), 'run')}: {'; '.join(parts)}")
    return 1 if by_code[1] else 2 if by_code[2] else 0
