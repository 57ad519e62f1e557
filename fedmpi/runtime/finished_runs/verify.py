"""Verify that a run's metrics and models result from its config, data and code (`fedmpi verify`).

Files are first compared with their checksums in checksums.json, and with each other. Then some rounds are trained
again, and their results are compared with those of the run. If code, torch version or machine differ from those of the
run, the last bits of numbers may differ. Such a difference is reported as "cannot tell" and not as "altered".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.cuda import is_available

from fedmpi import tasks
from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl, to_jsonable
from fedmpi.common.redaction import MARK
from fedmpi.common.text import pluralize, shorten
from fedmpi.config.field_types import flatten
from fedmpi.config.schema import Settings
from fedmpi.config.yaml_source import read_yaml_file
from fedmpi.engine.faults import lost_ranks
from fedmpi.flat.model import FlatModel
from fedmpi.runtime import code_trust, private_runs
from fedmpi.runtime.finished_runs import replay
from fedmpi.runtime.finished_runs.models import load_global_model
from fedmpi.runtime.inspection.compare import MISSING, RunRecord, find_differing_rows, find_setup_differences
from fedmpi.runtime.inspection.run_files import check_written_by_this_version, not_a_run_error, read_json_object
from fedmpi.runtime.record.atomic_files import CorruptFileError, read_tensors, serialize_tensors
from fedmpi.runtime.record.data_files import PREPROCESSING
from fedmpi.runtime.record.run_dir import (
    BEST,
    CHECKSUMS,
    MODEL,
    ROUND_FILES,
    RunDirectory,
    compute_checksums,
    compute_total_checksum,
)
from fedmpi.runtime.record.saved_model import describe_best_model, read_model_metadata
from fedmpi.runtime.record.summary import metric_names, summarize_run

PrintLine = Callable[[str], None]
Rows = Sequence[Mapping[str, Any]]
VERIFIED, ALTERED, UNKNOWN = 0, 1, 2  # exit codes
MAX_DIFFERENCES_SHOWN = 6  # differences that are printed for a row, at most


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `fedmpi verify`."""

    number: int | None = 3  # rounds to replay, drawn at random; None: all
    trusted: bool = False  # whether code that the config names, and that is not part of fedmpi, may be executed
    overrides: Sequence[str] = ()  # changes of the run's settings, such as data.root=DIR
    tolerance: float | None = None  # allowed difference of numbers; None: they must be equal to the bit
    published: str | None = None  # the checksum that was published with the run, or the digits with which it begins


@dataclass
class Findings:
    """The findings of a verification, which are printed as they are added.

    Attributes:
        altered: number of findings that show an alteration.
        undecided: number of findings that leave open whether something was altered.
        suspects: rounds with lines in .jsonl files that have changed since checksums.json was written.
    """

    print_line: PrintLine
    altered: int = 0
    undecided: int = 0
    suspects: set[int] = field(default_factory=set)

    def add_altered(self, text: str) -> None:
        self.altered += 1
        self.print_line(f"  ALTERED {text}")

    def add_undecided(self, text: str) -> None:
        self.undecided += 1
        self.print_line(f"  cannot tell: {text}")

    @property
    def exit_code(self) -> int:
        return ALTERED if self.altered else UNKNOWN if self.undecided else VERIFIED


def verify_all(place: Path, print_line: PrintLine, options: VerifyOptions) -> int:
    """Verify a run directory, or all run directories of a sweep.

    Returns:
        The exit code: 1 if any run was altered; otherwise 2 if any run remains undecided; otherwise 0.
    """
    is_run, working_dir = (place / "config.yaml").is_file(), Path.cwd()
    runs = [place] if is_run else sorted(path.parent for path in place.glob("*/config.yaml"))
    if not runs:
        raise not_a_run_error(place, "config.yaml, and no directory that does")
    for run in runs:
        check_written_by_this_version(run, read_json_object(run / "identity.json") or {})
    codes: dict[str, int] = {}
    for run in runs:
        try:
            codes[run.name] = verify_run(run, print_line, options, working_dir)
        except UserError as error:
            if len(runs) == 1:
                raise
            print_line(f"  cannot tell: {error}")
            codes[run.name] = UNKNOWN
    if len(runs) > 1:
        parts = [f"{list(codes.values()).count(VERIFIED)} verified"]
        for code, word in ((ALTERED, "altered"), (UNKNOWN, "undecided")):
            names = [name for name in codes if codes[name] == code]
            parts += [f"{len(names)} {word} ({', '.join(names)})"] if names else []
        print_line(f"{pluralize(len(runs), 'run')}: {'; '.join(parts)}")
    return next((code for code in (ALTERED, UNKNOWN) if code in codes.values()), VERIFIED)


