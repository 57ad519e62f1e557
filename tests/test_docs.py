"""docs/methods.md and docs/configuration.md are what their scripts make of the sources; the example of docs/tasks.md
runs.
"""

import re
import runpy
import warnings
from pathlib import Path

import fedmpi
from fedmpi import config
from fedmpi.config.values import flat

ROOT = Path(__file__).parent.parent


def test_methods_page_is_up_to_date(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path("docs/make_methods.py", run_name="__main__")
    assert (ROOT / "docs/methods.md").read_text() == capsys.readouterr().out, (
        "run: python -W ignore docs/make_methods.py > docs/methods.md"
    )


def test_configuration_page_is_up_to_date(capsys, monkeypatch):
    monkeypatch.setenv("FEDMPI_DATA", "/elsewhere")  # of which the page says nothing
    runpy.run_path(str(ROOT / "docs/make_configuration.py"), run_name="__main__")
    assert (ROOT / "docs/configuration.md").read_text() == capsys.readouterr().out, (
        "run: python docs/make_configuration.py > docs/configuration.md"
    )


def test_every_key_has_type_default_and_meaning_on_the_page():
    lines = (ROOT / "docs/configuration.md").read_text().splitlines()
    rows = {line.split("`")[1]: [c.strip(" |") for c in line.split(" | ")] for line in lines if line.startswith("| `")}
    settings = config.load(ROOT / "configs/quickstart.yaml", ["evaluate.best=loss", "data.validation=0.1"]).resolved()
    used = [key for key in flat(settings, "") if key not in ("data.partition.alpha", "method.margin", "method.keep")]
    assert set(used) <= set(rows)
    for key, (_, kind, default, meaning) in rows.items():
        assert kind, key
        assert meaning, key
        assert default or kind == "section", key
    assert rows["train.momentum"][1:3] == ["number >= 0, < 1", "`0.9`"]
    assert rows["data.root"][2] == "`$FEDMPI_DATA, else data`"
    assert rows["comm.wire.up.fraction"][1:3] == ["number > 0, < 0.5; null", "`null`"]


def test_the_example_of_tasks_runs(tmp_path, monkeypatch):
    """Several tensors a sample, a frozen embedding, LoRA, metrics of one's choice; above chance, which is .5."""
    text = (ROOT / "docs/tasks.md").read_text()
    blocks = dict(re.findall(r"^# (reviews\.\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for name, block in blocks.items():
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    summary = fedmpi.run("reviews.yaml", ["compute.threads=1"])
    assert list(summary["last"])[:3] == ["loss", "balanced_accuracy", "auroc"]
    assert summary["last"]["balanced_accuracy"] > 80
    assert summary["up_parameters"] == 20 * 4 * 1154
