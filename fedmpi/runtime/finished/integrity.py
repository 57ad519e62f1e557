"""Check a run directory without training: its seal, and that its files follow from each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmpi import tasks
from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import read_jsonl, to_jsonable
from fedmpi.common.redaction import MARK
from fedmpi.common.text import count
from fedmpi.config.field_types import flat
from fedmpi.config.schema import Settings
from fedmpi.config.yaml_source import read
from fedmpi.flat.model import FlatModel
from fedmpi.runtime.finished.models import rebuild_model
from fedmpi.runtime.reading.files import json_of
from fedmpi.runtime.record.durable import CorruptFileError, read_tensors, serialize_tensors
from fedmpi.runtime.record.run_dir import BEST, MODEL, SEAL, seal, seal_digest
from fedmpi.runtime.record.saved_model import best_model, facts_of
from fedmpi.runtime.record.summary import metric_names, summary

Rows = Sequence[Mapping[str, Any]]
VERIFIED, ALTERED, UNKNOWN = 0, 1, 2  # exit codes


@dataclass
class Findings:
    """The findings of `fedmpi verify`, which are printed as they come.

    Attributes:
        altered: what was altered and where, a line each.
        unsure: why it is not known whether something was altered.
        suspects: rounds whose lines have changed since the seal.
    """

    say: Callable[[str], None]
    altered: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    suspects: set[int] = field(default_factory=set)

    def add_altered(self, text: str) -> None:
        self.altered.append(text)
        self.say(f"  ALTERED {text}")

    def add_unsure(self, text: str) -> None:
        self.unsure.append(text)
        self.say(f"  cannot tell: {text}")

    @property
    def code(self) -> int:
        return ALTERED if self.altered else UNKNOWN if self.unsure else VERIFIED


def check_seal(run: Path, noted: str | None, findings: Findings) -> bool:
    """Compare files and rounds with the seal. Returns whether there is one. noted: the seal that was published."""
    if not (run / SEAL).is_file():
        if noted is not None:
            findings.add_unsure(f"there is no {SEAL}, which should have the seal {noted}")
        return False
    sealed, now = json_of(run / SEAL), seal(run)
    digest = str((sealed or {}).get("seal"))
    if sealed is None or digest != seal_digest(sealed):
        findings.add_altered(f"{SEAL}: its content is not that of the SHA-256 in it")
    if noted is not None and not digest.startswith(noted.lower()):
        findings.add_altered(f"{SEAL}: the seal is {digest[: max(len(noted), 12)]}, not {noted}")
    files, rounds = (dict((sealed or {}).get(key) or {}) for key in ("files", "rounds"))
    for name in {**files, **now["files"]}:
        before, after = files.get(name), now["files"].get(name)
        if before != after:
            lines = rounds.get(name, {}), now["rounds"].get(name, {})
            changed = [t for t in {**lines[0], **lines[1]} if lines[0].get(t) != lines[1].get(t)] if all(lines) else []
            findings.suspects |= {int(t) for t in changed if t.isdecimal()}
            where = f", round {', '.join(changed[:8])}," if changed else ""
            how = "is missing" if after is None else "was added" if before is None else "has changed"
            findings.add_altered(f"{name}{where} {how} since the run ended")
    if not findings.altered:
        findings.say(f"  ok seal {digest[:16]}: {count(len(files), 'file')} as they were when the run ended")
    return True


def read_rows(path: Path, findings: Findings) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file; lines that cannot be read are findings."""
    try:
        lines = read_jsonl(path, rounds=True)
    except UserError as error:
        findings.add_altered(str(error))
        return []
    for number in lines.damaged:
        findings.add_altered(f"{path.name}:{number}: is no row of a run")
    if lines.cut:
        findings.add_altered(f"{path.name}: its last line is cut")
    return lines.rows


def check_files(run: Path, settings: Settings, rows: Rows, reason: str, findings: Findings) -> None:
    """Check that rows, settings, summary, models and checkpoints agree. reason: why the run ended; "": it has not."""
    rounds, first = [row["round"] for row in rows], -1 if settings.rounds == 0 else 0
    if rounds != list(range(first, first + len(rows))):
        findings.add_altered("metrics.jsonl: its rounds are not 0, 1, 2, ... each once")
    elif reason == "finished" and len(rows) != max(settings.rounds, 1):
        findings.add_altered(f"metrics.jsonl: {count(len(rows), 'round')} of a finished run of {settings.rounds}")
    _check_config(run, findings)
    if reason and rows:
        _check_summary(run, rows, settings, findings)
    hashes = {row["round"]: row.get("sha256") for row in rows}
    for name in (MODEL, BEST):
        if (run / name).exists() and rows:
            t = rows[-1]["round"] if name == MODEL else facts_of(run / name).get("round")
            _check_model(run, settings, name, hashes.get(t), findings)
    for path in sorted([*run.glob("checkpoints/*.safetensors"), *run.glob("state/**/*.safetensors")]):
        try:
            tensors, facts = read_tensors(path)
            if serialize_tensors(tensors, facts) != path.read_bytes():
                raise CorruptFileError(f"{path}: its header is not as fedmpi writes it")
        except CorruptFileError as error:
            findings.add_altered(str(error))


def _check_config(run: Path, findings: Findings) -> None:
    """Check that config.yaml and identity.json have the same settings."""
    identity = json_of(run / "identity.json") or {}
    written = {key: repr(value) for key, value in flat(read(run / "config.yaml").data, "").items() if value != MARK}
    for key in identity.keys() & written.keys():
        if identity[key] not in (written[key], hashlib.sha256(written[key].encode()).hexdigest()):
            both = f"{key} is {written[key]} in the one, {identity[key]} in the other"
            findings.add_altered(f"config.yaml or identity.json: {both}")


def _check_summary(run: Path, rows: Rows, settings: Settings, findings: Findings) -> None:
    """Check that summary.json follows from the rows."""
    classes = str(facts_of(run / MODEL).get("classes", ""))
    task = registry.make(tasks.KIND, settings.task)(int(classes)) if classes.isdigit() else None
    lost = read_rows(run / "faults.jsonl", findings)
    falling = tuple(getattr(task, "falling", ()))
    try:
        recomputed = summary(rows, metric_names(rows), "", lost, best_model(run), falling)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        return findings.add_altered(f"metrics.jsonl or faults.jsonl: no summary can be made of it ({error})")
    written = json_of(run / "summary.json") or {}
    was, now = (flat(to_jsonable({**each, "exit_reason": ""}), "") for each in (written, recomputed))
    for key in {**now, **was}:
        if was.get(key) != now.get(key):
            findings.add_altered(f"summary.json: {key} is {was.get(key)}, metrics.jsonl makes {now.get(key)}")


def _check_model(run: Path, settings: Settings, name: str, expected: str | None, findings: Findings) -> None:
    try:
        model = FlatModel(rebuild_model(run, settings, name))
    except UserError as error:
        return findings.add_altered(str(error))
    if (digest := model.layout.sha256(model.w)) != expected:
        findings.add_altered(f"{name}: its weights have the SHA-256 {digest[:12]}, metrics.jsonl {str(expected)[:12]}")
