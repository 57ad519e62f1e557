"""A job of real processes goes on after ranks have died or frozen, or ends with one message (the ranks: losses.py).

All other combinations run with simulated ranks in tests/unit/comm/test_rank_failures.py; whole runs under mpirun in
tests/jobs/test_going_on.py and test_failures.py.
"""

import json

import pytest


def step(rank, where, do, t=None, **more):
    return {"rank": rank, "where": where, "do": do, "round": t, **more}


def play(ranks, rounds, *plan):
    """(exit codes, events of each rank, messages)"""
    outcome = ranks.start("losses.py", str(rounds), json.dumps(plan), "4", envs=[{}])
    messages = [line for line in outcome.text.splitlines() if line.startswith("fedmpi")]
    return json.loads((ranks.folder / "codes").read_text()), outcome.reports, messages


def assert_went_on(reports, survivors):
    """They came to the end after one regroup, with the same members, and heard the same from them."""
    for rank in survivors:
        assert [report["event"] for report in reports[rank]] == ["regrouped", "end"]
        regrouped, end = reports[rank]
        assert regrouped["alive"] == end["alive"] == survivors
        assert regrouped["payloads"] == reports[survivors[0]][0]["payloads"]
        assert all(text.startswith(f"{each} at ") for each, text in regrouped["payloads"].items())


@pytest.mark.smoke
def test_others_go_on_without_a_killed_rank(ranks):
    codes, reports, messages = play(ranks, 4, step(2, "middle", "kill", 2))
    assert_went_on(reports, [0, 1, 3])
    assert codes == [0, 0, -9, 0]
    assert messages == []


@pytest.mark.smoke
def test_a_frozen_rank_is_left_out_and_ends_by_itself_when_it_wakes(ranks):
    """It stops in its training; it wakes up while the others go on, and they wait for its end before the last round."""
    plan = [step(2, "middle", "stop", 1, patience=4), step(0, "begin", "wake", 2, of=2)]
    codes, reports, messages = play(ranks, 5, *plan, step(0, "begin", "join", 4, of=2))
    assert_went_on(reports, [0, 1, 3])
    assert codes == [0, 0, 1, 0]
    (message,) = messages
    assert "[rank 2 on" in message
    assert "the other ranks continued without this rank at" in message
    assert "rank 2 is silent: no message from or to it for 4 s" in reports[0][0]["lost"]


@pytest.mark.parametrize(
    ("do", "cause"), [pytest.param("kill", "dead", marks=pytest.mark.smoke), ("stop", "silent")], ids=["kill", "stop"]
)
def test_all_end_with_one_message_without_rank_0(ranks, do, cause):
    """Where rank 0 is frozen, its store, a process of its own, still answers."""
    codes, reports, messages = play(ranks, 4, step(0, "middle", do, 2, patience=4))
    assert codes == [-9, 1, 1, 1]
    assert all(f"rank 0 is {cause}" in reports[rank][-1]["lost"] for rank in (1, 2, 3))
    (message,) = messages
    assert f"error: rank 0 is {cause}" in message


def test_an_error_of_a_rank_ends_the_job_also_after_another_rank_was_lost(ranks):
    codes, _, messages = play(ranks, 4, step(2, "middle", "kill", 1), step(3, "middle", "raise", 2))
    assert codes[:1] + codes[2:] == [2, -9, 2]
    (message,) = messages
    assert "[rank 3 on" in message
    assert message.endswith("error: the ninth wave")
