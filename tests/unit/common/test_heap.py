"""Memory that is freed is not handed back to the kernel, to be mapped and zeroed again at the next step."""

import ctypes
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env

FAULTS = """
import resource
import torch
from fedmpi import config
from fedmpi.runtime.launch import set_numerics
set_numerics(config.load("configs/quickstart.yaml"))

def step():
    blocks = [torch.ones(2_000_000) for _ in range(4)]  # 8 MB each, all freed at the end

step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables):
    env = clean_env() | variables
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is another one")
def test_a_run_keeps_its_memory_unless_the_user_has_set_the_heap_up():
    assert faults() < 1000  # of 4 KiB; 32 MB are 7,812
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > 5 * 5000
