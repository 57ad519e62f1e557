"""Setting up rejects an unsuitable Python, and names it."""

import shutil
import subprocess

import pytest
from helpers import ROOT


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, "there is no python-of-tests on PATH"),
        ("echo Python 3.9.2; exit 1", "python-of-tests is Python 3.9.2, but 3.10 or later is needed"),
        ("[[ $2 = *version_info* ]]", "python-of-tests can make no virtual environment with pip"),
    ],
)
def test_an_unsuitable_python_is_rejected(tmp_path, answer, expected):
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
