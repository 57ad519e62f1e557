"""`fedmpi reproduce`: the list of tables, where their configs lie, downloads, and verdicts."""

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


def test_every_table_is_listed_with_its_data_sets():
    descriptions = dict(reproduce.describe_tables([]))
    names = {path.stem for folder in reproduce.TABLE_FOLDERS for path in (ROOT / "configs" / folder).glob("*.yaml")}
    assert descriptions.keys() == {name for name in names if "_common" not in name}
    assert descriptions["fedsol_table1"] == "15 runs on cifar10, published by FedSOL, Table 1"
    assert descriptions["fedld_table3"] == "18 runs on retina, published by FedLD, Table 3"
    assert descriptions["flamby_heart"].startswith("60 runs on heart_disease")
    assert descriptions["fedsol_table1_small"] == "5 runs on digits"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_a_wheel_has_every_config():
    data_files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    packaged = {path for patterns in data_files.values() for pattern in patterns for path in ROOT.glob(pattern)}
    files = {path for path in (ROOT / "configs").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - packaged == set()
    assert all(place == f"share/fedmpi/{patterns[0].rpartition('/')[0]}" for place, patterns in data_files.items())


def test_tables_of_an_installed_wheel_are_found(tmp_path, monkeypatch):
    place = tmp_path / "share" / "fedmpi" / "configs" / "papers"
    place.mkdir(parents=True)
    (place / "mine.yaml").write_text("grid: {seed: [0]}")
    monkeypatch.setattr(reproduce, "list_config_folders", lambda: [tmp_path / "none", place.parent])
    assert reproduce.find_table("configs/papers/mine.yaml") == place / "mine.yaml"
    with pytest.raises(UserError, match="unknown table 'min'; did you mean 'mine'"):
        reproduce.find_table("min")
    monkeypatch.setattr(reproduce, "list_config_folders", lambda: [tmp_path / "none"])
    with pytest.raises(UserError, match=r"no folders papers and benchmarks in .*none; install fedmpi"):
        reproduce.list_tables()


def test_missing_data_are_downloaded_or_reported(tmp_path, monkeypatch):
    downloads = []
    monkeypatch.setattr(fetch, "fetch_dataset", lambda name, root: downloads.append((name, root)))
    reproduce.fetch_data(expand.load_sweep(reproduce.find_table("fedsol_table1"), [f"data.root={tmp_path}"]), print)
    assert downloads == [("cifar10", tmp_path)]
    with pytest.raises(UserError, match=r"heart_disease: .*correct data\.root"):
        reproduce.fetch_data(expand.load_sweep(reproduce.find_table("flamby_heart"), [f"data.root={tmp_path}"]), print)


def test_reproduce_trains_a_table_and_writes_a_verdict(tmp_path):
    """On generated patients, with one round; finished runs are not trained again."""
    command = ["reproduce", "flamby_heart_small", "rounds=1", "train.steps=2", "evaluate.every=1", f"output={tmp_path}"]
    command += ["include={method: [FedAvg, SCAFFOLD]}", "--to", str(tmp_path / "out")]
    process = fedmpi(*command, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "verdict: this table has no published values; written: " in process.stdout
    facts = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert [cell["labels"]["method"] for cell in facts["cells"]] == ["FedAvg", "SCAFFOLD"]
    assert all(0 <= cell["mean"] <= 100 for cell in facts["cells"])
    last_lines = {path.parent.name: path.read_text().splitlines()[-1] for path in tmp_path.glob("*/*/metrics.jsonl")}
    assert facts["sha256_of_models"] == {name: json.loads(line)["sha256"] for name, line in last_lines.items()}
    assert len(last_lines) == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"table.md", "table.csv", "verdict.json"}
    second_run = fedmpi(*command, cwd=tmp_path)
    assert (second_run.returncode, "[1/" in second_run.stdout) == (0, False)


def test_a_verdict_contains_no_secret():
    sweep = expand.load_sweep(reproduce.find_table("flamby_heart"), ["model.token=HUSH123"])
    axes = tuple(axis for axis in sweep.axes if axis.name != "seed")
    tables = [ResultsTable(sweep, "accuracy", "last", axes, {})]
    text = json.dumps(reproduce.build_verdict(tables))
    assert "HUSH123" not in text
    assert "model.token=<redacted>" in text
