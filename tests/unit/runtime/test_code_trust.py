"""Untrusted run directories: their code is listed, but not executed, and secrets are never written."""

import json
import os
import shutil

import pytest
import torch
import yaml
from helpers import ROOT, clean_env, fedmpi

import fedmpi as package
from fedmpi import config
from fedmpi.common import redaction, registry
from fedmpi.common.errors import UserError
from fedmpi.runtime import code_trust
from fedmpi.runtime.record.run_dir import RunDirectory
from fedmpi.runtime.validate import validate_settings

CONFIG = f"""\
name: theirs
rounds: 1
data: {{source: digits, partition: {{scheme: iid, clients: 2}}}}
model: {{name: "{ROOT}/tests/helpers.py:norm_net"}}
method: {{name: fedatom, atoms: 3}}
train: {{batch_size: 200}}
"""
SECRET = "s3cr3t"
SECRET_KEYS = "token api_key apiKey APIKey db.password mypassword auth client_secret credentials"
SECRET_KEYS += " aws_credential auth_header token2 key"
# Leaves a file behind wherever it is imported, and stands for whatever a config may name.
PLUGIN = """\
from pathlib import Path
from torch import nn
import fedmpi
from fedmpi.data.sources.digits import digits
from fedmpi.data.partitions.random_partitions import iid as deal
from fedmpi.methods.fedavg import FedAvg as Mine
from fedmpi.aggregation.rules import mean
from fedmpi.tasks.classification import Classification
(Path(__file__).parent / "was_run").touch()

def web(root, token: str = "", retries: int = 1):
    assert token == "s3cr3t"
    return digits(root)

def net(input_shape, classes, api_key: str = "", key_dim: int = 64):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, key_dim), nn.ReLU(), nn.Linear(key_dim, classes))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run without external code (the model of CONFIG is not a plug-in here)."""
    place = tmp_path_factory.mktemp("theirs")
    (place / "theirs.yaml").write_text(CONFIG.replace(f"{ROOT}/tests/helpers.py:norm_net", "mcmahan_cnn"))
    result = fedmpi("run", place / "theirs.yaml", f"output={place}", "data.root=their/files", cwd=place)
    assert result.returncode == 0, result.stderr
    return place / "theirs"


@pytest.fixture
def copied(run, tmp_path):
    """Copy the run and change settings, given as {dotted key: value}."""

    def change(**changes):
        shutil.copytree(run, tmp_path / "copy")
        path = tmp_path / "copy" / "config.yaml"
        tree = yaml.safe_load(path.read_text())
        for key, value in changes.items():
            *sections, last = key.split("__")
            at = tree
            for section in sections:
                at = at[section]
            at[last] = value
        path.write_text(yaml.safe_dump(tree))
        return tmp_path / "copy"

    return change


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    return tmp_path / "mine.py"


def test_a_run_without_external_code_needs_no_trust(run):
    module = package.load(run)
    assert not module.training
    assert module(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("data__source", "web"),
        ("data__partition__scheme", "deal"),
        ("model__name", "net"),
        ("task__name", "Classification"),
        ("method__name", "Mine"),
        ("method__client", "Mine"),
        ("method__client", {"name": "Mine"}),
        ("method__client", {"name": "fedatom", "client": {"name": "Mine"}}),
        ("server__rule", "mean"),
        ("server__rule__name", "mean"),
    ],
    ids=str,
)
def test_external_code_is_listed_and_not_executed(copied, plugin, where, name):
    def spelled(value):
        return (
            {k: v if v == "fedatom" else spelled(v) for k, v in value.items()}
            if isinstance(value, dict)
            else (f"{plugin}:{value}")
        )

    theirs = copied(**{where: spelled(name)})
    with pytest.raises(UserError) as caught:
        package.load(theirs)
    output = str(caught.value)
    assert output.startswith(f"{theirs} names code that is not part of fedmpi: {plugin}:")
    assert where.replace("__", ".").removesuffix(".name") in output
    assert "trust=True" in output
    assert "--trust" in output
    assert not (plugin.parent / "was_run").exists()


def test_all_external_code_is_listed(copied):
    theirs = copied(model__name="os:system", data__source="/gone/there.py:Data", task__name="fedmpi.cli:main")
    with pytest.raises(UserError) as caught:
        package.load(theirs)
    named = "/gone/there.py:Data (data.source), os:system (model.name), fedmpi.cli:main (task.name)"
    assert f"not part of fedmpi: {named}. It was not executed" in str(caught.value)


def test_trusted_code_is_executed(tmp_path, plugin):
    (tmp_path / "c.yaml").write_text(CONFIG + f"output: {tmp_path}\n")
    words = [f"model={{name: '{plugin}:net'}}", "method={name: fedavg}"]
    result = fedmpi("run", tmp_path / "c.yaml", *words)
    assert result.returncode == 0, result.stderr
    with pytest.raises(UserError, match=r"mine\.py:net"):
        package.load(tmp_path / "theirs")
    assert package.load(tmp_path / "theirs", trust=True)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_unlisted_external_code_is_not_executed_either(plugin):
    """As a second protection, only names of the registries can be loaded for an untrusted run."""
    with registry.registered_code_only(), pytest.raises(UserError, match="is not fedmpi's own code"):
        registry.load_object(f"{plugin}:net", {}, "model")
    assert not (plugin.parent / "was_run").exists()
    with registry.registered_code_only():
        assert registry.load_object("root", {"root": "math:sqrt"}, "function")(9.0) == 3.0
    assert registry.load_object(f"{plugin}:net", {}, "model")


