"""Config files: layers, and for every mistake the file, the line, the key, the value and what is allowed."""

from pathlib import Path

import pytest
import yaml

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import redact
from fedmpi.config.loading import redact_override
from fedmpi.config.yaml_source import to_yaml

GOOD = """\
data: {source: digits, partition: {scheme: dirichlet, clients: 4, alpha: 0.3}}
model: {name: mlp, widths: [20]}
method: {name: fedld, margin: 0.03}
train:
  epochs: 2
  lr: 1e-3
"""


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def load(tmp_path):
    """Loads GOOD with overrides."""
    path = write(tmp_path, GOOD)
    return lambda *overrides: config.load(path, overrides)


def message(path, *overrides):
    with pytest.raises(UserError) as caught:
        config.load(path, overrides)
    return str(caught.value)


def test_defaults_and_options(load):
    settings = load()
    assert (settings.name, settings.seed, settings.rounds, settings.output) == ("run", 0, 20, Path("runs"))
    assert (settings.data.partition.clients, settings.data.partition.options) == (4, {"alpha": 0.3})
    assert settings.method.options == {"margin": 0.03}
    assert (settings.server.rule.name, settings.train.batch_size) == ("auto", 50)


def test_an_exponent_without_a_point_is_a_number_and_a_date_is_text(load):
    assert load().train.lr == 1e-3
    assert load("train.lr=2E-4").train.lr == 2e-4
    assert load("method.margin=-5e+1").method.options == {"margin": -50.0}
    for name in ("2024-05-01", "e5-2"):
        assert load(f"name={name}").name == name


def test_overrides_take_precedence_and_the_last_one_wins(load):
    settings = load("train.epochs=5", "train.epochs=7", "train={lr: 0.5}", "seed=3")
    assert (settings.train.epochs, settings.train.lr, settings.seed) == (7, 0.5, 3)
    assert settings.origin("train.epochs") == "command line: train.epochs=7"
    assert settings.origin("train.lr") == "command line: train={lr: 0.5}"


def test_a_file_overrides_its_base_files_which_are_relative_to_it(tmp_path):
    write(tmp_path, "train: {epochs: 1, lr: 0.1, momentum: 0.5}\nseed: 1\nrounds: 1", "parts/deep/a.yaml")
    write(tmp_path, "base: [deep/a.yaml]\ntrain: {epochs: 9}\nseed: 2", "parts/b.yaml")
    path = write(tmp_path, f"base: [parts/b.yaml]\n{GOOD}")
    settings = config.load(path)
    assert (settings.train.epochs, settings.train.lr, settings.train.momentum) == (2, 1e-3, 0.5)
    assert (settings.seed, settings.rounds, settings.name) == (2, 1, "run")
    assert settings.origin("rounds") == f"{tmp_path}/parts/deep/a.yaml:3"
    assert settings.origin("train.lr") == f"{path}:7"
    assert settings.key_origins("method") == {"": f"{path}:4", "name": f"{path}:4", "margin": f"{path}:4"}


def test_another_method_does_not_inherit_options(load):
    assert load("method.mu=1", "method.name=fedprox").method.options == {"mu": 1}
    partition = load("data.partition.scheme=iid").data.partition
    assert (partition.clients, partition.options) == (4, {})
    assert load("method.name=fedld").method.options == {"margin": 0.03}


def test_short_forms_of_sections(load):
    """A server rule by its name, to which options may be added; `comm.compression: int8` is what clients send."""
    assert load("server.rule=krum").origin("server.rule.name") == "command line: server.rule=krum"
    rule = load("server.rule=krum", "server.rule.byzantine=1").server.rule
    assert (rule.name, rule.options) == ("krum", {"byzantine": 1})
    assert load("comm.compression=int8").comm.compression == "int8"


def test_resolved_loads_to_the_same_settings(load, tmp_path):
    settings = load("evaluate.protocol=[global, personal]", "method.bound=.inf", "comm.compression=int8")
    again = config.load(write(tmp_path, yaml.safe_dump(settings.model_dump(mode="json")), "again.yaml"))
    assert again.model_dump(mode="json") == settings.model_dump(mode="json")
    assert again.method.options["bound"] == float("inf")


