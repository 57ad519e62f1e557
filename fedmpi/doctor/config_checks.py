"""Report what a config would use on this machine; data, model and plug-ins are built for it."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedmpi import config as configs
from fedmpi.comm import network
from fedmpi.comm.job import Job
from fedmpi.comm.launchers import detect, survivors
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import usable_cores
from fedmpi.common.text import count
from fedmpi.common.user_code_errors import known_fix
from fedmpi.config import resources
from fedmpi.doctor.libraries import BF16_UNITS
from fedmpi.doctor.report_rows import FAIL, WARN, Row, joined

LITTLE_BYTES = 1 << 30  # free for a run directory


def config(path: str, *overrides: str, env: Mapping[str, str]) -> Iterator[Row]:
    """Yield one line for each thing that would be picked, or for what keeps the config from running.

    env: the variables from which the job is read.
    """
    try:
        settings = configs.load(path, overrides)
        job = detect(env)
    except UserError as error:
        yield Row("config", str(error), FAIL)
        return
    parts: tuple[tuple[str, Callable[[configs.Settings, Job], Row]], ...] = (
        ("ranks", ranks),
        ("device", device),
        ("precision", precision),
        ("back end", backend),
        ("interface", interface),
        ("threads", threads),
        ("lost rank", lost_rank),
        ("memory", experiment),
        ("output", output),
    )
    for name, part in parts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                line = part(settings, job)
            except UserError as error:
                line = Row(name, str(error), FAIL)
            except Exception as error:
                known = known_fix(error)
                if known is None:
                    raise
                line = Row(name, known, FAIL)
        yield from (Row(name, str(each.message), WARN) for each in caught if issubclass(each.category, UserWarning))
        yield line


def one_thread(settings: configs.Settings) -> configs.Settings:
    """Return the settings with one thread, for checks that threads do not concern; too many have a row of their own."""
    return settings.model_copy(update={"compute": settings.compute.model_copy(update={"threads": 1})})


def trainer(job: Job) -> Job:
    """Return a rank of this host that trains, since rank 0, the server, may use another device."""
    return job if job.local_size == 1 or job.rank else replace(job, rank=1, local_rank=1)


def ranks(settings: configs.Settings, job: Job) -> Row:
    from fedmpi.runtime import build_data

    if settings.data.silos:
        build_data.site_ranks(settings, job.size)
    if job.size == 1:
        return Row("ranks", "one process, which is server and all clients; mpirun, srun or torchrun start more")
    return Row("ranks", f"{job.size} ({job.launcher}), {job.local_size} of them on this host")


def device(settings: configs.Settings, job: Job) -> Row:
    import torch

    from fedmpi.runtime.device import pick_device

    picked = pick_device(settings, trainer(job))
    return Row("device", f"{picked}, {torch.cuda.get_device_name(picked)}" if picked.type == "cuda" else "cpu")


def precision(settings: configs.Settings, job: Job) -> Row:
    """Report the precision; bf16 runs everywhere, but without units for it it is slower than fp32."""
    import torch

    from fedmpi.runtime.device import pick_device

    wanted = settings.compute.precision
    if wanted == "fp32":
        return Row("precision", wanted)
    try:
        picked = pick_device(settings, trainer(job))
    except UserError:  # the device's line says it
        return Row("precision", wanted)
    if picked.type != "cuda":
        times = bf16_times()
        text = f"bf16, in which a product takes {times:.1f} times as long as in fp32 on this CPU"
        slow = times > 1
    else:
        slow = torch.cuda.get_device_capability(picked)[0] < BF16_UNITS
        text = "bf16, for which this GPU has no units" if slow else wanted
    return Row("precision", text + slow * ": compute.precision=fp32 is faster", WARN if slow else " ")


def bf16_times() -> float:
    """Return how many times as long a matrix product takes in bf16 as in fp32, measured with one thread.

    Instructions for bf16, such as avx512_bf16, need not be faster.
    """
    import torch

    a, threads = torch.ones(384, 384), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        each = [min(_seconds(partial(torch.mm, x, x)) for _ in range(8)) for x in (a.bfloat16(), a)]
    finally:
        torch.set_num_threads(threads)
    return each[0] / each[1]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def backend(settings: configs.Settings, job: Job) -> Row:
    if job.size > 1:
        others = f"if other hosts are like this one ({job.host})" * (job.local_size < job.size)
        return Row("back end", joined([chosen(settings, job), others]))
    asked = chosen(settings, job) if settings.comm.backend == "mpi" else settings.comm.backend
    under = {"auto": "nccl under a launcher if each rank has a GPU of its own, else gloo"}.get(asked, asked)
    return Row("back end", f"none in one process; {under}")


def interface(settings: configs.Settings, job: Job) -> Row:
    if settings.comm.interface is None:
        return Row("interface", "of gloo's and NCCL's choice; comm.interface names one")
    try:
        return Row("interface", ", ".join(network.choose(settings.comm.interface)))
    except UserError as error:  # one process needs none
        return Row("interface", str(error), FAIL if job.size > 1 else WARN)


def chosen(settings: configs.Settings, job: Job) -> str:
    """Return gloo, nccl or mpi as this host's ranks would choose it. Raises UserError."""
    import torch

    from fedmpi.comm.backends import choice, mpi
    from fedmpi.runtime.device import pick_device

    asked = settings.comm.backend
    if asked == "mpi":
        mpi.load()
        if job.launcher in ("torchrun", "env://"):
            raise UserError(mpi.REMEDY[job.launcher])
        return "mpi"
    cards = []
    for rank in range(job.local_size):
        try:
            where = pick_device(settings, replace(job, rank=rank, local_rank=rank))
        except UserError:  # the device's line says it
            where = torch.device("cpu")
        cards.append(choice.describe(asked, job.host, where))
    return choice.choose(asked, cards)


