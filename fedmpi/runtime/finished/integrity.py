"""Checks of a run directory without training: its seal, and that its files agree with each other."""

from __future__ import annotations

import hashlib
import json
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
from fedmpi.flat.layout import Layout
from fedmpi.flat.model import FlatModel
from fedmpi.runtime.finished.models import rebuild_model
from fedmpi.runtime.record.durable import CorruptFileError, read_tensors, serialize_tensors
from fedmpi.runtime.record.run_dir import BEST, MODEL, SEAL, seal, seal_digest
from fedmpi.runtime.record.saved_model import best_model, facts_of
from fedmpi.runtime.record.summary import metric_names, summary

Rows = Sequence[Mapping[str, Any]]
VERIFIED, ALTERED, CANNOT = 0, 1, 2  # exit codes


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
        if text not in self.altered:
            self.altered.append(text)
            self.say(f"  ALTERED {text}")

    def add_unsure(self, text: str) -> None:
        if text not in self.unsure:
            self.unsure.append(text)
            self.say(f"  cannot tell: {text}")

    def report_ok(self, text: str) -> None:
        self.say(f"  ok {text}")

    @property
    def code(self) -> int:
        return ALTERED if self.altered else CANNOT if self.unsure else VERIFIED


def check_seal(run: Path, asked: str | None, findings: Findings) -> bool:
    """Compare files and rounds with the seal. Returns whether there is one. asked: the seal that somebody has noted."""
    path = run / SEAL
    if not path.is_file():
        if asked is not None:
            findings.add_unsure(f"{SEAL} is missing, which should have the seal {asked}")
        return False
    before = len(findings.altered)
    facts = json_of(path, findings)
    files, rounds = facts.get("files"), facts.get("rounds")
    if not isinstance(files, dict) or not isinstance(rounds, dict):
        if len(findings.altered) == before:
            findings.add_altered(f"{SEAL}: it lacks files or rounds")
        return True
    if facts.get("seal") != seal_digest(facts):
        findings.add_altered(f"{SEAL}: its content is not that of the SHA-256 in it")
    if asked is not None and not (len(asked) >= 8 and str(facts.get("seal", "")).startswith(asked.lower())):
        findings.add_altered(f"{SEAL}: the seal is {str(facts.get('seal'))[: max(len(asked), 12)]}, not {asked}")
    sealed = seal(run)
    now = sealed["files"]
    for name in {**files, **now}:
        if files.get(name) == now.get(name):
            continue
        where = _rounds(sealed["rounds"].get(name), rounds.get(name), findings)
        how = "is missing" if name not in now else "was added" if name not in files else "has changed"
        findings.add_altered(f"{name}{where} {how} since the run ended")
    if len(findings.altered) == before:
        findings.report_ok(f"seal {str(facts['seal'])[:16]}: {count(len(now), 'file')} as they were when the run ended")
    return True


def _rounds(now: dict[str, str] | None, sealed: Any, findings: Findings) -> str:
    """Say in which rounds lines have changed, and note these rounds as suspects."""
    if not isinstance(sealed, dict) or now is None:
        return ""
    different = [t for t in {**sealed, **now} if sealed.get(t) != now.get(t)]
    findings.suspects |= {int(t) for t in different if t.lstrip("-").isdigit()}
    return f", round {', '.join(different[:8])}{' ...' if len(different) > 8 else ''}," if different else ""


