"""docs/methods.md, docs/configuration.md and docs/hooks.md are what their scripts make of the sources; the example of
docs/tasks.md runs.
"""

import re
import runpy
import warnings
from pathlib import Path

import fedmpi
from fedmpi import config, method
from fedmpi.config.values import flat
from fedmpi.method import Client, Server, Uploads
from fedmpi.method.base import DECLARATIONS, HOOKS

ROOT = Path(__file__).parents[2]


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


def test_hooks_page_is_up_to_date_and_leaves_nothing_out(capsys):
    runpy.run_path(str(ROOT / "docs/make_hooks.py"), run_name="__main__")
    page = (ROOT / "docs/hooks.md").read_text()
    assert page == capsys.readouterr().out, "run: python docs/make_hooks.py > docs/hooks.md"
    said = {name for row in page.splitlines() if row.startswith("|") for name in re.findall(r"^\| `(\w+)` \|", row)}
    told = {name for line in page.splitlines() for name in re.findall(r"^(?:\*\*|- )`(\w+)", line)}
    beside = {"Client", "Server", "Uploads", "Method", "Loss"}  # sections, the page itself, a type
    assert {*method.__all__} - beside <= said | told
    assert {*DECLARATIONS, *HOOKS} <= said | told
    members = {"k": Client, "s": Server, "up": Uploads}
    for letter, owner in members.items():
        names = {name for name in (*vars(owner), *owner.__annotations__) if name[0] != "_"}
        assert names <= set(re.findall(rf"^(?:\| |- )`{letter}\.(\w+)", page, re.MULTILINE)), letter
    assert not re.findall(r"^\| `.*\|  \|$", page, re.MULTILINE), "a member without a meaning"


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
