"""Execute one run on one rank, from settings to exit code."""

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

from fedmpi.comm import Communicator, Job, RankLostError, connect, detect
from fedmpi.comm.audit import AuditLog
from fedmpi.comm.backends.choice import get_gpu_uuid
from fedmpi.comm.base import ConnectionLostError, RankTimeoutError
from fedmpi.comm.failures.error_reporter import ErrorReporter, summarize_error
from fedmpi.comm.failures.process_exit import enable_fault_handler
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.errors import RESTART_LATER, UserError
from fedmpi.common.signals import ProcessStartState, StopRequest
from fedmpi.common.user_code_errors import explain_known_error
from fedmpi.config import Settings
from fedmpi.config.resume_rules import normalize_identity
from fedmpi.engine.faults.lost_ranks import LostRanks
from fedmpi.engine.federation import Federation
from fedmpi.engine.private_release import PrivateRelease
from fedmpi.runtime import (
    build,
    build_data,
    build_method,
    checkpoints,
    code_trust,
    memory,
    private_runs,
    rank_agreement,
    sample_privacy,
    secure_aggregation,
)
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.checkpoints import CheckpointWriter, ClientStateFiles
from fedmpi.runtime.device import choose_device, configure_numerics
from fedmpi.runtime.record import atomic_files, console_text
from fedmpi.runtime.record.data_files import write_own_preprocessing
from fedmpi.runtime.record.loggers import make_loggers
from fedmpi.runtime.record.metadata import describe_environment, resolve_settings
from fedmpi.runtime.record.recorder import CheckpointRecorder, Recorder
from fedmpi.runtime.record.run_dir import TimelineFile

OUTCOME_FILE_VARIABLE = (
    "FEDMPI_OUTCOME"  # variable with the path of a file for rank 0's exit code and the number of rounds done
)
Summary = dict[str, Any]


def execute_run(
    settings: Settings,
    command: ProcessStartState | None = None,
    on_finish: Callable[[Settings, Summary], object] = lambda settings, summary: None,
) -> tuple[Summary, int]:
    """Execute a run on this rank, and return its summary and the exit code of the process.

    In a single process, errors are raised. In a job of several ranks, an error is printed once and ends the job.

    Args:
        settings: The settings of the run.
        command: The stop request and the launcher's process id, if this is a `fedmpi` process that ends after this
            call; None in other processes.
        on_finish: Function that rank 0 calls with settings and summary while the other ranks wait, because a launcher
            may end rank 0 as soon as they have exited.

    Returns:
        The summary ({} on ranks other than 0), and the exit code: 0 if the run finished; 1 if it diverged
        (faults.on_divergence: stop); 75 if a signal stopped it, or 128 + the signal's number if it has no checkpoints.
        If a job of several ranks is stopped, rank 0 returns that code and exits last; the other ranks return 0. A
        failed job exits with 2 for an error that the user can correct, and with 1 for a rank failure or a bug.
    """
    enable_fault_handler()
    process = command or ProcessStartState()
    job, stop = replace(detect(os.environ), parent_pid=process.parent_pid), process.stop
    timeouts = Timeouts(settings.comm.start_timeout_s, settings.comm.round_timeout_s)
    recorder = CheckpointRecorder() if job.rank else Recorder()
    error_reporter = ErrorReporter(job, timeouts, stop=stop, close_run=recorder.close_failed) if job.size > 1 else None
    exit_stack = ExitStack()  # contexts that stay open until all ranks have finished
    try:
        settings = settings.with_working_dir(os.getcwd())
        exit_stack.enter_context(recorder.collect_warnings())
        if command is not None:
            stop.install_handlers(signal.SIGINT)
        stop.set_exit_code_until_connected(
            RESTART_LATER if settings.checkpoint.every else 128 + (stop.signal or signal.SIGTERM)
        )
        comm, summary, code = _run(settings, job, stop, timeouts, recorder, error_reporter, exit_stack)
        if job.rank == 0:
            on_finish(settings, summary)
        with suppress(*([RankLostError] if settings.faults.on_lost_rank != "abort" else [])):  # all results are on disk
            comm.close()
        if code and job.size > 1:
            time.sleep(timeouts.launcher)  # the others exit first: a launcher ends them when it sees rank 0's exit code
        return summary, code
    except Exception as error:
        if error_reporter is not None:
            # The signal handlers stay installed: the launcher also notices a dead rank, and must not end rank 0 before
            # it has reported the error.
            if isinstance(error, RankTimeoutError):
                error = error.with_other_peers(error_reporter.find_root_cause(error.peers))
            error_reporter.fail(*_error_text_and_code(error), is_consequence=isinstance(error, ConnectionLostError))
        with suppress(Exception):  # the cause is reported even if the run directory cannot be closed
            recorder.close_failed(summarize_error(_error_text_and_code(error)[0]))
        known = explain_known_error(error)
        if known is None:
            raise
        raise UserError(known) from error
    finally:
        exit_stack.close()
        vars(recorder).clear()  # free model and data: the thread that watches the launcher keeps the object alive
        stop.set_exit_code_until_connected(None)
        stop.restore_handlers(command is not None)


def _run(
    settings: Settings,
    job: Job,
    stop: StopRequest,
    timeouts: Timeouts,
    recorder: CheckpointRecorder,
    error_reporter: ErrorReporter | None,
    exit_stack: ExitStack,
) -> tuple[Communicator, Summary, int]:
    """Build the experiment, connect the ranks, check that they agree, restore a checkpoint, train, and record results.

    Returns:
        The communicator; the summary and the exit code, as `execute_run` returns them.
    """
    # Objects are built before the ranks connect, so that errors are found before any rank waits for another. Silos are
    # opened later, when this rank knows which of them it owns.
    configure_numerics(settings)
    device, experiment = choose_device(settings, job), None
    digests = rank_agreement.compute_code_digests(settings.model.name)
    if settings.data.silos:
        build_method.make_method(settings)
    else:
        data = build_data.build_partitioned_data(settings)
        if job.size > 1 or settings.checkpoint.every:  # otherwise they are not compared
            digests |= rank_agreement.compute_data_digests(data)
        experiment = build.make_experiment(settings, data, device)

    comm = connect(job, settings.comm.backend, device, timeouts, error_reporter, settings.comm.interface)
    stop.install_handlers()
    stop.set_exit_code_until_connected(None)
    if settings.data.silos and settings.data.audit and comm.rank:
        comm.audit = AuditLog()
    written = resolve_settings(settings)
    # Settings are compared with all defaults filled in: rank 0 may resume from the config.yaml of the run directory,
    # the others from the user's file, which leaves defaults out.
    items = {
        key: rank_agreement.compute_short_digest(text)
        for key, text in normalize_identity(written.digest_items()).items()
    }
    rank_agreement.check_agreement(comm, items, settings.comm.start_timeout_s)
    if experiment is None:
        experiment = build.make_experiment(settings, build_data.build_silo_data(settings, comm), device)
    ranks = exchange_rank_info(experiment, job, comm, device)
    own_code = code_trust.find_plugins(code_trust.find_external_code(settings.model_dump(mode="json")).values())
    digests |= rank_agreement.compute_model_digests(experiment.model, experiment.initial, experiment.pretrained)
    digests |= {"(tokenizer)": experiment.data.files_digest} if experiment.data.files_digest else {}
    digests |= secure_aggregation.compute_key_digests(settings, experiment.data)
    digests |= code_trust.compute_plugin_digests(own_code) if own_code else {}
    rank_agreement.check_agreement(comm, digests, settings.comm.start_timeout_s)

    no_regroup = next((each["no_regroup"] for each in ranks if each["no_regroup"]), "")
    is_resumed, changes, identity, environment = False, list[str](), written.identity() | digests, Summary()
    privacy: PrivateRelease | None = None
    if isinstance(recorder, Recorder):  # rank 0
        loggers = make_loggers(settings) if settings.loggers or settings.callbacks else None
        directory, is_resumed, changes = checkpoints.open_run_directory(settings, identity, exit_stack)
        backend = type(comm).__name__.removesuffix("Communicator").lower()
        environment = describe_environment(job.launcher, backend, ranks, settings.compute.threads)
        recorder.open(directory, experiment, stop, loggers, console_text.describe_run(experiment, job, backend, ranks))
        if not is_resumed:  # a resumed run is described below, when it is known that it can be resumed
            recorder.write_description(identity, environment, own_code)
        privacy = private_runs.open_release(settings, experiment.data, experiment.messages, directory, identity)
        if settings.faults.on_lost_rank != "abort" and job.size > 1 and no_regroup:
            warnings.warn(f"faults.on_lost_rank: a rank failure will end this run: {no_regroup}", stacklevel=2)
    if experiment.private_steps is not None:
        run_directory = recorder.directory if isinstance(recorder, Recorder) else None
        sample_privacy.set_noise_key(experiment, comm, run_directory, identity)
    fed = build.make_federation(experiment, comm, stop, recorder, not no_regroup, privacy)
    after = _set_up_files_and_restore(experiment, fed, recorder, is_resumed)
    if isinstance(recorder, Recorder):
        if is_resumed:
            for change in changes:  # before anything else is written, as later rows depend on the change
                recorder.print_line(f"accepted: {change}; from round {after + 1} on")
            if changes:
                recorder.append_rows("accepted_changes.jsonl", {"round": after + 1, "changes": changes})
            recorder.write_description(identity, environment, own_code)
            _truncate_records(settings, recorder, fed, after)
        recorder.begin_training(fed, max(after, 0), is_resumed)

    end_reason = fed.run()
    if not isinstance(recorder, Recorder):
        return comm, {}, 0
    rounds_before = after + 1 if is_resumed else 0
    return comm, *_close_run(recorder, fed, end_reason, rounds_before, job)


def exchange_rank_info(
    experiment: Experiment, job: Job, comm: Communicator, device: torch.device
) -> list[dict[str, Any]]:
    """Exchange host, device and free memory between all ranks, and check that the job has enough memory.

    Memory is checked here because it is now known which ranks share a host or a GPU, and where uploads are gathered.

    Returns:
        For each rank, in order, a dict with `host`, `device`, `gpu` ("" on a CPU), and `no_regroup`: the reason why the
        rank cannot continue after the failure of another rank, or "" if it can.

    Raises:
        UserError: A host or GPU has too little free memory; the same error on every rank.
    """
    settings = experiment.settings
    facts = {"host": job.host, "device": f"cpu ({platform.machine()})", "gpu": "", "no_regroup": comm.can_regroup}
    if device.type != "cpu":
        name, gpu = torch.cuda.get_device_name(device), get_gpu_uuid(device)
        facts |= {"device": name, "gpu": gpu}
    gathers_on_gpu = comm.device.type == "cuda"
    needs = memory.estimate_memory(experiment, comm.size, gathers_on_gpu)
    payload = json.dumps({**facts, "needs": needs, "free": memory.measure_free_bytes(device)}).encode()
    answers = [json.loads(text) for text in comm.allgather_bytes(payload, settings.comm.start_timeout_s)]
    comm.hosts = dict(enumerate(each["host"] for each in answers))
    memory.check_memory(dict(enumerate(answers)), build_data.training_ranks(settings, comm.size), gathers_on_gpu)
    return [{key: value for key, value in each.items() if key not in ("needs", "free")} for each in answers]


