"""After ranks have died or frozen, a job of real processes continues, or ends with one message.

The ranks run rank_failures.py. All other combinations run with simulated ranks in
tests/unit/comm/test_rank_failures.py, and whole runs under mpirun in tests/jobs/test_resume_jobs.py and
test_failures.py.
"""

import json

import pytest


def step(rank, where, do, t=None, **more):
    return {"rank": rank, "where": where, "do": do, "round": t, **more}


def run_ranks(ranks, rounds, *plan):
    """Run the rounds; return the exit codes, the events of each rank, and the messages."""
    outcome = ranks.start("rank_failures.py", str(rounds), json.dumps(plan), "4", envs=[{}])
    messages = [line for line in outcome.text.splitlines() if line.startswith("fedmpi")]
    return json.loads((ranks.folder / "codes").read_text()), outcome.reports, messages


def assert_continued(reports, survivors):
    """Check that the survivors finished after one regroup, with the same members and the same payloads."""
    for rank in survivors:
        assert [report["event"] for report in reports[rank]] == ["regrouped", "end"]
        regrouped, end = reports[rank]
        assert regrouped["alive"] == end["alive"] == survivors
        assert regrouped["payloads"] == reports[survivors[0]][0]["payloads"]
        assert all(text.startswith(f"{each} at ") for each, text in regrouped["payloads"].items())


@pytest.mark.smoke
def test_the_job_continues_without_a_killed_rank(ranks):
    codes, reports, messages = run_ranks(ranks, 4, step(2, "middle", "kill", 2))
    assert_continued(reports, [0, 1, 3])
    assert codes == [0, 0, -9, 0]
    assert messages == []


@pytest.mark.smoke
def test_a_frozen_rank_is_excluded_and_ends_itself_when_it_wakes(ranks):
    """The rank stops while it trains, and wakes while the others continue, which wait for its end."""
    plan = [step(2, "middle", "stop", 1, patience=4), step(0, "begin", "wake", 2, of=2)]
    codes, reports, messages = run_ranks(ranks, 5, *plan, step(0, "begin", "join", 4, of=2))
    assert_continued(reports, [0, 1, 3])
    assert codes == [0, 0, 1, 0]
    (message,) = messages
    assert "[rank 2 on" in message
    assert "the other ranks continued without this rank at" in message
    assert "rank 2 is silent: no message from or to it for 4 s" in reports[0][0]["lost"]


@pytest.mark.parametrize(
    ("do", "cause"), [pytest.param("kill", "dead", marks=pytest.mark.smoke), ("stop", "silent")], ids=["kill", "stop"]
)
def test_the_job_ends_with_one_message_if_rank_0_is_lost(ranks, do, cause):
    """If rank 0 is frozen, its store, which is a separate process, still answers."""
    codes, reports, messages = run_ranks(ranks, 4, step(0, "middle", do, 2, patience=4))
    assert codes == [-9, 1, 1, 1]
    assert all(f"rank 0 is {cause}" in reports[rank][-1]["lost"] for rank in (1, 2, 3))
    (message,) = messages
    assert f"error: rank 0 is {cause}" in message


def test_an_error_of_a_rank_ends_the_job_even_after_a_regroup(ranks):
    codes, _, messages = run_ranks(ranks, 4, step(2, "middle", "kill", 1), step(3, "middle", "raise", 2))
    assert codes[:1] + codes[2:] == [2, -9, 2]
    (message,) = messages
    assert "[rank 3 on" in message
    assert message.endswith("error: the ninth wave")
