"""Start a program of this folder as several real processes, one per rank; each rank reports its results in a file.

The processes have torch imported already (fork_server.py).
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import COMMAND
from helpers import clean_env, warm_env

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIMIT_S = 120  # of one start of several processes: all time-outs under test are far shorter


def environment() -> dict[str, str]:
    return warm_env(clean_env(PYTHONPATH=str(ROOT)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def torchrun_env(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass
class Outcome:
    codes: list[int]  # of the processes; of mpirun alone under mpirun
    reports: dict[int, list[dict]]  # by rank: what it reported, in order
    text: str  # all they printed


class RankLauncher:
    """Starts programs as ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, program: str, *args: str, envs: list[dict[str, str]], backend: str = "gloo") -> Outcome:
        """Start one process per environment, as a launcher would."""
        command = [*COMMAND, str(HERE / program), str(self.folder), backend, *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [subprocess.Popen(command, env=environment() | env, **pipes) for env in envs]
        try:
            texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return self.outcome([process.returncode for process in processes], "".join(texts))

    def torchrun(self, program: str, *args: str, size: int, absent: tuple[int, ...] = ()) -> Outcome:
        port = free_port()
        envs = [torchrun_env(rank, size, port) for rank in range(size) if rank not in absent]
        return self.start(program, *args, envs=envs)

    def mpirun(
        self, program: str, *args: str, size: int, backend: str = "mpi", options: tuple[str, ...] = ()
    ) -> Outcome:
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if not mpirun:
            pytest.skip("no mpirun on PATH")
        pytest.importorskip("mpi4py")
        command = [mpirun, "-n", str(size), *COMMAND, str(HERE / program), str(self.folder), backend, *args]
        if "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout:
            command[1:1] = [
                "--oversubscribe",
                "--bind-to",
                "none",
                *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
            ]
        command[1:1] = options
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
        return self.outcome([done.returncode], done.stdout + done.stderr)

    def outcome(self, codes: list[int], text: str) -> Outcome:
        files = self.folder.glob("*.jsonl")
        reports = {int(file.stem): [json.loads(line) for line in file.read_text().splitlines()] for file in files}
        return Outcome(codes, reports, text)


@pytest.fixture
def ranks(tmp_path):
    return RankLauncher(tmp_path)
