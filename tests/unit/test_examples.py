"""The programs of examples/ run, and their results are correct."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env

FIGURES = ROOT / "examples" / "paper_figures"


def run(program, *words, cwd):
    command = [sys.executable, "-W", "ignore", FIGURES / program, *map(str, words), "--to", cwd / "figures"]
    return subprocess.run(command, env=clean_env(), cwd=cwd, check=True, capture_output=True, text=True).stdout


def test_the_variance_is_inversely_proportional_to_the_clients(tmp_path):
    """Independent clients: exactly 5 in expectation; over 4000 repetitions the ratio's standard error is below 4 %."""
    *_, last = run("gaussians.py", cwd=tmp_path).splitlines()
    assert float(last.partition(": ")[2]) == pytest.approx(5, rel=0.1)
    assert (tmp_path / "figures" / "gaussians.png").stat().st_size > 10_000


def test_fedsol_rests_on_the_line_to_the_minimum_and_fedprox_beside_it(tmp_path):
    prox, sol = run("toy.py", cwd=tmp_path).splitlines()
    assert prox.startswith("FedProx ends at 0.5000, 0.0909 (equilibrium 0.5000, 0.0909)")
    assert sol == "FedSOL ends at 0.6454, 0.6420 (equilibrium 0.6464, 0.6464), cosine to the minimum 1.0000"
    assert (tmp_path / "figures" / "toy.png").stat().st_size > 10_000


def test_trajectory(tmp_path):
    """Both start with the same kernels; the mean of all local and virtual clients is the next model (Eq. 10)."""
    words = ["rounds=2", "method.atoms=3", "model.name=lenet5", "data.augment=[{resize: 28}]", "train.epochs=1"]
    more = ["--first=0", "--last=2", "--grid=2"]
    run("trajectory.py", ROOT / "configs" / "quickstart.yaml", *words, *more, cwd=tmp_path)
    facts = json.loads((tmp_path / "figures" / "trajectory.json").read_text())
    own, other = facts["ways"]["fedatom"], facts["ways"]["fedavg"]
    assert len(own["loss"]) == len(other["loss"]) == 3
    assert own["loss"][0] == pytest.approx(other["loss"][0], rel=1e-5)
    assert own["loss"][-1] != pytest.approx(other["loss"][-1], rel=1e-3)
    assert own["at"][-1] == pytest.approx([0, 0], abs=1e-9)
    for t, each in enumerate(facts["rounds"]):
        assert len(each["models"]) == 16
        mean = [sum(m["p"] * m["at"][axis] for m in each["models"]) for axis in (0, 1)]
        assert mean == pytest.approx(own["at"][t + 1], rel=1e-3, abs=1e-4)
    assert (tmp_path / "figures" / "trajectory.png").stat().st_size > 10_000
