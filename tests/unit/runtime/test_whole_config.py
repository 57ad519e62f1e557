"""config.yaml of a run directory alone reproduces the run, even if directory and plug-ins are moved."""

import json

import pytest
import torch
import yaml
from every_method import VARIANTS
from helpers import fedmpi as command
from helpers import run_experiment, small_settings

import fedmpi
from fedmpi import config
from fedmpi.common import registry
from fedmpi.config.resume_rules import normalize_identity
from fedmpi.methods import registry as every_method
from fedmpi.runtime import introspection
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.inspection import compare
from fedmpi.runtime.record import metadata

SUPPLIED = {
    "models": ("input_shape", "classes"),
    "datasets": ("root", "site", "download"),
    "partitions": ("labels", "clients", "rng"),
    "tasks": ("classes",),
    "rules": ("up", "s"),
}
REFUSED = {"normalize": {"dataset"}}  # its null stands for "mean and std are given", and is refused where it is written
WITH_OPTIONS = [name for name in VARIANTS if "fedsol" in name or "alpha kept" in name or "median" in name]


@pytest.mark.parametrize("kind", introspection.KIND_MODULES)
def test_every_option_with_a_default_is_written(kind):
    for name, target in introspection.read_registry(kind).items():
        results = registry.load_object(name, {name: target}, kind)
        options = introspection.describe_component(kind, name).options
        declared = {o.name for o in options if o.default != "required"}
        inner = {key for key in declared if kind == "methods" and key in ("prox", "client")}
        needs = {
            o.name: o.type.split(", ")[0] if name == "medmnist" else "x" for o in options if o.default == "required"
        }
        given = metadata.missing_defaults(results, needs, SUPPLIED.get(kind, ()), inner)
        assert set(given) == declared - inner - REFUSED.get(name, set()), name


@pytest.mark.parametrize("name", [*sorted(every_method), *WITH_OPTIONS])
def test_the_written_config_gives_the_same_run(tmp_path, name):
    method, net, changes = VARIANTS.get(name, (name, "norm", {}))
    asked = small_settings(method, net, **{**changes, "rounds": 2})
    full = metadata.resolve_settings(asked)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(full.model_dump(mode="json"), sort_keys=False))
    again = config.load(tmp_path / "config.yaml")
    assert again.model_dump(mode="json") == full.model_dump(mode="json")
    assert metadata.resolve_settings(again).identity() == full.identity()
    assert normalize_identity(again.digest_items()) == normalize_identity(full.digest_items())
    assert set(asked.model_dump(mode="json")["method"]) <= set(full.model_dump(mode="json")["method"])
    one, two = run_experiment(asked), run_experiment(again)
    assert one.hashes == two.hashes
    assert torch.equal(one.b, two.b)


# ---- plug-ins ----
NET = """\
from torch import nn

def net(input_shape, classes, width: int = 8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.{}(), nn.Linear(width, classes))
"""
CONFIG = """\
name: mine
rounds: 2
data: {{source: digits, partition: {{scheme: iid, clients: 2}}}}
model: {{name: "{}"}}
method: {{name: fedavg}}
train: {{batch_size: 200}}
"""


@pytest.fixture
def run_with_plug_in(tmp_path, monkeypatch):
    """A run with a plug-in model, and the file of the plug-in."""
    own = tmp_path / "code"
    own.mkdir()
    (own / "mynet.py").write_text(NET.format("ReLU"))
    (tmp_path / "c.yaml").write_text(CONFIG.format(f"{own}/mynet.py:net"))
    execute_run(config.load(tmp_path / "c.yaml", [f"output={tmp_path}/runs"]))
    return tmp_path / "runs" / "mine", own / "mynet.py"


def test_options_of_plug_ins_are_written(run_with_plug_in):
    assert yaml.safe_load((run_with_plug_in[0] / "config.yaml").read_text())["model"]["width"] == 8


@pytest.mark.parametrize("what", ["deleted", "moved run", "changed"])
def test_a_model_is_loaded_from_the_copy_in_the_run_directory(run_with_plug_in, tmp_path, what):
    run, file = run_with_plug_in
    before = fedmpi.load(run, trust=True)
    if what == "changed":
        file.write_text(NET.format("Tanh"))  # would fit, and give other outputs
    else:
        file.unlink()
    if what == "moved run":
        run = run.rename(tmp_path / "elsewhere")
    x = torch.randn(5, 1, 8, 8)
    if what == "changed":
        with pytest.warns(UserWarning, match=r"mynet.py has changed since this run; its copy .* is used"):
            after = fedmpi.load(run, trust=True)
    else:
        after = fedmpi.load(run, trust=True)
    assert torch.equal(before(x), after(x))


def test_commands_use_the_copy_of_a_deleted_plug_in(run_with_plug_in, tmp_path):
    run, file = run_with_plug_in[0], run_with_plug_in[1].rename(tmp_path / "own.py")
    for words in (("verify", run), ("replay", run), ("export", run), ("resume", run, "rounds=3")):
        result = command(*words, *(["--trust"] if words[0] != "resume" else []))
        assert result.returncode == 0, (words, result.stdout, result.stderr)
    name = yaml.safe_load((run / "config.yaml").read_text())["model"]["name"]
    assert name == f"{run}/plugins/mynet.py:net"
    (run / "plugins" / "mynet.py").unlink()
    result = command("resume", run, "rounds=4")
    assert result.returncode == 2
    assert "plugins/mynet.py, the copy of" in result.stderr
    result = command("resume", run, "rounds=4", f"model.name={file.rename(tmp_path / 'mynet.py')}:net")
    assert result.returncode == 0, result.stderr  # the options of the model stay, too


def test_the_same_plug_in_in_two_folders_gives_the_same_settings(run_with_plug_in, tmp_path):
    run, file = run_with_plug_in
    other = file.rename(tmp_path / "mynet.py")
    execute_run(config.load(tmp_path / "c.yaml", [f"output={tmp_path}/runs", "name=d", f"model.name={other}:net"]))
    assert "mynet.py" not in json.dumps(compare.compare_runs(run, tmp_path / "runs" / "d")["settings"])


def test_a_missing_file_is_a_mistake_only_where_it_is_used(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG.format("gone.py:net"))
    result = command("run", "c.yaml", cwd=tmp_path)
    assert "c.yaml:4: model '" in result.stderr
    assert f"file not found: {tmp_path}/gone.py" in result.stderr
    assert config.load(tmp_path / "c.yaml", ["model={name: linear}"]).model.name == "linear"
