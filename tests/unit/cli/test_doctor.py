"""`fedmpi doctor`: each probe says what it finds; none that fails, hangs or dies keeps the report from being made."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, clean_env, wait_until_ended

from fedmpi.comm.launchers import Job
from fedmpi.doctor import FAIL, OK, WARN, ReportRow, config_checks, machine, report_rows
from fedmpi.doctor.report_rows import format_row
from fedmpi.runtime import memory

QUICK = str(ROOT / "configs" / "quickstart.yaml")
FOUR = Job("mpi", 0, 4, 0, 4, "here")
NEEDS_CPU_TORCH = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher."""
    for name in set(os.environ) - set(clean_env()):
        monkeypatch.delenv(name)


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# ---- programs ----
@pytest.mark.parametrize(
    ("script", "mark", "text"),
    [
        ("echo 'mpirun (Open MPI) 5.0.7'; echo; echo Report bugs to", OK, "mpirun (Open MPI) 5.0.7 ("),
        ("printf 'HYDRA build details:\\n  Version:   4.2.0\\n'", OK, "Version:   4.2.0 ("),
        ("echo hello", OK, "unknown version ("),
        ("echo no PMIx >&2; exit 1", WARN, "failed with exit code 1: no PMIx"),
        ("kill -SEGV $$", WARN, "failed with exit code "),
        ("trap '' TERM INT; while :; do sleep 987.25; done", WARN, "did not answer within 0.5 s"),
        (None, OK, "not on PATH"),
    ],
)
def test_an_mpirun_of_any_kind_is_one_line(tmp_path, monkeypatch, script, mark, text):
    if script is not None:
        program(tmp_path / "mpirun", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    monkeypatch.setattr(machine, "LAUNCHER_TIMEOUT_S", 0.5 if script and "sleep" in script else 60)
    row = machine.report_launcher_version("mpirun")
    assert (row.name, row.mark) == ("mpirun", mark)
    assert text in row.text
    assert wait_until_ended("987.25")


def test_a_launcher_that_cannot_be_started_and_a_torchrun_of_another_python(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "srun").write_bytes(b"\x7fELF")
    (tmp_path / "srun").chmod(0o755)
    program(tmp_path / "torchrun", "exit 0")
    *_, srun, torchrun = machine.report_launchers()
    assert (srun.mark, torchrun.mark) == (WARN, WARN)
    assert "failed with exit code 127" in srun.text
    assert "belongs to another Python" in torchrun.text


@pytest.mark.parametrize(
    ("library", "mpirun", "differs"),
    [
        ("Open MPI v5.0.7, package: x", "mpirun (Open MPI) 5.0.7", False),
        ("Open MPI v5.0.7, package: x", "mpirun (Open MPI) 4.1.4", True),
        ("Open MPI v5.0.7, package: x", "Version:   4.2.0", True),
        ("MPICH Version: 4.2.0", "Version:   4.2.0", False),
        ("", "mpirun (Open MPI) 5.0.7", False),
    ],
)
def test_an_mpirun_of_another_mpi_is_told(monkeypatch, library, mpirun, differs):
    monkeypatch.setattr(machine, "run_program", lambda *_: (library, "" if library else "failed with exit code 1"))
    monkeypatch.setattr(machine, "report_launcher_version", lambda name: ReportRow(name, f"{mpirun} (/bin/mpirun)"))
    rows = [row for row in machine.report_launchers() if row.name.startswith("mpi")]
    assert [row.mark for row in rows if row.name == "mpi"] == [OK if library else WARN]
    assert ["MPI4PY_LIBMPI" in row.text for row in rows if row.mark == WARN and library] == [True] * differs


def test_a_check_that_raises_is_one_line_and_keeps_what_it_said_before():
    def wrong():
        yield ReportRow("fine", "yes")
        raise ValueError("odd\nsecond line")

    rows = [*report_rows._run_check(wrong, "machine")]
    assert rows == [ReportRow("fine", "yes"), ReportRow("wrong", "check failed: ValueError: odd", WARN)]
    assert [*report_rows._run_check(wrong, "config")][1].mark == FAIL


# ---- the machine ----
def cards(monkeypatch, *capabilities):
    about = [SimpleNamespace(name="Card", total_memory=80 << 30, major=a, minor=b, uuid=n)
             for n, (a, b) in enumerate(capabilities)]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(about))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(about))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: about[getattr(n, "index", n)])


def test_temporary_files_want_room(monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 20))
    row = next(machine.report_free_disk_space())
    assert row.mark == WARN
    assert "TMPDIR" in row.text


