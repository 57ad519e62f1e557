"""Uploads travel in three ways, and the numbers do not tell in which."""

from dataclasses import dataclass

import pytest
import torch
from helpers import play, prepare, record, small_settings
from thread_ranks import play_in_threads

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.engine.transport import gather, gather_sharded, gather_sums
from fedmpi.engine.transport.gather import ChunkPlan
from fedmpi.flat import linear
from fedmpi.flat.packing import Packing
from fedmpi.method.context import State
from fedmpi.methods import registry

SIZE, BYTES = 4, ("sent_bytes", "received_bytes")
RULES = ("geometric_median", "harmonize", "krum", "median", "principal", "trimmed_mean")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Slots of a tiny model are large, and travel in many pieces."""
    monkeypatch.setattr(linear, "CHUNK", 64)
    monkeypatch.setattr(linear, "BLOCK", 128)
    monkeypatch.setattr(gather, "PIECE", 64)


@pytest.fixture
def ways(monkeypatch):
    """Which ways were taken."""
    found = []
    for way in (gather_sharded.ShardedGather, gather_sums.StreamingGather):
        plain = way.__init__
        monkeypatch.setattr(way, "__init__", lambda self, *a, _p=plain, _w=way: (found.append(_w), _p(self, *a))[1])
    return found


def whole(config, monkeypatch):
    """One process that holds all rows."""
    with monkeypatch.context() as patch:
        patch.setattr("fedmpi.engine.transport.round_transport.means_of", lambda method: None)
        return record(play(config))


def on_ranks(config, size=SIZE, data=None):
    """rank -> its finished run, of ranks that are threads."""

    def run(it):
        it.reason = it.fed.run()
        return it

    found = play_in_threads(size, {}, lambda seat: prepare(config, data, seat), run)
    for it in found.values():
        if isinstance(it, Exception):
            raise it
    return found


def at(placement, config):
    return config.model_copy(update={"server": config.server.model_copy(update={"placement": placement})})


# fedsr draws from torch's generator, which ranks as threads share
THREADED = sorted(set(registry) - {"fedsr"})


@pytest.mark.parametrize("method", THREADED)
def test_sharded_rows_give_the_bits_of_whole_ones(method, monkeypatch, ways):
    config = small_settings(method, "mlp", rounds=2)
    expected = whole(config, monkeypatch)
    found = on_ranks(at("sharded", config))
    assert record(found[0]) == expected
    travels = found[0].made.messages.upload(0).packing
    assert (gather_sharded.ShardedGather in ways) == bool(ChunkPlan(travels).large)


@pytest.mark.parametrize("rule", [*RULES, {"name": "principal", "scope": "tensor"}])
def test_rules_on_shards(rule, monkeypatch, ways):
    config = small_settings("fedavg", "mlp", rounds=2, server={"rule": rule})
    assert record(on_ranks(at("sharded", config))[0]) == whole(config, monkeypatch)
    assert gather_sharded.ShardedGather in ways


@pytest.mark.parametrize(
    "changes",
    [
        {"server": {"trains": True}},
        {"server": {"optim": "adam", "lr": 0.01}},
        {"faults": {"on_bad_update": "drop", "max_norm": 0.4}},
        {"cohort": {"weighting": "uniform", "fraction": 1.0}},
        {"cohort": {"fraction": 0.2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["scaffold", "fedld"])
def test_shards_and_what_becomes_of_rows(method, changes, monkeypatch):
    """Rows that are left out; rank 0 training; fewer clients than ranks."""
    config = small_settings(method, "mlp", rounds=3, **changes)
    found = record(on_ranks(at("sharded", config))[0])
    expected = whole(config, monkeypatch)
    assert found == expected
    if "max_norm" in str(changes):
        assert any(row["refused"] for row in expected["rows"])


@pytest.mark.parametrize("size", [1, 3])
def test_rows_of_a_round_that_may_have_to_leave_some_out_are_held(size, ways):
    config = small_settings("fedavg", "mlp", rounds=1, faults={"on_bad_update": "drop"})
    on_ranks(config, size)
    assert gather_sums.StreamingGather not in ways


# ---- a user's own ----
@dataclass(frozen=True)
class Raw(fedmpi.Method):
    """Reads the rows themselves."""

    def aggregate(self, s, up):
        return up.dw.sort(0).values[0], State()


@dataclass(frozen=True)
class Wrong(fedmpi.Method):
    means = {"dw": ("p",)}

    def aggregate(self, s, up):
        return up.dw[0], State()


@dataclass(frozen=True)
class Another(fedmpi.Method):
    means = {"dw": ("uniform",)}

    def aggregate(self, s, up):
        return up.mean("dw"), State()


def named(cls, **changes):
    config = small_settings("fedavg", "mlp", rounds=2, **changes)
    method = config.method.model_copy(update={"name": f"{__name__}:{cls.__name__}"})
    return config.model_copy(update={"method": method})


def test_a_rule_that_reads_rows_gets_them_wherever_they_lie(ways):
    config = named(Raw)
    assert record(on_ranks(at("sharded", config))[0]) == record(play(config))
    assert gather_sums.StreamingGather not in ways


@pytest.mark.parametrize(("cls", "said"), [(Wrong, "reads updates.dw"), (Another, "another sum")])
def test_what_means_does_not_say_is_told(cls, said):
    with pytest.raises(UserError, match=f"means says .*'dw'.*{said}.*leave out 'dw'"):
        play(named(cls))


# ---- cuts ----
def test_cuts_share_out_every_column_once(monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 16)
    monkeypatch.setattr(linear, "BLOCK", 32)
    packing = Packing({"_loss": (), "a": (100,), "b": (7,), "c": (3, 70), "d": (32,)})
    made = ChunkPlan(packing)
    assert list(made.large) == ["a", "c"]
    assert made.runs == [(0, 1), (101, 108), (318, 350)]
    row = torch.arange(packing.size, dtype=torch.float32)
    pieces = [made.part(row, *piece) for piece in made.pieces()]
    assert sorted(torch.cat([*made.small_parts(row), *pieces]).tolist()) == row.tolist()
    for holders in (1, 2, 3, 8):
        for name, (_, n) in made.large.items():
            shares = [made.share(name, j, holders) for j in range(holders)]
            assert [a for a, _ in shares] == [0, *(b for _, b in shares[:-1])]
            assert shares[-1][1] == n
            assert all(a % 32 == 0 for a, _ in shares if a < n)


def test_what_each_rank_holds(monkeypatch):
    """m d / W entries a rank, and one row on its way."""
    config = at("sharded", small_settings("fedavg", "mlp", rounds=1, cohort={"fraction": 1.0}))
    monkeypatch.setattr(gather_sharded, "UNSENT", 0)
    monkeypatch.setattr(linear, "CHUNK", 16)
    monkeypatch.setattr(linear, "BLOCK", 32)
    found = on_ranks(config)
    made = found[0].made
    d, m = made.model.layout.size, 7
    for it in found.values():
        held = {name: x.numel() for name, x in it.fed.transport.buffers.tensors.items()}
        assert held["shard dw"] <= m * (d / SIZE + 32)
        assert held.get("rows", 0) <= made.messages.upload(0).packing.size
    assert sum(it.fed.transport.buffers.tensors["shard dw"].numel() for it in found.values()) == m * d
