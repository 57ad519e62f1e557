"""The checks of battery.py in one process, and on real ranks over gloo and MPI."""

import ast
import socket
import stat
from pathlib import Path

import pytest

from fedmpi.comm.rendezvous import lookup

SIZE = 3  # no power of two: the broadcast's tree is uneven
STARTS = {  # name -> (class, number of ranks, how they are started)
    "solo": ("SingleProcess", 1, lambda ranks: ranks.start("battery.py", envs=[{}], backend="auto")),
    "gloo": ("GlooCommunicator", SIZE, lambda ranks: ranks.torchrun("battery.py", size=SIZE)),
    "mpi": ("MpiCommunicator", SIZE, lambda ranks: ranks.mpirun("battery.py", size=SIZE)),
    "gloo under mpirun": (
        "GlooCommunicator",
        SIZE,
        lambda ranks: ranks.mpirun("battery.py", size=SIZE, backend="gloo"),
    ),
}
PROGRAM = ast.parse(Path(__file__).with_name("battery.py").read_text())
CHECKS = [node.name for node in PROGRAM.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def assert_passed(outcome, size, communicator):
    assert set(outcome.codes) == {0}, outcome.text
    assert sorted(outcome.reports) == list(range(size)), outcome.text
    for rank, reports in outcome.reports.items():
        assert [report["check"] for report in reports] == CHECKS
        errors = [(rank, report) for report in reports if report["error"]]
        assert not errors, outcome.text
        assert {report["class"] for report in reports} == {communicator}


@pytest.mark.smoke
@pytest.mark.parametrize("name", STARTS)
def test_battery(ranks, name):
    communicator, size, start = STARTS[name]
    assert_passed(start(ranks), size, communicator)


def test_ranks_of_a_slurm_step_connect_by_the_secret_file_even_if_the_first_port_is_taken(ranks, tmp_path):
    job_id = next(job_id for job_id in range(10**6, 2 * 10**6) if all(map(is_free, ports(job_id)[:4])))
    step = {"SLURM_JOB_ID": job_id, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_NODEID": 0}
    step |= {"SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_STEP_NODELIST": "no-such-host"}  # one host needs no name
    step |= {"HOME": tmp_path, "FEDMPI_SECRET": ""}
    envs = [{key: str(value) for key, value in (step | own).items()} for own in map(numbers, range(2))]
    with socket.create_server(("", ports(job_id)[0])):  # accepts (the kernel does), never answers
        assert_passed(ranks.start("battery.py", envs=envs), 2, "GlooCommunicator")
    made = tmp_path / ".fedmpi"
    assert [path.name for path in made.iterdir()] == ["secret"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, made / "secret")] == [0o700, 0o600]


def numbers(rank):
    return {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}


def ports(job_id):
    return lookup.derive_ports(f"{job_id}.0.0")


def is_free(port):
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
