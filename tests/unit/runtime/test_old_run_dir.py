"""A run directory of an earlier version, whose config has old keys, is refused with one message and left as it is."""

import json
import re

import pytest
from helpers import ROOT

import fedmpi
from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.reports import run_groups
from fedmpi.runtime.code_trust import load_resume_settings, load_run_settings
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.finished_runs.verify import VerifyOptions, verify_all
from fedmpi.runtime.inspection.compare import RunRecord
from fedmpi.sweeps import progress, sweep_status

OLD = {"trace": "timeline", "loggers": "track"}


@pytest.fixture(scope="module")
def old_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("old")
    words = [f"output={output}", "name=old", "rounds=1", "report=false", "model={name: logistic}", "train.epochs=1"]
    execute_run(config.load(ROOT / "configs/quickstart.yaml", words))
    run = output / "old"
    text = (run / "config.yaml").read_text()
    identity = json.loads((run / "identity.json").read_text())
    for new, old in OLD.items():
        assert f"\n{new}:" in text
        text = text.replace(f"\n{new}:", f"\n{old}:")
        identity[old] = identity.pop(new)
    (run / "config.yaml").write_text(text)
    (run / "identity.json").write_text(json.dumps(identity))
    return run


def settings(run, *words):
    place = [f"output={run.parent}", "name=old", "rounds=2", "report=false", "model={name: logistic}"]
    return config.load(ROOT / "configs/quickstart.yaml", [*place, "train.epochs=1", *words])


READERS = {
    "load": fedmpi.load,
    "read settings": lambda run: load_run_settings(run, trust=False),
    "read trusted settings": lambda run: load_run_settings(run, trust=True),
    "resume": lambda run: load_resume_settings(run, []),
    "run with checkpoint.resume: must": lambda run: execute_run(settings(run, "checkpoint.resume=must")),
    "run with checkpoint.resume: auto": lambda run: execute_run(settings(run, "checkpoint.resume=auto")),
    "sweep": lambda run: progress.read_state(settings(run)),
    "status": sweep_status.read_status,
    "status of a sweep": lambda run: sweep_status.read_status(run.parent),
    "report": lambda run: run_groups.read_runs([run]),
    "verify": lambda run: verify_all(run, print, VerifyOptions()),
    "compare": RunRecord,
}


@pytest.mark.parametrize("reader", READERS)
def test_an_old_run_directory_is_refused_and_left_as_it_is(old_run, reader):
    before = {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}
    text = r"old was written by an earlier version .*\((timeline|track) is .* now, and 1 more key\).*another name"
    with pytest.raises(UserError, match=text) as error:
        READERS[reader](old_run)
    assert not re.search(r"\n", str(error.value))
    assert before == {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}
