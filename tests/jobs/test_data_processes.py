"""A data set read by a process of its own: the memory that an epoch takes."""

import subprocess
import sys

import h5py
import numpy as np
import pytest
from helpers import clean_env

EPOCH = """
import sys
from pathlib import Path
import torch
from fedmpi.data import streaming
from fedmpi.data.batches import Shard, batches
from fedmpi.data.sources.hdf5 import hdf5

def held():
    return {w[0]: int(w[1]) // 1024 for w in map(str.split, open("/proc/self/status")) if w[0] in ("VmRSS:", "VmHWM:")}

with streaming.choosing(True):
    data = hdf5(Path(sys.argv[1]), path="a.h5", test_fraction=0)
shard = Shard(data.train_x, data.train_y, torch.arange(len(data.train_y)))
before = held()["VmRSS:"]
seen = sum(len(y) for _, y in batches(shard, 16, torch.Generator().manual_seed(0)))
print(seen, held()["VmHWM:"] - before)
"""


@pytest.mark.smoke
def test_an_epoch_over_a_streamed_file_takes_less_memory_than_the_file(tmp_path):
    """The file has 294 MiB; a few batches of 2.3 MiB and their floats are in memory at once."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", (2048, 3, 224, 224), np.uint8)
        for k in range(2048):
            x[k] = k % 256
        file["y"] = np.arange(2048) % 2
    done = subprocess.run(
        [sys.executable, "-c", EPOCH, str(tmp_path)], capture_output=True, text=True, env=clean_env(), check=False
    )
    (tmp_path / "a.h5").unlink()
    assert done.returncode == 0, done.stderr
    samples, mebibytes = map(int, done.stdout.split())
    assert samples == 2048
    assert mebibytes < 200
