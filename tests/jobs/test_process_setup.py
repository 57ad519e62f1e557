"""What is set up once per process: the heap, torchvision's operators, and the locks of random number generators."""

import subprocess
import sys

from helpers import ROOT, clean_env


def run_python(code, **variables):
    """Run `code` in a separate Python, and return what it prints."""
    command, env = [sys.executable, "-c", code], clean_env() | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORWARD = """
try:
    import torchvision
except RuntimeError:
    pass
import torch
from fedmpi.common.torchvision_compat import torchvision
model = torchvision.models.resnet18(weights=None, num_classes=3).eval()
assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
import torchvision as again
assert again is torchvision
"""


def test_torchvision_can_be_imported_with_a_torch_that_it_was_not_built_for():
    """Operators are declared once per process."""
    run_python(FORWARD)


RESEEDING_THREADS = """
import gc, sys, threading, torch
from fedmpi.common import seeds

def work():
    for t in range(500):
        x = torch.randn(3, requires_grad=True)
        cycle = [x, x.sum()]
        cycle.append(cycle)
        del cycle, x
        with seeds.preserve_rng_state():
            seeds.seed_global_generators(0, "a", t)

torch.set_num_threads(1)
gc.set_threshold(1)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(3)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


def test_threads_that_seed_at_the_same_time_do_not_deadlock():
    """A generator's mutex is held while its state is returned; meanwhile garbage collection and threads may run."""
    run_python(RESEEDING_THREADS)
