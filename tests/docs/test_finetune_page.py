"""The program and configs of docs/finetune.md run unchanged, and PEFT loads the model of a run."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env, fedmpi

PAGE = (ROOT / "docs/finetune.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```(?:yaml|python)\n# (\w+\.(?:py|yaml))\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def run_program(folder, name):
    done = subprocess.run([sys.executable, name], cwd=folder, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the files of the page, and the data and models that its program writes."""
    pytest.importorskip("fedmpi.common.torchvision_compat")  # before the libraries
    for package in ("transformers", "peft", "timm"):
        pytest.importorskip(package)
    place = tmp_path_factory.mktemp("finetune")
    for name, text in FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    run_program(place, "make_example.py")
    return place


@pytest.mark.parametrize("name", ["skin", "notes"])
def test_a_config_of_the_page_trains(folder, name):
    assert len(FILES[f"{name}.yaml"].splitlines()) <= 15
    done = fedmpi("run", f"{name}.yaml", "rounds=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "round 1/1" in done.stdout


def test_adapters_of_texts_learn_and_are_loaded_by_fedmpi_and_by_peft(folder):
    done = fedmpi("run", "reports.yaml", kind="mpirun", size=3, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"accuracy ([\d.]+) after the last round", done.stdout)[1]) > 90
    assert run_program(folder, "load_both.py") == "equal\n"


def test_the_page_shows_the_output_of_validate(folder):
    done = fedmpi("validate", "reports.yaml", cwd=folder)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in shown.splitlines():
        assert line in done.stdout


SMALL = {
    "vit_base": "data.path=skin model.pretrained=false model.embed_dim=48 model.depth=2 model.num_heads=3",
    "llama_lora": "data.path=reports.csv data.site_column=hospital data.max_length=16",
}


@pytest.mark.parametrize("name", SMALL)
def test_a_config_for_a_large_model_is_valid_for_a_small_one(folder, name):
    done = fedmpi("validate", str(ROOT / f"configs/finetune/{name}.yaml"), *SMALL[name].split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^result +ok$", done.stdout, re.MULTILINE)
