"""Loggers and callbacks receive each round, also in a resumed run, and their errors do not end the run."""

import json
import sys
import types
from typing import ClassVar

import pytest

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.runtime import code_trust
from fedmpi.runtime.execute import execute_run

CONFIG = """\
name: one
rounds: {rounds}
output: {output}
data: {{source: digits, partition: {{scheme: iid, clients: 3}}}}
model: {{name: logistic}}
method: {{name: fedavg}}
"""
WATCH = """
import json, os, signal, time, torch
class Watch:
    def __init__(self, to: str, fails: str = "", leaves: bool = False, stays_s: float = 0.0):
        self.to, self.fails, self.leaves, self.stays_s = to, fails, leaves, stays_s
    def say(self, hook, what):
        with open(self.to, "a") as file:
            file.write(json.dumps([hook, what]) + "\\n")
        if self.fails == hook:
            raise SystemExit(0) if self.leaves else ValueError("broken\\nhere")
    def begin(self, run):
        self.say("begin", run)
    def round(self, row):
        self.say("round", row)
        row.clear()
        os.chdir("/")
        time.sleep(self.stays_s)
        torch.manual_seed(row.get("seed", 5))
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def end(self, summary):
        self.say("end", summary)
class Mute:
    pass
class Late:
    def round(self, row):
        pass
    def __init__(self):
        raise OSError("no such place")
"""


@pytest.fixture
def make_settings(tmp_path):
    (tmp_path / "mine.py").write_text(WATCH)

    def load(rounds=3, *more):
        (tmp_path / "one.yaml").write_text(CONFIG.format(rounds=rounds, output=tmp_path))
        return config.load(tmp_path / "one.yaml", more)

    return load


def callback(folder, name, **options):
    given = json.dumps({"to": str(folder / f"{name}.jsonl"), **options})
    return f"{{{folder}/mine.py:Watch: {given}}}"


def heard(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def rows(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_loggers_receive_each_round_and_do_not_change_the_run(make_settings, tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)  # the output is relative to it
    several = ", ".join(
        [
            callback(tmp_path, "good"),
            callback(tmp_path, "bad", fails="round"),
            callback(tmp_path, "gone", fails="begin", leaves=True),
        ]
    )
    place = ["output=.", "evaluate.protocol=[global, personal]"]
    execute_run(make_settings(3, *place, "name=bare"))
    execute_run(make_settings(3, *place, f"callbacks=[{several}]"))
    assert [row["sha256"] for row in rows(tmp_path, "one")] == [row["sha256"] for row in rows(tmp_path, "bare")]
    good = heard(tmp_path, "good")
    assert [hook for hook, _ in good] == ["begin", "round", "round", "round", "end"]
    assert [what for hook, what in good if hook == "round"] == rows(tmp_path, "one")
    about = good[0][1]
    assert (about["name"], about["first"], about["resumed"], about["settings"]["rounds"]) == ("one", 0, False, 3)
    assert good[-1][1] == json.loads((tmp_path / "one" / "summary.json").read_text())
    assert [hook for hook, _ in heard(tmp_path, "bad")] == ["begin", "round"]
    assert [hook for hook, _ in heard(tmp_path, "gone")] == ["begin"]
    said = [str(each.message) for each in recwarn if "callbacks" in str(each.message)]
    assert len(said) == 2
    assert "callbacks.1: " in said[1]
    assert "Watch: round: " in said[1]
    assert "ValueError: broken here; it is not called again, and the run continues" in said[1]
    # It goes on with more rounds: the line of the last one is written, and told, once more.
    execute_run(make_settings(5, *place, f"callbacks=[{callback(tmp_path, 'good')}]", "checkpoint.resume=must"))
    messages = [what["round"] for hook, what in heard(tmp_path, "good") if hook == "round"]
    assert messages == [0, 1, 2, 2, 3, 4]
    assert heard(tmp_path, "good")[5][1]["first"] == 2
    assert (
        code_trust.load_run_settings(tmp_path / "one", False).callbacks == ()
    )  # who looks at a run starts none of them


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("loggers=[tensorbord]", "unknown logger 'tensorbord'; did you mean 'tensorboard'"),
        ("loggers=[{wandb: 3}]", r"loggers\.0\.wandb: 3 is not allowed; must be a mapping of option names to values"),
        ("loggers=[{wandb: {projekt: x}}]", r"loggers\.0\.wandb\.projekt: unknown key; did you mean 'project'"),
        (
            "loggers=[wandb]",
            r"loggers\.0: wandb needs a package that is not installed: .*wandb.*; run pip install 'fedmpi\[wandb\]'",
        ),
        ("loggers=tensorboard", "loggers: 'tensorboard' is not allowed; must be a list of"),
        ("callbacks=[3]", r"callbacks\.0: 3 is not allowed; must be a name or {name: options}"),
        ("callbacks=[none.py:A]", r"none\.py:A.*: file not found: .*none\.py"),
        ("callbacks=[mine.py:Nothing]", "mine.py' does not define 'Nothing'"),
        ("callbacks=[mine.py:Mute]", "Mute has none of the functions begin, round, end; define at least one of them"),
        ("callbacks=[mine.py:Late]", "Late cannot be created: OSError: no such place"),
        ("callbacks=[mine.py:Watch]", r"callbacks\.0\..*mine\.py:Watch\.to: missing"),
    ],
)
def test_mistakes_in_loggers_are_reported_before_training(make_settings, tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=words):
        execute_run(make_settings(3, given))
    assert not (tmp_path / "one").exists()


def test_tensorboard_events_can_be_read(make_settings, tmp_path):
    """TensorBoard's reader finds one value per round, as in metrics.jsonl, also after the run was resumed."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    execute_run(make_settings(2, "loggers=[tensorboard]"))
    execute_run(make_settings(4, "loggers=[tensorboard]", "checkpoint.resume=must"))
    results = reader.EventAccumulator(str(tmp_path / "one" / "tensorboard"))
    results.Reload()
    for name in ("accuracy", "loss", "wall_s"):
        assert [each.step for each in results.Scalars(name)] == [1, 2, 3, 4]
        if name != "wall_s":  # that of a line that is told again is another one
            values = [each.value for each in results.Scalars(name)]
            assert values == pytest.approx([row[name] for row in rows(tmp_path, "one")]), name


class Recorder(types.ModuleType):
    """A fake module that accepts any call and returns itself; `said` records (name, arguments, keywords)."""

    said: ClassVar[list] = []

    def __getattr__(self, name):
        def call(*given, **named):
            self.said.append((name, given, named))
            return self

        return call


def test_wandb_receives_the_rows_of_metrics(make_settings, tmp_path, monkeypatch):
    module = Recorder("wandb")
    monkeypatch.setattr(Recorder, "said", said := [])
    monkeypatch.setitem(sys.modules, "wandb", module)
    execute_run(make_settings(2, "loggers=[{wandb: {project: mine}}]"))
    execute_run(make_settings(3, "loggers=[{wandb: {project: mine}}]", "checkpoint.resume=must"))
    calls = [each for each, _, _ in said if each != "Settings"]
    assert calls == ["init", "log", "log", "finish", "init", "log", "log", "finish"]
    begun = [named for each, _, named in said if each == "init"]
    assert begun[0]["id"] == begun[1]["id"]
    assert {named["project"] for named in begun} == {"mine"}
    assert begun[0]["mode"] == "offline"
    logged = [(given[0], named["step"]) for each, given, named in said if each == "log"]
    assert [step for _, step in logged] == [1, 2, 2, 3]
    assert logged[0][0]["accuracy"] == rows(tmp_path, "one")[0]["accuracy"]
