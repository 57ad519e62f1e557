"""A job goes on after ranks have died or frozen; or it ends at once, with one message. Played by losses.py."""

import json

import pytest
import torch

from fedmpi.comm.backends.solo import Solo
from fedmpi.comm.backends.torch_dist import Nccl
from fedmpi.comm.base import Lost
from fedmpi.comm.launchers import launcher_env
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.timeouts import Timeouts

SETTLED_S = 2.0  # from a death to the end of the last survivor's regroup, on a machine of its own
SLACK_S = 8.0  # for one that others use


def step(rank, where, do, t=None, **more):
    return {"rank": rank, "where": where, "do": do, "round": t, **more}


def play(ranks, size, rounds, *plan, mpirun=None):
    if mpirun:
        return ranks.mpirun(
            "losses.py", str(rounds), json.dumps(plan), size=size, backend=mpirun, options=("--with-ft", "ulfm")
        )
    outcome = ranks.start("losses.py", str(rounds), json.dumps(plan), str(size), envs=[{}])
    outcome.codes = json.loads((ranks.folder / "codes").read_text())
    return outcome


def events(outcome, rank, kind):
    return [report for report in outcome.reports.get(rank, []) if report["event"] == kind]


def agree(outcome, survivors, size):
    """All survivors came to the end, with the same members after each regroup, and heard the same from them."""
    for rank in survivors:
        ends = events(outcome, rank, "end")
        assert [end["alive"] for end in ends] == [survivors], f"rank {rank}: {outcome.text}"
    steps = [[(each["alive"], each["payloads"]) for each in events(outcome, rank, "regrouped")] for rank in survivors]
    assert all(each == steps[0] for each in steps), steps
    for members, payloads in steps[0]:
        assert list(payloads) == [str(rank) for rank in members]
        assert all(text.startswith(f"{rank} at ") for rank, text in payloads.items())
    return [members for members, _ in steps[0]]


def seconds(outcome, survivors, dead, which=0):
    """From a death to the last survivor's return from `regroup`."""
    died = events(outcome, dead, "death")[0]["time"]
    took = max(events(outcome, rank, "regrouped")[which]["time"] for rank in survivors) - died
    print(f"rank {dead} lost: {took:.2f} s until all others had regrouped")
    return took


def said(outcome):
    return [line for line in outcome.text.splitlines() if line.startswith("fedmpi")]


@pytest.mark.parametrize("size", [4, 5])
def test_a_rank_killed_in_the_middle_of_an_exchange(ranks, size):
    outcome = play(ranks, size, 4, step(2, "middle", "kill", 2))
    survivors = [rank for rank in range(size) if rank != 2]
    assert agree(outcome, survivors, size) == [survivors]
    assert outcome.codes == [-9 if rank == 2 else 0 for rank in range(size)]
    assert seconds(outcome, survivors, 2) < SETTLED_S + SLACK_S
    assert said(outcome) == []


def test_two_at_once_and_another_one_later_while_a_rank_is_busy(ranks):
    """The busy one, in Python for 3 s, is waited for; 3 dies while all that are left wait for rank 0's numbers."""
    plan = [step(2, "middle", "kill", 1), step(4, "middle", "kill", 1), step(1, "middle", "sleep", 1, s=3)]
    outcome = play(ranks, 6, 4, *plan, step(3, "begin", "kill", 3))
    assert agree(outcome, [0, 1, 5], 6) == [[0, 1, 3, 5], [0, 1, 5]]
    assert outcome.codes == [0, 0, -9, -9, -9, 0]


def test_ranks_that_die_while_the_others_regroup(ranks):
    """After its vote (3), and when it is to connect (4)."""
    plan = [step(2, "middle", "kill", 1), step(3, "vote", "kill"), step(4, "build", "kill")]
    outcome = play(ranks, 5, 3, *plan)
    assert agree(outcome, [0, 1], 5) == [[0, 1]]
    assert outcome.codes == [0, 0, -9, -9, -9]


def test_a_frozen_rank_is_left_out_and_ends_by_itself_when_it_wakes(ranks):
    """It stops in its training; patience_s notices it; it wakes up while the others go on."""
    plan = [step(2, "middle", "stop", 1, patience=4), step(0, "begin", "wake", 2, of=2)]
    plan += [step(0, "begin", "sleep", t, s=2) for t in (3, 4)]  # less than the patience of the others
    outcome = play(ranks, 4, 5, *plan)
    assert agree(outcome, [0, 1, 3], 4) == [[0, 1, 3]]
    assert outcome.codes == [0, 0, 1, 0]
    assert len(said(outcome)) == 1, outcome.text
    assert "[rank 2 on" in said(outcome)[0]
    assert "this rank was taken for lost at" in said(outcome)[0]
    assert "rank 2 is silent: no message from or to it for 4 s" in events(outcome, 0, "regrouped")[0]["lost"]


