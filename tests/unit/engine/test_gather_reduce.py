"""Each rank adds up its own clients' uploads: the same bits on any ranks, next to those of rank 0's own sums."""

from dataclasses import dataclass

import pytest
import torch
from helpers import play, prepare, record, small_settings
from test_transport import BYTES, SIZE, THREADED, on_ranks, small_blocks  # noqa: F401  (a fixture)

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.engine.transport import gather_sums
from fedmpi.engine.transport.gather import ChunkPlan
from fedmpi.method.base import means_of
from fedmpi.method.context import State


def local(config, **server):
    server = {"reduce": "local", **server}
    return config.model_copy(update={"server": config.server.model_copy(update=server)})


@pytest.mark.parametrize("method", THREADED)
def test_the_same_bits_on_any_ranks(method):
    config = small_settings(method, "mlp", rounds=3)
    it = prepare(config)
    large = {name for t in range(3) for name in ChunkPlan(it.made.messages.upload(t).packing).large}
    means = means_of(it.made.method)
    if means is None or not large <= {*means, "_b"}:
        with pytest.raises(UserError, match=r"looks at single .*; use server"):
            prepare(local(config))
        return
    root, alone = play(config), play(local(config))
    expected = record(alone)
    for size in (2, 3, SIZE, 6):
        found = on_ranks(local(config), size)
        assert record(found[0]) == expected
        sent, received = (sum(getattr(it.fed.comm, way) for it in found.values()) for way in BYTES)
        assert sent == received
    assert record(on_ranks(local(config, trains=True), 3)[0]) == expected
    # Each term is rounded to 2^-50, the mean to its own type: after three rounds nothing else has moved.
    w, w0 = root.fed.server.w, prepare(config).fed.server.w
    assert float((alone.fed.server.w - w).norm()) <= 1e-5 * float((w - w0).norm())


def test_sums_are_exact_in_any_order():
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
        parts.add(x[i, 300:], float(c[i]), at=300)
        parts.add(x[i, :300], float(c[i]))
    assert float((parts.value() - exact).abs().max()) <= 30 * gather_sums.UNIT / 2 + 1e-15


@pytest.mark.parametrize("size", [1, 4])
def test_an_entry_that_the_sums_cannot_hold_is_told(size, monkeypatch):
    monkeypatch.setattr(gather_sums, "LARGEST", 1e-6)
    with pytest.raises(UserError, match=r"takes entries of at most 1e-06, and client \d has one of .* in dw"):
        on_ranks(local(small_settings("fedavg", "mlp", rounds=1)), size)


@pytest.mark.parametrize("size", [1, 3])
def test_an_update_that_is_not_finite_ends_the_run_as_ever(size, monkeypatch):
    @dataclass(frozen=True)
    class Torn(fedmpi.Method):
        means = {"dw": ("p",)}

        def upload(self, k):
            return State(dw=(k.w - k.w0) / (0.0 if k.id == 1 else 1.0)), State()

        def aggregate(self, s, up):
            return up.mean("dw"), State()

    monkeypatch.setitem(globals(), "Torn", Torn)
    config = small_settings("fedavg", "mlp", rounds=1)
    config = config.model_copy(update={"method": config.method.model_copy(update={"name": f"{__name__}:Torn"})})
    with pytest.raises(UserError, match="client 1"):
        on_ranks(local(config), size)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "fedld"}, "method fedld looks at single uploads"),
        ({"server": {"rule": "median"}}, "server.rule median looks at single uploads"),
        ({"faults": {"on_bad_update": "drop"}}, "faults.on_bad_update: drop may leave some out"),
        ({"faults": {"on_client_error": "drop"}}, "faults.on_client_error: drop"),
        ({"faults": {"on_lost_rank": "redo"}}, "faults.on_lost_rank: redo"),
        ({"record": {"updates": "gram"}}, "record.updates: gram compares them"),
        ({"comm": {"wire": "bf16"}}, "comm.wire.up: bf16 is for single uploads"),
    ],
)
def test_what_needs_single_uploads_is_refused(changes, said):
    config = small_settings(changes.pop("method", "fedavg"), "mlp", rounds=1, **changes)
    with pytest.raises(UserError, match=f"{said}.*; use server.reduce: root"):
        prepare(local(config))
