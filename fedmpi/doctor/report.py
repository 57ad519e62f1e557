"""The report of `fedmpi doctor`, group by group. Lines are shown as soon as they are known."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fedmpi.comm.job import Job
from fedmpi.comm.launchers import detect, survivors
from fedmpi.common.errors import UserError
from fedmpi.common.version import __version__
from fedmpi.doctor import config_checks, host, libraries, programs
from fedmpi.doctor.report_rows import FAIL, LEGEND, OK, WARN, Row, joined, one_line, shown

PACKAGES = ("numpy", "scipy", "scikit-learn", "matplotlib", "safetensors", "pydantic", "mpi4py")
OF_A_RANK = ("OMPI_COMM_WORLD_", "OMPI_MCA_mpi_ft", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL")  # of this one's variables
Probe = Callable[[], Iterable[Row]]


def silent() -> bool:
    """Return whether another rank makes the report. MPI is not asked, as it might not return."""
    if _is_unnumbered():
        return os.environ["PMIX_RANK"] != "0"
    try:
        return detect(os.environ).rank != 0
    except UserError:
        return False


def report(show: Callable[[str], None], config: Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Show the report. Returns the exit code: 1 if something keeps the config from running."""
    job, trouble = None, "by a PMIx launcher, which does not say how many ranks there are"
    outside = {name: text for name, text in os.environ.items() if not name.startswith(OF_A_RANK)}
    if not _is_unnumbered():
        try:
            job = detect(os.environ)
        except UserError as error:
            trouble = str(error)
    groups: dict[str, dict[str, Probe]] = {
        "software": {
            "python": _python,
            "torch": libraries.torch,
            "gpu": libraries.gpus,
            "torchvision": libraries.torchvision,
            "packages": _packages,
        },
        "ranks": {
            "started": lambda: [_started(job, trouble), *host.meeting(job)],
            "mpi": partial(programs.mpi, outside),
            "srun": lambda: [programs.launcher("srun")],
            "torchrun": programs.torchrun,
            "slurm": host.slurm,
        },
        "machine": {
            "cpu": host.cpu,
            "memory": host.memory,
            "limits": host.limits,
            "temporary": host.temporary,
            "host": partial(host.names, job),
        },
    }
    if config is not None:
        env = outside if _is_unnumbered() else os.environ
        groups["config"] = {"config": partial(config_checks.config, str(config), *overrides, env=env)}
    marks = set()
    for title, probes in groups.items():
        show(title)
        for name, probe in probes.items():
            for line in _answers(name, probe):
                show(shown(line))
                marks.add(line.mark)
    if marks - {OK}:
        show(LEGEND)
    return int(FAIL in marks)


def _answers(name: str, probe: Probe) -> Iterator[Row]:
    """Yield the lines of a probe; one that fails ends with a line that says so."""
    try:
        yield from probe()
    except Exception as error:
        where, mark = (" (`fedmpi validate` says where)", FAIL) if name == "config" else ("", WARN)
        yield Row(name, f"could not be found out: {one_line(error)}{where}", mark)


def _is_unnumbered() -> bool:
    """Return whether a PMIx launcher started this process without a number of ranks."""
    numbers = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID")
    return "PMIX_RANK" in os.environ and not any(name in os.environ for name in numbers)


def _started(job: Job | None, trouble: str) -> Row:
    if job is None:
        return Row("started", trouble, WARN)
    if job.size == 1:
        return Row("started", f"one process ({job.launcher})")
    text = f"{job.size} ranks by {job.launcher}, {job.local_size} on this host"
    return Row("started", f"{text}; {survivors(job, os.environ) or 'the others outlive a lost rank'}")


def _python() -> list[Row]:
    from fedmpi.runtime.record.metadata import git_commit

    at = git_commit(Path(__file__).parent)
    commit = f"commit {at['commit'][:12]}{' with changes' * at['modified']}" if at else ""
    python = joined([platform.python_version(), platform.python_implementation(), platform.platform()])
    return [Row("fedmpi", joined([__version__, commit])), Row("python", python)]


def _packages() -> list[Row]:
    from fedmpi.runtime.record.metadata import installed_version

    return [Row(name, installed_version(name) or "not installed") for name in PACKAGES]
