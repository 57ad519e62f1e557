"""After ranks have died or frozen, a job continues, or ends with one message. Ranks are threads, time is simulated."""

from types import SimpleNamespace

import pytest
import torch
from simulated_job import SimulatedJob, SimulatedStore

from fedmpi.comm.backends import mpi, torch_dist
from fedmpi.comm.backends.torch_dist import NcclCommunicator
from fedmpi.comm.base import START_REMEDY, RankLostError, RankTimeoutError, SingleProcess
from fedmpi.comm.launchers import Job
from fedmpi.comm.rendezvous.store import allgather
from fedmpi.comm.timeouts import Timeouts

DEADLINE_S = 20


def step(rank, where, act, t=None, **more):
    """Return one thing that a rank does to itself, once.

    where: begin | middle (all others wait for its row) | gather (all others are in allgather_bytes) | vote (it has
    voted in a regroup) | build (it is about to connect to the members).

    act: kill | freeze | sleep (`s` seconds) | fail (report an error of its own) | thaw (the frozen rank `of`).
    """
    return {"rank": rank, "where": where, "act": act, "round": t, **more}


class Program:
    """Rounds of a broadcast, one row from each rank to rank 0, and an allgather; ranks regroup after each failure."""

    def __init__(self, rounds, plan, patience=30.0):
        self.rounds, self.plan, self.patience = rounds, plan, patience
        self.regroups = {}  # rank -> [(members, payloads, time, why)]

    def __call__(self, rank):
        comm = rank.connect()
        comm.message_timeout_s = self.patience
        mine = [each for each in self.plan if each["rank"] == rank.number]

        def act(where, t=None):
            for each in [each for each in mine if each["where"] == where and each["round"] in (t, None)]:
                mine.remove(each)
                if each["act"] == "sleep":
                    rank.clock.sleep(each["s"])
                elif each["act"] == "fail":
                    rank.fail(ValueError("the ninth wave"), 2)
                elif each["act"] == "thaw":
                    rank.job.ranks[each["of"]].thaw()
                else:
                    getattr(rank, each["act"])()

        store, connect = comm.membership.store, comm.membership._connect
        gather = store.gather

        def vote(name, call, number, ranks, value, seconds, **more):
            if name.startswith("vote"):
                store.set(f"{name}/{call}/{number}", value)
                act("vote")
            return gather(name, call, number, ranks, value, seconds, **more)

        store.gather = vote
        comm.membership._connect = lambda build: (act("build"), connect(build))[1]
        t = 0
        try:
            while t < self.rounds:
                try:
                    self.round(comm, t, act)
                    t += 1
                except RankLostError as error:
                    payloads = comm.regroup(f"{rank.number} at {t}".encode(), DEADLINE_S)
                    entry = (comm.alive, payloads, rank.clock.now(), str(error))
                    self.regroups.setdefault(rank.number, []).append(entry)
                    t = max(int(payload.split()[2]) for payload in payloads.values())
            comm.close()
        except RankLostError as error:
            rank.fail(error)
        return comm.alive

    def round(self, comm, t, act):
        act("begin", t)
        x = torch.full((3,), float(t if comm.rank == 0 else -1))
        comm.broadcast(x)
        assert (x == t).all()
        act("middle", t)
        rows = {rank: torch.zeros(3) for rank in comm.alive} if comm.rank == 0 else {}
        comm.exchange([(0, x + comm.rank)], list(rows.items()))
        assert all((row == t + rank).all() for rank, row in rows.items())
        act("gather", t)
        assert comm.allgather_bytes(b"%d" % comm.rank, DEADLINE_S) == [b"%d" % rank for rank in comm.alive]

    def members(self, survivors):
        """Return the members after each regroup, on which all survivors must agree, and check their payloads."""
        found = [[(members, payloads) for members, payloads, _, _ in self.regroups.get(r, [])] for r in survivors]
        assert all(each == found[0] for each in found), found
        for members, payloads in found[0]:
            assert all(payloads[rank].startswith(b"%d at " % rank) for rank in members)
        return [members for members, _ in found[0]]


