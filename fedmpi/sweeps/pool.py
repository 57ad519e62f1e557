"""Train the runs of a sweep side by side on this machine: each in a process forked from one that has imported torch.

`concurrent.futures` does not fit: it pickles what a worker is given, and one that is killed ends the pool for all.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch

from fedmpi.common import host_memory
from fedmpi.common.errors import RESTART_LATER, UserError
from fedmpi.config import Settings
from fedmpi.sweeps import progress

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_S = 0.25  # how often it is looked at how far the runs are
SPARE = 0.05  # of all memory stays free as a run begins
PATIENCE_S = 60.0  # for the first round of the first run: then what it holds counts as what a run needs
SMI_S = 10.0  # nvidia-smi
Job = Callable[[Settings], NoReturn]  # trains, and ends the process with its exit code


@dataclass(frozen=True)
class Resources:
    """What runs may use at the same time.

    Attributes:
        jobs: number of runs.
        gpus: values of CUDA_VISIBLE_DEVICES, one for each run; (): it is left as it is.
        check_memory: whether a run waits until there is memory for it beside the others.
    """

    jobs: int
    gpus: tuple[str, ...] = ()
    check_memory: bool = True


@dataclass
class Running:
    """A run that is training or has just ended. rounds: how many were done when it was started."""

    settings: Settings
    process: BaseProcess
    slot: int
    rounds: int
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Pool:
    """Trains runs in child processes.

    Args:
        job: what a child does.
        on_end: called with each run that has ended.
        on_look: called regularly with the runs that are training.
    """

    def __init__(
        self,
        job: Job,
        resources: Resources,
        on_end: Callable[[Running], None],
        on_look: Callable[[Sequence[Running]], None] = lambda running: None,
    ) -> None:
        self.job, self.resources, self.on_end, self.on_look = job, resources, on_end, on_look
        self.running: list[Running] = []
        self.stop_signals = 0
        self.largest = 0  # bytes that a run has held at its most; counts once a run has closed a round
        self.largest_is_known = False

    def run(self, todo: Sequence[Settings]) -> bool:
        """Train runs in their order; return False if a signal ended that early. No child outlives the call."""
        before = [signal.signal(number, self._stop) for number in SIGNALS]
        waiting = deque(todo)
        try:
            while self.running or (waiting and not self.stop_signals):
                while waiting and not self.stop_signals and self._has_room():
                    self._start(waiting.popleft())
                wait([each.process.sentinel for each in self.running], LOOK_S)
                for each in [each for each in self.running if each.process.exitcode is not None]:
                    self.running.remove(each)
                    self.largest_is_known |= each.process.exitcode == 0
                    self.on_end(each)
                self.on_look(self.running)
        finally:
            for each in self.running:  # only where something else has failed
                each.process.kill()
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)
        return not self.stop_signals

    def _stop(self, number: int, frame: object) -> None:
        """Handle a stop signal: children finish their round; at the third signal they are killed."""
        self.stop_signals += 1
        for each in self.running:
            with suppress(ProcessLookupError):  # it has just been waited for
                os.kill(each.process.pid or 0, signal.SIGTERM if self.stop_signals < 3 else signal.SIGKILL)

    def _has_room(self) -> bool:
        """Return whether one more run may start. Each run is assumed to need as much memory as the largest so far."""
        used = [_memory_of(each.process.pid) for each in self.running]
        self.largest = max([self.largest, *(most for _, most in used)])
        self.largest_is_known |= any(
            progress.rounds_done(each.settings) > each.rounds or each.seconds > PATIENCE_S for each in self.running
        )
        free = host_memory.available_bytes() if self.resources.check_memory and self.running else None
        if len(self.running) >= self.resources.jobs or free is None:
            return len(self.running) < self.resources.jobs
        growth = sum(max(self.largest - now, 0) for now, _ in used)
        return self.largest_is_known and free - growth - SPARE * _total_memory() >= self.largest

    def _start(self, settings: Settings) -> None:
        slot = min({*range(self.resources.jobs)} - {each.slot for each in self.running})
        gpus = self.resources.gpus
        gpu, rounds = gpus[slot % len(gpus)] if gpus else None, progress.rounds_done(settings)
        sys.stdout.flush()
        gc.freeze()  # what has been imported stays shared between the children
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            if not self.stop_signals:  # one that came since would not be handed on to a run that begins now
                child = multiprocessing.get_context("fork").Process(
                    target=_train, args=(self.job, settings, gpu, os.getpid(), blocked)
                )
                child.start()
                self.running.append(Running(settings, child, slot, rounds, time.monotonic()))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _train(job: Job, settings: Settings, gpu: str | None, parent: int, unblocked: set[signal.Signals]) -> None:
    """Train in a child process, which writes to its log instead of the console and ends with the sweep."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(RESTART_LATER)
    os.setpgid(0, 0)  # Ctrl-C is the sweep's, which hands it on once
    with log(settings).open("ab") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    job(settings)


def log(settings: Settings) -> Path:
    """Return the path of a run's console log, beside its directory, which may not exist yet."""
    return settings.output / f"{settings.name}.log"


def resources(jobs: str, todo: Sequence[Settings]) -> Resources:
    """Return the resources for --jobs: a number of runs, or auto for as many as cores, GPUs and memory allow."""
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    gpus = _gpus() if built and any(settings.compute.device != "cpu" for settings in todo) else ()
    if jobs != "auto":
        if not jobs.isdigit() or int(jobs) < 1:
            raise UserError(f"--jobs: {jobs}; auto, or a number from 1 on, is needed")
        return Resources(min(int(jobs), len(todo)), gpus, check_memory=False)
    threads = max(settings.compute.threads for settings in todo)
    most = max(1, min(host_memory.usable_cores() // threads, len(todo)))
    return Resources(min(most, len(gpus)) if gpus else most, gpus)


def _gpus() -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or where it is unset the idle GPUs, or all if none is idle.

    nvidia-smi is asked, as CUDA must not be initialised in a process that forks, and for UUIDs, as its numbers differ.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(gpu.strip() for gpu in visible.split(",") if gpu.strip() not in ("", "-1", "NoDevFiles"))
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True).stdout.splitlines()
        rows = [line.split(", ") for line in lines]
        # [N/A] where GPUs are divided: nobody knows whether they are used.
        idle = [gpu for gpu, used, of in rows if not (used.isdigit() and of.isdigit()) or int(used) < 0.1 * int(of)]
        return tuple(idle) or tuple(gpu for gpu, *_ in rows)
    return ()


def _memory_of(pid: int | None) -> tuple[int, int]:
    """Return the resident memory of a process in bytes, now and at its peak; 0 after its end."""
    with suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}
        return sizes.get("VmRSS:", 0), sizes.get("VmHWM:", 0)
    return 0, 0


def _total_memory() -> int:
    """Return the bytes of memory of this host, or the limit of this process's control groups if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in host_memory.control_groups())])
