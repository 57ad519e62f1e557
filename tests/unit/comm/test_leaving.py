"""The standard streams of a process, and where they are seen."""

import io
import sys

import pytest

from fedmpi.comm.launchers.job import Job
from fedmpi.comm.loss import leaving


def test_characters_that_a_stream_does_not_have_are_printed_as_escapes(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", out)
    leaving.prepare()
    print("Ω", "é", flush=True)
    assert out.buffer.getvalue() == b"\\u03a9 \xe9\n"


@pytest.mark.parametrize(
    ("launcher", "rank", "local_rank", "env", "expected"),
    [
        ("torchrun", 2, 0, {}, True),
        ("torchrun", 1, 1, {}, False),  # rank 0's host
        ("torchrun", 2, 0, {"SLURM_PROCID": "1"}, False),  # `srun torchrun` shows all output
        ("mpi", 2, 0, {}, False),
        ("slurm", 2, 0, {}, False),
        ("env://", 1, 0, {"MASTER_ADDR": "192.0.2.1"}, True),  # an address for documentation: no host has it
        ("env://", 1, 0, {"MASTER_ADDR": "no..name"}, True),
        ("env://", 1, 0, {"MASTER_ADDR": "127.0.0.1"}, False),
        ("env://", 1, 0, {"MASTER_ADDR": "192.0.2.1", "FLUX_TASK_RANK": "1"}, False),
    ],
)
def test_ranks_away_from_the_console_of_rank_0(monkeypatch, launcher, rank, local_rank, env, expected):
    for name in ("SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    job = Job(launcher, rank, 4, local_rank, 2, "node")
    assert leaving.Process(job).has_own_console() is expected
