"""The code of a run is gone: it goes on, and is looked at, with the copies in its directory."""

import json

import pytest
import yaml
from helpers import fedmpi as command

import fedmpi
from fedmpi import config
from fedmpi.runtime.reading import compare

OWN = """\
from torch import nn

def net(input_shape, classes, width: int = 16):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
"""
CONFIG = """\
rounds: 1
data: {source: digits, partition: {scheme: iid, clients: 2}}
model: {name: "code/own.py:net", width: 8}
method: {name: fedavg}
train: {batch_size: 500}
output: runs
report: false
"""
OWN_FILE, COPY = "code/own.py", "runs/c/plugins/own.py"


@pytest.fixture
def project(tmp_path):
    """The place of a project with a finished run of code of its own, which has been moved since."""
    old = tmp_path / "old"
    (old / "code").mkdir(parents=True)
    (old / OWN_FILE).write_text(OWN)
    (old / "c.yaml").write_text(CONFIG)
    done = command("run", "c.yaml", cwd=old)
    assert done.returncode == 0, done.stderr
    return old.rename(tmp_path / "new")


def test_a_resumed_run_finds_its_code(project):
    """An override replaces the name before anybody looks for the old file, and the options of the model stay."""
    run = project / "runs" / "c"
    done = command("resume", run, "rounds=2")
    assert done.returncode == 0, done.stderr
    model = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert model == {"name": f"{project / COPY}:net", "width": 8}
    (project / COPY).unlink()
    done = command("resume", run, "rounds=3")
    assert done.returncode == 2
    assert "plugins/own.py is missing: it is the copy of" in done.stderr
    done = command("resume", run, "rounds=3", f"model.name={project / OWN_FILE}:net")
    assert done.returncode == 0, done.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


def test_another_content_is_another_experiment(project):
    (project / OWN_FILE).write_text(OWN.replace("ReLU", "Tanh"))
    done = command("resume", project / "runs" / "c", "rounds=2", f"model.name={project / OWN_FILE}:net")
    assert done.returncode == 2
    assert "cannot go on as this experiment: plug-in own.py changed" in done.stderr


def test_what_looks_at_a_run_takes_the_copy_of_its_code(project):
    run = project / "runs" / "c"
    assert fedmpi.load(run, trust=True)
    for words in (("verify", run, "--trust"), ("replay", run, "--trust"), ("export", run, "--trust")):
        done = command(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_runs_of_one_code_at_two_places_have_the_same_settings(project, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    done = command("run", "c.yaml", f"model={{name: '{tmp_path}/own.py:net', width: 8}}", "name=d", cwd=project)
    assert done.returncode == 0, done.stderr
    found = compare.compare(project / "runs" / "c", project / "runs" / "d")
    assert "own.py" not in json.dumps(found["settings"])


def test_a_missing_file_is_a_mistake_only_where_it_is_used(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG.replace("code/own.py", "gone.py"))
    done = command("run", "c.yaml", cwd=tmp_path)
    assert "c.yaml:3: model '" in done.stderr
    assert f"there is no such file: {tmp_path}/gone.py" in done.stderr
    assert config.load(tmp_path / "c.yaml", ["model={name: linear}"]).model.name == "linear"
