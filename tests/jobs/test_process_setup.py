"""What is set up once in a process: the heap, torchvision's operators, the locks of random number generators."""

import ctypes
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env


def python(code, **variables):
    """Run `code` in a Python of its own; returns what it prints."""
    command, env = [sys.executable, "-c", code], clean_env() | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


PAGE_FAULTS = """
import resource
import torch
from fedmpi import config
from fedmpi.runtime.launch import set_numerics
set_numerics(config.load("configs/quickstart.yaml"))

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2_000_000) for _ in range(4)]  # 8 MB each, all freed at the end
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(faults() for _ in range(10)))  # in some steps the kernel may have taken pages for others
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_stays_with_the_process_unless_the_user_sets_the_heap_up():
    """Else the kernel maps and zeroes the same pages again in every step."""
    assert int(python(PAGE_FAULTS)) < 200  # of 4 KiB; 32 MB are 7,812
    assert int(python(PAGE_FAULTS, MALLOC_TRIM_THRESHOLD_="131072")) > 5000


FAILED_BEFORE = """
try:
    import torchvision
except RuntimeError:
    pass
"""

FORWARD = """
import torch
from fedmpi.common.torchvision_compat import torchvision
model = torchvision.models.resnet18(weights=None, num_classes=3).eval()
assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
import torchvision as again
assert again is torchvision
"""

HEALTHY = """
import sys
import torch
try:
    import torchvision
except RuntimeError:  # make it healthy: somebody else declares the operators
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from fedmpi.common import torchvision_compat
assert not torchvision_compat._declared
assert torchvision_compat.torchvision.models.resnet18
"""


@pytest.mark.parametrize("code", [FAILED_BEFORE + FORWARD, HEALTHY], ids=["failed before", "healthy"])
def test_torchvision_can_be_imported_beside_a_torch_that_it_was_not_built_for(code):
    """Operators are declared once in a process."""
    python(code)


RESEEDING_THREADS = """
import gc, sys, threading, torch
from fedmpi.common import seeds

def work():
    for t in range(500):
        x = torch.randn(3, requires_grad=True)
        cycle = [x, x.sum()]
        cycle.append(cycle)
        del cycle, x
        with seeds.restored():
            seeds.reseed(0, "a", t)

torch.set_num_threads(1)
gc.set_threshold(1)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(3)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


def test_threads_that_reseed_at_once_do_not_deadlock():
    """torch holds a mutex while a generator gives its state; garbage collection and other threads may run then."""
    python(RESEEDING_THREADS)
