"""One run on one rank, from settings to exit code."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch

from fedmpi.comm import Communicator, Job, Lost, connect, detect
from fedmpi.comm.audit import Audit
from fedmpi.comm.backends.choice import gpu_uuid
from fedmpi.comm.base import Gone
from fedmpi.comm.loss import silence
from fedmpi.comm.loss.alarm import Alarm, reason
from fedmpi.comm.loss.leaving import tell_fatal_signals
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common import heap, places
from fedmpi.common.blame import remedy
from fedmpi.common.errors import UserError
from fedmpi.common.signals import StopRequest
from fedmpi.config import Settings, machine
from fedmpi.config.later import comparable
from fedmpi.runtime import build, build_data, consistency, memory, recorded
from fedmpi.runtime.record import environment, plugins, report_text, warned
from fedmpi.runtime.record.describing import written
from fedmpi.runtime.record.tracking.hearing import hearing
from fedmpi.runtime.resuming import keeping


def pick_device(settings: Settings, job: Job) -> torch.device:
    """compute.device for this rank: GPUs are dealt out by local rank. Raises UserError if a rank that trains has none,
    though the config asks for it."""
    wanted = settings.compute.device
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", job.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    trains = job.size == 1 or job.rank > 0 or settings.server.trains  # else it is a server, which needs no GPU
    if wanted == "cuda" and trains:
        remedy = "use auto or cpu" if job.rank or job.size == 1 else "use auto or cpu, or server.trains: false"
        raise UserError(f"compute.device is cuda, but {why_no_gpu(job.host)}; {remedy}")
    return torch.device("cpu")


def why_no_gpu(host: str) -> str:
    """Say why this process, which is on `host`, has no usable GPU; in the words of CUDA where it has some."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return (
            f"on host {host} this PyTorch ({torch.__version__}) was built without CUDA; install a wheel with it "
            "(https://pytorch.org/get-started/locally)"
        )
    reason = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = f" ({(str(error).strip().splitlines() or [type(error).__name__])[0][:200]})"
    return f"host {host} has no usable GPU{reason}"


def set_numerics(settings: Settings) -> None:
    """Set the threads and kernels that decide the last bits of results, and what becomes of freed memory."""
    machine.check(settings, writes=False)
    heap.keep()
    torch.set_num_threads(settings.compute.threads)
    # These names work without a warning in every PyTorch since 2.6, and have no effect on a CPU.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.compute.tf32
    torch.backends.cudnn.benchmark = settings.compute.cudnn_benchmark
    if settings.compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def execute(
    settings: Settings,
    command: StopRequest | None = None,
    after: Callable[[dict[str, Any]], object] = lambda _: None,
) -> tuple[dict[str, Any], int]:
    """One rank's run: (summary at rank 0, exit code). command: its ear, if the process is `fedmpi run` and ends soon.
    after: what rank 0 does with the summary while the others wait: once they have left, launchers may end it.
    The exit code: 0 finished, 75 stopped by a signal, 128 + n without checkpoints, 1 come apart (faults.on_divergence:
    stop). Of the ranks of a job that was stopped rank 0 has that code, and leaves last; the others have 0. A job ends
    with 2 for a mistake that the user can correct, 1 for a lost rank or a defect.

    In a single process mistakes are raised; in a job of several ranks they are printed once, and end it.
    """
    tell_fatal_signals()
    job = detect(os.environ)
    timeouts = Timeouts(settings.comm.start_timeout_s, settings.comm.round_timeout_s)
    alarm, stop, until_end = Alarm(job, timeouts), command or StopRequest(), ExitStack()
    try:
        until_end.enter_context(places.here())
        until_end.enter_context(warned.heard())
        if command is not None:
            stop.listen(signal.SIGINT)
        stop.alone(recorded.stopped(settings.checkpoint.every > 0, stop))
        set_numerics(settings)
        device = pick_device(settings, job)
        # Mistakes are found before any rank waits for another; silos are opened later, when this rank knows its own.
        made, data = None, dict[str, str]()
        if not settings.data.silos:
            partitioned = build_data.partitioned(settings)
            if job.size > 1 or settings.checkpoint.every:  # else nobody compares them
                data = consistency.data(partitioned)
            made = build.experiment(settings, partitioned, device)
        build.make_method(settings)
        code = consistency.code()  # here: once all have met, they would do it at the same time, on few cores
        comm = connect(job, settings.comm.backend, device, timeouts, alarm, settings.comm.interface)
        stop.listen()
        stop.alone(None)
        result = _connected(settings, job, comm, device, made, code, data, stop, alarm, until_end)
        if comm.rank == 0:
            after(result[0])
        with suppress(*([Lost] if settings.faults.on_lost_rank != "abort" else [])):  # all of the run is on disk
            comm.close()
        if result[1] and job.size > 1:
            time.sleep(timeouts.launcher)  # the others leave first: a launcher that sees rank 0's exit code ends them
        return result
    except Exception as error:
        if job.size > 1:  # still listening: the launcher, which sees a dead rank, too, must not end rank 0 unheard
            error = silence.at_fault(alarm, error)
            alarm.fail(*_explained(error), reacts=isinstance(error, Gone))
        with suppress(Exception):  # the cause is said, whatever becomes of the run directory
            alarm.will(reason(_explained(error)[0]))
        known = remedy(error)
        if known is None:
            raise
        raise UserError(known) from error
    finally:
        until_end.close()
        stop.alone(None)
        stop.deaf(command is not None)