def test_a_host_name_that_leads_to_loopback_matters_between_hosts_only(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert {row.mark for row in machine.report_network()} == {OK}
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    first, second, _ = machine.report_network()
    assert "resolves to 127.0.1.1" in first.text
    assert second.mark == WARN
    assert "set the variable MASTER_ADDR, or comm.interface" in second.text


def test_how_a_rank_would_join_is_told(monkeypatch):
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, text)
    first, second = machine.report_job()
    assert first.text.startswith("2 ranks by env://")
    assert second.text == "by MASTER_ADDR=10.0.0.1, MASTER_PORT=29500"
    monkeypatch.setenv("RANK", "1")
    assert report_rows.print_report(pytest.fail) == 0  # rank 0 makes it


# ---- a config ----
def wants(*overrides, job=None, monkeypatch=None):
    if job is not None:
        monkeypatch.setattr(config_checks, "detect", lambda env: job)
    return {line.name: line for line in config_checks.check_config(QUICK, *overrides)}


@pytest.mark.parametrize(
    ("gpus", "backend", "host_bytes", "gpu_bytes", "refused"),
    [
        (0, "auto", 2, 0, "rank 0 and 3 training ranks on host here"),
        (4, "gloo", 2, 1, ""),  # rank 0 has its part of the host, the others have a GPU each
        (4, "auto", 0, 1, ""),  # rank 0, too, as NCCL carries the uploads
        (4, "gloo", 0, 1, "rank 0 on host here"),
        (2, "auto", 2, 1, "2 training ranks on GPU cuda:1"),  # which gloo carries, as two ranks share one
    ],
)
def test_host_and_gpus_have_a_sum_each(monkeypatch, gpus, backend, host_bytes, gpu_bytes, refused):
    """host_bytes, gpu_bytes: for how many ranks they are enough."""
    needs = {"rank 0": 20, "a training rank": 20, "of which client state": 0, "of which on the host": 0}
    monkeypatch.setattr(memory, "estimate_memory", lambda *_, **__: needs)
    cards(monkeypatch, *[(8, 0)] * gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * gpu_bytes, 80))
    monkeypatch.setattr(memory, "get_available_bytes", lambda: 20 * host_bytes)
    line = wants(f"comm.backend={backend}", job=FOUR, monkeypatch=monkeypatch)["memory"]
    assert (line.mark == FAIL) == bool(refused), line.text
    assert refused in line.text


def test_gpus_are_picked_and_dealt_out(monkeypatch):
    cards(monkeypatch, (7, 0), (7, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    two = Job("mpi", 0, 2, 0, 2, "here")
    found = wants(job=two, monkeypatch=monkeypatch)
    assert found["device"].text == "cuda:1, Card"
    assert found["backend"].text == "nccl"
    assert wants("comm.backend=nccl", job=FOUR, monkeypatch=monkeypatch)["backend"].mark == FAIL  # four on two


@NEEDS_CPU_TORCH
@pytest.mark.parametrize(
    ("override", "name", "said"),
    [
        ("compute.device=cuda", "device", "was built without CUDA; install a wheel with CUDA"),
        ("compute.threads=100000", "output", "compute.threads: 100000 is not allowed; must be at most"),
        ("output=/dev/null", "output", "/dev/null is a file; choose another output directory"),
        ("data.root=/nowhere", "", ""),
        ("data={source: mnist, root: /nowhere}", "memory", "/nowhere"),
        ("method.name=fedprxo", "memory", "did you mean 'fedprox'?"),
        ("comm.backend=nccl", "backend", "computes without a GPU"),
        ("comm.interface=ib*", "backend", "has no such network interface with an IPv4 address; it has lo"),
        ("sede=1", "config", "did you mean 'seed'?"),
    ],
)
def test_what_keeps_a_config_from_running_is_marked(monkeypatch, override, name, said):
    found = wants(override, job=FOUR, monkeypatch=monkeypatch)
    assert [line.name for line in found.values() if line.mark == FAIL] == [name] * bool(name)
    assert not name or said in found[name].text


def test_too_few_ranks_for_the_sites(monkeypatch):
    monkeypatch.setattr(config_checks, "detect", lambda env: Job("mpi", 0, 2, 0, 2, "here"))
    rows = {row.name: row for row in config_checks.check_config(str(ROOT / "configs" / "heart_disease.yaml"))}
    assert rows["ranks"].mark == FAIL
    assert "4 sites, but only 1 training rank" in rows["ranks"].text


# ---- the command ----
def test_lines_have_no_control_characters_and_no_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert format_row(ReportRow("a", "/home/me/x \x1b[31m\nmore", FAIL)) == f"! a{' ' * 14}~/x  [31m\n{' ' * 17}more"
    assert format_row(ReportRow("a", "/home/meyer", OK)).endswith("/home/meyer")
