"""The standard streams of a process, and which consoles show them."""

import os
import subprocess
import sys

import pytest

from fedmpi.comm.failures import process_exit
from fedmpi.comm.launchers import Job

PROGRAM = "import sys; from fedmpi.comm.failures import process_exit; process_exit.setup_stdio(); "


@pytest.mark.parametrize("to", [">&-", "> /dev/full", "| true"])
@pytest.mark.parametrize("python", ["python", "python -u"])
def test_a_closed_or_full_stream_does_not_end_a_command(to, python):
    """Exit code 3 shows that Python's own flush at the exit does not fail, either; it would give 120."""
    program = PROGRAM + "print('line\\n' * 99999, flush=True); sys.stdout.write('end'); sys.exit(3)"
    command = f'set -o pipefail; {python.replace("python", sys.executable)} -c "$PROGRAM" {to}'
    done = subprocess.run(
        ["bash", "-c", command], env=os.environ | {"PROGRAM": program}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_streams_keep_their_options_and_escape_unencodable_characters():
    program = (
        PROGRAM + "print('\u03a9 \u00e9'); print(sys.stdout.encoding, sys.stdout.write_through, sys.stdout.isatty())"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", program],
        env=os.environ | {"PYTHONIOENCODING": "iso-8859-1"},
        capture_output=True,
        timeout=120,
    )
    assert done.stdout == b"\\u03a9 \xe9\niso8859-1 True False\n", done.stderr


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
def test_which_ranks_have_a_console_of_their_own(monkeypatch, launcher, rank, local_rank, env, expected):
    for name in ("SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    job = Job(launcher, rank, 4, local_rank, 2, "node")
    assert process_exit.RankProcess(job).has_own_console() is expected


@pytest.mark.parametrize("closes", [True, False])
def test_a_message_to_a_closed_stream_is_dropped(closes):
    read, write = os.pipe()
    os.close(read)
    out = open(write, "w")  # noqa: SIM115
    if closes:
        out.close()
    process_exit.print_message("a line", out)
    if not closes:
        with pytest.raises(BrokenPipeError):
            out.close()
