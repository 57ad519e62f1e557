"""The configs of docs/data.md and docs/tasks.md train unchanged on small generated data."""

import re

import numpy as np
import pytest
from helpers import ROOT, fedmpi
from PIL import Image

import fedmpi as library

PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
CONFIGS = dict(re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def sheet(rows=60):
    """Write the page's spreadsheet with more patients."""
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


READERS = """\
from torch import nn

class Reader(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 8), nn.Linear(8, classes)

    def forward(self, input_ids, attention_mask):
        return self.head((self.embedding(input_ids) * attention_mask[..., None]).sum(1))

def reader(input_shape, classes):
    return Reader(classes)
"""


def reports(root):
    """Write reports of two words, a tokenizer and a model for the tokens."""
    pytest.importorskip("fedmpi.common.torchvision_compat")  # before transformers
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    words = {word: k for k, word in enumerate(("[PAD]", "[UNK]", "lesion", "normal"))}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(root.parent / "models/bert")
    rows = (f"{site},a {word} image,{word}\n" for word in ("lesion", "normal") for site in ("north", "south") * 10)
    (root / "reports.csv").write_text("hospital,text,label\n" + "".join(rows))
    (root.parent / "readers.py").write_text(READERS)


def clinic(root):
    """Write images of several sizes and a table about them; images of sick patients are brighter."""
    rng = np.random.default_rng(0)
    rows = ["path,label,hospital"]
    (root / "clinic/scans").mkdir(parents=True)
    for k in range(60):
        ill, site = k % 2, ("north", "south", "west")[k % 3]
        image = rng.integers(0, 120, (20 + k % 7, 30, 3)) + 120 * ill
        Image.fromarray(image.astype(np.uint8)).save(root / f"clinic/scans/{k:04}.png")
        rows.append(f"scans/{k:04}.png,{('healthy', 'ill')[ill]},{site}")
    (root / "clinic/pictures.csv").write_text("\n".join(rows) + "\n")


MAKE_DATA = {
    "patients.yaml": patients,
    "hospitals.yaml": hospitals,
    "novels.yaml": novels,
    "reports.yaml": reports,
    "clinic.yaml": clinic,
}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the configs of the page and its `data` folder."""
    (tmp_path / "data").mkdir()
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def trains(folder, *words):
    done = fedmpi("run", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", MAKE_DATA)
def test_config_of_the_page_trains(folder, name):
    assert len(CONFIGS[name].splitlines()) <= 12
    MAKE_DATA[name](folder if name == "clinic.yaml" else folder / "data")
    trains(folder, name, "rounds=2")
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 2  # rounds


def test_sites_of_an_image_table_work_as_silos(folder):
    clinic(folder)
    silos = ["data.partition=null", "data.silos=[north, south, west]", "data.class_names=[healthy, ill]"]
    assert "3 clients with 16 to 16 samples, 2 classes" in trains(folder, "clinic.yaml", "rounds=1")
    assert "all 3 sites: north, south, west" in trains(folder, "clinic.yaml", *silos, "rounds=1", "name=silos")


def test_the_run_prints_which_rank_has_which_site(folder):
    """As on the page, each site has a rank of its own."""
    hospitals(folder / "data")
    done = fedmpi("run", "hospitals.yaml", "rounds=1", kind="mpirun", size=3, cwd=folder)
    assert done.returncode == 0, done.stderr
    for rank, site in ((1, "north"), (2, "south")):
        assert re.search(rf"site {site} +rank {rank} on ", done.stdout + done.stderr)


def test_example_on_the_tasks_page_trains(tmp_path, monkeypatch):
    """Samples with several tensors, a frozen embedding, LoRA and custom metrics give an accuracy above chance (0.5)."""
    text = (ROOT / "docs/tasks.md").read_text()
    for name, block in re.findall(r"^# (reviews\.\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    summary = library.run("reviews.yaml", ["compute.threads=1"])
    assert list(summary["last"])[:3] == ["loss", "balanced_accuracy", "auroc"]
    assert summary["last"]["balanced_accuracy"] > 80
    assert summary["up_parameters"] == 20 * 4 * 1154
