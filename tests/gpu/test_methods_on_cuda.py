"""Every method, rule and placement of tests/every_method.py on a GPU: alone and with ranks that share it."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, clean_env, launcher

NO_GPU = "this machine has no GPU; what the methods do on CPUs stands in test_ranks.py"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{(device, number of ranks): {case: results}}"""
    results = {}
    for device, kind, size in (("cpu", "alone", 1), ("cuda", "alone", 1), ("cuda", "torchrun", 3)):
        file = tmp_path_factory.mktemp("found") / "found.json"
        program = [sys.executable, str(ROOT / "tests" / "every_method.py"), str(file), "gloo", device]
        done = subprocess.run(
            [*launcher(kind, size), *program], env=clean_env(), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[device, size] = json.loads(file.read_text())
    return results


def test_ranks_that_share_a_gpu_give_the_bits_of_one(found):
    alone, three = found["cuda", 1], found["cuda", 3]
    assert alone.keys() == three.keys()
    parts = ("w", "b", "server", "kept")
    assert not [(case, part) for case in alone for part in parts if alone[case][part] != three[case][part]]


def test_the_gpu_learns_what_the_cpu_learns(found):
    """The loss of the first round. Masks of dropout are drawn elsewhere, and kernels round otherwise: roughly."""
    for case, there in found["cuda", 1].items():
        mine, others = there["rows"][0]["train_loss"], found["cpu", 1][case]["rows"][0]["train_loss"]
        assert mine == pytest.approx(others, rel=0.2, abs=0.02), case