@pytest.mark.parametrize("base", [["/etc/passwd"], "../elsewhere.yaml", []])
def test_base_files_of_an_untrusted_config_are_not_read(copied, base):
    with pytest.raises(UserError, match=r"names other files \(base\), which fedmpi never writes there"):
        package.load(copied(base=base))


def test_nothing_is_downloaded_for_an_untrusted_run(copied):
    theirs = copied(data__download=True)
    assert code_trust.load_run_settings(theirs, trust=False).data.download is False
    assert code_trust.load_run_settings(theirs, trust=True).data.download is True


def write_weights(run, **facts):
    RunDirectory(run).write_model({"w": torch.ones(2)}, facts)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda run: (run / "model.safetensors").unlink(), "contains no model.safetensors"),
        (lambda run: (run / "config.yaml").unlink(), "is not a run directory: it contains no config.yaml"),
        (
            lambda run: (run / "model.safetensors").write_bytes(b"\x80\x04K\x01."),
            "is damaged, or is not a model file of fedmpi",
        ),
        (lambda run: torch.save({}, run / "model.safetensors"), "is damaged, or is not a model file of fedmpi"),
        (lambda run: write_weights(run), "is damaged, or is not a model file of fedmpi: KeyError"),
        (
            lambda run: write_weights(run, input='[[1,8,8],"float32"]', classes="10"),
            "does not match the model in config.yaml",
        ),
    ],
    ids=["no model", "no config", "a pickle", "torch.save", "no facts", "another model"],
)
def test_damaged_run_directories_are_errors(copied, damage, text):
    theirs = copied()
    damage(theirs)
    with pytest.raises(UserError, match=text):
        package.load(theirs)


# ---- secrets ----
def test_secrets_are_neither_written_nor_printed(tmp_path, plugin):
    """Secrets are hidden in files and on the console; other values are not changed."""
    (tmp_path / "c.yaml").write_text(
        f"name: mine\nrounds: 1\noutput: {tmp_path}/runs\n"
        f"model: {{name: '{plugin}:net', api_key: {SECRET}, key_dim: 8}}\n"
        f"data: {{source: '{plugin}:web', partition: {{scheme: iid, clients: 2}}}}\nmethod: {{name: fedavg}}\n"
    )
    words = [f"data.token={SECRET}", f"data={{token: {SECRET}, retries: 2}}"]
    result = fedmpi("run", tmp_path / "c.yaml", *words, env=clean_env(MY_TOKEN=SECRET, SOME_OTHER=SECRET))
    assert result.returncode == 0, result.stderr
    assert SECRET not in result.stdout + result.stderr
    for path in filter(os.path.isfile, (tmp_path / "runs" / "mine").rglob("*")):
        if path.parent.name != "plugins":  # the user's own text, in which this one compares with it
            assert SECRET.encode() not in path.read_bytes(), path
    messages = yaml.safe_load((tmp_path / "runs" / "mine" / "config.yaml").read_text())
    assert messages["data"]["token"] == messages["model"]["api_key"] == redaction.MARK
    assert (messages["data"]["retries"], messages["model"]["key_dim"]) == (2, 8)
    command = json.loads((tmp_path / "runs" / "mine" / "environment.json").read_text())["command"]
    assert "data.token=<redacted>" in command
    assert "data={token: <redacted>, retries: 2}" in command

    again = fedmpi("run", tmp_path / "runs" / "mine" / "config.yaml")
    assert again.returncode == 2
    assert (
        "data.token: this value is not stored in the run directory, as it may be a secret; set data.token="
        in again.stderr
    )
    with pytest.raises(UserError, match=r"model\.api_key: this value is not stored in the run directory"):
        package.load(tmp_path / "runs" / "mine", trust=True)
    result = fedmpi("run", tmp_path / "runs/mine/config.yaml", words[0], "model.api_key=x", "output=" + str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_loading_a_model_does_not_need_other_secrets(copied):
    assert package.load(copied(data__token=redaction.MARK))


@pytest.mark.parametrize("text", [f"data.token={SECRET}", f"data={{token: {SECRET}}}", f"data={{token: {SECRET}"])
def test_an_error_message_does_not_contain_the_secret(tmp_path, capsys, text):
    (tmp_path / "c.yaml").write_text(CONFIG)
    with pytest.raises(UserError) as caught:
        validate_settings(config.load(tmp_path / "c.yaml", [text]))
    assert SECRET not in str(caught.value)


def test_ranks_compare_secrets_by_their_real_values(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    a, b = (config.load(tmp_path / "c.yaml", [f"data.token={x}"]).digest_items() for x in "ab")
    assert a["data.token"] != b["data.token"]


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        *((key, "x", True) for key in SECRET_KEYS.split()),
        *((key, 1234, True) for key in ("password", "token")),
        ("credentials", {"user": "x"}, True),
        *((key, "x", False) for key in ("monkey", "keyboard", "author", "tokenizer", "keep", "name")),
        *((key, 64, False) for key in ("key_dim", "token_size", "max_tokens")),
        ("use_auth_token", True, False),
        ("token", None, False),
    ],
)
def test_keys_and_values_that_look_secret(key, value, secret):
    assert redaction.looks_secret(key, value) is secret
    assert (redaction.redact({"a": [{key: value}]}) != {"a": [{key: value}]}) is secret