def test_a_rank_that_is_only_late_stays(ranks):
    outcome = play(ranks, 4, 3, step(2, "middle", "sleep", 1, s=5, patience=2))
    assert agree(outcome, [0, 1, 2, 3], 4) == [[0, 1, 2, 3]]
    assert outcome.codes == [0, 0, 0, 0]


def test_without_rank_0_all_end_with_one_message(ranks):
    outcome = play(ranks, 4, 4, step(0, "middle", "kill", 2))
    assert outcome.codes == [-9, 1, 1, 1]
    died = events(outcome, 0, "death")[0]["time"]
    for rank in (1, 2, 3):
        (lost,) = events(outcome, rank, "lost")
        assert "rank 0 is dead" in lost["lost"]
        assert lost["time"] - died < 1 + SLACK_S
    assert len(said(outcome)) == 1, outcome.text
    assert "error: rank 0 is dead" in said(outcome)[0]


def test_with_rank_0_frozen_all_end(ranks):
    """Its store, a process of its own, still answers."""
    outcome = play(ranks, 4, 4, step(0, "middle", "stop", 2, patience=4))
    assert outcome.codes == [-9, 1, 1, 1]
    died = events(outcome, 0, "death")[0]["time"]
    for rank in (1, 2, 3):
        (lost,) = events(outcome, rank, "lost")
        assert "rank 0 is silent" in lost["lost"]
        assert lost["time"] - died < 4 + 7 + SLACK_S
    assert len(said(outcome)) == 1, outcome.text
    assert "error: rank 0 is silent" in said(outcome)[0]


def test_a_mistake_of_a_rank_still_ends_the_job(ranks):
    """Also after another one was lost."""
    outcome = play(ranks, 4, 4, step(2, "middle", "kill", 1), step(3, "middle", "raise", 2))
    assert outcome.codes == [2, 2, -9, 2] or outcome.codes == [2, 1, -9, 2]
    assert len(said(outcome)) == 1, outcome.text
    assert "[rank 3 on" in said(outcome)[0]
    assert said(outcome)[0].endswith("error: the ninth wave")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_an_mpirun_that_lets_ranks_die(ranks, backend):
    """One is killed while another one is busy, one freezes and wakes up later; then mpirun ends in good order."""
    plan = [step(1, "middle", "kill", 1), step(3, "middle", "sleep", 1, s=2), step(0, "middle", "wake", 3, of=2)]
    plan += [step(2, "begin", "stop", 2, patience=4), *(step(0, "begin", "sleep", t, s=2) for t in (4, 5))]
    outcome = play(ranks, 4, 6, *plan, mpirun=backend)
    assert agree(outcome, [0, 3], 4) == [[0, 2, 3], [0, 3]]
    assert outcome.codes == [0]
    assert len(said(outcome)) == 1, outcome.text
    assert "this rank was taken for lost at" in said(outcome)[0]


@pytest.mark.parametrize(
    ("launcher", "env", "reason"),
    [
        ("torchrun", {}, "torchrun ends all ranks"),
        ("mpi", {}, "mpirun ends all ranks"),
        ("mpi", {"OMPI_MCA_mpi_ft_enable": "1"}, ""),
        ("slurm", {"SLURM_KILL_BAD_EXIT": "1"}, "--kill-on-bad-exit=0"),
        ("slurm", {}, ""),
    ],
)
def test_where_ranks_cannot_outlive_one(launcher, env, reason):
    found = launcher_env.survivors(Job(launcher, 1, 3, 1, 3, "here"), env)
    assert reason in found
    assert bool(reason) == bool(found)


def test_one_rank_and_nccl_cannot_regroup():
    solo = Solo(torch.device("cpu"))
    assert solo.alive == [0]
    assert solo.can_regroup == "there is a single process"
    with pytest.raises(Lost, match="there is a single process"):
        solo.regroup(b"", 1)
    with pytest.raises(ValueError, match="at most 4096 bytes"):
        solo.regroup(b"x" * 4097, 1)
    nccl = Nccl(Job("slurm", 1, 3, 1, 3, "here"), torch.device("cpu"), None, Timeouts(round=60))
    assert "NCCL cannot" in nccl.can_regroup
    assert nccl.patience_s == 60
