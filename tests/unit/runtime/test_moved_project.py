"""A project folder that was moved with its runs: they go on, and their code is found by its content."""

import json

import pytest
import yaml
from helpers import fedmpi as command

import fedmpi
from fedmpi import config
from fedmpi.runtime.reading import compare
from fedmpi.sweeps import expand, progress, status

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


@pytest.fixture
def project(tmp_path):
    """A project with a finished run of code of its own, which has been moved since, and its place."""
    old = tmp_path / "old"
    (old / "code").mkdir(parents=True)
    (old / "code" / "own.py").write_text(OWN)
    (old / "c.yaml").write_text(CONFIG)
    done = command("run", "c.yaml", cwd=old)
    assert done.returncode == 0, done.stderr
    return old.rename(tmp_path / "new")


def resume(project, *overrides):
    """Train a second round; returns what the command said."""
    done = command("resume", project / "runs" / "c", "rounds=2", *overrides)
    if done.returncode == 0:
        assert len((project / "runs" / "c" / "metrics.jsonl").read_text().splitlines()) == 2
    return done


OWN_FILE, COPY = "code/own.py", "runs/c/plugins/own.py"


@pytest.mark.parametrize(
    ("gone", "override", "place"),
    [
        ([], None, OWN_FILE),  # it has moved with the project
        ([OWN_FILE], None, COPY),
        # An override replaces the name before anybody looks for the old file, and the options of the model stay.
        ([OWN_FILE, COPY], "model.name={place}:net", "elsewhere/own.py"),
    ],
)
def test_a_resumed_run_finds_its_code(project, gone, override, place):
    for name in gone:
        (project / name).unlink()
    (project / "elsewhere").mkdir()
    if override:
        (project / place).write_text(OWN)
    done = resume(project, *([override.format(place=project / place)] if override else []))
    assert done.returncode == 0, done.stderr
    model = yaml.safe_load((project / "runs" / "c" / "config.yaml").read_text())["model"]
    assert model == {"name": f"{project / place}:net", "width": 8}


def test_another_content_is_another_experiment(project):
    """A file of that name with another content is not taken for the one that has moved, unless it is asked for."""
    (project / "code" / "own.py").write_text(OWN.replace("ReLU", "Tanh"))
    done = resume(project, f"model.name={project}/code/own.py:net")
    assert done.returncode == 2
    assert "cannot go on as this experiment: plug-in own.py changed" in done.stderr
    done = resume(project)  # with the copy of then
    assert done.returncode == 0, done.stderr


def test_code_that_is_nowhere(project):
    (project / "code" / "own.py").unlink()
    (project / "runs" / "c" / "plugins" / "own.py").unlink()
    done = resume(project)
    assert done.returncode == 2
    assert "plugins/own.py is missing: it is the copy of" in done.stderr


def test_what_looks_at_a_moved_run_finds_its_code(project):
    run = project / "runs" / "c"
    assert fedmpi.load(run, trust=True)
    for words in (("verify", run, "--trust"), ("replay", run, "--trust"), ("export", run, "--trust")):
        done = command(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_a_sweep_that_was_moved(project):
    """Its runs are done, also for `fedmpi status`, which finds the file of the sweep beside them."""
    old = project.rename(project.parent / "before")
    (old / "s.yaml").write_text("base: [c.yaml]\nover: {seed: [0, 1]}\n")
    done = command("sweep", "s.yaml", cwd=old)
    assert done.returncode == 0, done.stderr
    project = old.rename(project.parent / "after")
    asked = expand.load(project / "s.yaml", [f"output={project}/runs"])
    assert [progress.read_state(settings).what for _, settings in asked.runs()] == [progress.DONE] * 2
    file, given = status.read_sweep_list(project / "runs" / "s")
    assert file == project / "s.yaml"
    assert len(list(expand.load(file, given).runs())) == 2


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
