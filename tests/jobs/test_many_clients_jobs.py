"""Clients that are never drawn take next to no memory on each of three ranks."""

import json
import subprocess
import sys

from helpers import BIN, clean_env, launcher
from test_plan_jobs import PEAK

ROWS, FEW, MANY = 400_000, 100, 200_000


SOURCE = f"""
import torch
from fedmpi.data.dataset import Dataset


def rows(root):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn({ROWS} + 100, 16, generator=g), torch.randint(10, ({ROWS} + 100,), generator=g)
    return Dataset(x[:{ROWS}], y[:{ROWS}], x[{ROWS}:], y[{ROWS}:], 10)
"""


def peak(folder, clients):
    """MiB of the largest rank of a run with SCAFFOLD, of whose clients 50 are drawn in each of 3 rounds."""
    config = folder / "run.yaml"
    (folder / "source.py").write_text(SOURCE)
    config.write_text(
        f"name: run\noutput: {folder}\nrounds: 3\nreport: false\ndata: {{source: '{folder}/source.py:rows', "
        f"partition: {{scheme: iid, clients: {clients}}}}}\nmodel: {{name: logistic}}\nmethod: {{name: scaffold}}\n"
        "train: {steps: 1, momentum: 0}\ncohort: {size: 50}\n"
    )
    words = [*launcher("mpirun", 3), BIN / "fedmpi", "run", config, "comm.backend=gloo"]
    done = subprocess.run([sys.executable, "-c", PEAK, *words], env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


def test_memory_does_not_grow_with_clients_that_are_not_drawn(tmp_path):
    """200,000 clients with 2 rows each, beside 100 with 4,000: an array, a shard and an entry of two dictionaries for
    each client would take more than 300 MiB."""
    found = {}
    for clients in (FEW, MANY):
        folder = tmp_path / str(clients)
        folder.mkdir()
        found[clients] = peak(folder, clients)
        facts = json.loads((folder / "run/partition.json").read_text())
        assert facts["clients"] == clients
        assert (folder / "run/partition.json").stat().st_size < 50_000
        drawn = {
            k for row in (folder / "run/metrics.jsonl").read_text().splitlines() for k in json.loads(row)["cohort"]
        }
        assert {int(path.name[:6]) for path in (folder / "run/state").iterdir()} == drawn
    assert found[MANY] - found[FEW] < 100
