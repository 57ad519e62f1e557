"""Measure memory and files of a process during runs of many rounds.  leak_check.py FOLDER METHOD...

Prints {method: [numbers after EARLY rounds, numbers after LATE rounds]}: kB of memory, open files, threads, bytes
written, and files of checkpoints and client state.
"""

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # imported here, because torch.optim does so at its first step, which ccvr makes in the last round
from helpers import small_settings

from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.record.recorder import Recorder
from fedmpi.runtime.record.run_dir import RunDirectory

EARLY, LATE = 20, 200


def now(directory: RunDirectory) -> dict[str, int]:
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    written = sum((directory.path / name).stat().st_size for name in ("metrics.jsonl", "log.txt"))
    kept = [path.name for part in ("checkpoints", "state") for path in (directory.path / part).glob("*")]
    files = len(os.listdir("/proc/self/fd"))
    return {"kB": memory, "files": files, "threads": threading.active_count(), "bytes": written, "kept": len(kept)}


def main(folder: Path, names: list[str]) -> dict[str, list[dict[str, int]]]:
    torch.set_num_threads(1)
    g = np.random.default_rng(0)
    y = np.arange(60) % 4
    np.savez(folder / "a.npz", x=g.normal(size=(60, 1, 8, 8)), y=y, test_x=g.normal(size=(8, 1, 8, 8)), test_y=y[:8])
    add, found = Recorder.record_round, dict[str, list[dict[str, int]]]()

    def added(self, row):
        add(self, row)
        if row["round"] + 1 in (EARLY, LATE):
            found.setdefault(name, []).append(now(self.directory))

    Recorder.record_round = added
    for name in names:
        data = {"source": "npz", "path": "a.npz", "root": str(folder), "client_test": "global"}
        partition = {"scheme": "iid", "clients": 3}
        more = {"rounds": LATE, "output": str(folder), "evaluate": {"every": 10}, "name": name}
        execute_run(small_settings(name, "mlp", data={**data, "partition": partition}, **more))
    return found


if __name__ == "__main__":
    sys.stdout, shown = open(os.devnull, "w"), sys.stdout  # noqa: SIM115
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])), file=shown)