def threads(settings: configs.Settings, job: Job) -> Row:
    resources.check(settings, writes=False)
    each, cores = settings.compute.threads, usable_cores()
    text = f"{each} a rank; this process may use {count(cores, 'core')}"
    return Row("threads", text)


def lost_rank(settings: configs.Settings, job: Job) -> Row:
    """Report whether the job could go on without a lost rank, and whether the config asks for it."""
    wanted = settings.faults.on_lost_rank
    asked = f"faults.on_lost_rank: {wanted}"
    if job.size == 1:
        return Row("lost rank", f"{asked}; there is one process alone")
    why = survivors(job, os.environ)
    try:
        by = chosen(settings, job)
    except UserError:  # the back end's line says it
        by = settings.comm.backend
    if by == "nccl" or (by == "mpi" and job.launcher != "mpi"):
        why = why or f"{by} does not go on without a rank here (comm.backend=gloo does)"
    if wanted == "abort":
        return Row("lost rank", f"ends the run ({asked}); {why or 'drop or redo would go on without it'}")
    return Row("lost rank", f"{asked}, but {why}" if why else f"{asked}: the run goes on", WARN if why else " ")


def experiment(settings: configs.Settings, job: Job) -> Row:
    """Build data, model and method as `fedmpi validate` does, and report its line about memory."""
    from fedmpi.runtime.validate import validate_settings

    rows: Sequence[tuple[str, str]] = validate_settings(one_thread(settings), job)
    return Row("memory", joined(text for label, text in rows if label == "memory"))


def output(settings: configs.Settings, job: Job) -> Row:
    """Report the place of the run directory, and the free space there."""
    from fedmpi.common.host_memory import size_text

    if job.rank == 0:
        resources.check(one_thread(settings))
    place = settings.output.absolute()
    there = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    text = f"{place / settings.name}, {size_text(free)} free"
    if free == 0:
        raise UserError(f"{text}: make room, or choose another output")
    taken = "; it is there already: the run gets a number behind its name" * Path(place / settings.name).exists()
    little = "; little for checkpoints: make room, or choose another output" * (free < LITTLE_BYTES)
    return Row("output", text + taken + little, WARN if little else " ")
