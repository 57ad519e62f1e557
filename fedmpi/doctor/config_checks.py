"""Report the ranks, device, back end and memory that a config would use on this machine, after loading its data."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace

from fedmpi import config as configs
from fedmpi.comm import network
from fedmpi.comm.launchers import Job, detect, explain_why_failure_ends_job
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import format_bytes
from fedmpi.common.user_code_errors import explain_known_error
from fedmpi.config import resources
from fedmpi.doctor import FAIL, OK, WARN, ReportRow, join_nonempty

MIN_FREE_BYTES = 1 << 30  # warn if the disk of the run directory has less free space


def check_config(path: str, *overrides: str) -> Iterator[ReportRow]:
    """Yield the rows of the report on a config: the resources that it would use, warnings and errors.

    Args:
        path: the config file.
        overrides: KEY=VALUE settings that replace those of the file.
    """
    try:
        settings = configs.load(path, overrides)
        job = detect(os.environ)
    except UserError as error:
        yield ReportRow("config", str(error), FAIL)
        return
    reports = {
        "output": report_output_directory,
        "ranks": report_ranks_and_failure_policy,
        "device": report_device,
        "backend": report_backend_and_interface,
        "memory": report_memory_needs,
    }
    for name, report in reports.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                row = report(settings, job)
            except Exception as error:
                known = str(error) if isinstance(error, UserError) else explain_known_error(error)
                if known is None:
                    raise
                row = ReportRow(name, known, FAIL)
        yield from (
            ReportRow(row.name, str(each.message), WARN) for each in caught if issubclass(each.category, UserWarning)
        )
        yield row


def report_ranks_and_failure_policy(settings: configs.Settings, job: Job) -> ReportRow:
    """Report the number of ranks, and whether the job would continue after a rank failure."""
    from fedmpi.runtime import build_data

    if settings.data.silos:
        build_data.assign_sites_to_ranks(settings, job.size)
    if job.size == 1:
        return ReportRow(
            "ranks", "one process, which is the server and all clients; start more ranks with mpirun, srun or torchrun"
        )
    started = f"{job.size} ({job.launcher}), {job.local_size} of them on this host"
    policy = settings.faults.on_lost_rank
    if policy == "abort":
        return ReportRow("ranks", started)
    why = explain_why_failure_ends_job(job, os.environ)
    if not why and settings.comm.backend in ("nccl", "mpi"):
        why = f"{settings.comm.backend} cannot continue after a rank failure (comm.backend: gloo can)"
    return ReportRow(
        "ranks", join_nonempty([started, f"faults.on_lost_rank: {policy}, but {why}" * bool(why)]), WARN if why else OK
    )


def report_device(settings: configs.Settings, job: Job) -> ReportRow:
    """Report the device on which a rank on this host would train."""
    import torch

    from fedmpi.runtime.device import choose_device

    # Report the device of a rank that trains, since rank 0, the server, may use another device.
    trainer = job if job.local_size == 1 or job.rank else replace(job, rank=1, local_rank=1)
    picked = choose_device(settings, trainer)
    return ReportRow("device", f"{picked}, {torch.cuda.get_device_name(picked)}" if picked.type == "cuda" else "cpu")


def report_backend_and_interface(settings: configs.Settings, job: Job) -> ReportRow:
    """Report the communication back end and the network interface that the ranks would use."""
    if settings.comm.backend == "mpi":
        from fedmpi.comm.backends import mpi

        mpi.import_mpi(job.launcher)
    if job.size == 1:
        auto = "nccl for several ranks if each has its own GPU, otherwise gloo"
        requested = settings.comm.backend
        return ReportRow(
            "backend",
            f"not needed for one process; {auto if requested == 'auto' else f'{requested} for several ranks'}",
        )
    interface = settings.comm.interface
    by = f"over {', '.join(network.choose_interface(interface))}" if interface is not None else ""
    others = f"if the other hosts are like this one ({job.host})" * (job.local_size < job.size)
    return ReportRow("backend", join_nonempty([_predict_backend(settings, job), by, others]))


def _predict_backend(settings: configs.Settings, job: Job) -> str:
    """Return the communication back end that the ranks on this host would choose: gloo, nccl or mpi."""
    import torch

    from fedmpi.comm.backends import choice
    from fedmpi.runtime.device import choose_device

    descriptions = []
    for rank in range(job.local_size):
        try:
            where = choose_device(settings, replace(job, rank=rank, local_rank=rank))
        except UserError:  # reported in the row about the device
            where = torch.device("cpu")
        descriptions.append(choice.describe_rank(settings.comm.backend, job.host, where))
    return choice.choose_backend(settings.comm.backend, descriptions)


def report_memory_needs(settings: configs.Settings, job: Job) -> ReportRow:
    """Build data, model and method, as `fedmpi validate` does, and report the memory that they need."""
    from fedmpi.runtime.validate import validate_settings

    one_thread = settings.compute.model_copy(update={"threads": 1})  # too many threads are reported in another row
    rows = validate_settings(settings.model_copy(update={"compute": one_thread}), job)
    return ReportRow("memory", join_nonempty(text for label, text in rows if label == "memory"))


def report_output_directory(settings: configs.Settings, job: Job) -> ReportRow:
    """Check the resources that the config requires, and report the run directory and the free space there."""
    resources.check_threads_and_output_dir(settings, writes=job.rank == 0)
    place = settings.output.absolute() / settings.name
    free = shutil.disk_usage(next(path for path in place.parents if path.is_dir())).free
    number = "; it exists already, so a number will be appended to the run's name" if place.exists() else ""
    little = "; this is little for checkpoints: free disk space, or set another output" if free < MIN_FREE_BYTES else ""
    return ReportRow("output", f"{place}, {format_bytes(free)} free{number}{little}", WARN if little else OK)
