"""Every method, rule and placement of tests/every_method.py on a GPU, alone and with ranks that share it."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, clean_env, launcher

NO_GPU = "this machine has no GPU; what the methods do on CPUs stands in test_ranks.py"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return {(device, number of ranks): {case: results}}.

    The key ("server", 1) is one process with the server on the GPU, too.
    """
    results = {}
    for device, kind, size in (
        ("cpu", "alone", 1),
        ("cuda", "alone", 1),
        ("cuda", "torchrun", 3),
        ("server", "alone", 1),
    ):
        file = tmp_path_factory.mktemp("results") / "results.json"
        how = ("auto", "cuda") if device == "server" else ("gloo", device)
        program = [sys.executable, str(ROOT / "tests" / "every_method.py"), str(file), *how]
        done = subprocess.run(
            [*launcher(kind, size), *program], env=clean_env(), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[device, size] = json.loads(file.read_text())
    return results


def test_ranks_that_share_a_gpu_give_the_bits_of_one_process(results):
    alone, three = results["cuda", 1], results["cuda", 3]
    assert alone.keys() == three.keys()
    parts = ("w", "b", "server", "kept")
    assert not [(case, part) for case in alone for part in parts if alone[case][part] != three[case][part]]


@pytest.mark.parametrize("where", ["cuda", "server"])
def test_the_gpu_gives_nearly_the_losses_of_the_cpu(results, where):
    """Compares the loss of the first round roughly, since dropout masks and rounding differ."""
    for case, there in results[where, 1].items():
        mine, others = there["rows"][0]["train_loss"], results["cpu", 1][case]["rows"][0]["train_loss"]
        assert mine == pytest.approx(others, rel=0.2, abs=0.02), case


def test_a_server_on_the_gpu_gives_nearly_the_losses_of_one_on_the_cpu(results):
    """Compares the loss of the second round, which starts from the result of the server's step."""
    for case, there in results["server", 1].items():
        pairs = zip(there["rows"], results["cuda", 1][case]["rows"], strict=True)
        losses = [(mine["train_loss"], others["train_loss"]) for mine, others in pairs if "train_loss" in mine]
        for mine, others in losses[1:2]:
            assert mine == pytest.approx(others, rel=0.05, abs=0.01), case
