"""A job of real processes goes on after ranks have died or frozen, or ends with one message (the ranks: losses.py).

All other combinations run with simulated ranks in tests/unit/comm/test_rank_failures.py.
"""

import json

import pytest


def step(rank, where, do, t=None, **more):
    return {"rank": rank, "where": where, "do": do, "round": t, **more}


def play(ranks, size, rounds, *plan):
    outcome = ranks.start("losses.py", str(rounds), json.dumps(plan), str(size), envs=[{}])
    outcome.codes = json.loads((ranks.folder / "codes").read_text())
    return outcome


def play_under_mpirun(ranks, size, rounds, *plan, backend, options=()):
    return ranks.mpirun("losses.py", str(rounds), json.dumps(plan), size=size, backend=backend, options=options)


def events(outcome, rank, kind):
    return [report for report in outcome.reports.get(rank, []) if report["event"] == kind]


def agree(outcome, survivors):
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


def messages(outcome):
    return [line for line in outcome.text.splitlines() if line.startswith("fedmpi")]


@pytest.mark.smoke
def test_others_go_on_without_a_killed_rank(ranks):
    outcome = play(ranks, 4, 4, step(2, "middle", "kill", 2))
    assert agree(outcome, [0, 1, 3]) == [[0, 1, 3]]
    assert outcome.codes == [0, 0, -9, 0]
    assert messages(outcome) == []


@pytest.mark.smoke
def test_a_frozen_rank_is_left_out_and_ends_by_itself_when_it_wakes(ranks):
    """It stops in its training; it wakes up while the others go on, and they wait for its end before the last round."""
    plan = [step(2, "middle", "stop", 1, patience=4), step(0, "begin", "wake", 2, of=2), step(0, "begin", "join", 4)]
    outcome = play(ranks, 4, 5, *plan)
    assert agree(outcome, [0, 1, 3]) == [[0, 1, 3]]
    assert outcome.codes == [0, 0, 1, 0]
    (message,) = messages(outcome)
    assert "[rank 2 on" in message
    assert "this rank was taken for lost at" in message
    assert "rank 2 is silent: no message from or to it for 4 s" in events(outcome, 0, "regrouped")[0]["lost"]


@pytest.mark.parametrize(
    ("do", "cause"), [pytest.param("kill", "dead", marks=pytest.mark.smoke), ("stop", "silent")], ids=["kill", "stop"]
)
def test_all_end_with_one_message_without_rank_0(ranks, do, cause):
    """Where rank 0 is frozen, its store, a process of its own, still answers."""
    outcome = play(ranks, 4, 4, step(0, "middle", do, 2, patience=4))
    assert outcome.codes == [-9, 1, 1, 1]
    for rank in (1, 2, 3):
        (lost,) = events(outcome, rank, "lost")
        assert f"rank 0 is {cause}" in lost["lost"]
    (message,) = messages(outcome)
    assert f"error: rank 0 is {cause}" in message


def test_an_error_of_a_rank_ends_the_job_also_after_another_rank_was_lost(ranks):
    outcome = play(ranks, 4, 4, step(2, "middle", "kill", 1), step(3, "middle", "raise", 2))
    assert outcome.codes[:1] + outcome.codes[2:] == [2, -9, 2]
    (message,) = messages(outcome)
    assert "[rank 3 on" in message
    assert message.endswith("error: the ninth wave")


@pytest.mark.smoke
def test_an_mpirun_with_ulfm_lets_ranks_die(ranks):
    """One rank is killed while another one is busy, one freezes and wakes up later; then mpirun ends without error."""
    plan = [step(1, "middle", "kill", 1), step(0, "middle", "wake", 3, of=2), step(0, "begin", "join", 5)]
    plan += [step(2, "begin", "stop", 2, patience=4)]
    outcome = play_under_mpirun(ranks, 4, 6, *plan, backend="gloo", options=("--with-ft", "ulfm"))
    assert agree(outcome, [0, 3]) == [[0, 2, 3], [0, 3]]
    assert outcome.codes == [0]
    (message,) = messages(outcome)
    assert "this rank was taken for lost at" in message


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_plain_mpirun_ends_the_job_of_a_killed_rank(ranks, backend):
    outcome = play_under_mpirun(ranks, 3, 3, step(1, "middle", "kill", 1), backend=backend)
    assert outcome.codes != [0]
    assert not any(events(outcome, rank, "end") for rank in range(3))