def verify_run(run: Path, print_line: PrintLine, options: VerifyOptions, working_dir: Path) -> int:
    """Verify one run directory and print the findings.

    Args:
        working_dir: the directory to which paths are relative. It is passed because a plug-in may change the working
            directory of the process.

    Returns:
        The exit code: 0 if the run is verified, 1 if it was altered, 2 if this cannot be determined.

    Raises:
        UserError: `run` is not a run directory, or it is not trusted and its config names code outside fedmpi.
    """
    print_line(f"{run}")
    findings, run, rows, replayed = Findings(print_line), working_dir / run, list[dict[str, Any]](), set[int]()
    has_checksums = _check_checksums(run, options.published, findings)
    try:
        settings = code_trust.load_run_settings(run, options.trusted, options.overrides).with_working_dir(working_dir)
    except UserError as error:
        if not findings.altered:
            raise
        findings.add_undecided(str(error))
    else:
        rows = _read_rows(run / "metrics.jsonl", findings)
        reason = str((read_json_object(run / "summary.json") or {}).get("exit_reason", ""))
        with code_trust.forbid_external_code(options.trusted):
            _check_records_consistent(run, settings, rows, reason, findings)
        replayed = _replay_some_rounds(run, settings, sorted({row["round"] for row in rows}), reason, options, findings)
    rest = len(rows) - len(replayed)
    if findings.exit_code == VERIFIED and not rows:
        findings.add_undecided("this run has recorded no round")
    elif findings.exit_code == VERIFIED and rest and not has_checksums:
        why = f"{CHECKSUMS} is missing, because the run was killed or has not ended"
        findings.add_undecided(f"{why}; --rounds all replays all rounds")
    others = f"; the other {rest} by checksums, which anyone who changes a file can also rewrite"
    verdicts = {ALTERED: f"ALTERED: {pluralize(findings.altered, 'finding')}", UNKNOWN: "CANNOT TELL"}
    print_line(verdicts.get(findings.exit_code, f"verified{others if rest else ''}"))
    return findings.exit_code


# ---- without training ----
def _check_checksums(run: Path, published: str | None, findings: Findings) -> bool:
    """Compare the files, and the lines of each round, with checksums.json. Returns whether this file exists.

    published: the run's published checksum, or its first digits; None: no checksum was published.
    """
    if not (run / CHECKSUMS).is_file():
        if published is not None:
            findings.add_undecided(f"{CHECKSUMS} is missing, so the checksum {published} cannot be compared")
        return False
    recorded, now = read_json_object(run / CHECKSUMS) or {}, compute_checksums(run)
    digest = str(recorded.get("checksum"))
    if digest != compute_total_checksum(recorded):
        findings.add_altered(f"{CHECKSUMS}: the content does not match the SHA-256 in this file")
    if published is not None and not digest.startswith(published.lower()):
        findings.add_altered(f"{CHECKSUMS}: the checksum is {digest[: max(len(published), 12)]}, not {published}")
    files, rounds = (dict(recorded.get(key) or {}) for key in ("files", "rounds"))
    for name in {**files, **now["files"]}:
        before, after = files.get(name), now["files"].get(name)
        if before != after:
            old, new = rounds.get(name, {}), now["rounds"].get(name, {})
            changed = [t for t in {**old, **new} if old.get(t) != new.get(t)] if old and new else []
            findings.suspects |= {int(t) for t in changed if t.isdecimal()}
            where = f", round {', '.join(changed[:8])}," if changed else ""
            how = "is missing" if after is None else "was added" if before is None else "has changed"
            findings.add_altered(f"{name}{where} {how} since the run ended")
    if not findings.altered:
        findings.print_line(
            f"  ok checksum {digest[:16]}: {pluralize(len(files), 'file')} as they were when the run ended"
        )
    return True


