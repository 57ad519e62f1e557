"""One run on one rank, from settings to exit code: `execute`, which is read from top to bottom."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedmpi.comm import Communicator, Job, Lost, connect, detect
from fedmpi.comm.audit import Audit
from fedmpi.comm.backends.choice import gpu_uuid
from fedmpi.comm.base import ConnectionLostError, RankTimeoutError
from fedmpi.comm.failures.error_reporter import ErrorReporter, reason
from fedmpi.comm.failures.process_exit import tell_fatal_signals
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.errors import RESTART_LATER, UserError
from fedmpi.common.signals import CommandProcess, StopRequest
from fedmpi.common.user_code_errors import known_fix
from fedmpi.config import Settings
from fedmpi.config.resume_rules import comparable
from fedmpi.engine.faults.lost_ranks import LostRanks
from fedmpi.engine.federation import Federation
from fedmpi.runtime import build, build_data, memory, rank_agreement, trust
from fedmpi.runtime.device import pick_device, set_numerics, why_no_gpu
from fedmpi.runtime.record import durable, plugins, report_text
from fedmpi.runtime.record.data_files import write_own_preprocessing
from fedmpi.runtime.record.metadata import describe_environment, describe_gpu, resolve
from fedmpi.runtime.record.plugins import PluginFile
from fedmpi.runtime.record.recorder import RankRecorder, Recorder
from fedmpi.runtime.record.timeline import TimelineFile
from fedmpi.runtime.record.tracking import make_loggers
from fedmpi.runtime.resuming import resume
from fedmpi.runtime.resuming.checkpoints import Checkpoints, Rows

OUTCOME = "FEDMPI_OUTCOME"  # environment variable: a file for rank 0's exit code and the rounds it completed


@dataclass
class RunContext:
    """What the steps of a run on one rank share. Each step sets the fields that it finds out."""

    settings: Settings
    job: Job
    stop: StopRequest
    timeouts: Timeouts
    recorder: RankRecorder  # a Recorder at rank 0
    until_end: ExitStack = field(default_factory=ExitStack)  # what stays open until all ranks are at their end
    code_digests: dict[str, str] = field(default_factory=dict)
    data_digests: dict[str, str] = field(default_factory=dict)
    device: torch.device = field(init=False)
    experiment: build.Experiment = field(init=False)
    comm: Communicator = field(init=False)
    ranks: list[dict[str, Any]] = field(init=False)  # host, device, ... of each
    no_regroup: str = ""  # why the job cannot go on without one of its ranks
    plugins: list[PluginFile] = field(init=False)  # files of the user's own code
    identity: dict[str, str] = field(init=False)  # rank 0's: settings and digests, which a resumed run must share
    environment: dict[str, Any] = field(init=False)  # rank 0's: versions, hosts, devices, ...
    is_resumed: bool = False  # rank 0's: whether the run directory holds a run to go on with
    accepted: list[str] = field(default_factory=list)  # rank 0's: what a resumed run may have changed


def execute(
    settings: Settings,
    command: CommandProcess | None = None,
    after: Callable[[Settings, dict[str, Any]], object] = lambda settings, summary: None,
) -> tuple[dict[str, Any], int]:
    """Run one rank: (summary at rank 0, exit code).

    In a single process mistakes are raised; in a job of several ranks they are printed once, and end it.

    Args:
        settings: of the run.
        command: the process of `fedmpi run`, which ends soon.
        after: what rank 0 does with the summary while the others wait: once they have left, launchers may end it.

    Returns:
        The exit code is 0 for finished, 75 for stopped by a signal, 128 + n without checkpoints, 1 for diverged
        (faults.on_divergence: stop). Of the ranks of a job that was stopped rank 0 has that code, and leaves last; the
        others have 0. A job ends with 2 for a mistake that the user can correct, 1 for a lost rank or a defect.
    """
    tell_fatal_signals()
    process = command or CommandProcess()
    job, stop = replace(detect(os.environ), parent_pid=process.parent_pid), process.stop
    timeouts = Timeouts(settings.comm.start_timeout_s, settings.comm.round_timeout_s)
    recorder = RankRecorder() if job.rank else Recorder()
    error_reporter = ErrorReporter(job, timeouts, stop=stop, close_run=recorder.close_failed) if job.size > 1 else None
    run = RunContext(settings, job, stop, timeouts, recorder)
    try:
        run.settings = settings.begun_in(os.getcwd())
        run.until_end.enter_context(recorder.collect_warnings())
        if command is not None:
            stop.listen(signal.SIGINT)
        stop.exit_if_alone(RESTART_LATER if settings.checkpoint.every else 128 + (stop.signal or signal.SIGTERM))
        _build(run)
        run.comm = connect(job, settings.comm.backend, run.device, timeouts, error_reporter, settings.comm.interface)
        stop.listen()
        stop.exit_if_alone(None)
        _agree(run)
        if isinstance(recorder, Recorder):
            _open(run, recorder)
        fed = build.federation(run.experiment, run.comm, stop, recorder, not run.no_regroup)
        first = _restore(run, fed) + 1
        if isinstance(recorder, Recorder):
            if run.is_resumed:
                _resume_records(run, recorder, fed, first - 1)
            recorder.begin(fed, max(first - 1, 0), run.is_resumed)
        why_ended = fed.run()
        summary, code = dict[str, Any](), 0
        if isinstance(recorder, Recorder):
            summary, code = _finish(run, recorder, fed, why_ended, first)
            after(run.settings, summary)
        with suppress(*([Lost] if settings.faults.on_lost_rank != "abort" else [])):  # all of the run is on disk
            run.comm.close()
        if code and job.size > 1:
            time.sleep(timeouts.launcher)  # the others leave first: a launcher that sees rank 0's exit code ends them
        return summary, code
    except Exception as error:
        if error_reporter is not None:
            # Still listening: the launcher, which sees a dead rank, too, must not end rank 0 unheard.
            if isinstance(error, RankTimeoutError):
                error = error.blame(error_reporter.find_root_cause(error.peers))
            error_reporter.fail(*_explained(error), reacts=isinstance(error, ConnectionLostError))
        with suppress(Exception):  # the cause is said, whatever becomes of the run directory
            recorder.close_failed(reason(_explained(error)[0]))
        known = known_fix(error)
        if known is None:
            raise
        raise UserError(known) from error
    finally:
        run.until_end.close()
        vars(recorder).clear()  # model and data: who watches the launcher keeps the object itself alive
        stop.exit_if_alone(None)
        stop.restore_handlers(command is not None)


def _build(run: RunContext) -> None:
    """Build all that can be built before the ranks meet: mistakes are found before any rank waits for another.

    Silos are opened later, when this rank knows which are its own.
    """
    settings, job = run.settings, run.job
    set_numerics(settings)
    run.device = pick_device(settings, job)
    if settings.data.silos:
        build.make_method(settings)
    else:
        data = build_data.partitioned(settings)
        if job.size > 1 or settings.checkpoint.every:  # else nobody compares them
            run.data_digests = rank_agreement.data_digests(data)
        run.experiment = build.experiment(settings, data, run.device)
    run.code_digests = rank_agreement.code_digests()  # once all have met, they would do it together, on few cores


def _agree(run: RunContext) -> None:
    """Check that all ranks run the same experiment, open silos, and learn where each rank computes."""
    settings, comm, timeout_s = run.settings, run.comm, run.settings.comm.start_timeout_s
    if settings.data.silos and settings.data.audit and comm.rank:
        comm.audit = Audit()
    written = resolve(settings)
    # What one config leaves out equals the default that another one names: rank 0 may go on from the config.yaml of the
    # run, the others from the user's own.
    compared = comparable(written.digest_items())
    rank_agreement.agree(comm, {key: rank_agreement.digest(text) for key, text in compared.items()}, timeout_s)
    if settings.data.silos:
        run.experiment = build.experiment(settings, build_data.siloed(settings, comm), run.device)
    run.ranks, experiment = exchange_facts(run), run.experiment
    run.no_regroup = next((each["no_regroup"] for each in run.ranks if each["no_regroup"]), "")
    names = trust.foreign(settings.model_dump(mode="json")).values()
    run.plugins = plugins.find_plugins(names, experiment.method, experiment.task, experiment.net.module)
    layout = {"(layout)": rank_agreement.digest(repr(experiment.model.layout))}
    layout |= {} if experiment.initial is None else {"(initial weights)": experiment.initial.digest}
    layout |= rank_agreement.frozen_digest(experiment.model.frozen) if experiment.model.frozen else {}
    own = plugins.digests(run.plugins) if run.plugins else {}
    digests = {**run.code_digests, **own, **run.data_digests, **layout}
    rank_agreement.agree(comm, digests, timeout_s)
    if comm.rank == 0:
        run.identity = {**written.identity(), **digests}


def exchange_facts(run: RunContext) -> list[dict[str, Any]]:
    """Tell all ranks where each computes. Returns the facts about them, in order.

    Only now is it known which ranks share a host or a GPU, and where uploads are gathered: raises UserError, the same
    on every rank, if they need more memory than there is. Rank 0 warns of those that should have a GPU.
    """
    comm, experiment, device, host = run.comm, run.experiment, run.device, run.job.host
    on_cpu, auto = device.type == "cpu", experiment.settings.compute.device == "auto"
    facts = {"host": host, "device": f"cpu ({platform.machine()})", "gpu": "", "no_regroup": comm.can_regroup}
    if not on_cpu:
        name, gpu = torch.cuda.get_device_name(device), gpu_uuid(device)
        facts |= {"device": name, "gpu": gpu, **describe_gpu(device)}
    gathers_on_gpu, free = comm.device.type == "cuda", memory.free(device)
    needs = memory.memory_needs(experiment, comm.size, gathers_on_gpu, experiment.model.w.is_cuda)
    more = {"needs": needs, "free": free, "no_gpu": why_no_gpu(host) if on_cpu and auto and comm.size > 1 else ""}
    payload = json.dumps({**facts, **more}).encode()
    answers = [json.loads(text) for text in comm.allgather_bytes(payload, experiment.settings.comm.start_timeout_s)]
    comm.hosts = dict(enumerate(each["host"] for each in answers))
    trains = build_data.training_ranks(experiment.settings, comm.size)
    memory.check(dict(enumerate(answers)), trains, gathers_on_gpu)
    has_gpus = any(each["gpu"] for each in answers)
    if comm.rank == 0 and has_gpus and (slow := report_text.slow_ranks_warning(answers, trains)):
        warnings.warn(slow, stacklevel=2)
    return [{key: value for key, value in each.items() if key not in more} for each in answers]


def _open(run: RunContext, recorder: Recorder) -> None:
    """Open the run directory and the console (rank 0)."""
    settings, job, experiment = run.settings, run.job, run.experiment
    loggers = make_loggers(settings) if settings.track or settings.callbacks else None
    directory, run.is_resumed, run.accepted = resume.open_directory(settings, run.identity, run.until_end)
    backend = type(run.comm).__name__.lower()
    run.environment = describe_environment(job.launcher, backend, run.ranks, settings.compute.threads)
    live = job.launcher in ("single", "torchrun") and "SLURM_JOB_ID" not in os.environ
    recorder.open(
        directory, experiment, run.stop, loggers, report_text.headlines(experiment, job, backend, run.ranks), live
    )
    if not run.is_resumed:  # else when it is known that it can be
        recorder.describe(run.identity, run.environment, run.plugins)
    if settings.faults.on_lost_rank != "abort" and job.size > 1 and run.no_regroup:
        warnings.warn(f"faults.on_lost_rank: a rank that is lost ends this run: {run.no_regroup}", stacklevel=2)


def _restore(run: RunContext, fed: Federation) -> int:
    """Set up where this rank keeps the state of the run, and bring it to the newest whole checkpoint.

    Returns the round after which the run goes on, -1 for a run from the start.
    """
    settings, comm, experiment, recorder = run.settings, run.comm, run.experiment, run.recorder
    timeout_s, checkpoint, private = (
        settings.comm.start_timeout_s,
        settings.checkpoint,
        settings.output_mode == "private",
    )
    directory = recorder.directory if isinstance(recorder, Recorder) else None
    own_facts: dict[str, Any] = {}
    if directory is not None:
        own_facts = {"job": round(time.time(), 3), "name": directory.path.name, "going_on": run.is_resumed}
        own_facts |= resume.earlier_records(settings, directory)
    start = comm.broadcast_json(own_facts)
    fed.scheduler.lost_ranks = LostRanks(start["losses"])
    if start["placement"]:
        fed.scheduler.replayed_rows = resume.placement_of_these_ranks(start["placement"], fed, experiment)
    there = settings.working_dir / settings.output / start["name"]
    path = there.absolute() if directory is None else directory.path
    if comm.audit is not None:  # here, if this host does not see rank 0's directory
        comm.audit.open(path / "audit" / f"rank-{comm.rank}.jsonl", private)
    if settings.data.silos:
        write_own_preprocessing(path, settings, experiment.data)
    if settings.timeline and path.is_dir():
        head = {"job": start["job"], "rank": comm.rank, "of": comm.size, "host": socket.gethostname()}
        file = TimelineFile(path, head, private)
        fed.timeline.to, fed.timeline.ended, fed.timeline.early = file.add, file.flush, comm.rank > 0  # it waits then
    if checkpoint.every == 0:
        return -1
    stateful, silos = bool(experiment.messages.client_state.size), settings.data.silos
    answers = comm.allgather_bytes(b"seen" if (path / resume.IDENTITY).is_file() else b"", timeout_s)
    blind = [rank for rank, answer in enumerate(answers) if answer != b"seen"]
    if stateful and blind and not silos:
        where = f"rank {blind[0]} does not see {path}, where the clients' state would be kept"
        if start["going_on"] or checkpoint.resume == "must":
            raise UserError(f"checkpoint: {where}; put output on a file system that all ranks share")
        if comm.rank == 0:
            warnings.warn(f"checkpoint: {where}; this run cannot be gone on with", stacklevel=2)
        return -1
    rows = Rows(path / "state", silos, private)
    if comm.rank == 0:
        (path / "checkpoints").mkdir(0o700 if private else 0o777, exist_ok=True)
    recorder.checkpoints = Checkpoints(path / "checkpoints", rows, checkpoint.every, checkpoint.keep)
    if stateful:
        fed.states.store, fed.states.max_in_memory = rows, experiment.max_states_in_memory or experiment.data.clients
    if not start["going_on"]:
        return -1
    return resume.go_on(fed, recorder.checkpoints, timeout_s, recorder.say)


def _resume_records(run: RunContext, recorder: Recorder, fed: Federation, after: int) -> None:
    """Bring the files of the run directory to the round after which the run goes on (rank 0)."""
    settings, directory = run.settings, recorder.directory
    for change in run.accepted:  # first of all: what is written next is made with it
        recorder.say(f"accepted: {change}; from round {after + 1} on")
    if run.accepted:
        directory.append("accepted.jsonl", {"round": after + 1, "changes": run.accepted})
    was_described = (directory.path / "config.yaml").exists()  # else it is where a replay begins
    recorder.describe(run.identity, run.environment, run.plugins)
    best = fed.server.best if fed.server else None
    over = after + 1 >= settings.rounds or (best is not None and best.should_stop())
    rows_before = directory.truncate_after(after, over or (after + 1) % settings.evaluate.every == 0, was_described)
    if best and best.round is not None:
        recorder.save_best_model(best)
    if fed.scheduler.lost_ranks.rows or (directory.path / "faults.jsonl").exists():
        directory.write_rows("faults.jsonl", fed.scheduler.lost_ranks.rows)
    placed = directory.rows("placement.jsonl")[-1:]
    fed.scheduler.recorded = {k: v for row in placed for k, v in row.items() if k != "round"}
    recorder.say(report_text.resume_line(after, settings.rounds, rows_before))


def _finish(
    run: RunContext, recorder: Recorder, fed: Federation, reason: str, first: int
) -> tuple[dict[str, Any], int]:
    """Close the run directory (rank 0). Returns the summary, and the exit code.

    Args:
        run: the run.
        recorder: rank 0's.
        fed: the federation, at its end.
        reason: why it has ended (`Federation.run`).
        first: the first round that was to be trained.
    """
    result = recorder.close(fed, reason)
    # The signal may have come to another rank.
    stopped = 128 + (run.stop.signal or signal.SIGTERM) if recorder.checkpoints is None else RESTART_LATER
    code = {"finished": 0, "early_stopped": 0, "diverged": 1}.get(reason, stopped)
    if os.environ.get(OUTCOME):
        fresh = len(recorder.directory.rows("metrics.jsonl")) - (first if run.is_resumed else 0)
        with suppress(OSError):  # its reader has the launcher's exit code, too
            durable.write(Path(os.environ[OUTCOME]), f"{code} {fresh}\n".encode())
            code = 0 if run.job.launcher == "torchrun" else code  # which would make it 1, and print a traceback
    return {**result, "directory": str(recorder.directory.shown)}, code


def _explained(error: Exception) -> tuple[str, int]:
    """Return the message on an error, and the exit code."""
    known = known_fix(error)
    if known is None and not isinstance(error, UserError | Lost):
        return f"this is a defect of fedmpi or of a plug-in:\n{traceback.format_exc()}", 1
    return f"error: {known or error}", 1 if isinstance(error, Lost) else 2
