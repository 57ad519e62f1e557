"""A rank may fail at any of its messages: the others continue, and faults.jsonl determines the results."""

import random
from dataclasses import replace
from functools import lru_cache

import pytest
from helpers import FinishedRun, digest, federated, prepare, small_settings
from thread_ranks import ThreadCommunicator, run_in_threads
from torch import nn

from fedmpi.engine.faults import lost_ranks
from fedmpi.engine.faults.lost_ranks import LostRanks
from fedmpi.engine.scheduler import assign_pinned
from fedmpi.flat import linear
from fedmpi.methods import registry
from fedmpi.runtime import checkpoints
from fedmpi.runtime.checkpoints import CheckpointWriter, ClientStateFiles

ROUNDS, SIZE = 5, 4


def fault_tolerant_config(method, policy="drop", placement="balanced", **changes):
    cohort = {"placement": placement, "fraction": 0.6}
    faults = {"on_lost_rank": policy, **changes.pop("faults", {})}
    return small_settings(method, "mlp", rounds=ROUNDS, faults=faults, cohort=cohort, **changes)


def attach_checkpoints(it, folder, room):
    """Make a federation write checkpoints into `folder`, with at most `room` client states in memory."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    it.checkpoints = CheckpointWriter(folder / "checkpoints", ClientStateFiles(folder / "state"), 1, 2)
    it.fed.reporter.callbacks.save_state = it.checkpoints.save
    if it.experiment.messages.client_state.size:
        it.fed.states.store, it.fed.states.max_in_memory = it.checkpoints.rows, room


def silo_federation(seat=None):
    """Return data in which each client is a site that only its rank reads; without `seat`, one process reads all."""
    data = replace(federated(), global_test=None)
    if seat is None:
        return data
    mine = [k for k, rank in assign_pinned(range(data.clients), range(1, SIZE)).items() if rank == seat.rank]
    own = ({k: shards[k] for k in mine} for shards in (data.train, data.test))
    return replace(data, **dict(zip(("train", "test"), own, strict=True)))


def make(config, folder=None, room=10**6, feds=None):
    def on(seat: ThreadCommunicator) -> FinishedRun:
        it = prepare(config, silo_federation(seat) if "global" not in config.evaluate.protocol else None, comm=seat)
        it.recorded_failures, it.fed.reporter.callbacks.record_lost_ranks = (
            [],
            lambda row: it.recorded_failures.append(row),
        )
        if folder is not None:
            attach_checkpoints(it, folder, room)
        if feds is not None:
            feds[seat.rank] = it.fed
        return it

    return on


def run(it: FinishedRun) -> FinishedRun:
    it.reason = it.fed.run()
    return it


def run_with_failures(config, dies, folder=None, room=10**6, feds=None):
    """Return rank 0's run, after all other living ranks have ended; feds: rank -> its federation."""
    runs = run_in_threads(SIZE, dies, make(config, folder, room, feds), run)
    wrong = {rank: it for rank, it in runs.items() if not isinstance(it, FinishedRun)}
    assert not wrong, wrong
    assert set(runs) >= set(range(SIZE)) - set(dies)
    assert (runs[0].reason, len(runs[0].rows)) == ("finished", config.rounds)
    assert runs[0].recorded_failures == runs[0].fed.scheduler.lost_ranks.rows
    return runs[0]


def set_rank_failures(fed, rows):
    """Make a federation replay the rank failures of another run."""
    fed.scheduler.lost_ranks = LostRanks(rows)
    for part in (fed, fed.control):
        part.config = replace(part.config, replays_failures=True)


def run_replay(config, rows) -> FinishedRun:
    """Run without failures, replaying the failures of another run."""
    it = prepare(config, silo_federation() if "global" not in config.evaluate.protocol else None)
    set_rank_failures(it.fed, rows)
    return run(it)


def assert_same_results(it, again):
    assert it.hashes == again.hashes, it.recorded_failures
    assert digest(it.b) == digest(again.b)
    mine, theirs = ([metrics_of(row) for row in each.rows] for each in (it, again))
    assert str(mine) == str(theirs), it.recorded_failures  # as text, because nan != nan
    assert str(it.lines) == str(again.lines)


def check_bits(it, config):
    """Check that the bits are those of a replay, and with `redo` (unless states were lost) of an undisturbed run."""
    assert_same_results(it, run_replay(config, it.fed.scheduler.lost_ranks.rows))
    if config.faults.on_lost_rank == "redo" and not any(row["reverted"] for row in it.recorded_failures):
        assert_same_results(it, run_without_failures(config)[0])