def _set_up_files_and_restore(
    experiment: Experiment, fed: Federation, recorder: CheckpointRecorder, is_resumed: bool
) -> int:
    """Set up the files that this rank writes, and restore the newest complete checkpoint if the run is resumed.

    Returns:
        The round of that checkpoint; -1 if training begins at round 0.
    """
    settings, comm, silos = experiment.settings, fed.comm, experiment.settings.data.silos
    timeout_s, checkpoint = settings.comm.start_timeout_s, settings.checkpoint
    directory, start_info = recorder.directory if isinstance(recorder, Recorder) else None, dict[str, Any]()
    if directory is not None:
        start_info = {"job": round(time.time(), 3), "name": directory.path.name, "is_resumed": is_resumed}
        start_info |= {"rank_failures": checkpoints.load_rank_failures(settings, directory)}
        start_info |= private_runs.choose_cohort_draws(settings, fed)
    start = comm.broadcast_json(start_info)
    fed.scheduler.lost_ranks = LostRanks(start["rank_failures"])
    private_runs.set_cohort_draws(fed, start)
    there = settings.working_dir / settings.output / start["name"]
    path = there.absolute() if directory is None else directory.path
    if comm.audit is not None:  # written on this host if it does not see rank 0's directory
        comm.audit.open(path / "audit" / f"rank-{comm.rank}.jsonl")
    if silos:
        write_own_preprocessing(path, resolve_settings(settings), experiment.data)
    if settings.trace and path.is_dir() and not fed.config.withholds_participation:
        head = {"job": start["job"], "rank": comm.rank, "of": comm.size, "host": socket.gethostname()}
        file = TimelineFile(path, head)
        # A rank other than 0 waits for the next broadcast, and has time to write its lines before that.
        fed.timeline.write_row, fed.timeline.on_end, fed.timeline.flushes_before_broadcast = (
            file.add,
            file.flush,
            comm.rank > 0,
        )
    if checkpoint.every == 0:
        return -1
    stateful = bool(experiment.messages.client_state.size)
    answers = comm.allgather_bytes(b"seen" if (path / checkpoints.IDENTITY).is_file() else b"", timeout_s)
    blind = [rank for rank, answer in enumerate(answers) if answer != b"seen"]
    if stateful and blind and not silos:
        where = f"rank {blind[0]} cannot see {path}, where the clients' state is stored"
        if start["is_resumed"] or checkpoint.resume == "must":
            raise UserError(f"checkpoint: {where}; set output to a directory on a file system that all ranks share")
        if comm.rank == 0:
            warnings.warn(
                f"checkpoint: {where}; no checkpoints are written, and this run cannot be resumed", stacklevel=2
            )
        return -1
    rows = ClientStateFiles(path / "state", silos)
    if comm.rank == 0:
        (path / "checkpoints").mkdir(exist_ok=True)
    recorder.checkpoints = CheckpointWriter(path / "checkpoints", rows, checkpoint.every, checkpoint.keep)
    if stateful:
        fed.states.store, fed.states.max_in_memory = rows, experiment.max_states_in_memory or experiment.data.clients
    if not start["is_resumed"]:
        return -1
    return checkpoints.restore_newest_checkpoint(fed, recorder.checkpoints, timeout_s, recorder.print_line)


def _truncate_records(settings: Settings, recorder: Recorder, fed: Federation, after: int) -> None:
    """Reset the files of the run directory to their state after round `after`, from which the run is resumed."""
    directory, best = recorder.directory, fed.server.best if fed.server else None
    over = after + 1 >= settings.rounds or (best is not None and best.should_stop())
    rows_before = directory.delete_rows_from(after, over or (after + 1) % settings.evaluate.every == 0)
    if best and best.round is not None:
        recorder.save_best_model(best)
    if fed.scheduler.lost_ranks.rows or (directory.path / "faults.jsonl").exists():
        directory.write_rows("faults.jsonl", fed.scheduler.lost_ranks.rows)
    recorder.print_line(console_text.format_resume(after, settings.rounds, rows_before))


def _close_run(
    recorder: Recorder, fed: Federation, reason: str, rounds_before: int, job: Job
) -> tuple[dict[str, Any], int]:
    """Close the run directory on rank 0, and return the summary and the exit code.

    Args:
        reason: The reason why training ended, as returned by `Federation.run`.
        rounds_before: Number of rounds that earlier jobs of this run have completed.
    """
    result = recorder.close(fed, reason)
    # If another rank received the signal, its number is not known here, and SIGTERM is assumed.
    stopped = 128 + (recorder.stop.signal or signal.SIGTERM) if recorder.checkpoints is None else RESTART_LATER
    code = {"finished": 0, "early_stopped": 0, "budget_spent": 0, "diverged": 1}.get(reason, stopped)
    if os.environ.get(OUTCOME_FILE_VARIABLE):
        rounds = len(recorder.directory.read_rows("metrics.jsonl")) - rounds_before
        with suppress(OSError):  # the reader of the file can fall back to the launcher's exit code
            atomic_files.write_atomically(Path(os.environ[OUTCOME_FILE_VARIABLE]), f"{code} {rounds}\n".encode())
            code = 0 if job.launcher == "torchrun" else code  # torchrun would turn it into 1 and print a traceback
    return {**result, "directory": str(recorder.directory.display_path)}, code


def _error_text_and_code(error: Exception) -> tuple[str, int]:
    """Return the message to print for an error, and the exit code of the job."""
    known = explain_known_error(error)
    if known is None and not isinstance(error, UserError | RankLostError):
        return f"this is a bug in fedmpi or in a plug-in:\n{traceback.format_exc()}", 1
    return f"error: {known or error}", 1 if isinstance(error, RankLostError) else 2
