"""The clients' optimiser is torch's, to the bit."""

import copy
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, clean_env

from fedmpi.engine.sgd import SGD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_it_is_torchs(momentum, weight_decay):
    """Over views of one vector, a parameter without gradient from the start and one that has its first in step 2."""
    torch.manual_seed(0)
    flat = torch.randn(60)
    ours = [torch.nn.Parameter(flat[i : i + 20].view(4, 5)) for i in (0, 20, 40)]
    theirs = copy.deepcopy(ours)
    optimiser = SGD(ours, 0.1, momentum, weight_decay)
    # Of torch's, one a parameter: its fused kernel wants all of them to begin at once.
    references = [torch.optim.SGD([p], 0.1, momentum, weight_decay=weight_decay, fused=True) for p in theirs]
    for step in range(4):
        optimiser.forget()
        assert all(p.grad is None for p in ours)
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            q.grad = torch.randn(4, 5) if i == 0 or (i == 1 and step >= 2) else None
            p.grad = None if q.grad is None else q.grad.clone()
        optimiser.step()
        for reference in references:
            reference.step()
        assert torch.equal(flat, torch.cat([q.detach().flatten() for q in theirs]))


def test_a_run_imports_nothing_that_it_does_not_need(tmp_path):
    program = f"""
import sys
from fedmpi import run
run({str(ROOT / "configs/quickstart.yaml")!r}, ["rounds=1", "checkpoint.every=1", {f"output={tmp_path}"!r}])
print(*sorted({{"torch._dynamo", "sklearn", "scipy", "matplotlib", "torchvision", "rich"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], env=clean_env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