def test_digest_items_name_the_keys_that_differ(load):
    one, two = (load(f"train.lr={lr}", f"data.root=/{lr}").digest_items() for lr in (0.1, 0.2))
    assert {key for key in one if one[key] != two[key]} == {"train.lr"}  # each host may keep its data where it likes
    assert one["data.partition.alpha"] == "0.3"
    assert all(isinstance(text, str) for text in one.values())


@pytest.mark.parametrize("key", ["compute.precision", "compute.tf32", "compute.cudnn_benchmark"])
def test_settings_that_affect_last_bits_are_part_of_the_identity(load, key):
    one, two = load().identity(), load(f"{key}={'bf16' if 'precision' in key else 'true'}").identity()
    assert {name for name in one if one[name] != two[name]} == {key}


def test_data_root(load, monkeypatch):
    monkeypatch.delenv("FEDMPI_DATA", raising=False)
    assert load().data.root == Path("data")
    monkeypatch.setenv("FEDMPI_DATA", "/scratch/d")
    assert load().data.root == Path("/scratch/d")
    assert load("data.root=other").data.root == Path("other")
    assert load("data.root=~/d").data.root == Path.home() / "d"


# every kind of mistake: (lines put behind GOOD or overrides) -> exact line of the message

EDITS = [
    (
        "cohort: {fractoin: 1}",
        "{path}:7: cohort.fractoin: unknown key; did you mean 'fraction'? allowed: fraction, placement, sampling",
    ),
    ("rounds: many", "{path}:7: rounds: 'many' is not allowed; must be a whole number"),
    ("name: no", "{path}:7: name: false is not allowed; must be a string"),
    (
        "  batch_size: ful",
        "{path}:7: train.batch_size: 'ful' is not allowed; must be a whole number from 1 to 1,000,",
    ),
    ("  weight_decay: .nan", "{path}:7: train.weight_decay: nan is not allowed; must be a finite number"),
    ("  schedule: off", "{path}:7: train.schedule: false is not allowed; must be constant, exponential"),
    ("seed: 1\nseed: 2", "{path}:8: seed: duplicate key; it is already set in {path}:7"),
    (
        "evaluate: {protocol: [globl]}",  # and not, besides, that a list without it is too short
        "{path}:7: evaluate.protocol.0: 'globl' is not allowed; must be 'global', 'sites', 'personal', "
        "'personal_on_global' or 'ft(EPOCHS)'",
    ),
    (
        "evaluate: {protocol: []}",
        "{path}:7: evaluate.protocol: [] is not allowed; must be a non-empty list of strings",
    ),
    ("no: 3", "{path}:7: YAML reads the key no as a boolean, not as a string; put it in quotes: 'no'"),
    ("seed: !!python/name:os.system", "{path}:7: seed: the YAML tag !!python/name:os.system is not allowed"),
    ("seed: [1, 2", "{path}:8:1: not valid YAML: a bracket [ or {{ is not closed"),
    ("\tseed: 1", "{path}:7:1: not valid YAML: a line is indented with a tab"),
    ("cohort: &a {x: *a}", "{path}: nesting is too deep, or an alias (*) refers to the anchor that contains it"),
    ("seed: ${env:GONE}", "{path}:7: seed: the environment variable GONE is not set; set it, or"),
]


@pytest.mark.parametrize(("text", "expected"), EDITS)
def test_a_mistake_in_a_file_is_reported_with_its_line(tmp_path, text, expected):
    path = write(tmp_path, GOOD + text + "\n")
    assert message(path).startswith(expected.format(path=path))


@pytest.mark.parametrize("mark", [",", "|", ":", "#", "-", "'", "\t"])
def test_a_single_mark_on_the_command_line_is_a_text(load, mark):
    assert load(f"data.delimiter={mark}").data.options["delimiter"] == mark


def test_an_override_with_invalid_yaml_suggests_quotes(tmp_path):
    path = write(tmp_path, GOOD)
    text = message(path, "data.folder=@home")
    assert "not valid YAML" in text
    assert text.endswith("""; to use this value as plain text, write 'data.folder="@home"'""")
    assert "quotes" not in message(path, "seed=[1")


