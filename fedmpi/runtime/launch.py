"""One run on one rank, from settings to exit code."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from fedmpi.comm import Communicator, Job, Lost, connect, detect
from fedmpi.common.errors import UserError
from fedmpi.config import Settings, machine
from fedmpi.data.federated import Federated
from fedmpi.engine.federation import Sink
from fedmpi.runtime import build, build_data, consistency, environment, report_text
from fedmpi.runtime.progress import Console
from fedmpi.runtime.run_dir import RunDirectory, summary
from fedmpi.runtime.signals import StopRequest


def pick_device(settings: Settings, job: Job) -> torch.device:
    """compute.device for this rank: GPUs are dealt out by local rank."""
    wanted = settings.compute.device
    if wanted == "cuda" and not torch.cuda.is_available():
        if job.rank == 0 and job.size > 1:
            return torch.device("cpu")  # a server needs no GPU
        raise UserError(f"compute.device is cuda, but host {job.host} has no usable GPU; use auto or cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", job.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def set_numerics(settings: Settings) -> None:
    """Set the threads and kernels that decide the last bits of results."""
    machine.check(settings, writes=False)
    torch.set_num_threads(settings.compute.threads)
    if settings.compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def run(settings: Settings) -> int:
    """Run for the console. Returns the exit code: 0 finished, 128 + n stopped by signal n.

    A job of several ranks ends with 2 for a mistake that the user can correct, 1 for a lost rank or a defect.
    """
    return execute(settings)[1]


def execute(settings: Settings) -> tuple[dict[str, Any], int]:
    """One rank's run: (summary at rank 0, exit code).

    Mistakes found before the ranks connect are raised; later ones are printed and end the job.
    """
    job = detect(os.environ)
    set_numerics(settings)
    device = pick_device(settings, job)
    # Mistakes are found before any rank waits for another; silos are opened later, when this rank knows which are its.
    made = None if settings.data.silos else _made(settings, job, build_data.partitioned(settings), device)
    build.make_method(settings)
    comm = connect(job, settings.comm.backend, device, settings.comm.start_timeout_s, settings.comm.round_timeout_s)
    stop = StopRequest().listen()
    try:
        result = _connected(settings, job, comm, device, made, stop)
    except Exception as error:
        if job.size == 1:
            raise
        if isinstance(error, UserError | Lost):
            _complain(job, f"error: {error}")
        else:
            _complain(job, f"this is a defect of fedmpi or of a plug-in:\n{traceback.format_exc()}")
        comm.abort(2 if isinstance(error, UserError) else 1)
    finally:
        stop.deaf()
    comm.close()
    return result


def _complain(job: Job, text: str) -> None:
    """Rank 0 reports at once; another rank adds who it is, after a moment in which the launcher may have ended it."""
    if job.rank:
        time.sleep(1.0)
    where = f"fedmpi [rank {job.rank} on {job.host}]" if job.rank else "fedmpi"
    print(f"{where}: {text}", file=sys.stderr, flush=True)


def _made(settings: Settings, job: Job, data: Federated, device: torch.device) -> build.Experiment:
    made = build.experiment(settings, data, device)
    build.check_memory(made, job)
    return made


def _connected(
    settings: Settings,
    job: Job,
    comm: Communicator,
    device: torch.device,
    made: build.Experiment | None,
    stop: StopRequest,
) -> tuple[dict[str, Any], int]:
    timeout_s = settings.comm.start_timeout_s
    consistency.agree(comm, {key: consistency.of(text) for key, text in settings.digest_items().items()}, timeout_s)
    made = made or _made(settings, job, build_data.siloed(settings, comm), device)
    code = consistency.code(type(made.method), type(made.task), type(made.net.module))
    layout = {"(layout)": consistency.of(made.model.layout.describe())}
    data = consistency.data(made.data) if job.size > 1 else {}  # hashing all of it takes a moment
    consistency.agree(comm, {**code, **data, **layout}, timeout_s)

    facts = {"host": job.host, "device": report_text.device_name(device)}
    ranks = [json.loads(said) for said in comm.allgather_bytes(json.dumps(facts).encode(), timeout_s)]
    if comm.rank:
        build.federation(made, comm, stop).run()
        return {}, 128 + stop.signal if stop() else 0
    return _rank0(made, job, comm, stop, ranks)


def _rank0(
    made: build.Experiment, job: Job, comm: Communicator, stop: StopRequest, ranks: list[dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    settings, data = made.settings, made.data
    directory = RunDirectory.create(settings.output, settings.name)
    directory.write_config(settings.resolved())
    backend = type(comm).__name__.lower()
    directory.write_environment(environment.describe(job.launcher, backend, ranks, settings.compute.threads))
    scheme = settings.data.partition.scheme if settings.data.partition else "silos"
    held = [data.validation[k].index.numpy() for k in sorted(data.validation)] if data.parts is not None else []
    directory.write_partition(scheme, settings.seed, data.train_sizes, data.label_counts, data.parts, held)

    headline = made.task.names[0]
    prefix = "" if "global" in settings.evaluate.protocol else f"{settings.evaluate.protocol[0]}_"
    shown = [f"{prefix}{name}" for name in ("loss", *made.task.names)]
    live = job.launcher in ("single", "torchrun") and "SLURM_JOB_ID" not in os.environ
    console = Console(settings.rounds, shown, directory.log, live=live)
    last_clients: list[dict[str, Any]] = []

    def on_round(row: dict[str, Any]) -> None:
        directory.add_metrics(row)
        console.round(row, fed.server.view.noted if fed.server is not None else ())

    def on_clients(rows: list[dict[str, Any]]) -> None:
        last_clients[:] = rows or last_clients
        for row in rows:
            directory.add_client(row)

    for line in report_text.headlines(made, job, backend):
        console.say(line)
    fed = build.federation(made, comm, stop, Sink(on_round, on_clients))
    reason = fed.run()
    console.close()
    facts = {"input_shape": ",".join(map(str, data.input_shape)), "classes": str(data.classes)}
    assert fed.server is not None  # this is rank 0
    directory.write_model(made.model.state_dict(fed.server.w, fed.server.b), facts)
    rows = directory.metrics()
    result = summary(rows, report_text.figures_in(rows), reason if not stop() else f"signal {stop.signal}")
    directory.write_summary(result)
    report_text.farewell(console, directory, result, f"{prefix}{headline}", last_clients, made)
    return {**result, "directory": str(directory.path)}, 128 + stop.signal if stop() else 0


def validate(settings: Settings) -> list[tuple[str, str]]:
    """Check everything that can be checked without training, data included. Returns rows (label, text) to show."""
    from fedmpi.comm.solo import Solo

    set_numerics(settings)
    comm, cpu = Solo(torch.device("cpu")), torch.device("cpu")
    data = build_data.siloed(settings, comm) if settings.data.silos else build_data.partitioned(settings)
    made = build.experiment(settings, data, cpu)
    fed = build.federation(made, comm, lambda: False)
    return report_text.check_list(made, fed, build.check_memory(made, detect({})))
