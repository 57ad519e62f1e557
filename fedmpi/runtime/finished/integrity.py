"""What of a run directory can be checked without training: the seal, and that its files follow from each other."""

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
from fedmpi.runtime.record.durable import CorruptFileError, packed, read_tensors
from fedmpi.runtime.record.run_dir import BEST, MODEL, SEAL, seal, stamp
from fedmpi.runtime.record.saved_model import best_model, facts_of
from fedmpi.runtime.record.summary import metric_names, summary

Rows = Sequence[Mapping[str, Any]]
VERIFIED, ALTERED, CANNOT = 0, 1, 2  # exit codes


@dataclass
class Findings:
    """altered: what and where, a line each; unsure: why it cannot be told; suspects: rounds whose lines have changed
    since the seal."""

    say: Callable[[str], None]
    altered: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    suspects: set[int] = field(default_factory=set)

    def found(self, text: str) -> None:
        if text not in self.altered:
            self.altered.append(text)
            self.say(f"  ALTERED {text}")

    def cannot(self, text: str) -> None:
        if text not in self.unsure:
            self.unsure.append(text)
            self.say(f"  cannot tell: {text}")

    def fine(self, text: str) -> None:
        self.say(f"  ok {text}")

    @property
    def code(self) -> int:
        return ALTERED if self.altered else CANNOT if self.unsure else VERIFIED


def check_seal(run: Path, asked: str | None, to: Findings) -> bool:
    """Whether there is a seal; files and rounds that are not as it says. asked: the seal that somebody has noted."""
    path = run / SEAL
    if not path.is_file():
        if asked is not None:
            to.cannot(f"{SEAL} is missing, which should have the seal {asked}")
        return False
    before = len(to.altered)
    facts = json_of(path, to)
    files, rounds = facts.get("files"), facts.get("rounds")
    if not isinstance(files, dict) or not isinstance(rounds, dict):
        if len(to.altered) == before:
            to.found(f"{SEAL}: it lacks files or rounds")
        return True
    if facts.get("seal") != stamp(facts):
        to.found(f"{SEAL}: its content is not that of the SHA-256 in it")
    if asked is not None and not (len(asked) >= 8 and str(facts.get("seal", "")).startswith(asked.lower())):
        to.found(f"{SEAL}: the seal is {str(facts.get('seal'))[: max(len(asked), 12)]}, not {asked}")
    sealed = seal(run)
    now = sealed["files"]
    for name in {**files, **now}:
        if files.get(name) == now.get(name):
            continue
        where = _rounds(sealed["rounds"].get(name), rounds.get(name), to)
        how = "is missing" if name not in now else "was added" if name not in files else "has changed"
        to.found(f"{name}{where} {how} since the run ended")
    if len(to.altered) == before:
        to.fine(f"seal {str(facts['seal'])[:16]}: {count(len(now), 'file')} as they were when the run ended")
    return True


def _rounds(now: dict[str, str] | None, sealed: Any, to: Findings) -> str:
    """Of which rounds lines have changed, in words; they are suspects."""
    if not isinstance(sealed, dict) or now is None:
        return ""
    bad = [t for t in {**sealed, **now} if sealed.get(t) != now.get(t)]
    to.suspects |= {int(t) for t in bad if t.lstrip("-").isdigit()}
    return f", round {', '.join(bad[:8])}{' ...' if len(bad) > 8 else ''}," if bad else ""


def json_of(path: Path, to: Findings) -> dict[str, Any]:
    """A JSON file's object; {} where it is none, which is a finding."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        why = "it holds no object"
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    to.found(f"{path.name}: cannot be read ({why})")
    return {}


def rows_of(path: Path, to: Findings) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; lines that are none are findings."""
    try:
        found = read_jsonl(path, rounds=True)
    except UserError as error:
        to.found(str(error))
        return []
    for number in found.damaged:
        to.found(f"{path.name}:{number}: is no row of a run")
    if found.cut:
        to.found(f"{path.name}: its last line is cut")
    return found.rows


def check_rounds(rows: Rows, settings: Settings, reason: str, to: Findings) -> None:
    """Whether the rows are those of the rounds that there should be."""
    first = -1 if settings.rounds == 0 else 0
    if [row["round"] for row in rows] != list(range(first, first + len(rows))):
        to.found("metrics.jsonl: its rounds are not 0, 1, 2, ... each once")
    elif reason == "finished" and len(rows) != max(settings.rounds, 1):
        to.found(f"metrics.jsonl: {count(len(rows), 'round')} of a finished run of {settings.rounds}")


