"""A run uses after 200 rounds what it used after 20, and writes the same amount in each round."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env

from fedmpi.methods import registry

SOME = ["fedavg", "scaffold", "fedatom"]
OTHERS = sorted(set(registry) - set(SOME))


@pytest.mark.parametrize(
    "names", [SOME, *(pytest.param(OTHERS[i::6], marks=pytest.mark.soak) for i in range(6))], ids=lambda names: names[0]
)
def test_resources_do_not_grow_with_rounds(tmp_path, names):
    """Memory, open files and threads stay within 2 %, checkpoints do not grow.

    Records grow by the same amount per round.
    """
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "leak_check.py"), str(tmp_path), *names]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT / "tests", capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    for name, (early, late) in json.loads(done.stdout.splitlines()[-1]).items():
        for what in ("kB", "files", "threads"):  # one file may just be being written
            assert late[what] <= 1.02 * early[what] + (what == "files"), (name, what, early, late)
        assert late["threads"] <= 3, (name, late)  # those of the runs before have ended
        assert late["kept"] <= 3 + 3 * 4 + 1, (name, late)  # checkpoints, rows of three clients, one in the making
        assert late["bytes"] / early["bytes"] == pytest.approx(10, rel=0.1), (name, early, late)
