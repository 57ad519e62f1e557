"""Setting up: a Python that will not do is refused by name; the version has one place; make says what it can."""

import re
import shutil
import subprocess
from importlib.metadata import version

import pytest
from helpers import ROOT

import fedmpi


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, "there is no python-of-tests on PATH"),
        ("echo Python 3.9.2; exit 1", "python-of-tests is Python 3.9.2, but 3.10 or later is needed"),
        ("[[ $2 = *version_info* ]]", "python-of-tests can make no virtual environment with pip"),
    ],
)
def test_a_python_that_will_not_do(tmp_path, answer, expected):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "setup", tmp_path / ".ci")
    if answer:
        fake = tmp_path / "python-of-tests"
        fake.write_text(f"#!/usr/bin/env bash\n{answer}\n")
        fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([".ci/setup", "python-of-tests"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"setup: {expected}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_the_version_has_one_place():
    assert version("fedmpi") == fedmpi.__version__
    assert f"\n## {fedmpi.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_make_help_shows_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)", makefile, flags=re.MULTILINE)[1].split()
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == [name for name in targets if name != "help"]
