"""The memory that `fedmpi plan` estimates is what a run uses on this machine with this build of PyTorch."""

import json
import subprocess
import sys

import pytest
import yaml
from helpers import BIN, clean_env
from real_job import succeed

CONFIG = {
    "name": "run",
    "rounds": 3,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
    "model": {"name": "mlp", "hidden": [512, 1024]},
    "method": {"name": "scaffold"},
    "report": False,
}
# A process begins with the memory of the one that forks it, hence a small one in between.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.smoke
def test_a_run_uses_the_memory_that_was_estimated(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "output": str(tmp_path)}))
    planned = succeed("plan", config, "--json", cold=True)
    command = [sys.executable, "-c", PEAK, BIN / "fedmpi", "run", config]
    peak = 1024 * int(subprocess.run(command, env=clean_env(), check=True, stdout=subprocess.PIPE).stdout)
    estimate = json.loads(planned.stdout)["memory"]["rank 0"]["all"]
    assert 0.75 < estimate / peak < 1.5
