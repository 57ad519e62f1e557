"""Rank 0's side of a run: what is trained is shown on the console, and put on disk."""

from __future__ import annotations

import os
import signal
import warnings
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedmpi.comm import Communicator, Job
from fedmpi.comm.loss.alarm import Alarm
from fedmpi.common.errors import COME_AGAIN
from fedmpi.common.inputs import to_text
from fedmpi.common.signals import StopRequest
from fedmpi.config import Settings
from fedmpi.engine.best import Best
from fedmpi.engine.plan import Sink
from fedmpi.runtime import build
from fedmpi.runtime.build_data import training_ranks
from fedmpi.runtime.record import durable, environment, report_text, warned
from fedmpi.runtime.record.closing import close_failed
from fedmpi.runtime.record.describing import describe
from fedmpi.runtime.record.model_facts import personal_facts
from fedmpi.runtime.record.progress import Console
from fedmpi.runtime.record.run_dir import BEST
from fedmpi.runtime.record.summary import judged_first, summary
from fedmpi.runtime.record.tracking.hearing import hearing
from fedmpi.runtime.resuming import keeping, resume

FEW_GPUS = 8  # of more, rank 0's is a small part
OUTCOME = "FEDMPI_OUTCOME"  # environment variable: a file for rank 0's exit code and the rounds it completed


def stuck(ranks: list[dict[str, Any]]) -> str:
    """Why the job cannot go on without one of its ranks; "" where it can."""
    return next((each["no_regroup"] for each in ranks if each["no_regroup"]), "")


def unused_gpu(settings: Settings, size: int, backend: str) -> str:
    """A warning that one of few GPUs is rank 0's, which trains nobody; "" where that is not so.

    With NCCL every rank has a GPU. Where clients are sites, `server.trains` would change which rank opens whose files.
    """
    if backend != "nccl" or size > FEW_GPUS or settings.data.silos or 0 in training_ranks(settings, size):
        return ""
    return (
        f"rank 0 occupies one of {size} GPUs, and trains nobody on it (server.trains: false); with server.trains=true "
        "it trains clients, too"
    )


def stopped(kept: bool, stop: StopRequest) -> int:
    """The exit code of a run that was told to stop, maybe on another rank."""
    return COME_AGAIN if kept else 128 + (stop.signal or signal.SIGTERM)


