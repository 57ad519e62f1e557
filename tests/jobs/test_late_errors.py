"""Mistakes that appear late, or on one rank only, end in one message, too; tests/error_cases has the others."""

import re
import subprocess

import numpy as np
import pytest
from helpers import ROOT, launcher, wait_until_ended, warm_env, write_rank_script

CONFIG = """\
rounds: 1
output: OUTPUT
data:
  source: digits
  root: ROOT
  partition: {scheme: iid, clients: 4}
model: {name: logistic}
method: {name: fedavg}
train:
  lr: 0.1
"""


@pytest.fixture
def config(tmp_path):
    """Return a function that writes run.yaml with some text replaced, and returns its path."""

    def write(old="", new="", name="run.yaml", net="logistic"):
        text = CONFIG.replace("OUTPUT", str(tmp_path / "runs")).replace("ROOT", str(tmp_path)).replace("logistic", net)
        assert old in text
        path = tmp_path / name
        path.write_text(text.replace(old, new) if old else text)
        return path

    return write


def check(done, message):
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr, re.S), done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout


# ---- under a launcher ----


def mpirun_with_configs(tmp_path, *paths):
    """Return an mpirun command of `fedmpi run` that gives each rank its own config."""
    script = write_rank_script(tmp_path / "start.sh", *(f"fedmpi run {path}" for path in paths))
    command = [*launcher("mpirun", len(paths)), str(script)]
    return subprocess.run(command, env=warm_env(), cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.smoke
def test_a_rank_with_another_config_is_named(config, tmp_path):
    more = "name: run\ncomm: {backend: mpi}\ntrain:\n"
    one = config("train:\n", more)
    other = config("train:\n  lr: 0.1", f"{more}  lr: 0.2\nseed: 5", name="other.yaml")
    done = mpirun_with_configs(tmp_path, one, one, other)
    check(done, r"rank 2 differs from rank 0 in seed, train\.lr")
    assert "rank 1 differs" not in done.stderr
    assert wait_until_ended(str(tmp_path))


def config_with_data(config, tmp_path, name, labels):
    """Write a config whose data.root contains a table with these labels, or no table if `labels` is None."""
    root = tmp_path / name
    root.mkdir()
    if labels is not None:
        np.savez(root / "a.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=labels)
    path = config("source: digits", "source: npz\n  path: a.npz", name=f"{name}.yaml")
    path.write_text(path.read_text().replace(f"root: {tmp_path}", f"root: {root}") + "name: run\n")
    return path


def test_a_rank_with_other_data_is_named(config, tmp_path):
    one = config_with_data(config, tmp_path, "one", np.arange(40) % 2)
    other = config_with_data(config, tmp_path, "other", np.arange(40) // 20)
    check(mpirun_with_configs(tmp_path, one, other, one), r"rank 1 differs from rank 0 in .*\(training data\)")
