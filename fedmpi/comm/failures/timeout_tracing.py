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
from fedmpi.comm.failures.error_reporter import WHOM, ErrorReporter
from fedmpi.comm.failures.event_log import EventLog
from fedmpi.comm.timeouts import Timeouts

POLL_S = 0.01


def root_cause(error_reporter: ErrorReporter, error: Exception) -> Exception:
    """The silence that explains this one; any other error as it is."""
    if isinstance(error, RankTimeoutError):
        peers = error.peers
        with suppress(Exception):  # the store may be on a host that is gone, and never answer
            limits = error_reporter.timeouts
            trace_peers = lambda: trace(error_reporter.job.rank, peers, error_reporter.event_log(), limits)  # noqa: E731
            found = call_with_timeout(3 * limits.frozen, trace_peers, "", limits.clock)
            return RankTimeoutError(found, error.seconds, error.setting, error.hosts)
    return error


def answer(line: str | None, rank: int, waiting_for: Iterable[int], store: Store) -> None:
    """Say for whom this rank waits, if the line asks that, and asks this rank."""
    if line is None or not line.startswith(WHOM):
        return
    _, asker, asked = line.split()
    if int(asked) == rank:
        store.set(_key(asker, rank), "=" + " ".join(map(str, waiting_for)))


def trace(rank: int, peers: Iterable[int], events: EventLog, timeouts: Timeouts) -> list[int]:
    """The ranks at fault where `peers` have been silent to `rank`, ascending."""
    peers = sorted(peers)
    asked, ask, dumb, busy = {rank}, set(peers), set[int](), set[int]()
    while ask:
        asked |= ask
        for peer in sorted(ask):
            events.add(f"{WHOM} {rank} {peer}")
        said = _answers(rank, ask, events.store, timeouts)
        dumb |= ask - said.keys()
        busy |= {peer for peer, others in said.items() if not others}
        ask = {other for others in said.values() for other in others} - asked
    return sorted(dumb or busy) or peers


def _answers(rank: int, peers: set[int], store: Store, timeouts: Timeouts) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {}
    clock = timeouts.clock
    until = clock.now() + timeouts.frozen
    while len(said) < len(peers) and clock.now() < until:
        for peer in peers - said.keys():
            if store.check([key := _key(rank, peer)]):
                said[peer] = [int(word) for word in store.get(key).decode()[1:].split()]
        clock.sleep(POLL_S)
    return said


def _key(asker: int | str, asked: int) -> str:
    return f"{WHOM}/{asker}/{asked}"