def _read_rows(path: Path, findings: Findings) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file; a line that cannot be read is reported as an alteration."""
    lines = read_jsonl(path, need_round=True)
    for number in lines.damaged_lines:
        findings.add_altered(f"{path.name}:{number}: this line is not a valid row")
    if lines.is_truncated:
        findings.add_altered(f"{path.name}: the last line is incomplete")
    return lines.rows


def _check_records_consistent(run: Path, settings: Settings, rows: Rows, reason: str, findings: Findings) -> None:
    """Check that settings, summary, models and checkpoints agree with metrics.jsonl and with each other.

    reason: why the run ended; "" if it has not ended.
    """
    rounds, first = [row["round"] for row in rows], -1 if settings.rounds == 0 else 0
    if rounds != list(range(first, first + len(rows))):
        findings.add_altered("metrics.jsonl: the rounds are not numbered 0, 1, 2, ... without gaps and repeats")
    elif reason == "finished" and len(rows) != max(settings.rounds, 1):
        text = f"metrics.jsonl has {pluralize(len(rows), 'round')}, but the finished run has {settings.rounds}"
        findings.add_altered(text)
    identity = read_json_object(run / "identity.json") or {}
    written = {
        key: repr(value)
        for key, value in flatten(read_yaml_file(run / "config.yaml").data, "").items()
        if value != MARK
    }
    for key in identity.keys() & written.keys():
        if identity[key] not in (written[key], hashlib.sha256(written[key].encode()).hexdigest()):
            both = f"{key} is {written[key]} in config.yaml, but {identity[key]} in identity.json"
            findings.add_altered(both)
    if reason and rows:
        _check_summary(run, rows, settings, findings)
    hashes = {row["round"]: row.get("sha256") for row in rows}
    for name in (name for name in (MODEL, BEST) if rows and (run / name).exists()):
        t = rows[-1]["round"] if name == MODEL else read_model_metadata(run / name).get("round")
        try:
            model = FlatModel(load_global_model(run, settings, name))
            if (digest := model.layout.sha256(model.w)) != hashes.get(t):
                both = f"{digest[:12]}, but metrics.jsonl gives {str(hashes.get(t))[:12]}"
                findings.add_altered(f"{name}: the weights have the SHA-256 {both}")
        except UserError as error:
            findings.add_altered(str(error))
    for path in sorted([*run.glob("checkpoints/*.safetensors"), *run.glob("state/**/*.safetensors")]):
        try:
            tensors, facts = read_tensors(path)
            if serialize_tensors(tensors, facts) != path.read_bytes():
                raise CorruptFileError(f"{path}: the header was not written by fedmpi")
        except CorruptFileError as error:
            findings.add_altered(str(error))


def _check_summary(run: Path, rows: Rows, settings: Settings, findings: Findings) -> None:
    """Recompute the summary from the rows of metrics.jsonl, and compare it with summary.json."""
    classes = str(read_model_metadata(run / MODEL).get("classes", ""))
    task = registry.make_component(tasks.KIND, settings.task)(int(classes)) if classes.isdigit() else None
    lost, lower_is_better = _read_rows(run / "faults.jsonl", findings), tuple(getattr(task, "lower_is_better", ()))
    try:
        recomputed = summarize_run(rows, metric_names(rows), "", lost, describe_best_model(run), lower_is_better)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        return findings.add_altered(f"no summary can be computed from metrics.jsonl and faults.jsonl ({error})")
    written = read_json_object(run / "summary.json") or {}
    # The traffic of a client, and the guarantee of differential privacy, follow from the settings and the model.
    others = [key for key in written if key.startswith("client_") or key == "privacy"]
    written = {key: value for key, value in written.items() if key not in others or key in recomputed}
    was, now = (flatten(to_jsonable({**each, "exit_reason": ""}), "") for each in (written, recomputed))
    for key in {**now, **was}:
        if was.get(key) != now.get(key):
            findings.add_altered(f"summary.json: {key} is {was.get(key)}, but metrics.jsonl gives {now.get(key)}")


# ---- by training ----
def _replay_some_rounds(
    run: Path, settings: Settings, rounds: list[int], reason: str, options: VerifyOptions, findings: Findings
) -> set[int]:
    """Train some rounds of a run again, report differences, and return the rounds that were compared."""
    record, done = RunRecord(run, strict=False), set[int]()
    if problem := private_runs.find_key_problem(run, settings):
        findings.add_undecided(f"no round was replayed, because the noise of this run cannot be drawn again: {problem}")
        return done
    # A resumed run evaluates the round of its checkpoint again. If a rank failed after the first evaluation, the two
    # evaluations may differ, so such a checkpoint is not used.
    late = {
        row["round"]
        for row in record.read_rows("faults.jsonl").values()
        if lost_ranks.followed_previous_evaluation(row)
    }
    checkpoints = [t for t in replay.find_intact_checkpoints(run) if t in rounds and t + 1 not in late]
    reasons = dict[str, None]()
    for start, last in replay.choose_segments(rounds, options.number, findings.suspects, checkpoints):
        findings.print_line(
            f"  replaying to round {last}, {f'after checkpoint {start}' if start >= 0 else 'from the start'}"
        )
        segment = (start, last, len(rounds))
        with replay.replay_rounds(run, options.trusted, options.overrides, *segment) as (path, stopped):
            replayed = RunRecord(path, strict=False)
            changes = find_setup_differences(record, replayed)
            if other_data := [name for name in ("partition", "training data", "test data") if name in changes["data"]]:
                where = f"in {settings.data.root} differ from those of the run; set data.root to their directory"
                findings.add_undecided(f"{' and '.join(other_data)} {where}")
                return done
            reasons |= dict.fromkeys(_causes_of_bit_differences(run, settings, changes))
            differences = _describe_row_differences(record, replayed, (start, last), stopped, options.tolerance)
            if last == rounds[-1] and reason and options.tolerance is None:
                names = (MODEL, BEST, "partition.npz", PREPROCESSING)
                pairs = ((name, record.file_digest(name), replayed.file_digest(name)) for name in names)
                differences += [f"{name}: the replay gave other bytes" for name, a, b in pairs if a and b and a != b]
            done |= {t for t in replayed.rounds if t <= last}
        for text in differences:
            if reasons and options.tolerance is None:
                why = f"A possible cause: {'; '.join(reasons)}. --tolerance 1e-3 allows small differences of numbers"
                findings.add_undecided(f"{text}. {why}")
            else:
                findings.add_altered(text)
    if done and findings.exit_code == VERIFIED:
        same = "the same bits and metrics" if options.tolerance is None else f"metrics within {options.tolerance:g}"
        findings.print_line(f"  ok {pluralize(len(done), 'round')} replayed: {same}")
    return done


def _describe_row_differences(
    record: RunRecord, replayed: RunRecord, span: tuple[int, int], stopped: bool, tolerance: float | None
) -> list[str]:
    """Return messages about the differences between the rows of a run and those of its replay.

    Args:
        span: (start, last): the round of the checkpoint from which the replay starts, and the last round to compare.
            Round `start` is evaluated again, but not analysed again.
        stopped: whether the replay ended without evaluating its last round.
        tolerance: the allowed difference between numbers; None: they must be equal.
    """
    start, last = span
    end = max(replayed.rounds, default=-1) if stopped else None  # the round that was not evaluated
    texts = []
    for name in ROUND_FILES:
        left_out = {end if name != "metrics.jsonl" else None, start if name == "analysis.jsonl" else None}
        for (t, client, protocol, *_), differences in find_differing_rows(
            record, replayed, name, tolerance, partial=end
        ):
            if t in replayed.rounds and t <= last and t not in left_out:
                each = [
                    f"{what} is {_shorten_value(a)}, but the replay gave {_shorten_value(b)}"
                    for what, a, b in differences[:MAX_DIFFERENCES_SHOWN]
                ]
                who = "" if client is None else f", client {client}"
                who += "" if protocol is None else f", {protocol}"
                texts.append(f"{name}, round {t}{who}: {'; '.join(each)}")
    return texts


def _shorten_value(value: Any) -> str:
    return "missing" if value is MISSING else shorten(str(value), 24)


def _causes_of_bit_differences(run: Path, settings: Settings, changes: dict[str, Any]) -> list[str]:
    """Return what may have changed the last bits of numbers, such as different code, versions or devices."""
    machine = {key: pair for key, pair in changes["environment"].items() if key in ("devices", "cpu")}
    code = {key: pair for key, pair in changes["code"].items() if not key.startswith("plug-in ")}
    reasons = [f"{name} was {was}, but is {now} here" for name, (was, now) in {**code, **machine}.items()]
    ranks = len((read_json_object(run / "environment.json") or {}).get("ranks") or [1])
    if settings.compute.device != "cpu" and not (settings.compute.deterministic and ranks == 1):
        reasons += (
            ["on GPUs only a single process with compute.deterministic is reproducible"] if is_available() else []
        )
    reasons += RunDirectory(run).read_accepted_changes()
    if settings.compute.clients_per_pass != 1 and ranks > 1:
        pack = settings.compute.clients_per_pass
        reasons.append(f"{pluralize(ranks, 'rank')} trained clients in other groups (compute.clients_per_pass: {pack})")
    return reasons
