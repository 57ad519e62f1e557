"""Rank failures at unlucky moments: refused states, states on disk, and ranks that are one round behind."""

import time

import pytest
import torch
from helpers import prepare, small_settings
from test_recovery import assert_same_results, attach_checkpoints, run, run_replay, run_with_failures, set_rank_failures
from thread_ranks import RankDied, ThreadCommunicator

from fedmpi.comm.base import ConnectionLostError
from fedmpi.common.errors import UserError
from fedmpi.engine import scheduler
from fedmpi.engine.faults import lost_ranks
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.runtime import checkpoints


def test_a_refused_state_is_not_restored_from_disk(tmp_path, monkeypatch):
    """Its row leaves the memory in the round in which its upload is refused, and its rank fails soon afterwards."""
    config = small_settings(
        "scaffold",
        "mlp",
        rounds=6,
        cohort={"placement": "pinned", "fraction": 1.0},
        faults={"on_lost_rank": "drop", "on_bad_update": "drop"},
    )
    honest, feds = ClientContext.run_round, {}

    def spoiled(self, row):
        fine = honest(self, row)
        if (self.id, self.round) == (0, 2):
            self.trainer.messages.upload_layout(self.round).packing.views(row).dw.mul_(1e30)
        return fine

    step = ThreadCommunicator.step

    def dying(self):
        if self.rank == 1 and feds[1].states.round == 3:
            with self.shared.changed:
                self.shared.dead.add(1)
                self.shared.changed.notify_all()
            raise RankDied
        step(self)

    monkeypatch.setattr(ClientContext, "run_round", spoiled)
    monkeypatch.setattr(ThreadCommunicator, "step", dying)
    it = run_with_failures(config, {1: ()}, tmp_path, 1, feds)
    monkeypatch.setattr(ThreadCommunicator, "step", step)
    assert [each["client"] for each in it.rows[2]["refused"]] == [0]
    assert it.recorded_failures
    assert_same_results(it, run_replay(config, it.fed.scheduler.lost_ranks.rows))


def find_unlucky_seed(rounds):
    """Return (seed, t, idle, failing): one client per round, and none for rank `idle` in rounds t and t + 1."""
    for seed in range(200):
        who = [1 + scheduler.draw_cohort(seed, t, 7, 0.15)[0] % 3 for t in range(rounds)]
        for t in range(2, rounds - 3, 2):
            idle, at = who[t + 2], who[t + 1]
            if idle not in who[t : t + 2]:
                return seed, t, idle, next(rank for rank in (1, 2, 3) if rank not in (idle, at))
    raise AssertionError


def test_a_rank_without_clients_does_not_miss_a_round(monkeypatch):
    """It receives a broadcast late, because its parent in the tree fails, and must return to the start of the round."""
    rounds = 9
    seed, t0, idle, dead = find_unlucky_seed(rounds)
    config = small_settings(
        "fedatom",
        "mlp",
        rounds=rounds,
        faults={"on_lost_rank": "redo"},
        cohort={"placement": "pinned", "fraction": 0.15},
        model={"name": "helpers:conv_net"},
        options={"period": 2},  # the groups that are sent depend on the round
        evaluate={"protocol": ["global"]},  # with other protocols, all ranks exchange messages
    ).model_copy(update={"seed": seed})
    feds, plain = {}, ThreadCommunicator._broadcast

    def broadcast(self, x):
        at, shared = feds[self.rank].states.round, self.shared
        if self.generation == 0 and (self.rank, at) == (idle, t0 - 1):
            with shared.changed:
                shared.wait(lambda: bool(shared.dead))
            raise ConnectionLostError("its parent in the tree is dead")
        if self.generation == 0 and (self.rank, at) == (dead, t0):
            end = time.monotonic() + 2
            while feds[0].states.round < t0 + 2 and time.monotonic() < end:  # until rank 0 has reached this round
                time.sleep(0.01)
            with shared.changed:
                shared.dead.add(dead)
                shared.changed.notify_all()
            raise RankDied
        plain(self, x)

    monkeypatch.setattr(ThreadCommunicator, "_broadcast", broadcast)
    it = run_with_failures(config, {dead: ()}, feds=feds)
    assert it.recorded_failures
    assert_same_results(it, run_replay(config, it.fed.scheduler.lost_ranks.rows))


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_replay_is_resumed_from_a_checkpoint(tmp_path, after):
    """Client 0 reverts in round 4 to its state of round 1, which the checkpoint has or lacks, or which was copied."""
    known = [lost_ranks.make_row(4, {2: ""}, clients=[1], gone=(), reverted={0: 1}, why="")]
    cohorts = {"fraction": 1.0}

    def played(rounds, folder=None):
        it = prepare(small_settings("scaffold", "mlp", rounds=rounds, cohort=cohorts))
        set_rank_failures(it.fed, known)
        if folder is None:
            return run(it)
        attach_checkpoints(it, folder, 10**6)
        checkpoints.restore_newest_checkpoint(it.fed, it.checkpoints, 10, print)
        run(it)
        it.checkpoints.wait()
        return it

    played(after + 1, tmp_path)
    if after == 2:
        with pytest.raises(UserError, match="client 0 reverts to its state of round 1, which is not in the checkpoint"):
            played(6, tmp_path)
        return
    again, undisturbed = played(6, tmp_path), played(6)
    assert again.hashes == undisturbed.hashes[after:]
    assert torch.equal(again.w, undisturbed.w)
