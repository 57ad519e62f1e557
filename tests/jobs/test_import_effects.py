"""Importing fedmpi has no side effects, and does not import torch before it is needed."""

import pkgutil
import subprocess
import sys

import pytest
from helpers import clean_env

import fedmpi

EFFECTS = """
import gc, os, random, signal, sys, threading, warnings
import matplotlib, numpy, rich.console, scipy.stats, sklearn, torch  # what importing them does is not ours

NAMES = sys.argv[1:]

def state():
    return {
        "torch random numbers": torch.get_rng_state().tolist(),
        "numpy random numbers": str(numpy.random.get_state()),
        "random numbers": random.getstate(),
        "threads of torch": torch.get_num_threads(),
        "type": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark),
        "gradients": torch.is_grad_enabled(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("TORCH")},  # torchvision names a cache
        "search path": list(sys.path),
        "working directory": (os.getcwd(), os.listdir()),
        "threads": threading.active_count(),
        "process group": torch.distributed.is_initialized(),
    }

before = state()
import fedmpi
first = state()
for name in NAMES:
    __import__(name)
after = state()
after["warnings"] = first["warnings"]  # other packages add filters
print(*[name for name in before if not before[name] == first[name] == after[name]], sep=", ")
print(*[name for name in ("mpi4py",) if name in sys.modules], sep=", ")
"""


@pytest.mark.smoke
def test_imports_have_no_side_effects(tmp_path):
    modules = [found.name for found in pkgutil.walk_packages(fedmpi.__path__, "fedmpi.")]
    command = [sys.executable, "-c", EFFECTS, *modules]
    done = subprocess.run(command, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n\n"
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())
