"""Rank 0's store as a separate process, and a job whose ports are attacked by other processes of the host."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from attacker import Attacker, listeners
from helpers import BIN, ROOT, clean_env, launcher


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_store_process_is_small_and_ends_with_rank_0(tmp_path):
    """When rank 0 is killed its store ends, as the other ranks expect; signals to the job do not end it earlier."""
    program = """
import os, signal, sys, time
from fedmpi.comm.rendezvous import lookup
from fedmpi.comm.launchers import Job
store = lookup.connect_to_store(Job("slurm", 0, 2, 0, 2, "here"), 30)
child = store.server
assert "torch" not in open(f"/proc/{child.pid}/maps").read()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    os.kill(child.pid, number)
for i in range(100):
    store.set("a", str(i))
print(child.pid, flush=True)
time.sleep(100)
"""
    env = clean_env(SLURM_JOB_ID="4712", SLURM_STEP_ID="0", SLURM_NODELIST="here", PYTHONPATH=str(ROOT))
    rank_0 = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
    child = int(rank_0.stdout.readline())
    rank_0.kill()
    rank_0.wait()
    end = time.monotonic() + 100
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.mark.parametrize("kind", ["torchrun", pytest.param("mpirun", marks=pytest.mark.soak)])
def test_a_job_under_attack_gives_the_same_model(tmp_path, kind):
    """Attackers on loopback, where all ports of the ranks are, change nothing.

    The ports of MPI and of the torchrun agent are not fedmpi's, and are excluded (docs/security.md).
    """
    rounds, digests = 15, []
    config = {
        "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
        "model": {"name": "mlp"},
        "method": {"name": "fedavg"},
        "rounds": rounds,
        "compute": {"threads": 1},
        "comm": {"backend": "gloo", "start_timeout_s": 60, "round_timeout_s": 60},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    for attacked in (False, True):
        name = "attacked" if attacked else "calm"
        command = [*launcher(kind, 3), str(BIN / "fedmpi"), "run", "c.yaml", f"name={name}", f"output={tmp_path}"]
        log = (tmp_path / f"{name}.log").open("w+")
        job = subprocess.Popen(command, cwd=tmp_path, env=clean_env(), stdout=log, stderr=log)
        attacks = {}
        end = time.monotonic() + 120
        while job.poll() is None and time.monotonic() < end:
            for where in listeners(fedmpi_descendants(job.pid)) if attacked else ():
                if where[0] == "127.0.0.1" and where not in attacks:
                    attacks[where] = Attacker([where], pause_s=0.1)
                if where[0] not in ("127.0.0.1", "::1"):
                    assert kind == "mpirun", f"a rank listens at {where}"  # Open MPI's
            time.sleep(0.02)
        job.kill()
        log.seek(0)
        assert job.wait() == 0, log.read()
        for attack in attacks.values():
            attack.stop()
        if attacked:
            assert len(attacks) >= 4  # the store's process, and gloo's port of each rank
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == rounds
        digests.append([json.loads(line)["sha256"] for line in lines])
    assert digests[0] == digests[1]


def fedmpi_descendants(pid):
    """Return the fedmpi processes among the descendants of a process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = set(), {pid}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in found} - found
    return [
        each
        for each in found
        if {str(BIN / "fedmpi"), "fedmpi.comm.rendezvous.store_server"} & set(command_words(each)[:3])
    ]


def command_words(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []
