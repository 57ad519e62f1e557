"""One run on one rank, from settings to exit code: `execute`, whose steps stand in `_run`, read from top to bottom."""

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
from dataclasses import replace
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
from fedmpi.runtime import build, build_data, checkpoints, memory, rank_agreement, trust
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.checkpoints import Checkpoints, Rows
from fedmpi.runtime.device import pick_device, set_numerics
from fedmpi.runtime.record import durable, report_text
from fedmpi.runtime.record.data_files import write_own_preprocessing
from fedmpi.runtime.record.metadata import describe_environment, resolve
from fedmpi.runtime.record.recorder import RankRecorder, Recorder
from fedmpi.runtime.record.run_dir import TimelineFile
from fedmpi.runtime.record.tracking import make_loggers

OUTCOME = "FEDMPI_OUTCOME"  # environment variable: a file for rank 0's exit code and the rounds it completed
Summary = dict[str, Any]


def execute(
    settings: Settings,
    command: CommandProcess | None = None,
    after: Callable[[Settings, Summary], object] = lambda settings, summary: None,
) -> tuple[Summary, int]:
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
    until_end = ExitStack()  # what stays open until all ranks are at their end
    try:
        settings = settings.begun_in(os.getcwd())
        until_end.enter_context(recorder.collect_warnings())
        if command is not None:
            stop.listen(signal.SIGINT)
        stop.exit_if_alone(RESTART_LATER if settings.checkpoint.every else 128 + (stop.signal or signal.SIGTERM))
        comm, summary, code = _run(settings, job, stop, timeouts, recorder, error_reporter, until_end)
        if job.rank == 0:
            after(settings, summary)
        with suppress(*([Lost] if settings.faults.on_lost_rank != "abort" else [])):  # all of the run is on disk
            comm.close()
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
        until_end.close()
        vars(recorder).clear()  # model and data: who watches the launcher keeps the object itself alive
        stop.exit_if_alone(None)
        stop.restore_handlers(command is not None)


def _run(
    settings: Settings,
    job: Job,
    stop: StopRequest,
    timeouts: Timeouts,
    recorder: RankRecorder,
    error_reporter: ErrorReporter | None,
    until_end: ExitStack,
) -> tuple[Communicator, Summary, int]:
    """Build, connect, agree, restore, train, and at rank 0 record. Returns summary and exit code, as `execute` does."""
    # Before the ranks meet, so that mistakes are found before any waits for another. Silos are opened later, when this
    # rank knows which are its own.
    set_numerics(settings)
    device, experiment, digests = pick_device(settings, job), None, rank_agreement.code_digests()
    if settings.data.silos:
        build.make_method(settings)
    else:
        data = build_data.partitioned(settings)
        if job.size > 1 or settings.checkpoint.every:  # else nobody compares them
            digests |= rank_agreement.data_digests(data)
        experiment = build.experiment(settings, data, device)

    comm = connect(job, settings.comm.backend, device, timeouts, error_reporter, settings.comm.interface)
    stop.listen()
    stop.exit_if_alone(None)
    if settings.data.silos and settings.data.audit and comm.rank:
        comm.audit = Audit()
    written = resolve(settings)
    # What one config leaves out equals the default that another one names: rank 0 may go on from the config.yaml of the
    # run, the others from the user's own.
    items = {key: rank_agreement.digest(text) for key, text in comparable(written.digest_items()).items()}
    rank_agreement.agree(comm, items, settings.comm.start_timeout_s)
    if experiment is None:
        experiment = build.experiment(settings, build_data.siloed(settings, comm), device)
    ranks = exchange_facts(experiment, job, comm, device)
    own_code = trust.find_plugins(trust.foreign(settings.model_dump(mode="json")).values())
    digests |= rank_agreement.model_digests(experiment.model, experiment.initial)
    digests |= trust.digests(own_code) if own_code else {}
    rank_agreement.agree(comm, digests, settings.comm.start_timeout_s)

    no_regroup = next((each["no_regroup"] for each in ranks if each["no_regroup"]), "")
    is_resumed, changes, identity, environment = False, list[str](), written.identity() | digests, Summary()
    if isinstance(recorder, Recorder):  # rank 0
        loggers = make_loggers(settings) if settings.track or settings.callbacks else None
        directory, is_resumed, changes = checkpoints.open_directory(settings, identity, until_end)
        backend = type(comm).__name__.lower()
        environment = describe_environment(job.launcher, backend, ranks, settings.compute.threads)
        recorder.open(directory, experiment, stop, loggers, report_text.headlines(experiment, job, backend, ranks))
        if not is_resumed:  # else when it is known that it can be
            recorder.describe(identity, environment, own_code)
        if settings.faults.on_lost_rank != "abort" and job.size > 1 and no_regroup:
            warnings.warn(f"faults.on_lost_rank: a rank that is lost ends this run: {no_regroup}", stacklevel=2)
    fed = build.federation(experiment, comm, stop, recorder, not no_regroup)
    after = _restore(experiment, fed, recorder, is_resumed)
    if isinstance(recorder, Recorder):
        if is_resumed:
            for change in changes:  # first of all: what is written next is made with it
                recorder.say(f"accepted: {change}; from round {after + 1} on")
            if changes:
                recorder.append("accepted.jsonl", {"round": after + 1, "changes": changes})
            recorder.describe(identity, environment, own_code)
            _resume_records(settings, recorder, fed, after)
        recorder.begin(fed, max(after, 0), is_resumed)

    why_ended = fed.run()
    if not isinstance(recorder, Recorder):
        return comm, {}, 0
    rounds_before = after + 1 if is_resumed else 0
    return comm, *_finish(recorder, fed, why_ended, rounds_before, job)


def exchange_facts(experiment: Experiment, job: Job, comm: Communicator, device: torch.device) -> list[dict[str, Any]]:
    """Tell all ranks where each computes. Returns the facts about them, in order: host, device, ...

    Only now is it known which ranks share a host or a GPU, and where uploads are gathered: raises UserError, the same
    on every rank, if they need more memory than there is.
    """
    settings = experiment.settings
    facts = {"host": job.host, "device": f"cpu ({platform.machine()})", "gpu": "", "no_regroup": comm.can_regroup}
    if device.type != "cpu":
        name, gpu = torch.cuda.get_device_name(device), gpu_uuid(device)
        facts |= {"device": name, "gpu": gpu}
    gathers_on_gpu = comm.device.type == "cuda"
    needs = memory.memory_needs(experiment, comm.size, gathers_on_gpu)
    payload = json.dumps({**facts, "needs": needs, "free": memory.free(device)}).encode()
    answers = [json.loads(text) for text in comm.allgather_bytes(payload, settings.comm.start_timeout_s)]
    comm.hosts = dict(enumerate(each["host"] for each in answers))
    memory.check(dict(enumerate(answers)), build_data.training_ranks(settings, comm.size), gathers_on_gpu)
    return [{key: value for key, value in each.items() if key not in ("needs", "free")} for each in answers]