def resume_in_one_process(config, folder, rows, policy="drop"):
    """Resume in one process from the checkpoint in `folder`; return the first round that is trained, and the run."""
    faults = config.faults.model_copy(update={"on_lost_rank": policy})
    it = prepare(
        config.model_copy(update={"faults": faults}),
        None if "global" in config.evaluate.protocol else silo_federation(),
    )
    attach_checkpoints(it, folder, 10**6)
    it.fed.scheduler.lost_ranks = LostRanks(rows)
    t = checkpoints.restore_newest_checkpoint(it.fed, it.checkpoints, 10, lambda text: None)
    run(it)
    again = run_replay(config, it.fed.scheduler.lost_ranks.rows)
    assert it.hashes == again.hashes[t:]
    assert str([*map(metrics_of, it.rows)]) == str([*map(metrics_of, again.rows)][t:])
    return t, it


def metrics_of(row):
    return {name: value for name, value in sorted(row.items()) if "loss" in name or "accuracy" in name}


@lru_cache(maxsize=4)
def run_without_failures(config):
    """Return a run without failures, and the number of messages of each rank in it."""
    runs = run_in_threads(SIZE, {}, make(config), run)
    return runs[0], {rank: it.fed.comm.count for rank, it in runs.items()}


def draw_failures(config, rng, ranks):
    """Draw, for each of these ranks, the number of its last message."""
    _, counts = run_without_failures(config)
    return {rank: [rng.randint(1, counts[rank])] for rank in ranks}