def check_config(run: Path, to: Findings) -> None:
    """Whether config.yaml and identity.json have the same settings."""
    identity = json_of(run / "identity.json", to)
    written = flat(read(run / "config.yaml").data, "")
    texts = {key: repr(value) for key, value in written.items() if value != MARK}
    secret = {key for key, value in written.items() if value == MARK}
    digests = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}
    for key, was in identity.items():
        if not key.startswith("(") and key not in secret and was not in (texts.get(key), digests.get(key)):
            to.found(
                f"config.yaml or identity.json: {key} is {texts.get(key, 'missing')} in the one, {was} in the other"
            )


def check_summary(run: Path, rows: Rows, settings: Settings, lost: Rows, to: Findings) -> None:
    """Whether summary.json is what the rows make."""
    said = json_of(run / "summary.json", to)
    if not said:
        return
    if not rows and said.get("rounds"):  # not each figure that is lacking, for one cause
        if not to.altered:
            to.found(f"metrics.jsonl: it has no round, and summary.json tells of {said['rounds']}")
        return
    try:
        now = summary(rows, metric_names(rows), "", lost, best_model(run), _falling(run, settings))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        to.found(f"metrics.jsonl or faults.jsonl: its rows make no summary ({type(error).__name__}: {error})")
        return
    flat_said, flat_now = (flat(to_jsonable({**each, "exit_reason": ""}), "") for each in (said, now))
    bad = [key for key in {**flat_now, **flat_said} if flat_said.get(key) != flat_now.get(key)]
    for key in bad:
        to.found(f"summary.json: {key} is {flat_said.get(key)}, metrics.jsonl makes {flat_now.get(key)}")
    if not bad:
        to.fine("summary.json follows from metrics.jsonl")


def _falling(run: Path, settings: Settings) -> Sequence[str]:
    """The task's own figures of which less is better."""
    classes = str(facts_of(run / MODEL).get("classes", ""))
    if not classes.isdigit():
        return ()
    return tuple(getattr(registry.make(tasks.KIND, settings.task)(int(classes)), "falling", ()))


def check_models(run: Path, settings: Settings, rows: Rows, to: Findings) -> None:
    """Whether the models are those whose hashes the rows have, and checkpoints and states are whole."""
    hashes = {row["round"]: row.get("sha256") for row in rows}
    layout = None
    for name in (MODEL, BEST):
        if not (run / name).exists() or not rows:
            continue
        t = rows[-1]["round"] if name == MODEL else facts_of(run / name).get("round")
        try:
            model = FlatModel(rebuild_model(run, settings, name))
        except UserError as error:
            to.found(str(error))
            continue
        layout = model.layout
        _compare(name, layout.sha256(model.w), t, hashes, to)
        facts = facts_of(run / name)
        if name == BEST and (row := next((row for row in rows if row["round"] == t), None)) is not None:
            value = row.get(str(facts.get("figure")))
            if value != facts.get("value"):
                to.found(f"{name}: {facts.get('figure')} is {facts.get('value')}, in metrics.jsonl {value}, round {t}")
    _check_kept(run, layout, hashes, to)


def _compare(what: str, digest: str, t: Any, hashes: Mapping[int, Any], to: Findings) -> None:
    if isinstance(t, int) and hashes.get(t) == digest:
        to.fine(f"{what} is that of round {t} in metrics.jsonl")
    else:
        row = f"round {t} in metrics.jsonl has {str(hashes.get(t) if isinstance(t, int) else None)[:12]}"
        to.found(f"{what}: its weights have the SHA-256 {digest[:12]}, {row}")


def _numbers(facts: Mapping[str, Any]) -> list[int]:
    """Client and round of a state file, as far as it tells them."""
    return [each for key in ("client", "round") if isinstance(each := facts.get(key), int)]


def _check_kept(run: Path, layout: Layout | None, hashes: Mapping[int, Any], to: Findings) -> None:
    """checkpoints/ and state/: each file has a SHA-256 of its own; a checkpoint's model is that of its round."""
    before, files = (
        len(to.altered),
        sorted([*run.glob("checkpoints/*.safetensors"), *run.glob("state/**/*.safetensors")]),
    )
    for path in files:
        name = path.relative_to(run)
        try:
            tensors, facts = read_tensors(path)
        except CorruptFileError as error:
            to.found(f"{name}: {str(error).removeprefix(str(path)).lstrip(': ')}")
            continue
        if packed(tensors, facts) != path.read_bytes():
            to.found(f"{name}: its header is not as fedmpi writes it")
        if name.parts[0] == "checkpoints":
            t = facts.get("round")
            known = isinstance(t, int) and path.stem == f"{t:06}" and "w" in tensors
            if not known or (layout and layout.sha256(tensors["w"]) != hashes.get(t)):
                to.found(f"{name}: its model is not that of round {t} in metrics.jsonl")
        elif path.stem.split(".") != [f"{each:06}" for each in _numbers(facts)]:
            to.found(f"{name}: it holds client {facts.get('client')} after round {facts.get('round')}")
    if files and len(to.altered) == before:
        to.fine(f"{count(len(files), 'file')} of checkpoints and states are whole")