def json_of(path: Path, findings: Findings) -> dict[str, Any]:
    """Return a JSON file's object; {} with a finding if the file holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        why = "it holds no object"
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    findings.add_altered(f"{path.name}: cannot be read ({why})")
    return {}


def rows_of(path: Path, findings: Findings) -> list[dict[str, Any]]:
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


def check_rounds(rows: Rows, settings: Settings, reason: str, findings: Findings) -> None:
    """Check that the rows are those of the rounds that a run with these settings has."""
    first = -1 if settings.rounds == 0 else 0
    if [row["round"] for row in rows] != list(range(first, first + len(rows))):
        findings.add_altered("metrics.jsonl: its rounds are not 0, 1, 2, ... each once")
    elif reason == "finished" and len(rows) != max(settings.rounds, 1):
        findings.add_altered(f"metrics.jsonl: {count(len(rows), 'round')} of a finished run of {settings.rounds}")


def check_config(run: Path, findings: Findings) -> None:
    """Check that config.yaml and identity.json have the same settings."""
    identity = json_of(run / "identity.json", findings)
    written = flat(read(run / "config.yaml").data, "")
    texts = {key: repr(value) for key, value in written.items() if value != MARK}
    secret = {key for key, value in written.items() if value == MARK}
    digests = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}
    for key, was in identity.items():
        if not key.startswith("(") and key not in secret and was not in (texts.get(key), digests.get(key)):
            findings.add_altered(
                f"config.yaml or identity.json: {key} is {texts.get(key, 'missing')} in the one, {was} in the other"
            )


def check_summary(run: Path, rows: Rows, settings: Settings, lost: Rows, findings: Findings) -> None:
    """Check that summary.json follows from the rows."""
    written = json_of(run / "summary.json", findings)
    if not written:
        return
    if not rows and written.get("rounds"):  # not each figure that is lacking, for one cause
        if not findings.altered:
            findings.add_altered(f"metrics.jsonl: it has no round, and summary.json tells of {written['rounds']}")
        return
    try:
        now = summary(rows, metric_names(rows), "", lost, best_model(run), _falling(run, settings))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        findings.add_altered(
            f"metrics.jsonl or faults.jsonl: its rows make no summary ({type(error).__name__}: {error})"
        )
        return
    flat_written, flat_now = (flat(to_jsonable({**each, "exit_reason": ""}), "") for each in (written, now))
    different = [key for key in {**flat_now, **flat_written} if flat_written.get(key) != flat_now.get(key)]
    for key in different:
        findings.add_altered(f"summary.json: {key} is {flat_written.get(key)}, metrics.jsonl makes {flat_now.get(key)}")
    if not different:
        findings.report_ok("summary.json follows from metrics.jsonl")


def _falling(run: Path, settings: Settings) -> Sequence[str]:
    """Return the metrics of the task's own of which less is better."""
    classes = str(facts_of(run / MODEL).get("classes", ""))
    if not classes.isdigit():
        return ()
    return tuple(getattr(registry.make(tasks.KIND, settings.task)(int(classes)), "falling", ()))


def check_models(run: Path, settings: Settings, rows: Rows, findings: Findings) -> None:
    """Check that models have the hashes in the rows, and that checkpoints and states are not damaged."""
    hashes = {row["round"]: row.get("sha256") for row in rows}
    layout = None
    for name in (MODEL, BEST):
        if not (run / name).exists() or not rows:
            continue
        t = rows[-1]["round"] if name == MODEL else facts_of(run / name).get("round")
        try:
            model = FlatModel(rebuild_model(run, settings, name))
        except UserError as error:
            findings.add_altered(str(error))
            continue
        layout = model.layout
        _compare(name, layout.sha256(model.w), t, hashes, findings)
        facts = facts_of(run / name)
        if name == BEST and (row := next((row for row in rows if row["round"] == t), None)) is not None:
            value = row.get(str(facts.get("figure")))
            if value != facts.get("value"):
                findings.add_altered(
                    f"{name}: {facts.get('figure')} is {facts.get('value')}, in metrics.jsonl {value}, round {t}"
                )
    _check_kept(run, layout, hashes, findings)


def _compare(what: str, digest: str, t: Any, hashes: Mapping[int, Any], findings: Findings) -> None:
    if isinstance(t, int) and hashes.get(t) == digest:
        findings.report_ok(f"{what} is that of round {t} in metrics.jsonl")
    else:
        row = f"round {t} in metrics.jsonl has {str(hashes.get(t) if isinstance(t, int) else None)[:12]}"
        findings.add_altered(f"{what}: its weights have the SHA-256 {digest[:12]}, {row}")


def _numbers(facts: Mapping[str, Any]) -> list[int]:
    """Return client and round of a state file, as far as it has them."""
    return [each for key in ("client", "round") if isinstance(each := facts.get(key), int)]


def _check_kept(run: Path, layout: Layout | None, hashes: Mapping[int, Any], findings: Findings) -> None:
    """checkpoints/ and state/: each file has a SHA-256 of its own; a checkpoint's model is that of its round."""
    before, files = (
        len(findings.altered),
        sorted([*run.glob("checkpoints/*.safetensors"), *run.glob("state/**/*.safetensors")]),
    )
    for path in files:
        name = path.relative_to(run)
        try:
            tensors, facts = read_tensors(path)
        except CorruptFileError as error:
            findings.add_altered(f"{name}: {str(error).removeprefix(str(path)).lstrip(': ')}")
            continue
        if serialize_tensors(tensors, facts) != path.read_bytes():
            findings.add_altered(f"{name}: its header is not as fedmpi writes it")
        if name.parts[0] == "checkpoints":
            t = facts.get("round")
            is_named = isinstance(t, int) and path.stem == f"{t:06}" and "w" in tensors
            if not is_named or (layout and layout.sha256(tensors["w"]) != hashes.get(t)):
                findings.add_altered(f"{name}: its model is not that of round {t} in metrics.jsonl")
        elif path.stem.split(".") != [f"{each:06}" for each in _numbers(facts)]:
            findings.add_altered(f"{name}: it holds client {facts.get('client')} after round {facts.get('round')}")
    if files and len(findings.altered) == before:
        findings.report_ok(f"{count(len(files), 'file')} of checkpoints and states are whole")
