"""What a config would get on this machine: data and model are built, plug-ins included."""

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
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.launchers.launcher_env import detect, survivors
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import usable_cores
from fedmpi.common.text import count
from fedmpi.common.user_code_errors import known_fix
from fedmpi.config import resources
from fedmpi.doctor.libraries import BF16_UNITS
from fedmpi.doctor.lines import BAD, ODD, Line, joined

LITTLE_BYTES = 1 << 30  # free for a run directory


def config(path: str, *overrides: str, env: Mapping[str, str]) -> Iterator[Line]:
    """Yield one line for each thing that would be picked, or for what keeps the config from running.

    env: the variables from which the job is read.
    """
    try:
        settings = configs.load(path, overrides)
        job = detect(env)
    except UserError as error:
        yield Line("config", str(error), BAD)
        return
    parts: tuple[tuple[str, Callable[[configs.Settings, Job], Line]], ...] = (
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
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                line = part(settings, job)
            except UserError as error:
                line = Line(name, str(error), BAD)
            except Exception as error:
                known = known_fix(error)
                if known is None:
                    raise
                line = Line(name, known, BAD)
        yield from (Line(name, str(each.message), ODD) for each in told if issubclass(each.category, UserWarning))
        yield line


def one_thread(settings: configs.Settings) -> configs.Settings:
    """For what does not depend on threads: too many of them are said in their own line."""
    return settings.model_copy(update={"compute": settings.compute.model_copy(update={"threads": 1})})


def trainer(job: Job) -> Job:
    """A rank of this host that trains: rank 0, the server, may compute elsewhere."""
    return job if job.local_size == 1 or job.rank else replace(job, rank=1, local_rank=1)


def ranks(settings: configs.Settings, job: Job) -> Line:
    from fedmpi.runtime import build_data

    if settings.data.silos:
        build_data.site_ranks(settings, job.size)
    if job.size == 1:
        return Line("ranks", "one process, which is server and all clients; mpirun, srun or torchrun start more")
    return Line("ranks", f"{job.size} ({job.launcher}), {job.local_size} of them on this host")


def device(settings: configs.Settings, job: Job) -> Line:
    import torch

    from fedmpi.runtime.device import pick_device

    picked = pick_device(settings, trainer(job))
    return Line("device", f"{picked}, {torch.cuda.get_device_name(picked)}" if picked.type == "cuda" else "cpu")


def precision(settings: configs.Settings, job: Job) -> Line:
    """bf16 runs everywhere; without units for it, it is slower than fp32."""
    import torch

    from fedmpi.runtime.device import pick_device

    wanted = settings.compute.precision
    if wanted == "fp32":
        return Line("precision", wanted)
    try:
        picked = pick_device(settings, trainer(job))
    except UserError:  # the device's line says it
        return Line("precision", wanted)
    if picked.type != "cuda":
        times = bf16_times()
        said = f"bf16, in which a product takes {times:.1f} times as long as in fp32 on this CPU"
        slow = times > 1
    else:
        slow = torch.cuda.get_device_capability(picked)[0] < BF16_UNITS
        said = "bf16, for which this GPU has no units" if slow else wanted
    return Line("precision", said + slow * ": compute.precision=fp32 is faster", ODD if slow else " ")


def bf16_times() -> float:
    """Seconds of a product of matrices in bf16 by one thread over those in fp32, measured: instructions for it, which a
    CPU may name (avx512_bf16), need not be faster."""
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


def backend(settings: configs.Settings, job: Job) -> Line:
    if job.size > 1:
        others = f"if other hosts are like this one ({job.host})" * (job.local_size < job.size)
        return Line("back end", joined([chosen(settings, job), others]))
    asked = chosen(settings, job) if settings.comm.backend == "mpi" else settings.comm.backend
    under = {"auto": "nccl under a launcher if each rank has a GPU of its own, else gloo"}.get(asked, asked)
    return Line("back end", f"none in one process; {under}")


def interface(settings: configs.Settings, job: Job) -> Line:
    if settings.comm.interface is None:
        return Line("interface", "of gloo's and NCCL's choice; comm.interface names one")
    try:
        return Line("interface", ", ".join(network.choose(settings.comm.interface)))
    except UserError as error:  # one process needs none
        return Line("interface", str(error), BAD if job.size > 1 else ODD)


def chosen(settings: configs.Settings, job: Job) -> str:
    """gloo | nccl | mpi, as far as this host can tell: its own ranks stand for all. Raises UserError."""
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


def threads(settings: configs.Settings, job: Job) -> Line:
    resources.check(settings, writes=False)
    each, cores = settings.compute.threads, usable_cores()
    text = f"{each} a rank; this process may use {count(cores, 'core')}"
    return Line("threads", text)


def lost_rank(settings: configs.Settings, job: Job) -> Line:
    """Whether the job could go on without one, and whether the config asks for it (faults.on_lost_rank)."""
    wanted = settings.faults.on_lost_rank
    asked = f"faults.on_lost_rank: {wanted}"
    if job.size == 1:
        return Line("lost rank", f"{asked}; there is one process alone")
    why = survivors(job, os.environ)
    try:
        by = chosen(settings, job)
    except UserError:  # the back end's line says it
        by = settings.comm.backend
    if by == "nccl" or (by == "mpi" and job.launcher != "mpi"):
        why = why or f"{by} does not go on without a rank here (comm.backend=gloo does)"
    if wanted == "abort":
        return Line("lost rank", f"ends the run ({asked}); {why or 'drop or redo would go on without it'}")
    return Line("lost rank", f"{asked}, but {why}" if why else f"{asked}: the run goes on", ODD if why else " ")


def experiment(settings: configs.Settings, job: Job) -> Line:
    """Data, model and method are built as `fedmpi validate` builds them; its line about memory is ours."""
    from fedmpi.runtime.validate import validate_settings

    rows: Sequence[tuple[str, str]] = validate_settings(one_thread(settings), job)
    return Line("memory", joined(text for label, text in rows if label == "memory"))


def output(settings: configs.Settings, job: Job) -> Line:
    """Where the run directory goes, and the space there."""
    from fedmpi.common.host_memory import size_text

    if job.rank == 0:
        resources.check(one_thread(settings))
    place = settings.output.absolute()
    there = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    said = f"{place / settings.name}, {size_text(free)} free"
    if free == 0:
        raise UserError(f"{said}: make room, or choose another output")
    taken = "; it is there already: the run gets a number behind its name" * Path(place / settings.name).exists()
    little = "; little for checkpoints: make room, or choose another output" * (free < LITTLE_BYTES)
    return Line("output", said + taken + little, ODD if little else " ")
