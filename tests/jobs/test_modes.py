"""The modes of all files of a run."""

import subprocess
import sys

import pytest
from helpers import ROOT, clean_env
from real_job import succeed

CONFIG = f"""\
name: theirs
rounds: 1
data: {{source: digits, partition: {{scheme: iid, clients: 2}}}}
model: {{name: "{ROOT}/tests/helpers.py:norm_net"}}
method: {{name: fedatom, atoms: 3}}
train: {{batch_size: 200}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of fedmpi's own code alone (CONFIG's model was a plug-in; its atoms make it worth analysing)."""
    place = tmp_path_factory.mktemp("theirs")
    (place / "theirs.yaml").write_text(CONFIG.replace(f"{ROOT}/tests/helpers.py:norm_net", "mcmahan_cnn"))
    succeed("run", place / "theirs.yaml", f"output={place}", "data.root=their/files", cwd=place)
    return place / "theirs"


@pytest.mark.parametrize(
    ("umask", "private", "folder", "file"),
    [
        (0o022, False, 0o755, 0o644),
        (0o027, False, 0o750, 0o640),
        (0o002, True, 0o700, 0o600),
        (0o077, False, 0o700, 0o600),
    ],
)
def test_modes(tmp_path, umask, private, folder, file):
    """Of every file of a run, those that are written under a temporary name and renamed too."""
    words = ["output_mode=private"] if private else []
    (tmp_path / "c.yaml").write_text(CONFIG + f"output: {tmp_path}\n")
    program = f"import os, sys; os.umask({umask}); from fedmpi.cli import main; main()"
    more = ["method={name: fedavg}", "model={name: logistic}", "evaluate.protocol=[personal]"]
    command = [sys.executable, "-c", program, "run", str(tmp_path / "c.yaml"), *words, *more]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "theirs"
    assert run.stat().st_mode & 0o777 == folder
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in run.rglob("*") if path.is_file()}
    assert set(modes.values()) == {oct(file)}, modes
    assert len(modes) == 18
    inner = {path.name: oct(path.stat().st_mode & 0o777) for path in run.rglob("*") if path.is_dir()}
    assert "checkpoints" in inner
    assert set(inner.values()) == {oct(folder)}, inner
