"""docs/data.md keeps its word: its config is run on small pictures, and what it says of each set is what is listed."""

import re

import numpy as np
import pytest
from helpers import ROOT, fork_server
from PIL import Image

from fedmpi.data.fetching.getting import SETS
from fedmpi.data.fetching.medmnist import TABLE
from fedmpi.data.sources import registry

PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))


@pytest.fixture
def clinic(tmp_path):
    """What the page asks a reader to have: pictures of several sizes, and a table; the ill are bright."""
    rng = np.random.default_rng(0)
    rows = ["path,label,hospital"]
    for k in range(60):
        ill, site = k % 2, ("north", "south", "west")[k % 3]
        (tmp_path / "clinic/scans").mkdir(parents=True, exist_ok=True)
        image = rng.integers(0, 120, (20 + k % 7, 30, 3)) + 120 * ill
        Image.fromarray(image.astype(np.uint8)).save(tmp_path / f"clinic/scans/{k:04}.png")
        rows.append(f"scans/{k:04}.png,{('healthy', 'ill')[ill]},{site}")
    (tmp_path / "clinic/pictures.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "clinic.yaml").write_text(BLOCKS["clinic.yaml"])
    return tmp_path


def test_a_folder_of_pictures_with_a_table_of_sites(clinic):
    """As the page has it, at most twelve lines and no Python; and with the hospitals as silos."""
    assert len(BLOCKS["clinic.yaml"].splitlines()) <= 12
    fedmpi = fork_server()
    for words in (["validate", "clinic.yaml"], ["run", "clinic.yaml", "rounds=1"]):
        done = fedmpi(*words, cwd=clinic)
        assert done.returncode == 0, done.stderr
    assert "3 clients with 16 to 16 samples, 2 classes" in done.stdout
    assert "round 1/1" in done.stdout
    silos = ["data.partition=null", "data.silos=[north, south, west]", "data.class_names=[healthy, ill]", "rounds=1"]
    done = fedmpi("run", "clinic.yaml", *silos, "name=silos", cwd=clinic)
    assert done.returncode == 0, done.stderr
    assert "all 3 sites: north, south, west" in done.stdout


def test_what_the_page_says_of_each_set_is_what_is_listed():
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
    alone = {name for name in SETS if name.partition("_")[0] not in TABLE and name != "svhn_extra"}
    assert alone | {"medmnist"} <= set(sections) <= set(registry)
    for name in alone:
        listing = SETS[name]
        for text in (
            listing.samples,
            listing.config,
            listing.home,
            listing.licence,
            listing.reference,
            listing.by_hand,
        ):
            assert text in sections[name], (name, text)
    for name, (classes, _, (training, validation, test), _) in TABLE.items():
        assert f"| {name} | {training:,} + {validation:,} + {test:,} | {classes} |" in sections["medmnist"]


def test_every_picture_source_is_on_the_page():
    of_pictures = {name for name, target in registry.items() if ".pictures." in target or "mnist" in target}
    assert [name for name in of_pictures if f"`source: {name}`" not in PAGE and f"source: {name}" not in PAGE] == []
