"""The file modes of all files of a run."""

import subprocess
import sys

import pytest
from helpers import ROOT, clean_env

CONFIG = f"""\
name: theirs
rounds: 1
data: {{source: digits, partition: {{scheme: iid, clients: 2}}}}
model: {{name: "{ROOT}/tests/helpers.py:norm_net"}}
method: {{name: fedatom, atoms: 3}}
train: {{batch_size: 200}}
"""


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o027, 0o750, 0o640), (0o077, 0o700, 0o600)])
def test_file_modes_follow_the_umask(tmp_path, umask, folder, file):
    """Checks every file of a run, including files that are written under a temporary name and renamed."""
    (tmp_path / "c.yaml").write_text(CONFIG + f"output: {tmp_path}\n")
    program = f"import os, sys; os.umask({umask}); from fedmpi.cli import main; main()"
    more = ["method={name: fedavg}", "model={name: logistic}", "evaluate.protocol=[personal]"]
    command = [sys.executable, "-c", program, "run", str(tmp_path / "c.yaml"), *more]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "theirs"
    assert run.stat().st_mode & 0o777 == folder
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in run.rglob("*") if path.is_file()}
    assert set(modes.values()) == {oct(file)}, modes
    assert len(modes) == 17
    inner = {path.name: oct(path.stat().st_mode & 0o777) for path in run.rglob("*") if path.is_dir()}
    assert "checkpoints" in inner
    assert set(inner.values()) == {oct(folder)}, inner
