"""Links, names, quotations, configs and generated parts of README and docs are correct."""

import inspect
import re
import runpy
import sys
import warnings

import pytest
from doc_commands import PAGES, RUN, blocks, file_name
from helpers import ROOT

from fedmpi import config, method
from fedmpi.cli import load_app
from fedmpi.common.metrics_row import CLIENTS_KEYS, METRICS_KEYS
from fedmpi.config.field_types import flatten
from fedmpi.data.download.catalogue import CATALOGUE, MEDMNIST
from fedmpi.data.sources import registry
from fedmpi.data.sources.tables.read_table import MISSING_WORDS
from fedmpi.method import Client, Server, Uploads
from fedmpi.method.base import DECLARATIONS, HOOKS

DATA_PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
BLOCKS = [(f"{page.stem}-{k}", *block) for page in PAGES for k, block in enumerate(blocks(page))]
# Pages that are the output of docs/make_NAME.py: {NAME: (page, arguments)}.
MADE = {
    "methods": ("methods", []),
    "configuration": ("configuration", []),
    "hooks": ("hooks", []),
    "performance": ("performance", ["--no-figures"]),
    "reproduction": ("reproduced", ["--no-figure"]),
}


def table_rows(page):
    """Return the rows of a page's tables as {first cell without quotes: the other cells}."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return {line.split("`")[1]: [c.strip(" |") for c in line.split(" | ")][1:] for line in lines if line[:3] == "| `"}


def test_the_page_of_runs_has_the_keys_of_rows():
    lines = (ROOT / "docs/runs.md").read_text(encoding="utf-8").splitlines()
    for keys in (METRICS_KEYS, CLIENTS_KEYS):
        first = lines.index(f"| `{keys[0].name}` | integer |  | {keys[0].meaning} |")
        assert lines[first : first + len(keys) + 1] == [
            *(f"| `{key.name}` | {key.type} | {key.unit} | {key.meaning} |" for key in keys),
            "",
        ]


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, kind, text in BLOCKS if kind == "bash"])
def test_names_in_error_messages(text):
    app = load_app()
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    assert set(re.findall(r"(?<!-n )\bfedmpi ([a-z]+)", text)) <= commands
    for path in re.findall(r"(?<![\w/$}.])(?:configs|launch|slurm|docs|benchmarks)/[\w./-]+", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=name) for name, kind, text in BLOCKS if kind == "yaml" and not file_name(kind, text)]
)
def test_a_fragment_is_valid(tmp_path, text):
    path = tmp_path / "whole.yaml"
    (tmp_path / "mine.py").write_text(
        "class Watch:\n    def __init__(self, every=1): ...\n    def round(self, row): ...\n"
    )
    path.write_text(f"base: [{ROOT / 'configs/quickstart.yaml'}]\n{text}", encoding="utf-8")
    config.load(path)


def test_quotations_of_source_files_are_current():
    (quoted,) = [text for language, text in RUN if language == "python" and not file_name(language, text)]
    assert any(quoted in path.read_text(encoding="utf-8") for path in (ROOT / "fedmpi").rglob("*.py"))


def anchors(page):
    """Return the anchors that GitHub creates for the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_has_a_target(page):
    for link in re.findall(r"\]\(([^) ]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_contents():
    contents = re.findall(r"^\w+$", (ROOT / "docs/index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted([*contents, "index"]) == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", MADE)
def test_generated_pages_are_up_to_date(name, monkeypatch, capsys):
    page, words = MADE[name]
    monkeypatch.setenv("FEDMPI_DATA", "/elsewhere")  # of which no page speaks
    monkeypatch.setattr(sys, "argv", [f"docs/make_{name}.py", *words])
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(f"docs/make_{name}.py", run_name="__main__")
    remedy = " ".join(["run: python -W ignore", *sys.argv, f"> docs/{page}.md"])
    assert (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") == capsys.readouterr().out, remedy


def test_the_hooks_page_is_complete():
    page = (ROOT / "docs/hooks.md").read_text()
    named = {name for row in page.splitlines() if row.startswith("|") for name in re.findall(r"^\| `(\w+)` \|", row)}
    named |= {name for line in page.splitlines() for name in re.findall(r"^(?:\*\*|- )`(\w+)", line)}
    beside = {"Client", "Server", "Uploads", "Method", "Loss"}  # sections, the page itself, a type
    public = {name for name, value in vars(method).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert {*public, *DECLARATIONS, *HOOKS} - beside <= named
    members = {"client": Client, "server": Server, "updates": Uploads}
    for letter, owner in members.items():
        names = {name for name in (*vars(owner), *owner.__annotations__) if name[0] != "_"}
        assert names <= set(re.findall(rf"^(?:\| |- )`{letter}\.(\w+)", page, re.MULTILINE)), letter
    assert not re.findall(r"^\| `.*\|  \|$", page, re.MULTILINE), "a member without a meaning"


def test_every_config_key_is_documented():
    rows = table_rows("configuration.md")
    settings = config.load(ROOT / "configs/quickstart.yaml", ["evaluate.best=loss", "data.validation=0.1"]).model_dump(
        mode="json"
    )
    used = [key for key in flatten(settings, "") if key not in ("data.partition.alpha", "method.margin", "method.keep")]
    assert set(used) <= set(rows)
    for key, (kind, default, meaning) in rows.items():
        assert kind, key
        assert meaning, key
        assert default or kind == "section", key
    assert rows["train.momentum"][:2] == ["number >= 0 and < 1", "`0.9`"]
    assert rows["data.root"][1] == "`$FEDMPI_DATA, else data`"
    assert rows["cohort.fraction"][:2] == ["number > 0 and <= 1, or null", "`1.0`"]


def test_the_data_page_agrees_with_the_list_of_data_sets():
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", DATA_PAGE, flags=re.MULTILINE | re.DOTALL))
    alone = {name for name in CATALOGUE if name.partition("_")[0] not in MEDMNIST}
    assert alone | {"medmnist"} <= set(sections) <= set(registry)
    for name in alone:
        for part in ("config", "home", "licence", "manual_steps"):
            assert getattr(CATALOGUE[name], part) in sections[name], (name, part)
    for name, (classes, _, (training, validation, test), _) in MEDMNIST.items():
        assert f"| {name} | {training:,} + {validation:,} + {test:,} | {classes} |" in sections["medmnist"]


def test_every_image_source_and_missing_word_is_on_the_data_page():
    of_pictures = {name for name, target in registry.items() if ".pictures." in target or "mnist" in target}
    assert [name for name in of_pictures if not re.search(rf"\bsource: {name}\b", DATA_PAGE)] == []
    row = re.search(r"^\| `missing` \|.*$", DATA_PAGE, re.MULTILINE)[0].casefold()
    assert [word for word in MISSING_WORDS - {""} if f"`{word}`" not in row] == []
    assert re.search(r"This is an extract of\s+`patients\.csv`; it is too short to be trained on", DATA_PAGE)
