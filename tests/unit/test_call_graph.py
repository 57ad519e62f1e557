"""The number of functions that a short run calls, which is what a reader must follow, is limited."""

import subprocess
import sys

from helpers import ROOT, clean_env

MOST = {"functions": 660, "files": 130, "deep": 16}

MEASURE = """
import inspect, os, sys, threading
import fedmpi

PACKAGE = os.path.dirname(fedmpi.__file__) + os.sep
found, deepest, depth = set(), 0, threading.local()

def profile(frame, event, argument):
    global deepest
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
        return
    if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class in a module that is imported late
        return
    depth.now = getattr(depth, "now", 0) + (1 if event == "call" else -1)
    if event == "call":
        found.add(code)
        deepest = max(deepest, depth.now)

import fedmpi.api
threading.setprofile(profile)
sys.setprofile(profile)
fedmpi.run(sys.argv[1], sys.argv[2:])
sys.setprofile(None)
print(len(found), len({code.co_filename for code in found}), deepest, file=sys.stderr)
"""


def test_a_short_run_calls_a_limited_number_of_functions(tmp_path):
    """Lambdas and comprehensions are not counted."""
    words = ["configs/quickstart.yaml", "rounds=2", f"output={tmp_path}"]
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, *words]
    result = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    counts = dict(zip(MOST, map(int, result.stderr.split()[-3:]), strict=True))
    assert all(counts[what] <= most for what, most in MOST.items()), counts
