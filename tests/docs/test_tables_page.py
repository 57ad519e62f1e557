"""docs/data.md keeps its word: its tables and texts, each with the config as it stands there, train as told."""

import re

import numpy as np
import pytest
from helpers import ROOT, fedmpi, fork_server

from fedmpi.data.sources.tables.files import GAPS

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
CONFIGS = dict(re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def sheet(rows=60):
    """The page's spreadsheet, with more patients."""
    rng = np.random.default_rng(0)
    for k in range(rows):
        pressure = "" if k % 7 == 0 else rng.integers(100, 150)
        site, smoker, sick = ("north", "south")[k % 2], ("no", "yes")[k // 3 % 2], ("no", "yes")[k // 2 % 2]
        yield f"{site},{rng.integers(30, 80)},{smoker},{pressure},{sick}\n"


def patients(root):
    head, quoted = re.search(r"^```\n(hospital,.*?\n)(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL).groups()
    (root / "patients.csv").write_text(head + quoted + "".join(sheet()))


def hospitals(root):
    for site in ("north", "south"):
        rows = [row.split(",", 1)[1] for row in sheet() if row.startswith(site)]
        (root / f"{site}.csv").write_text("age,smoker,pressure,sick\n" + "".join(rows))


def novels(root):
    (root / "novels").mkdir()
    for author, said in (("jane", "a truth "), ("mary", "rejoice! ")):
        (root / "novels" / f"{author}.txt").write_text(said * 40)


WRITES = {"patients.yaml": patients, "hospitals.yaml": hospitals, "novels.yaml": novels}


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_the_two_texts_of_the_page(data):
    """As a table, with the config that the page changes for it."""
    quoted = re.search(r"^```\n(author,text.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    (data / "letters.csv").write_text(quoted)
    (data.parent / "letters.yaml").write_text(CONFIGS["novels.yaml"].replace("path: novels", "path: letters.csv"))
    done = fork_server()("run", "letters.yaml", "rounds=1", "data.context=5", "model.hidden=8", cwd=data.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WRITES)
def test_a_config_of_the_page(data, name):
    folder = data.parent
    (folder / name).write_text(CONFIGS[name])
    assert len(CONFIGS[name].splitlines()) <= 12
    WRITES[name](data)
    done = fork_server()("run", name, "rounds=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 2  # rounds


def test_the_page_names_every_gap_and_says_that_its_table_is_an_extract():
    row = re.search(r"^\| `missing` \|.*$", PAGE, re.MULTILINE)[0].casefold()
    assert [word for word in GAPS - {""} if f"`{word}`" not in row] == []
    assert re.search(r"of `patients\.csv` this is an extract,\s+too short to be run", PAGE)


def test_it_says_which_rank_holds_which_site(data):
    """As the page has it: a rank a site."""
    hospitals(data)
    (data.parent / "hospitals.yaml").write_text(CONFIGS["hospitals.yaml"])
    done = fedmpi("run", "hospitals.yaml", "rounds=1", kind="mpirun", size=3, cwd=data.parent)
    assert done.returncode == 0, done.stderr
    for rank, site in ((1, "north"), (2, "south")):
        assert re.search(rf"site {site} +rank {rank} on ", done.stdout + done.stderr)
