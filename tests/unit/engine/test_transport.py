"""The four gather modes: three have the same bits, and those of reducing do not depend on the ranks."""

from dataclasses import dataclass

import pytest
import torch
from helpers import prepare, record, run_experiment, small_settings
from thread_ranks import run_in_threads

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.engine.transport import gather, gather_sharded, gather_sums
from fedmpi.engine.transport.gather import ChunkPlan
from fedmpi.flat import linear
from fedmpi.flat.packing import Packing
from fedmpi.method.base import get_mean_only_slots
from fedmpi.method.context import State
from fedmpi.methods import registry

SIZE, BYTES = 4, ("sent_bytes", "received_bytes")
RULES = ("geometric_median", "harmonize", "krum", "median", "principal", "trimmed_mean")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Make blocks so small that slots of a tiny model are large, and are sent in many pieces."""
    monkeypatch.setattr(linear, "CHUNK", 64)
    monkeypatch.setattr(linear, "BLOCK", 128)
    monkeypatch.setattr(gather, "PIECE_ENTRIES", 64)


@pytest.fixture
def gather_classes(monkeypatch):
    """Record the names of the gather classes that are used."""
    names, plain = [], gather.UploadGather.__init__
    record_class = lambda self, *a: (names.append(type(self).__name__), plain(self, *a))[1]  # noqa: E731
    monkeypatch.setattr(gather.UploadGather, "__init__", record_class)
    return names


def run_with_rows(config, monkeypatch):
    """Run in one process that stores all rows."""
    with monkeypatch.context() as patch:
        patch.setattr("fedmpi.engine.transport.round_transport.get_mean_only_slots", lambda method: None)
        return record(run_experiment(config))


def run_on_ranks(config, size=SIZE, data=None):
    """Run on ranks that are threads; return rank -> its finished run."""

    def run(it):
        it.reason = it.fed.run()
        return it

    runs = run_in_threads(size, {}, lambda seat: prepare(config, data, seat), run)
    for it in runs.values():
        if isinstance(it, Exception):
            raise it
    return runs


def with_server_keys(config, **server):
    return config.model_copy(update={"server": config.server.model_copy(update=server)})


def sharded_config(config):
    return with_server_keys(config, placement="sharded")


def reducing_config(config, **server):
    return with_server_keys(config, reduce="local", **server)


# fedsr draws from torch's global generator, which thread ranks share
THREADED = sorted(set(registry) - {"fedsr"})


@pytest.mark.parametrize("method", THREADED)
def test_sharded_gather_has_the_bits_of_rows(method, monkeypatch, gather_classes):
    config = small_settings(method, "mlp", rounds=2)
    expected = run_with_rows(config, monkeypatch)
    runs = run_on_ranks(sharded_config(config))
    assert record(runs[0]) == expected
    packing = runs[0].experiment.messages.upload_layout(0).packing
    assert ("ShardedGather" in gather_classes) == bool(ChunkPlan(packing).large)


@pytest.mark.parametrize("rule", [*RULES, {"name": "principal", "scope": "tensor"}])
def test_rules_have_the_same_bits_on_shards(rule, monkeypatch, gather_classes):
    config = small_settings("fedavg", "mlp", rounds=2, server={"rule": rule})
    assert record(run_on_ranks(sharded_config(config))[0]) == run_with_rows(config, monkeypatch)
    assert "ShardedGather" in gather_classes


@pytest.mark.parametrize(
    "changes",
    [
        {"server": {"trains_clients": True}},
        {"server": {"optim": "adam", "lr": 0.01}},
        {"faults": {"on_bad_update": "drop", "max_norm": 0.4}},
        {"cohort": {"weighting": "uniform", "fraction": 1.0}},
        {"cohort": {"fraction": 0.2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["scaffold", "fedld"])
def test_shards_with_dropped_rows_training_rank_0_and_few_clients(method, changes, monkeypatch):
    """Dropped uploads; rank 0 trains, too; fewer clients than ranks."""
    config = small_settings(method, "mlp", rounds=3, **changes)
    runs = record(run_on_ranks(sharded_config(config))[0])
    expected = run_with_rows(config, monkeypatch)
    assert runs == expected
    if "max_norm" in str(changes):
        assert any(row["refused"] for row in expected["rows"])


@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_stored_if_uploads_may_be_dropped(size, gather_classes):
    config = small_settings("fedavg", "mlp", rounds=1, faults={"on_bad_update": "drop"})
    run_on_ranks(config, size)
    assert "StreamingGather" not in gather_classes


# ---- user-defined methods ----
@dataclass(frozen=True)
class RowReader(fedmpi.Method):
    """A method that reads the rows themselves."""

    def aggregate(self, server, updates):
        return updates.dw.sort(0).values[0], State()


@dataclass(frozen=True)
class UndeclaredReader(fedmpi.Method):
    mean_only_slots = {"dw": ("p",)}

    def aggregate(self, server, updates):
        return updates.dw[0], State()


@dataclass(frozen=True)
class UndeclaredSum(fedmpi.Method):
    mean_only_slots = {"dw": ("uniform",)}

    def aggregate(self, server, updates):
        return updates.mean("dw"), State()


def config_of_class(cls, **changes):
    config = small_settings("fedavg", "mlp", rounds=2, **changes)
    method = config.method.model_copy(update={"name": f"{__name__}:{cls.__name__}"})
    return config.model_copy(update={"method": method})


def test_a_method_that_reads_rows_gets_them_from_all_holders(gather_classes):
    config = config_of_class(RowReader)
    assert record(run_on_ranks(sharded_config(config))[0]) == record(run_experiment(config))
    assert "StreamingGather" not in gather_classes


@pytest.mark.parametrize(("cls", "text"), [(UndeclaredReader, "reads updates.dw"), (UndeclaredSum, "another sum")])
def test_undeclared_use_of_a_slot_is_an_error(cls, text):
    with pytest.raises(UserError, match=f"mean_only_slots declares .*'dw'.*{text}.*remove 'dw'"):
        run_experiment(config_of_class(cls))


# ---- the gather mode reducing ----
@pytest.mark.parametrize("method", THREADED)
def test_reducing_has_the_same_bits_on_any_number_of_ranks(method):
    config = small_settings(method, "mlp", rounds=3)
    it = prepare(config)
    large = {name for t in range(3) for name in ChunkPlan(it.experiment.messages.upload_layout(t).packing).large}
    means = get_mean_only_slots(it.experiment.method)
    if means is None or not large <= {*means, "_b"}:
        with pytest.raises(UserError, match=r"uses individual uploads.*; set server"):
            prepare(reducing_config(config))
        return
    root, alone = run_experiment(config), run_experiment(reducing_config(config))
    expected = record(alone)
    for size in (2, 3, SIZE, 6):
        runs = run_on_ranks(reducing_config(config), size)
        assert record(runs[0]) == expected
        sent, received = (sum(getattr(it.fed.comm, way) for it in runs.values()) for way in BYTES)
        assert sent == received
    assert record(run_on_ranks(reducing_config(config, trains_clients=True), 3)[0]) == expected
    # Each term is rounded to a multiple of 2^-50, and the mean to its own type; nothing else differs after three
    # rounds.
    w, w0 = root.fed.server.w, prepare(config).fed.server.w
    assert float((alone.fed.server.w - w).norm()) <= 1e-5 * float((w - w0).norm())


def test_integer_sums_are_exact_in_any_order():
    g = torch.Generator().manual_seed(0)
    x, c = torch.randn(30, 1000, generator=g), torch.rand(30, generator=g, dtype=torch.float64)
    c /= c.sum()

    def total(order):
        sum_ = gather_sums.IntegerSum(torch.zeros(1000, dtype=torch.int64), torch.float32)
        for i in order:
            sum_.add(x[i], float(c[i]))
        return sum_.value()

    forth, exact = total(range(30)), c @ x.double()
    assert torch.equal(forth, total(reversed(range(30))))
    assert torch.equal(forth, exact.float())
    parts = gather_sums.IntegerSum(torch.zeros(1000, dtype=torch.int64), torch.float64)
    for i in range(30):
        parts.add(x[i, 300:], float(c[i]), offset=300)
        parts.add(x[i, :300], float(c[i]))
    assert float((parts.value() - exact).abs().max()) <= 30 * gather_sums.UNIT / 2 + 1e-15


@pytest.mark.parametrize("size", [1, 4])
def test_an_entry_beyond_the_range_of_integer_sums_is_an_error(size, monkeypatch):
    monkeypatch.setattr(gather_sums, "MAX_ENTRY", 1e-6)
    with pytest.raises(UserError, match=r"limited to values up to 1e-06, but client \d sent .* in slot dw"):
        run_on_ranks(reducing_config(small_settings("fedavg", "mlp", rounds=1)), size)


@dataclass(frozen=True)
class NanSender(fedmpi.Method):
    mean_only_slots = {"dw": ("p",)}

    def upload(self, client):
        return State(dw=(client.w - client.w0) / (0.0 if client.id == 1 else 1.0)), State()

    def aggregate(self, server, updates):
        return updates.mean("dw"), State()


@pytest.mark.parametrize("size", [1, 3])
def test_an_update_that_is_not_finite_ends_the_run(size):
    with pytest.raises(UserError, match="client 1"):
        run_on_ranks(reducing_config(config_of_class(NanSender)), size)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "fedld"}, "method fedld uses individual uploads"),
        ({"server": {"rule": "median"}}, "server.rule median uses individual uploads"),
        ({"faults": {"on_bad_update": "drop"}}, "faults.on_bad_update: drop may exclude some of them"),
        ({"faults": {"on_client_error": "drop"}}, "faults.on_client_error: drop"),
        ({"faults": {"on_lost_rank": "redo"}}, "faults.on_lost_rank: redo"),
        ({"record": {"updates": "gram"}}, "record.updates: gram compares individual uploads"),
        ({"comm": {"compression": "bf16"}}, "comm.compression: bf16 encodes individual uploads"),
    ],
)
def test_options_that_need_single_uploads_are_refused(changes, text):
    config = small_settings(changes.pop("method", "fedavg"), "mlp", rounds=1, **changes)
    with pytest.raises(UserError, match=f"{text}.*; set server.reduce: root"):
        prepare(reducing_config(config))


# ---- chunk plans ----
def test_chunk_plan_sends_every_column_once(monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 16)
    monkeypatch.setattr(linear, "BLOCK", 32)
    packing = Packing({"_loss": (), "b": (7,), "d": (32,), "a": (100,), "c": (3, 70)})
    plan = ChunkPlan(packing)
    assert list(plan.large) == ["a", "c"]
    assert list(plan.small.shapes) == ["_loss", "b", "d"]
    row = torch.arange(packing.size, dtype=torch.float32)
    pieces = [plan.large_slot_columns(row, *piece) for piece in plan.pieces()]
    assert sorted(torch.cat([plan.small_slots_part(row), *pieces]).tolist()) == row.tolist()
    for holders in (1, 2, 3, 8):
        for name, (_, n) in plan.large.items():
            shares = [plan.holder_span(name, j, holders) for j in range(holders)]
            assert [a for a, _ in shares] == [0, *(b for _, b in shares[:-1])]
            assert shares[-1][1] == n
            assert all(a % 32 == 0 for a, _ in shares if a < n)


def test_memory_of_each_rank(monkeypatch):
    """m d / W entries per rank, and one row that is being sent."""
    config = sharded_config(small_settings("fedavg", "mlp", rounds=1, cohort={"fraction": 1.0}))
    monkeypatch.setattr(gather_sharded, "MAX_UNSENT_BYTES", 0)
    monkeypatch.setattr(linear, "CHUNK", 16)
    monkeypatch.setattr(linear, "BLOCK", 32)
    runs = run_on_ranks(config)
    experiment = runs[0].experiment
    d, m = experiment.model.layout.size, 7
    for it in runs.values():
        entries = {name: x.numel() for name, x in it.fed.transport.buffers.tensors.items()}
        assert entries["shard dw"] <= m * (d / SIZE + 32)
        assert entries.get("rows", 0) <= experiment.messages.upload_layout(0).packing.size
    assert sum(it.fed.transport.buffers.tensors["shard dw"].numel() for it in runs.values()) == m * d