def run(
    made: build.Experiment,
    job: Job,
    comm: Communicator,
    stop: StopRequest,
    alarm: Alarm,
    until_end: ExitStack,
    ranks: list[dict[str, Any]],
    own: dict[Path, bytes],
    identity: dict[str, str],
) -> tuple[dict[str, Any], int]:
    """All rounds, and what is left of them: (summary, exit code).

    until_end: what is open until this process has done all. ranks: host and device of each. own: the user's code, by
    its place. identity: digests of settings, code, data and layout, of which a run that goes on must be.
    """
    settings, data = made.settings, made.data
    heard = hearing(settings)
    directory, going_on, accepted = resume.directory(settings, identity, until_end)
    falling, backend = tuple(getattr(made.task, "falling", ())), type(comm).__name__.lower()
    protocols = sorted(settings.evaluate.protocol, key="global".__ne__)
    starts = ["" if each == "global" else f"{each}_" for each in protocols]
    judged = [f"{start}{name}" for start in starts for name in ("loss", *made.task.names)]  # what rounds may have
    about = environment.describe(job.launcher, backend, ranks, settings.compute.threads)

    def begin() -> None:
        alarm.will = partial(close_failed, directory, falling, judged)
        describe(directory, made, identity, about, own)

    if not going_on:  # else when it is known that it can
        begin()
    shown = judged[: 1 + len(made.task.names)]
    headline = shown[1]
    shown += [f"validation_{settings.evaluate.best.metric}"] if settings.evaluate.best.metric else []
    live = job.launcher in ("single", "torchrun") and "SLURM_JOB_ID" not in os.environ
    console = Console(settings.rounds, shown, directory.log, live=live)
    last_clients: list[dict[str, Any]] = []

    def on_round(row: dict[str, Any]) -> None:
        directory.add_metrics(row)
        console.round(row, fed.server.view.noted if fed.server is not None else ())
        stop.done(row["round"] + 1)
        heard.round(row)

    def on_clients(rows: list[dict[str, Any]]) -> None:
        last_clients[:] = rows or last_clients
        directory.add_clients(rows)

    def on_loss(row: dict[str, Any]) -> None:
        directory.add_loss(row)
        console.say(report_text.loss(row, data.site_names))

    facts = {"input": to_text(data.input_shape, data.x_dtype), "classes": str(data.classes)}
    facts |= personal_facts(made.settings.method.name, made.messages)

    def on_best(best: Best) -> None:
        about = {**facts, "figure": best.choice.figure, "round": best.round, "value": best.value}
        directory.write_model(made.model.state_dict(best.w, best.b), about, BEST)

    for line in report_text.headlines(made, job, backend, ranks):
        console.say(line)
    warned.into(directory.log)
    if made.settings.faults.on_lost_rank != "abort" and comm.size > 1 and stuck(ranks):
        warnings.warn(f"faults.on_lost_rank: a rank that is lost ends this run: {stuck(ranks)}", stacklevel=2)
    if unused := unused_gpu(settings, comm.size, backend):
        warnings.warn(unused, stacklevel=2)
    sink = Sink(on_round, on_clients, best=on_best, loss=on_loss, placement=directory.add_placement)
    sink.updates, sink.analysis = directory.add_updates, directory.add_analysis
    fed = build.federation(made, comm, stop, sink, not stuck(ranks))
    kept, after = keeping.start(fed, made, directory, going_on, console.say)
    if going_on:
        for change in accepted:  # first of all: what is written next is made with it
            console.say(f"accepted: {change}; from round {after + 1} on")
        if accepted:
            directory.add_accepted(after + 1, accepted)
        whole = (directory.path / "config.yaml").exists()  # else it is where a replay begins
        begin()
        best = fed.server.best if fed.server else None
        over = after + 1 >= settings.rounds or (best is not None and best.ends())
        known = directory.begin_after(after, over or (after + 1) % settings.evaluate.every == 0, whole)
        if best and best.round is not None:
            on_best(best)
        if fed.scheduler.losses.rows or (directory.path / "faults.jsonl").exists():
            directory.write_losses(fed.scheduler.losses.rows)
        fed.scheduler.recorded = {k: v for row in directory.placement()[-1:] for k, v in row.items() if k != "round"}
        console.say(report_text.goes_on(after, settings.rounds, known))
    heard.begin(settings, directory, max(after, 0), going_on)
    reason = fed.run()
    console.close()
    assert fed.server is not None  # this is rank 0
    directory.write_model(made.model.state_dict(fed.server.w, fed.server.b), facts)
    rows = directory.metrics()
    ended = f"signal {stop.signal}" if reason == "stopped" and stop.signal else reason
    ended = f"diverged: {fed.reporter.watch.said}" if reason == "apart" else ended
    ended = f"enough: {fed.server.best.why}" if reason == "enough" and fed.server.best else ended
    names = judged_first(report_text.figures_in(rows), judged)
    result = summary(rows, names, ended, directory.losses(), directory.best_model(), falling)
    directory.write_summary(result)
    heard.end(result)
    report_text.farewell(console, directory, result, headline, last_clients, made)
    if reason == "stopped" and kept is not None and not stop.enough:
        console.say(f"go on with: fedmpi resume {directory.shown}")
    ended_so = {"finished": 0, "enough": 0, "apart": 1}
    code = ended_so[reason] if reason in ended_so else stopped(kept is not None, stop)
    if os.environ.get(OUTCOME):
        fresh = len(rows) - (after + 1 if going_on else 0)
        with suppress(OSError):  # its reader has the launcher's exit code, too
            durable.write(Path(os.environ[OUTCOME]), f"{code} {fresh}\n".encode())
            code = 0 if job.launcher == "torchrun" else code  # which would make it 1, and print a traceback
    return {**result, "directory": str(directory.shown)}, code