def _explained(error: Exception) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    known = remedy(error)
    if known is None and not isinstance(error, UserError | Lost):
        return f"this is a defect of fedmpi or of a plug-in:\n{traceback.format_exc()}", 1
    return f"error: {known or error}", 1 if isinstance(error, Lost) else 2


def _connected(
    settings: Settings,
    job: Job,
    comm: Communicator,
    device: torch.device,
    made: build.Experiment | None,
    code: dict[str, str],
    data: dict[str, str],
    stop: StopRequest,
    alarm: Alarm,
    until_end: ExitStack,
) -> tuple[dict[str, Any], int]:
    timeout_s = settings.comm.start_timeout_s
    if settings.data.silos and settings.data.audit and comm.rank:
        comm.audit = Audit()
    items = compared(settings)
    consistency.agree(comm, {key: consistency.of(text) for key, text in items.items()}, timeout_s)
    made = made or build.experiment(settings, build_data.siloed(settings, comm), device)
    ranks = _exchange_facts(made, job, comm, device, timeout_s)
    own = plugins.files(settings, made.method, made.task, made.net.module)
    code |= plugins.digests(own)
    layout = {"(layout)": consistency.of(made.model.layout.describe())}
    layout |= {} if made.initial is None else {"(initial weights)": made.initial.digest}
    layout |= consistency.frozen(made.model.frozen)
    consistency.agree(comm, {**code, **data, **layout}, timeout_s)
    if comm.rank:
        fed = build.federation(made, comm, stop, regroups=not recorded.stuck(ranks))
        keeping.start(fed, made, None, False, lambda text: None)
        fed.run()
        return {}, 0
    identity = {**written(settings).identity(), **code, **data, **layout}
    return recorded.run(made, job, comm, stop, alarm, until_end, ranks, own, identity)


def compared(settings: Settings) -> dict[str, str]:
    """Return the settings that all ranks must have in common, by dotted key.

    What one config leaves out equals the default that another one names: rank 0 may go on from the config.yaml of the
    run, the others from the user's own.
    """
    return comparable(written(settings).digest_items())


def _exchange_facts(
    made: build.Experiment, job: Job, comm: Communicator, device: torch.device, timeout_s: float
) -> list[dict[str, Any]]:
    """Tell all ranks where each computes. Returns the facts about them, in order.

    Only now is it known which ranks share a host or a GPU, and where uploads are gathered: raises UserError, the same
    on every rank, if they need more memory than there is. Rank 0 warns of those that should have a GPU.
    """
    on_cpu, auto = device.type == "cpu", made.settings.compute.device == "auto"
    facts = {"host": job.host, "device": report_text.device_name(device), "gpu": gpu_uuid(device)}
    facts |= {"no_regroup": comm.can_regroup, **environment.describe_gpu(device)}
    gathers_on_gpu, free = comm.device.type == "cuda", memory.free(device)
    needs = build.memory_needs(made, comm.size, gathers_on_gpu, made.model.w.is_cuda)
    more = {"needs": needs, "free": free, "no_gpu": why_no_gpu(job.host) if on_cpu and auto else ""}
    answers = [json.loads(text) for text in comm.allgather_bytes(json.dumps({**facts, **more}).encode(), timeout_s)]
    comm.hosts = dict(enumerate(each["host"] for each in answers))
    trains = build_data.training_ranks(made.settings, comm.size)
    memory.check(dict(enumerate(answers)), trains, gathers_on_gpu)
    slow = report_text.without_gpu(answers, trains)
    if slow and comm.rank == 0:
        warnings.warn(slow, stacklevel=2)
    return [{key: value for key, value in each.items() if key not in more} for each in answers]


def validate(settings: Settings, job: Job | None = None) -> list[tuple[str, str]]:
    """Check everything that can be checked without training, data included. Returns rows (label, text) to show.

    job: whose ranks need memory; None: a single process.
    """
    from fedmpi.comm.backends.solo import Solo

    set_numerics(settings)
    comm, cpu = Solo(torch.device("cpu")), torch.device("cpu")
    data = build_data.siloed(settings, comm) if settings.data.silos else build_data.partitioned(settings)
    made = build.experiment(settings, data, cpu)
    fed = build.federation(made, comm, lambda: False)
    hearing(settings)
    job = job or detect({})
    return report_text.check_list(made, fed, build.check_memory(made, job, _devices_here(settings, job)))


def _devices_here(settings: Settings, job: Job) -> list[torch.device]:
    """Where each rank of this host would compute; on the CPU where `pick_device` refuses, which says so elsewhere."""
    devices, first = list[torch.device](), max(job.rank - job.local_rank, 0)
    for local_rank in range(job.local_size):
        try:
            devices.append(pick_device(settings, replace(job, rank=first + local_rank, local_rank=local_rank)))
        except UserError:
            devices.append(torch.device("cpu"))
    return devices
