"""`fedmpi reproduce`: every published table by its name, wherever fedmpi lies, and its verdict as data."""

import json
import sys

import pytest
from helpers import ROOT, fedmpi

from fedmpi.common.errors import UserError
from fedmpi.data.download import fetch
from fedmpi.sweeps import expand, reproduce
from fedmpi.sweeps.results_table import ResultsTable

if sys.version_info >= (3, 11):
    import tomllib


def test_every_table_says_which_data_it_needs():
    shown = dict(reproduce.describe_tables([]))
    there = {path.stem for folder in reproduce.TABLE_FOLDERS for path in (ROOT / "configs" / folder).glob("*.yaml")}
    assert shown.keys() == {name for name in there if "_common" not in name}
    assert shown["fedsol_table1"] == "15 runs on cifar10, published by FedSOL, Table 1"
    assert shown["fedld_table3"] == "18 runs on retina, published by FedLD, Table 3"
    assert shown["flamby_heart"].startswith("60 runs on heart_disease")
    assert shown["fedsol_table1_small"] == "5 runs on digits"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_a_wheel_has_every_config():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    packed = {path for patterns in told.values() for pattern in patterns for path in ROOT.glob(pattern)}
    files = {path for path in (ROOT / "configs").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - packed == set()
    assert all(place == f"share/fedmpi/{patterns[0].rpartition('/')[0]}" for place, patterns in told.items())


def test_tables_are_found_where_a_wheel_puts_them(tmp_path, monkeypatch):
    place = tmp_path / "share" / "fedmpi" / "configs" / "papers"
    place.mkdir(parents=True)
    (place / "mine.yaml").write_text("grid: {seed: [0]}")
    monkeypatch.setattr(reproduce, "config_folders", lambda: [tmp_path / "none", place.parent])
    assert reproduce.find_table("configs/papers/mine.yaml") == place / "mine.yaml"
    with pytest.raises(UserError, match="unknown table 'min'; did you mean 'mine'"):
        reproduce.find_table("min")
    monkeypatch.setattr(reproduce, "config_folders", lambda: [tmp_path / "none"])
    with pytest.raises(UserError, match=r"no folders papers and benchmarks in .*none; install fedmpi"):
        reproduce.list_tables()


def test_missing_data_are_fetched_or_told(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(fetch, "fetch_dataset", lambda name, root: asked.append((name, root)))
    reproduce.fetch_data(expand.load_sweep(reproduce.find_table("fedsol_table1"), [f"data.root={tmp_path}"]), print)
    assert asked == [("cifar10", tmp_path)]
    with pytest.raises(UserError, match=r"heart_disease: .*correct data\.root"):
        reproduce.fetch_data(expand.load_sweep(reproduce.find_table("flamby_heart"), [f"data.root={tmp_path}"]), print)


def test_the_command_from_nothing_to_a_verdict(tmp_path):
    """On made patients, one round; what is done is not done twice."""
    words = ["reproduce", "flamby_heart_small", "rounds=1", "train.steps=2", "evaluate.every=1", f"output={tmp_path}"]
    words += ["include={method: [FedAvg, SCAFFOLD]}", "--to", str(tmp_path / "out")]
    done = fedmpi(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: this table has no published values; written: " in done.stdout
    facts = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert [cell["labels"]["method"] for cell in facts["cells"]] == ["FedAvg", "SCAFFOLD"]
    assert all(0 <= cell["mean"] <= 100 for cell in facts["cells"])
    made = {path.parent.name: path.read_text().splitlines()[-1] for path in tmp_path.glob("*/*/metrics.jsonl")}
    assert facts["sha256_of_models"] == {name: json.loads(line)["sha256"] for name, line in made.items()}
    assert len(made) == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"table.md", "table.csv", "verdict.json"}
    again = fedmpi(*words, cwd=tmp_path)
    assert (again.returncode, "[1/" in again.stdout) == (0, False)


def test_a_verdict_is_no_place_for_a_secret():
    asked = expand.load_sweep(reproduce.find_table("flamby_heart"), ["model.token=HUSH123"])
    axes = tuple(axis for axis in asked.axes if axis.name != "seed")
    tables = [ResultsTable(asked, "accuracy", "last", axes, {})]
    text = json.dumps(reproduce.build_verdict(tables))
    assert "HUSH123" not in text
    assert "model.token=<redacted>" in text