@pytest.mark.parametrize("placement", ["balanced", "pinned"])
@pytest.mark.parametrize("policy", ["drop", "redo"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper"])
def test_one_or_two_ranks_fail_at_any_message(tmp_path, method, policy, placement):
    """Also with states on disk of which few stay in memory."""
    config, rng = fault_tolerant_config(method, policy, placement), random.Random(f"{method} {policy} {placement}")
    for number in range(3):
        dies = draw_failures(config, rng, rng.sample([1, 2, 3], 1 + number % 2))
        folder = tmp_path / str(number) if number % 2 else None
        it = run_with_failures(config, dies, folder, room=2)
        check_bits(it, config)


def norm_model(input_shape, classes):
    """A model with batch statistics that draws no random numbers, because thread ranks share torch's generator."""
    layers = [nn.Conv2d(input_shape[0], 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6 * 9, classes))


@pytest.mark.parametrize(
    ("net", "policy", "changes"),
    [
        ("norm", "drop", {"model": {"name": f"{__name__}:norm_model"}}),  # float buffers are queried, too
        ("mlp", "redo", {"faults": {"on_bad_update": "drop", "max_norm": 0.3}}),
        # two clients per round; norms of earlier rounds are queried
        ("mlp", "drop", {"cohort": {"fraction": 0.3}, "faults": {"on_bad_update": "drop"}}),
    ],
    ids=str,
)
def test_a_rank_fails_at_any_message_of_a_sharded_gather(monkeypatch, net, policy, changes):
    """Before, during and after the queries of rank 0: a round counts once or not at all."""
    for size in ("CHUNK", "BLOCK"):
        monkeypatch.setattr(linear, size, 4 if net == "norm" else 64)
    faults = {"on_lost_rank": policy, **changes.get("faults", {})}
    server = {"placement": "sharded", "optim": "adam", "lr": 0.01}
    config = small_settings("fedavg", net, rounds=2, server=server, **changes | {"faults": faults})
    counts = run_without_failures(config)[1]
    for number in range(1, counts[2] + 1):
        it = run_with_failures(config, {2: [number]})
        again = run_replay(config, it.fed.scheduler.lost_ranks.rows)
        assert_same_results(it, again)
        assert it.fed.server.update_filter.idle_since == again.fed.server.update_filter.idle_since
        assert [row["down_parameters"] for row in it.rows] == [row["down_parameters"] for row in again.rows]


DRAWS = {"fedsr"}  # methods that draw from torch's global generator, which thread ranks share


@pytest.mark.soak
@pytest.mark.parametrize("method", sorted(set(registry) - DRAWS))
def test_every_method_recovers_from_failures_at_many_messages(tmp_path, method):
    rng = random.Random(method)
    for number in range(20):
        config = fault_tolerant_config(method, rng.choice(["drop", "redo"]), rng.choice(["balanced", "pinned"]))
        dies = draw_failures(config, rng, rng.sample([1, 2, 3], rng.choice([1, 1, 2])))
        it = run_with_failures(config, dies, tmp_path / str(number) if number % 2 else None, room=2)
        check_bits(it, config)


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_a_run_with_failures_is_resumed_from_a_checkpoint(tmp_path, method):
    """The job is killed and resumed in one process; the bits are those that the recorded failures determine."""
    config, rng = fault_tolerant_config(method), random.Random(method)
    short = config.model_copy(update={"rounds": 3})
    for number in range(4):
        folder = tmp_path / str(number)
        first = run_with_failures(short, draw_failures(short, rng, [2]), folder, room=2)
        rows = first.fed.scheduler.lost_ranks.rows
        t, it = resume_in_one_process(config, folder, rows, policy="abort")
        assert t == 2
        assert not any(row["reported"] for row in it.fed.scheduler.lost_ranks.rows if row["round"] == t + 1)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper"])
def test_a_failed_site_is_unavailable_until_the_run_is_resumed(tmp_path, method):
    """No other rank has its data; after the run is resumed, it takes part with the state on its own disk."""
    config = fault_tolerant_config(method, "drop", "pinned", evaluate={"protocol": ["personal"]})
    short, rng = config.model_copy(update={"rounds": 3}), random.Random(f"sites {method}")
    for number in range(6):
        folder = tmp_path / str(number)
        dead = rng.sample([1, 2, 3], 1 + number % 2)
        first = run_with_failures(short, draw_failures(short, rng, dead), folder, room=2)
        rows = first.fed.scheduler.lost_ranks.rows
        assert_same_results(first, run_replay(short, rows))
        mine = {k for k, rank in assign_pinned(range(7), range(1, SIZE)).items() if rank in dead}
        assert first.fed.scheduler.lost_ranks.unavailable_clients(3) == mine
        assert all(not mine & set(row["cohort"]) for row in first.rows if row["round"] > rows[-1]["round"])

        _, it = resume_in_one_process(config, folder, [row for row in rows if row["round"] <= 2])
        assert not it.fed.scheduler.lost_ranks.unavailable_clients(3)
        assert any(mine & set(row["cohort"]) for row in it.rows if row["round"] > 2)


def test_the_run_ends_if_all_training_ranks_fail():
    config = fault_tolerant_config("fedavg")
    runs = run_in_threads(3, {1: [4], 2: [4]}, make(config), run)
    assert "all training ranks have failed" in str(runs[0])


def test_without_the_policy_a_rank_failure_ends_the_run():
    config = fault_tolerant_config("fedavg", "abort")
    runs = run_in_threads(SIZE, {2: [4]}, make(config), run)
    assert all("dead" in str(runs[rank]) or "broken" in str(runs[rank]) for rank in (0, 1, 3))


def test_effects_of_recorded_rank_failures():
    rows = [
        lost_ranks.make_row(1, {2: "a"}, clients=[3], reverted={5: 0}),
        lost_ranks.make_row(2, {1: "b"}, clients=[0], gone=[4]),
        lost_ranks.make_row(4, {}, back=[4], reverted={4: 1}),
    ]
    failures = LostRanks(rows)
    assert [failures.participants(t, range(6)) for t in range(5)] == [
        [0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5], [1, 2, 3, 5], [0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip
    assert [failures.reverted_states(t) for t in (0, 1, 4)] == [{}, {5: 0}, {4: 1}]
    assert failures.needed_states() == {(5, 0), (4, 1)}
    assert failures.up_to_round(2).rows == rows[:2]
    failures.replace_failures_since(2, [])
    assert failures.rows == rows[:1]
    late = lost_ranks.make_row(2, {}, gone=[1], reverted={0: 1}, reported=True)
    late_failures = LostRanks([lost_ranks.make_row(2, {}, gone=[4]), late])
    assert (late_failures.before_evaluation(2).unavailable_clients(2), late_failures.unavailable_clients(2)) == (
        {4},
        {1, 4},
    )
    assert (late_failures.before_evaluation(2).reverted_states(2), late_failures.before_evaluation(3).rows) == (
        {},
        late_failures.rows,
    )
    assert (
        late_failures.for_resume(2).before_evaluation(2).unavailable_clients(2),
        late_failures.for_resume(3).rows,
    ) == ({1, 4}, late_failures.rows)
    assert not lost_ranks.followed_previous_evaluation({"round": 2})  # a row of an earlier version
