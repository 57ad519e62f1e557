"""`make gpu` on a machine that has torch and little else, and with parts that hang."""

import json
import re
import signal
import subprocess
import sys
import time
import venv
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers import ROOT, clean_env, gone

KIT = "benchmarks/gpu/kit.py"
# Its child has left the process group, as torchrun's ranks do, and does not heed SIGTERM.
HANGS = """
import json, pathlib, subprocess, sys, time
folder, word = sys.argv[1:]
program = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(600)"
found = json.loads(next(pathlib.Path(folder, "to").glob("*.json")).read_text())
print("on disk:", found["running"], [part["part"] for part in found["parts"]], flush=True)
subprocess.Popen([sys.executable, "-c", program, f"{folder}/ready", word], start_new_session=True)
time.sleep(600)
"""


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_by(package):
    """The installed packages that a package needs, itself included."""
    try:
        wanted = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return set()
    names = [re.match(r"[\w.-]+", each)[0] for each in wanted if "extra ==" not in each]
    return {normal(package)}.union(*map(needed_by, names))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """(a Python that has torch and what torch needs, a folder with all other packages but fedmpi)"""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", symlinks=True)
    site, rest = next(folder.glob("venv/lib/python*/site-packages")), folder / "rest"
    rest.mkdir()
    torchs = needed_by("torch")
    for package in metadata.distributions(path=[str(Path(torch.__file__).parents[1])]):
        name = normal(package.metadata["Name"])
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            place = site if name in torchs else rest
            if name != "fedmpi" and not (place / top).exists():
                (place / top).symlink_to(Path(package.locate_file(top)))
    return folder / "venv" / "bin" / "python", rest


def run_kit(python, *words, **env):
    env = {key: value for key, value in clean_env().items() if key != "PYTHONPATH"} | env
    return subprocess.run(
        [str(python), KIT, *map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900
    )


@pytest.mark.smoke
def test_what_is_missing_is_said_first(bare, tmp_path):
    done = run_kit(bare[0], "--device", "cpu", "--to", tmp_path / "to")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for package in ("pydantic", "rich", "torchvision", "pytest-xdist"):
        assert re.search(rf"^  {package}\S* is not installed$", done.stderr, re.MULTILINE), package
    assert "  torch>" not in done.stderr
    version, minor = f"{sys.version_info.major}.{sys.version_info.minor}", int(torch.__version__.split(".")[1])
    assert re.search(rf"python3 -m pip download .* --python-version {version} .*'pydantic>=2.7'", done.stderr)
    assert re.search(rf"pip download .* --no-deps .*'torchvision==0\.{minor + 15}\.\*'", done.stderr)
    assert f'{bare[0]} -m zipfile -e "$wheel" packages' in done.stderr  # this Python has no pip
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_packages_on_pythonpath_are_found(bare, tmp_path, device):
    """fedmpi is not installed there: the kit has put the root of the repository before what PYTHONPATH held."""
    done = run_kit(bare[0], "vectors", "--device", device, "--to", tmp_path, PYTHONPATH=str(bare[1]))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(tmp_path.glob(f"*-{device}.json")).read_text())
    assert [(part["part"], part["code"]) for part in found["parts"]] == [("vectors", 0)]
    assert found["running"] is None
    assert "| vectors | 1 rank(s), 100,000 parameters, 8 clients |" in done.stdout


@pytest.fixture
def kit(monkeypatch):
    """The module, of which the parts are what a test says; SIGTERM means afterwards what it meant before."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "gpu"), *sys.path])
    import kit

    monkeypatch.setattr(kit, "probe", lambda: {"usable": False})
    handler = signal.getsignal(signal.SIGTERM)
    yield kit
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.smoke
def test_a_part_that_hangs_is_ended_with_its_children(kit, tmp_path, monkeypatch, capsys):
    word, wait = f"hangs-{tmp_path}", subprocess.Popen.wait
    parts = [
        kit.Part("first", ["-c", "print('one')"], 100),
        kit.Part("hangs", ["-c", HANGS, str(tmp_path), word], 100),
        kit.Part("fails", ["-c", "raise SystemExit('no')"], 100),
        kit.Part("last", ["-c", "print('four')"], 100),
    ]

    def wait_until_it_hangs(process, timeout=None):
        if process.args[-1] != word or process.returncode is not None:
            return wait(process, timeout)
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_it_hangs)
    monkeypatch.setattr(kit, "measures_and_tests", lambda device, folder: parts)
    monkeypatch.setattr(kit, "GRACE_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["kit.py", "--to", str(tmp_path / "to")])
    with pytest.raises(SystemExit) as ended:
        kit.main()
    assert ended.value.code == 1
    assert gone(word)
    (file,) = (tmp_path / "to").iterdir()
    found = json.loads(file.read_text())
    assert [(part["part"], part["code"]) for part in found["parts"]] == [
        ("first", 0), ("hangs", 124), ("fails", 1), ("last", 0),
    ]  # fmt: skip
    assert found["parts"][1]["lines"] == ["on disk: hangs ['first']", "not done after 100 s: ended"]
    assert "| fails | FAILED, exit code 1: no |" in capsys.readouterr().out