def _restore(experiment: Experiment, fed: Federation, recorder: RankRecorder, is_resumed: bool) -> int:
    """Set up where this rank keeps the state of the run, and bring it to the newest whole checkpoint.

    Returns the round after which the run goes on, -1 for a run from the start.
    """
    settings, comm, silos = experiment.settings, fed.comm, experiment.settings.data.silos
    timeout_s, checkpoint = settings.comm.start_timeout_s, settings.checkpoint
    directory, own_facts = recorder.directory if isinstance(recorder, Recorder) else None, dict[str, Any]()
    if directory is not None:
        own_facts = {"job": round(time.time(), 3), "name": directory.path.name, "going_on": is_resumed}
        own_facts |= {"losses": checkpoints.earlier_losses(settings, directory)}
    start = comm.broadcast_json(own_facts)
    fed.scheduler.lost_ranks = LostRanks(start["losses"])
    there = settings.working_dir / settings.output / start["name"]
    path = there.absolute() if directory is None else directory.path
    if comm.audit is not None:  # here, if this host does not see rank 0's directory
        comm.audit.open(path / "audit" / f"rank-{comm.rank}.jsonl")
    if silos:
        write_own_preprocessing(path, settings, experiment.data)
    if settings.timeline and path.is_dir():
        head = {"job": start["job"], "rank": comm.rank, "of": comm.size, "host": socket.gethostname()}
        file = TimelineFile(path, head)
        fed.timeline.to, fed.timeline.ended, fed.timeline.early = file.add, file.flush, comm.rank > 0  # it waits then
    if checkpoint.every == 0:
        return -1
    stateful = bool(experiment.messages.client_state.size)
    answers = comm.allgather_bytes(b"seen" if (path / checkpoints.IDENTITY).is_file() else b"", timeout_s)
    blind = [rank for rank, answer in enumerate(answers) if answer != b"seen"]
    if stateful and blind and not silos:
        where = f"rank {blind[0]} does not see {path}, where the clients' state would be kept"
        if start["going_on"] or checkpoint.resume == "must":
            raise UserError(f"checkpoint: {where}; put output on a file system that all ranks share")
        if comm.rank == 0:
            warnings.warn(f"checkpoint: {where}; this run cannot be gone on with", stacklevel=2)
        return -1
    rows = Rows(path / "state", silos)
    if comm.rank == 0:
        (path / "checkpoints").mkdir(exist_ok=True)
    recorder.checkpoints = Checkpoints(path / "checkpoints", rows, checkpoint.every, checkpoint.keep)
    if stateful:
        fed.states.store, fed.states.max_in_memory = rows, experiment.max_states_in_memory or experiment.data.clients
    if not start["going_on"]:
        return -1
    return checkpoints.go_on(fed, recorder.checkpoints, timeout_s, recorder.say)


def _resume_records(settings: Settings, recorder: Recorder, fed: Federation, after: int) -> None:
    """Bring the files of the run directory to the round after which the run goes on (rank 0)."""
    directory, best = recorder.directory, fed.server.best if fed.server else None
    over = after + 1 >= settings.rounds or (best is not None and best.should_stop())
    rows_before = directory.truncate_after(after, over or (after + 1) % settings.evaluate.every == 0)
    if best and best.round is not None:
        recorder.save_best_model(best)
    if fed.scheduler.lost_ranks.rows or (directory.path / "faults.jsonl").exists():
        directory.write_rows("faults.jsonl", fed.scheduler.lost_ranks.rows)
    recorder.say(report_text.resume_line(after, settings.rounds, rows_before))


def _finish(
    recorder: Recorder, fed: Federation, reason: str, rounds_before: int, job: Job
) -> tuple[dict[str, Any], int]:
    """Close the run directory (rank 0). Returns the summary, and the exit code.

    reason: why the federation has ended. rounds_before: rounds that earlier jobs of this run have trained.
    """
    result = recorder.close(fed, reason)
    # The signal may have come to another rank.
    stopped = 128 + (recorder.stop.signal or signal.SIGTERM) if recorder.checkpoints is None else RESTART_LATER
    code = {"finished": 0, "early_stopped": 0, "diverged": 1}.get(reason, stopped)
    if os.environ.get(OUTCOME):
        rounds = len(recorder.directory.rows("metrics.jsonl")) - rounds_before
        with suppress(OSError):  # its reader has the launcher's exit code, too
            durable.write(Path(os.environ[OUTCOME]), f"{code} {rounds}\n".encode())
            code = 0 if job.launcher == "torchrun" else code  # which would make it 1, and print a traceback
    return {**result, "directory": str(recorder.directory.shown)}, code


def _explained(error: Exception) -> tuple[str, int]:
    """Return the message on an error, and the exit code."""
    known = known_fix(error)
    if known is None and not isinstance(error, UserError | Lost):
        return f"this is a defect of fedmpi or of a plug-in:\n{traceback.format_exc()}", 1
    return f"error: {known or error}", 1 if isinstance(error, Lost) else 2