def test_all_mistakes_are_reported_in_one_message_in_order(tmp_path):
    """A mistake in a base, which is named twice here, has the line in the base."""
    base = write(tmp_path, "train: {momentum: x}\nseed: 1\nseed: 2", "base.yaml")
    path = write(tmp_path, "base: [base.yaml, base.yaml]\n" + GOOD + "  epochs: 3\nrounds: x\nsede: 1\n")
    first, *lines = message(path, "train.clip_norm=-2").splitlines()
    wheres = [
        f"{base}:3: seed: duplicate key; it is already set in {base}:2",
        f"{path}:8: train.epochs: duplicate key",
        f"{base}:1: train.momentum: 'x' is not allowed",
        f"{path}:9: rounds: 'x' is not allowed",
        f"{path}:10: sede: unknown key",
        "command line: train.clip_norm: -2 is not allowed",
    ]
    assert first == "6 mistakes in the config"
    assert [line.startswith(f"  {where}") for line, where in zip(lines, wheres, strict=True)] == [True] * 6


def test_a_plugin_is_searched_next_to_its_config_then_in_the_working_directory(tmp_path, monkeypatch):
    for place in ("configs/parts/mine.py", "here/mine.py", "here/only.py"):
        write(tmp_path, "", place)
    write(tmp_path, "method: {name: 'mine.py:M'}", "configs/parts/part.yaml")
    text = "base: [parts/part.yaml]\n" + GOOD.replace("method: {name: fedld, margin: 0.03}\n", "")
    path = write(tmp_path, text.replace("mlp", "only.py:f"), "configs/run.yaml")
    monkeypatch.chdir(tmp_path / "here")
    settings = config.load(path)
    assert settings.method.name == f"{tmp_path}/configs/parts/mine.py:M"
    assert settings.model.name == f"{tmp_path}/here/only.py:f"
    assert config.load(path, ["method.name=mine.py:M"]).method.name == f"{tmp_path}/here/mine.py:M"
    assert config.load(path, ["server.rule=mine.py:r"]).server.rule.name == f"{tmp_path}/here/mine.py:r"
    options = config.load(path, ["model.parts=[mine.py:f, {head: only.py:g}]"]).model.options
    assert options["parts"] == [f"{tmp_path}/here/mine.py:f", {"head": f"{tmp_path}/here/only.py:g"}]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=${env:GONE}", "command line: seed: the environment variable GONE is not set; set it"),
        ("method={name: fedprox, mu: '${env:GONE}'}", "method.mu: the environment variable GONE is not set"),
        ("seed=${env:TEXT}", "seed: 'seven' is not allowed; must be a whole number"),
        ("seed=${env:}", "seed: '${env:}' is not allowed; write ${env:NAME}"),
        ("name=run-${USER}", "name: 'run-${USER}' is not allowed; write ${env:NAME}"),
        ("name=a${env:TEXT", "name: 'a${env:TEXT' is not allowed; write ${env:NAME}"),
        ("name=${env:CIRCLE}", "name: '${env:TEXT}' is not allowed; write ${env:NAME}"),
        ("name='${env:CONTROL}'", "contains the control character"),
        ("train={'${env:TEXT}': 3}", "the key '${env:TEXT}' contains ${env:"),
    ],
)
def test_an_invalid_environment_reference_is_one_mistake(tmp_path, monkeypatch, override, expected):
    monkeypatch.delenv("GONE", raising=False)
    for name, value in {"TEXT": "seven", "CIRCLE": "${env:TEXT}", "CONTROL": "a\x07"}.items():
        monkeypatch.setenv(name, value)
    text = message(write(tmp_path, GOOD), override)
    assert expected in text
    assert text.count("\n") == 0


def test_a_secret_from_an_environment_variable_is_redacted(load, monkeypatch):
    monkeypatch.setenv("HIDDEN", "hunter2")
    settings = load("method.token=${env:HIDDEN}")
    assert settings.method.options["token"] == "hunter2"
    assert "hunter2" not in to_yaml(redact(settings.model_dump(mode="json")))
    for text in ("method.token=${env:HIDDEN}", "method={token: '${env:HIDDEN}'}", "method={token: ${env:HIDDEN}}"):
        assert "hunter2" not in redact_override(text)
