"""`fedmpi validate`: everything that can be checked of a config without training."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedmpi.comm import Job, detect
from fedmpi.common.errors import UserError
from fedmpi.config import Settings
from fedmpi.runtime import build, build_data, memory
from fedmpi.runtime.device import pick_device, set_numerics
from fedmpi.runtime.record import report_text
from fedmpi.runtime.record.tracking.hearing import hearing


def validate_settings(settings: Settings, job: Job | None = None) -> list[tuple[str, str]]:
    """Check everything that can be checked without training, data included. Returns rows (label, text) to show.

    job: whose ranks need memory; None: a single process.
    """
    from fedmpi.comm.base import Solo

    set_numerics(settings)
    comm, cpu = Solo(torch.device("cpu")), torch.device("cpu")
    data = build_data.siloed(settings, comm) if settings.data.silos else build_data.partitioned(settings)
    made = build.experiment(settings, data, cpu)
    fed = build.federation(made, comm, lambda: False)
    hearing(settings)
    job = job or detect({})
    return report_text.check_list(made, fed, memory.check_job(made, job, _devices_here(settings, job)))


def _devices_here(settings: Settings, job: Job) -> list[torch.device]:
    """Where each rank of this host would compute; on the CPU where `pick_device` refuses, which says so elsewhere."""
    devices, first = list[torch.device](), max(job.rank - job.local_rank, 0)
    for local_rank in range(job.local_size):
        try:
            devices.append(pick_device(settings, replace(job, rank=first + local_rank, local_rank=local_rank)))
        except UserError:
            devices.append(torch.device("cpu"))
    return devices
