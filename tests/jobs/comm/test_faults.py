"""Every fault ends within its bound in one error that names the rank."""

import time

import pytest
from torch.distributed import TCPStore

from fedmpi.comm.base import Lost
from fedmpi.comm.meeting.store_allgather import StoreAllgather

SLACK_S = 10  # for a busy machine; the bounds under test are 1 to 3 s, and 300 and 1800 s by default


def by_step(outcome, rank):
    return {report["step"]: report for report in outcome.reports[rank]}


@pytest.mark.parametrize(("absent", "size"), [((1, 2), 3), ((0,), 2)])
def test_ranks_that_never_start_are_named_by_all_that_did(ranks, absent, size):
    outcome = ranks.torchrun("faults.py", "silent", "3", "20", size=size, absent=absent)
    assert set(outcome.codes) == {1}, outcome.text
    for rank in set(range(size)) - set(absent):
        step = by_step(outcome, rank)["connect"]
        expected = "rank 0 is silent" if 0 in absent else f"{', '.join(map(str, absent))} of {size}"
        assert expected in step["lost"]
        assert step["seconds"] < 3 + SLACK_S


def start(ranks, backend, *args):
    return ranks.torchrun(*args, size=3) if backend == "gloo" else ranks.mpirun(*args, size=3)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_rank_that_hangs_is_named(ranks, backend):
    outcome = start(ranks, backend, "faults.py", "hang", "30", "2")
    for rank in (0, 2):
        steps = by_step(outcome, rank)
        assert steps["connect"]["lost"] == "", outcome.text
        assert "rank 1 of 3" in steps["meet"]["lost"]
        assert steps["meet"]["seconds"] < 1 + SLACK_S
    # Whoever gives up first ends the job, by the launcher's hand: only the first is sure to report its message.
    first = [step for rank in (0, 2) for name, step in by_step(outcome, rank).items() if name in ("receive", "send")]
    assert first, outcome.text
    assert all("rank 1" in step["lost"] for step in first)
    assert all(step["seconds"] < 2 + SLACK_S for step in first)
    assert 7 in outcome.codes


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_rank_that_dies_does_not_leave_the_others_waiting(ranks, backend):
    began = time.monotonic()
    outcome = start(ranks, backend, "faults.py", "die", "30", "40")
    assert time.monotonic() - began < 30 + SLACK_S
    if backend == "gloo":  # no launcher here: the survivors themselves notice, long before the round's 40 s
        assert outcome.codes == [7, 9, 7], outcome.text
        assert "rank 1 is dead" in by_step(outcome, 0)["receive"]["lost"]
        assert "rank 1 is dead" in by_step(outcome, 2)["send"]["lost"]
        assert by_step(outcome, 0)["receive"]["seconds"] < SLACK_S
    else:  # mpirun ends the job
        assert outcome.codes != [0], outcome.text


def test_a_rank_that_freezes_after_its_last_message_is_named():
    """Else the launcher would wait for it for good."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(Lost, match="rank 0 is silent: it has not left"):
        StoreAllgather(store, 1, range(3)).leave(0.2)
    with pytest.raises(Lost, match="rank 2 is silent: it has not left"):
        StoreAllgather(store, 0, range(3)).leave(0.2)
    StoreAllgather(store, 2, range(3)).leave(0.2)
    StoreAllgather(store, 0, range(3)).leave(0.2)
