"""Which rank is at fault for a silence.

A rank that waits in vain is often not the first: rank 1 awaits the model of rank 0, which awaits the update of rank 2,
which is frozen; whose patience ends first is chance. So the silent rank is asked, through the event log, for whom it
waits itself, and so on. At fault is who does not answer; if all do, who waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from torch.distributed import Store

from fedmpi.comm.base import RankTimeoutError, call_with_timeout
from fedmpi.comm.failures.error_reporter import WHOM, ErrorReporter, EventLog
from fedmpi.comm.timeouts import Timeouts

POLL_S = 0.01


def root_cause(error_reporter: ErrorReporter, error: Exception) -> Exception:
    """The silence that explains this one; any other error as it is."""
    if isinstance(error, RankTimeoutError):
        peers, rank, limits = error.peers, error_reporter.job.rank, error_reporter.timeouts

        def trace_peers() -> list[int]:
            return trace(rank, peers, error_reporter.event_log(), limits)

        with suppress(Exception):  # the store may be on a host that is gone, and never answer
            at_fault = call_with_timeout(3 * limits.frozen, trace_peers, "", limits.clock)
            return RankTimeoutError(at_fault, error.seconds, error.setting, error.hosts)
    return error


def answer(line: str | None, rank: int, waiting_for: Iterable[int], store: Store) -> None:
    """Say for whom this rank waits, if the line asks that, and asks this rank."""
    if line is not None and line.startswith(WHOM):
        _, asker, asked = line.split()
        if int(asked) == rank:
            store.set(f"{WHOM}/{asker}/{rank}", "=" + " ".join(map(str, waiting_for)))


def trace(rank: int, peers: Iterable[int], events: EventLog, timeouts: Timeouts) -> list[int]:
    """The ranks at fault where `peers` have been silent to `rank`, ascending."""
    peers = sorted(peers)
    asked, ask, silent, busy = {rank}, set(peers), set[int](), set[int]()
    while ask:
        asked |= ask
        for peer in sorted(ask):
            events.add(f"{WHOM} {rank} {peer}")
        answers = _answers(rank, ask, events.store, timeouts)
        silent |= ask - answers.keys()
        busy |= {peer for peer, others in answers.items() if not others}
        ask = {other for others in answers.values() for other in others} - asked
    return sorted(silent or busy) or peers


def _answers(rank: int, peers: set[int], store: Store, timeouts: Timeouts) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    until = timeouts.clock.now() + timeouts.frozen
    while len(answers) < len(peers) and timeouts.clock.now() < until:
        for peer in peers - answers.keys():
            if store.check([key := f"{WHOM}/{rank}/{peer}"]):
                answers[peer] = [int(word) for word in store.get(key).decode()[1:].split()]
        timeouts.clock.sleep(POLL_S)
    return answers
