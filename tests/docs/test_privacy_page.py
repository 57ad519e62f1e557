"""The configs of docs/privacy.md run unchanged, and the page shows what a run without its key says."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env, fedmpi

FILES = {
    name: text
    for page in ("consortium", "privacy")
    for name, text in re.findall(
        r"^```(?:yaml|python)\n# (\w+\.(?:py|yaml))\n(.*?)^```$",
        (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the files of the page, and the data of three invented hospitals."""
    pytest.importorskip("dp_accounting")
    place = tmp_path_factory.mktemp("privacy")
    for name, text in FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "make_sites.py"], cwd=place, env=clean_env(), check=True)
    return place


def run(folder, *words, **options):
    return fedmpi("run", *words, f"privacy.noise_file={folder / 'key'}", "report=false", cwd=folder, **options)


@pytest.mark.parametrize(
    ("name", "ranks", "epsilon"),
    [("clients", 1, 8), ("adaptive", 1, 8), ("turns", 1, 8), ("samples", 4, 4), ("both", 1, 8)],
)
def test_a_config_of_the_page_states_its_epsilon(folder, name, ranks, epsilon):
    assert len(FILES[f"{name}.yaml"].splitlines()) <= 15
    done = run(folder, f"{name}.yaml", f"name={name}", **({"kind": "mpirun", "size": ranks} if ranks > 1 else {}))
    assert done.returncode == 0, done.stderr
    stated = float(re.search(r"^privacy: epsilon ([\d.]+) at delta 0.001$", done.stdout, re.MULTILINE)[1])
    assert 0.9 * epsilon < stated <= epsilon


def test_verify_tells_what_it_cannot_check_without_the_key(folder):
    assert run(folder, "clients.yaml", "name=verified", "rounds=2").returncode == 0
    done = fedmpi("verify", "runs/verified", "privacy.noise_file=KEY", cwd=folder)
    assert done.returncode == 2
    (line,) = (line for line in done.stdout.splitlines() if "cannot tell" in line)
    assert line in (ROOT / "docs/privacy.md").read_text(encoding="utf-8")
    done = fedmpi("verify", "runs/verified", f"privacy.noise_file={folder / 'key'}", cwd=folder)
    assert done.returncode == 0, done.stdout


def test_the_model_card_and_the_pages_of_sites_state_the_guarantee(folder):
    assert run(folder, "samples.yaml", "name=card", "rounds=1", kind="mpirun", size=4).returncode == 0
    done = fedmpi("report", "runs/card", "--sites", cwd=folder)
    assert done.returncode == 0, done.stderr
    for page in ("model-card", "north"):
        text = (folder / f"runs/card/sites/{page}.html").read_text(encoding="utf-8")
        assert "have differential privacy for each training sample: epsilon" in text
