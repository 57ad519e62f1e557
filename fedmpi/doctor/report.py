"""The report, group by group."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedmpi.comm.launchers.job import Job
from fedmpi.comm.launchers.launcher_env import detect, survivors
from fedmpi.common.errors import UserError
from fedmpi.common.version import __version__
from fedmpi.doctor import host, launchers
from fedmpi.doctor.asking import CommandRunner, Probe, all_at_once
from fedmpi.doctor.lines import BAD, FINE, LEGEND, ODD, Line, joined, shown

TORCH_S, MPI_S, CONFIG_S, FAST_S = 30.0, 10.0, 120.0, 5.0
PACKAGES = ("numpy", "scipy", "scikit-learn", "matplotlib", "safetensors", "pydantic", "mpi4py")
OF_A_RANK = ("OMPI_COMM_WORLD_", "OMPI_MCA_mpi_ft", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL")  # a child is none


def silent() -> bool:
    """Whether another rank makes the report. MPI is not asked: that could take for ever."""
    if "PMIX_RANK" in os.environ and not _numbered():
        return os.environ["PMIX_RANK"] != "0"
    try:
        return detect(os.environ).rank != 0
    except UserError:
        return False


def report(show: Callable[[str], None], config: Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Show the report. Returns the exit code: 1 if something keeps the config from running."""
    runner = CommandRunner()
    with runner.ended_by_signals():
        found = gather(config, overrides, runner)
    marks = {line.mark for _, lines in found for line in lines}
    for title, lines in found:
        show(title)
        for line in lines:
            show(shown(line))
    if marks - {FINE}:
        show(LEGEND)
    return int(BAD in marks)


def gather(config: Path | None, overrides: Sequence[str], runner: CommandRunner) -> list[tuple[str, list[Line]]]:
    """(title, lines) of each group; all probes run at the same time."""
    job, trouble = _job()
    child = runner.run_in_subprocess
    outside = {name: text for name, text in os.environ.items() if not name.startswith(OF_A_RANK)}
    inherited = outside if "PMIX_RANK" in os.environ and not _numbered() else None
    groups: list[tuple[str, list[tuple[str, Probe, float]]]] = [
        (
            "software",
            [
                ("python", _python, FAST_S),
                ("torch", partial(child, "torch", limit_s=TORCH_S), TORCH_S),
                ("packages", _packages, FAST_S),
            ],
        ),
        (
            "ranks",
            [
                ("started", lambda: [_started(job, trouble), *host.meeting(job)], FAST_S),
                ("mpi", partial(child, "mpi", limit_s=MPI_S, env=outside), MPI_S),
                ("mpirun", partial(launchers.launcher, "mpirun", runner), FAST_S),
                ("srun", partial(launchers.launcher, "srun", runner), FAST_S),
                ("torchrun", launchers.torchrun, FAST_S),
                ("slurm", host.slurm, FAST_S),
            ],
        ),
        (
            "machine",
            [
                ("cpu", host.cpu, FAST_S),
                ("memory", host.memory, FAST_S),
                ("limits", host.limits, FAST_S),
                ("temporary", host.temporary, FAST_S),
                ("host", partial(host.names, job), FAST_S),
            ],
        ),
    ]
    if config is not None:
        words = partial(child, "config", str(config), *overrides, limit_s=CONFIG_S, env=inherited)
        groups.append(("config", [("config", words, CONFIG_S)]))
    lines = iter(all_at_once([probe for _, probes in groups for probe in probes]))
    found = [(title, [line for _ in probes for line in next(lines)]) for title, probes in groups]
    for _, group in found:
        group += mismatch(group)
    return found


def mismatch(lines: Sequence[Line]) -> list[Line]:
    """An mpirun that is not of the MPI that mpi4py loads: each rank would believe that it is alone."""
    texts = {line.name: line.text for line in lines if line.mark == FINE}
    ours, theirs = texts.get("mpi", ""), texts.get("mpirun", "")
    version = re.search(r"\d+\.\d+(\.\d+)?", theirs)
    kind = "Open MPI"
    if not ours or not version or ((kind in ours) == (kind in theirs) and version[0] in ours):
        return []
    advice = "set MPI4PY_LIBMPI to its libmpi.so, or put the mpirun of that MPI first on PATH"
    return [Line("mpirun", f"is not of the MPI that mpi4py loads: {advice}", ODD)]


def _numbered() -> bool:
    """Whether the environment says how many ranks there are, too."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ or "SLURM_STEP_ID" in os.environ


def _job() -> tuple[Job | None, str]:
    if "PMIX_RANK" in os.environ and not _numbered():
        return None, "by a PMIx launcher, which does not say how many ranks there are"
    try:
        return detect(os.environ), ""
    except UserError as error:
        return None, str(error)


def _started(job: Job | None, trouble: str) -> Line:
    if job is None:
        return Line("started", trouble, ODD)
    if job.size == 1:
        return Line("started", f"one process ({job.launcher})")
    text = f"{job.size} ranks by {job.launcher}, {job.local_size} on this host"
    return Line("started", f"{text}; {survivors(job, os.environ) or 'the others outlive a lost rank'}")


def _python() -> list[Line]:
    from fedmpi.runtime.record.metadata import git_commit

    at = git_commit(Path(__file__).parent)
    commit = f"commit {at['commit'][:12]}{' with changes' * at['modified']}" if at else ""
    python = joined([platform.python_version(), platform.python_implementation(), platform.platform()])
    return [Line("fedmpi", joined([__version__, commit])), Line("python", python)]


def _packages() -> list[Line]:
    from fedmpi.runtime.record.metadata import installed_version

    return [Line(name, installed_version(name) or "not installed") for name in PACKAGES]