def run_job(size, rounds, *plan, patience=30.0):
    job, program = SimulatedJob(size, start=30, round=30), Program(rounds, list(plan), patience)
    return job, program, job.run(program)


@pytest.mark.parametrize("where", ["begin", "middle", "gather"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_job_continues_without_a_killed_rank(size, where):
    dead = size - 1
    job, program, results = run_job(size, 4, step(dead, where, "kill", 2))
    survivors = list(range(dead))
    assert results == dict.fromkeys(survivors, survivors)
    assert program.members(survivors) == [survivors]
    assert job.codes == [0] * dead + [-9]
    assert job.messages == []
    took = max(program.regroups[rank][0][2] for rank in survivors) - job.ranks[dead].died_at
    assert took < (DEADLINE_S + 6 if where == "gather" else 7)


WAKES = [step(2, "middle", "freeze", 1), step(0, "begin", "thaw", 3, of=2), step(0, "begin", "sleep", 4, s=2)]
BUSY = [step(2, "middle", "kill", 1), step(4, "middle", "kill", 1), step(1, "middle", "sleep", 1, s=15)]
DURING = [step(2, "middle", "kill", 1), step(3, "vote", "kill"), step(4, "build", "kill")]


@pytest.mark.parametrize(
    ("size", "patience", "plan", "members", "codes"),
    [
        # Two at once while rank 1 is busy; rank 3 dies while all that are left wait for rank 0's numbers.
        (6, 30, [*BUSY, step(3, "begin", "kill", 3)], [[0, 1, 3, 5], [0, 1, 5]], [0, 0, -9, -9, -9, 0]),
        # While the others regroup: rank 3 after its vote, rank 4 when it is to connect.
        (5, 30, DURING, [[0, 1]], [0, 0, -9, -9, -9]),
        (4, 4, WAKES, [[0, 1, 3]], [0, 0, 1, 0]),  # a frozen rank is left out, and ends by itself when it wakes
        (4, 2, [step(2, "middle", "sleep", 1, s=12)], [[0, 1, 2, 3]], [0, 0, 0, 0]),  # a late rank stays
        (3, 2, [step(2, "middle", "sleep", 1, s=100)], [[0, 1]], [0, 0, 1]),  # past the deadline of the regroup
    ],
    ids=["two, then another one", "during a regroup", "frozen", "late", "too late"],
)
def test_living_ranks_continue(size, patience, plan, members, codes):
    job, program, results = run_job(size, 5, *plan, patience=patience)
    survivors = members[-1]
    assert results == dict.fromkeys(survivors, survivors)
    assert program.members(survivors) == members
    assert job.codes == codes
    lost = (
        [(2, "fedmpi [rank 2 on node]: error: the other ranks continued without this rank at ")] if 1 in codes else []
    )
    assert [(rank, text.partition("at ")[0] + "at ") for rank, text in job.messages] == lost
    if plan is WAKES:
        assert "rank 2 is silent: no message from or to it for 4 s" in program.regroups[0][0][3]


NINTH = "fedmpi [rank 3 on node]: error: the ninth wave"


@pytest.mark.parametrize(
    ("plan", "codes", "said"),
    [
        ([step(0, "middle", "kill", 2)], [-9, 1, 1, 1], "error: rank 0 is dead"),
        ([step(0, "gather", "kill", 2)], [-9, 1, 1, 1], "error: rank 0 is dead"),
        ([step(0, "vote", "kill"), step(2, "middle", "kill", 2)], [-9, 1, -9, 1], "error: rank 0 is dead"),
        ([step(0, "middle", "freeze", 2)], [-9, 1, 1, 1], "error: rank 0 is silent"),  # its store still answers
        ([step(3, "middle", "fail", 2)], [2, 2, 2, 2], NINTH),
        ([step(2, "middle", "kill", 1), step(3, "middle", "fail", 2)], [2, 2, -9, 2], NINTH),
        # The first of several errors counts.
        (
            [step(3, "middle", "fail", 1), step(2, "middle", "sleep", 1, s=0.2), step(2, "gather", "fail", 1)],
            [2, 2, 2, 2],
            NINTH,
        ),
    ],
)
def test_a_job_ends_with_one_message(plan, codes, said):
    """The exit code is that of the error."""
    job, _, results = run_job(4, 4, *plan, patience=4)
    assert results == {}
    assert job.codes[0] == codes[0]
    if said == NINTH:  # rank 0, which has the message, may end the others
        assert set(job.codes[1:]) <= {2, -9}
    else:
        assert job.codes == codes
    ((_, text),) = job.messages
    assert said in text
    assert job.time.now - min(rank.died_at for rank in job.ranks if rank.died_at) < 30


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_each_host_with_its_own_console_shows_the_error_once(failing):
    """Each host has two ranks; rank 0 prints on the first host."""
    job = SimulatedJob(6, per_host=2, start=30, round=60)

    def program(rank):
        rank.connect()
        rank.clock.sleep(5)
        if rank.number == failing:
            rank.fail(ValueError("the ninth wave"), 2)
        rank.clock.sleep(500)

    assert job.run(program) == {}
    assert {text for _, text in job.messages} == {f"fedmpi [rank {failing} on node]: error: the ninth wave"}
    assert sorted(job.host_of(rank) for rank, _ in job.messages) == [0, 1, 2]
    assert set(job.codes) == {2}


def test_a_dead_launcher_ends_all_ranks_with_one_message():
    job = SimulatedJob(3, start=30, round=1000)

    def program(rank):
        comm = rank.connect()
        if rank.number == 0:
            rank.clock.sleep(10)
            job.launcher_alive = False
        rank.clock.sleep(500)
        comm.close()

    assert job.run(program) == {}
    assert set(job.codes) == {1}
    ((rank, text),) = job.messages
    assert rank == 0
    assert "the launcher (slurm, process" in text
    assert job.time.now < 10 + 1 + 7 + 5


@pytest.mark.parametrize("absent", [(2,), (1, 3)])
def test_ranks_that_never_arrive_are_named(absent):
    job, said = SimulatedJob(4, start=30), {}

    def program(rank):
        with pytest.raises(RankLostError) as lost:
            allgather(SimulatedStore(rank), "g", 0, rank.number, range(4), b"", 30)
        said[rank.number] = str(lost.value)

    job.run(program, absent)
    names = ", ".join(map(str, absent))
    expected = f"no message for 30 s from {'rank' if len(absent) == 1 else 'ranks'} {names} (of 4 ranks)"
    assert said == dict.fromkeys(set(range(4)) - set(absent), expected)
    assert 30 <= job.time.now < 30 + 4 * 5


def test_the_error_about_a_missing_rank_says_what_to_check(monkeypatch):
    job, said, stores = SimulatedJob(3, start=30), {}, {}

    def program(rank):
        store = stores[rank.number] = SimulatedStore(rank)
        store.get_ip_addresses = lambda: ("10.0.0.2", "10.0.0.1")
        error_reporter = SimpleNamespace(listen=lambda open_store: None)
        with pytest.raises(RankLostError) as lost:
            torch_dist.connect(
                Job("env://", rank.number, 3, 0, 1, "node"), "gloo", torch.device("cpu"), rank.timeouts, error_reporter
            )
        said[rank.number] = str(lost.value)

    monkeypatch.setattr(torch_dist.lookup, "connect_to_store", lambda job, *_, **__: stores[job.rank])
    job.run(program, (2,))
    assert set(said) == {0, 1}
    for text in said.values():
        assert text.startswith("no message for 30 s from rank 2 (of 3 ranks).\n")
        for check in ("number of ranks, address and port", "comm.interface", "comm.start_timeout_s"):
            assert check in text


def test_under_mpi_the_error_about_a_missing_rank_says_what_to_check(monkeypatch):
    comm = mpi.MpiCommunicator(Job("mpi", 0, 2, 0, 1, "node"), SimpleNamespace(rank=0, size=2), Timeouts())
    monkeypatch.setattr(comm, "_receive", lambda peer, *_: peer)
    monkeypatch.setattr(comm, "_wait", lambda posted, timeout_s: set(posted))
    with pytest.raises(RankLostError) as lost:
        comm.allgather_bytes(b"", 30)
    assert str(lost.value) == f"no message for 30 s from rank 1 (of 2 ranks){START_REMEDY}"
    comm.hosts = {0: "n0", 1: "n1"}  # they have been there
    with pytest.raises(RankLostError, match=r"no message for 30 s from rank 1 on n1 \(of 2 ranks\)$"):
        comm.allgather_bytes(b"", 30)


def test_a_rank_that_does_not_disconnect_is_named():
    """Otherwise the launcher would wait for it for ever."""
    job, said = SimulatedJob(3, start=30, round=40), {}

    def program(rank):
        comm = rank.connect()
        if rank.number == 2:
            comm.allgather_bytes(b"", 40)
            rank.clock.sleep(1000)
        try:
            comm.close()
        except RankLostError as error:
            said[rank.number] = str(error)
            rank.fail(error)

    job.run(program)
    assert said[0] == "rank 2 is silent: it has not disconnected within 40 s after its last message"


@pytest.mark.parametrize(
    ("waits_for", "asker", "expected"),
    [
        ({0: [2], 1: [0], 2: None}, 1, [2]),  # rank 0 waits for rank 2, which is frozen
        ({0: [2], 1: [0], 2: []}, 1, [2]),  # rank 2 answers, but waits for nobody: it is busy
        ({0: [2, 3], 1: [0], 2: [], 3: None}, 1, [3]),  # a frozen rank rather than a busy one
        ({0: [1], 1: [0], 2: [3], 3: [0], 4: [2]}, 4, [2]),  # a circle: the peer of the asker
        ({0: None, 1: [0]}, 1, [0]),
        ({0: [1, 2], 1: None, 2: None, 3: [0]}, 0, [1, 2]),
        ({0: [1, 2], 1: [0], 2: None, 3: [0]}, 0, [2]),  # rank 1 waits for the asker
        ({0: [1], 1: [3], 2: [0], 3: [4], 4: None}, 2, [4]),
    ],
)
def test_the_cause_of_a_time_out_is_traced_through_waiting_ranks(waits_for, asker, expected):
    """In `waits_for`, None means that the rank is frozen, [] that it is busy with its training."""
    job, found = SimulatedJob(len(waits_for), start=30, round=100), []

    def program(rank):
        comm, peers = rank.connect(), waits_for[rank.number]
        comm.waiting_for = peers or []
        rank.clock.sleep(1)
        if peers is None:
            rank.freeze()
        if rank.number == asker:
            rank.clock.sleep(1)
            found.append(rank.error_reporter.find_root_cause(peers))
        rank.clock.sleep(60)

    job.run(program)
    assert found == [expected]


def test_a_call_that_takes_too_long_is_abandoned():
    def program(rank):
        assert rank.clock.call_with_timeout(5, lambda: rank.clock.sleep(1) or "answer") == "answer"
        with pytest.raises(TimeoutError):
            rank.clock.call_with_timeout(5, lambda: rank.clock.sleep(9))
        return "done"

    assert SimulatedJob(1, start=30).run(program) == {0: "done"}


def test_messages_name_silent_ranks():
    assert str(RankTimeoutError([2], 3, " (x)")) == "rank 2 is silent: no message from or to it for 3 s (x)"
    assert str(RankTimeoutError([2, 3], 3, hosts={2: "node5"})).startswith("ranks 2 on node5, 3 are silent: ")
    assert str(RankTimeoutError({3, 1}, 1800)) == "ranks 1, 3 are silent: no message from or to them for 1800 s"


def test_one_rank_and_nccl_cannot_regroup():
    solo = SingleProcess(torch.device("cpu"))
    assert solo.alive == [0]
    assert solo.can_regroup == "the job has a single process"
    with pytest.raises(RankLostError, match="the job has a single process"):
        solo.regroup(b"", 1)
    nccl = NcclCommunicator(Job("slurm", 1, 3, 1, 3, "here"), torch.device("cpu"), None, Timeouts(round=60))
    assert "NCCL cannot reconnect" in nccl.can_regroup
    assert nccl.message_timeout_s == 60
