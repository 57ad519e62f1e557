"""What of this machine a sweep may fill: how many runs at once, on which GPU each, and whether one more fits into
memory.

A run needs what an earlier one of its group (all labels but the seed) held at its most. Until a group's first run has
closed a round nothing is known of it: it counts as twice the largest known one, and the very first run of all is alone
until then. Should memory run out all the same, the youngest run is ended, and goes on later from its
checkpoint.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import available_bytes, control_groups
from fedmpi.config import Settings, machine

SPARE, SCARCE = 0.05, 0.02  # of all memory: stays free as runs begin; below it one is ended
PATIENCE_S = 60.0  # for the first round of a run of unknown size: then it needs half more than it holds
GROWS = 1.1  # the next run of a group may hold so many times what the last one did
ASK_S = 10.0  # nvidia-smi


@dataclass
class Held:
    """A run that is under way. most: bytes that it has held; seen: that it has closed a round, or had time for one."""

    settings: Settings
    group: str
    began: float
    slot: int
    rounds: int  # that it had closed when it began
    most: int = 0
    now: int = 0
    seen: bool = False
    ended: bool = False  # by us, for want of memory

    def look(self, pid: int, rounds: int, now_s: float) -> None:
        self.most, self.now = max(self.most, _status(pid, "VmHWM")), _status(pid, "VmRSS")
        self.seen = self.seen or rounds > self.rounds or now_s - self.began > PATIENCE_S


@dataclass
class Room:
    """at_once: runs; gpus: what each slot's CUDA_VISIBLE_DEVICES is, none: as it is; counts: whether memory does."""

    at_once: int
    gpus: tuple[str, ...] = ()
    counts: bool = True
    needs: dict[str, int] = field(default_factory=dict)  # group -> bytes

    def fits(self, group: str, running: Iterable[Held]) -> bool:
        """Whether a run may begin beside those that are under way."""
        held = list(running)
        if not self.counts or not held:
            return True
        free = available_bytes()
        if free is None:
            return True
        growth = sum(max(self.of(each, held) - each.now, 0) for each in held)
        known = [self.needs[group]] if group in self.needs else []
        known += [self.of(each, held) for each in held if each.group == group and each.seen]
        need = max(known, default=None) or self._unknown(held)
        return need is not None and free - growth - SPARE * total() >= need

    def of(self, each: Held, held: Sequence[Held]) -> int:
        """Bytes that a run will hold at its most, as far as it is known."""
        early = int(1.5 * each.most) if each.seen else self._unknown(held) or 0
        return max(self.needs.get(each.group, early), each.most)

    def _unknown(self, held: Sequence[Held]) -> int | None:
        """Bytes for a run of a group of which nothing is known; None while nothing is known of any."""
        known = [*self.needs.values(), *(int(1.5 * each.most) for each in held if each.seen)]
        return 2 * max(known) if known else None

    def learn(self, each: Held, most: int) -> None:
        """A run has ended, or closed a round."""
        self.needs[each.group] = max(self.needs.get(each.group, 0), int(GROWS * most))

    def scarce(self) -> bool:
        free = available_bytes() if self.counts else None
        return free is not None and free < SCARCE * total()

    def gpu(self, slot: int) -> str | None:
        return self.gpus[slot % len(self.gpus)] if self.gpus else None


def room(jobs: str, todo: Sequence[Settings], needs: dict[str, int]) -> Room:
    """For --jobs: a number, which is taken at its word, or auto. needs: of groups that are known."""
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    gpus = _gpus() if built and any(settings.compute.device != "cpu" for settings in todo) else ()
    if jobs != "auto":
        if not jobs.isdigit() or int(jobs) < 1:
            raise UserError(f"--jobs: {jobs}; auto, or a number from 1 on, is needed")
        return Room(min(int(jobs), len(todo)), gpus, counts=False, needs=needs)
    threads = max(settings.compute.threads for settings in todo)
    most = max(1, min(machine.cores() // threads, len(todo)))
    return Room(min(most, len(gpus)) if gpus else most, gpus, needs=needs)


def total() -> int:
    """Memory of this host, or of the control groups that this process is in, whichever is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, _ in control_groups())])


def _gpus() -> tuple[str, ...]:
    """The entries of CUDA_VISIBLE_DEVICES (numbers, GPU-..., MIG-...); where it is unset the GPUs that nobody uses, or
    all where somebody uses each. Asked of nvidia-smi, by names, as its numbers are not CUDA's: to ask CUDA in this
    process would spoil it for its children."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return tuple(gpu.strip() for gpu in told.split(",") if gpu.strip() not in ("", "-1", "NoDevFiles"))
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
        found = {cells[0]: _share(*cells[1:]) for line in said.splitlines() if (cells := line.split(", "))}
        return tuple(gpu for gpu, used in found.items() if used < 0.1) or tuple(found)
    return ()


def _share(used: str, whole: str) -> float:
    return float(used) / float(whole) if used.isdigit() and whole.isdigit() else 0.0  # [N/A], where GPUs are divided


def _status(pid: int, key: str) -> int:
    """A line of /proc/PID/status, in bytes; 0 where there is none."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0
