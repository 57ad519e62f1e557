"""Bad uploads end the run, or are left out of the round as if their clients had not taken part."""

import math
import warnings

import pytest
import torch
from helpers import digest, federated, prepare, run_experiment, settings

from fedmpi.common.errors import UserError
from fedmpi.engine import scheduler
from fedmpi.engine.faults.upload_filter import UpdateFilter
from fedmpi.engine.local import training_loop
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.transport.gather import ChunkPlan, GatheredUploads
from fedmpi.flat import linear
from fedmpi.flat.packing import Packing


def refused_clients(guard, norms, t=0, w=0.0):
    """Return the refused clients, for updates with these norms and a model of norm w."""
    rows = torch.zeros(len(norms), 3)
    rows[:, 2] = torch.tensor(norms)
    uploads = GatheredUploads(rows, ChunkPlan(Packing({"_loss": (), "dw": (2,)}), split=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = guard.find_refused(t, range(len(norms)), uploads, torch.tensor([w, 0.0]))
    return [each["client"] for each in refused]


# ---- the bound ----
@pytest.mark.parametrize(
    ("norms", "bad"),
    [
        ([1, 2, 3, 1e6], [3]),
        ([1, 2, 3, 1e30], [3]),
        ([1, 1, 1000, 1], []),
        ([1, 1, 1001, 1], [2]),
        ([1e4, 1e4, 1, 1], [0, 1]),  # for an even number of norms, the lower of the two middle ones is the median
        ([0, 0, 0, 5], []),  # zero norms do not count
        ([0, 0, 1, 1, 5e6], [4]),
        ([1, 1e9], []),  # of two norms it is unclear which one is wrong
        ([1e9], []),
        ([1, math.nan, 1], [1]),
        ([math.inf, 1, 1, 1], [0]),
        ([1e-30, 1e-30, 1e-30, 1], []),  # like zeros, because their squares underflow
    ],
)
def test_updates_longer_than_a_thousand_medians_are_refused(norms, bad):
    assert refused_clients(UpdateFilter("auto", drop=True), norms) == bad


def test_an_update_no_longer_than_the_model_is_never_refused():
    """If the other clients have converged, the update of a client with new data is far from their median."""
    assert refused_clients(UpdateFilter("auto", drop=True), [1e-6, 1e-6, 1e-6, 5.0], w=6.0) == []
    assert refused_clients(UpdateFilter("auto", drop=True), [1e-6, 1e-6, 1e-6, 7.0], w=6.0) == [3]


def test_max_norm_may_be_a_number_or_null():
    assert refused_clients(UpdateFilter(2.0, drop=True), [1, 2, 2.5], w=100.0) == [2]
    assert refused_clients(UpdateFilter(None, drop=True), [1, 1, 1, 1e30]) == []
    assert refused_clients(UpdateFilter(None, drop=True), [1, 1, 1, math.nan]) == [3]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_equal_those_in_float64(kind):
    """Also if float32 squares overflow; nan if a value is not finite."""
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e25
    x[2] = 0
    x = x.to(kind)
    x[3, 5] = torch.inf
    norms = linear.row_norms(linear.block_norms(x))
    assert norms.dtype == torch.float64
    assert norms[:3].tolist() == pytest.approx(x[:3].double().norm(dim=1).tolist(), rel=1e-3)
    assert math.isnan(norms[3])
    assert linear.row_norms(linear.block_norms(x[:, :0])).tolist() == [0.0] * 4


# ---- runs ----
BAD = 2  # the client whose uploads are bad


def scale_upload(monkeypatch, factor, rounds=(1,), slot="dw"):
    """Multiply the upload of client BAD by `factor` in these rounds."""
    honest = ClientContext.run_round

    def spoiled(self, row):
        honest(self, row)
        if self.id == BAD and self.round in rounds:
            getattr(self.trainer.messages.upload_layout(self.round).packing.views(row), slot).mul_(factor)

    monkeypatch.setattr(ClientContext, "run_round", spoiled)


def config_with_all_clients(method="fedavg", **more):
    return settings(method, cohort={"fraction": 1.0}, **more)


@pytest.mark.parametrize("factor", [1e6, 1e30])
def test_a_huge_update_ends_the_run_by_default(monkeypatch, factor):
    scale_upload(monkeypatch, factor)
    with pytest.raises(UserError) as caught:
        run_experiment(config_with_all_clients())
    message = str(caught.value)
    assert message.startswith("round 1: client 2 sent an update of norm ")
    assert "above the bound of" in message
    assert "faults.max_norm: auto; the median norm is 0." in message
    assert "the round was discarded" in message
    assert "faults.on_bad_update: drop" in message


SPOILED = [*((m, "dw") for m in ("fedavg", "scaffold", "feddyn", "fedper", "fedbn", "apfl", "fednova"))]
SPOILED += [("scaffold", "dc"), ("feddyn", "_b"), ("fedper", "_b"), ("apfl", "_b")]


@pytest.mark.parametrize(("method", "slot"), SPOILED)
def test_a_dropped_upload_equals_an_absent_client(monkeypatch, method, slot):
    """Bit for bit: the server, the other clients, and the client's own state in later rounds."""
    config = config_with_all_clients(method, net="norm", rounds=4, faults={"on_bad_update": "drop"})
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale_upload(patch, 1e6 if slot == "dw" else torch.nan, slot=slot)
        spoiled = run_experiment(config, federated())
    message = [str(w.message) for w in caught if "sent" in str(w.message)]
    assert len(message) == 1
    assert message[0].startswith(f"round 1: client 2 sent {'an update of norm' if slot == 'dw' else 'values that are'}")
    draw_cohort = scheduler.draw_cohort

    def without(seed, t, *how):
        return [k for k in draw_cohort(seed, t, *how) if (t, k) != (1, BAD)]

    monkeypatch.setattr(scheduler, "draw_cohort", without)
    clean = run_experiment(config, federated())
    assert spoiled.hashes == clean.hashes
    assert digest(spoiled.fed.server.state_row) == digest(clean.fed.server.state_row)
    assert digest(spoiled.b) == digest(clean.b)
    for k, row in clean.fed.states.rows.items():
        assert digest(spoiled.fed.states.rows[k]) == digest(row), k
    names = ("train_loss", "personal_accuracy", "accuracy")[: 2 + ("accuracy" in clean.rows[0])]
    assert [[row[n] for n in names] for row in spoiled.rows] == [[row[n] for n in names] for row in clean.rows]
    refused = [row["refused"] for row in spoiled.rows]
    assert [len(each) for each in refused] == [0, 1, 0, 0]
    assert refused[1][0]["client"] == BAD
    assert math.isnan(refused[1][0]["norm"]) == (slot != "dw")
    assert all(row["cohort"] == list(range(7)) for row in spoiled.rows)  # they took part and sent uploads


def test_a_round_without_accepted_uploads_changes_nothing():
    config = config_with_all_clients(rounds=2, faults={"max_norm": 1e-9, "on_bad_update": "drop"})
    with pytest.warns(UserWarning, match="client 0 sent .* no upload is left, so the model does not change"):
        it = run_experiment(config)
    assert torch.equal(it.w, it.w0)
    assert [len(row["refused"]) for row in it.rows] == [7, 7]
    assert math.isnan(it.rows[0]["train_loss"])
    it = prepare(config_with_all_clients(rounds=4, faults={"max_norm": 1e-9, "on_bad_update": "drop"}))
    with (
        pytest.warns(UserWarning, match="round 1: client 0"),
        pytest.raises(UserError, match=r"round 2: .*in 3 consecutive rounds"),
    ):
        it.fed.run()


def test_values_of_the_server_that_are_not_finite_end_the_run(monkeypatch):
    """They are not the upload of any client, and cannot be dropped."""
    it = prepare(config_with_all_clients(faults={"on_bad_update": "drop"}))
    it.fed.server.rule = lambda up, s: up.mean("dw") * torch.inf
    with pytest.raises(UserError, match=r"round 0: the server's direction, .* values that are not finite"):
        it.fed.run()


# ---- clients whose code raises an error ----
def raise_error_in_training(monkeypatch, error, rounds=(1,), after=2):
    """Make the training of client BAD raise an error after some batches in these rounds."""
    honest, steps = training_loop.iterate_batches, []

    def failing(self, *of_a_fit):
        for batch in honest(self, *of_a_fit):
            if self.id == BAD and self.round in rounds:
                steps.append(self.round)
                if steps.count(self.round) == after:
                    steps[:] = [t for t in steps if t != self.round]
                    raise error
            yield batch

    monkeypatch.setattr(training_loop, "iterate_batches", failing)


ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to"),
    OSError(5, "bad sample"),
    KeyError("a"),
]


@pytest.mark.parametrize(
    ("method", "error"), zip(("fedavg", "scaffold", "fedper", "ditto", "apfl"), [*ERRORS, ERRORS[0]], strict=True)
)
def test_a_client_with_an_error_equals_a_refused_upload(monkeypatch, method, error):
    """The bits are those of a run in which the upload was refused; one warning names client, round and line."""
    faults_ = {"on_bad_update": "drop", "on_client_error": "drop"}
    config = config_with_all_clients(method, net="norm", rounds=3, faults=faults_)
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raise_error_in_training(patch, error)
        failed = run_experiment(config, federated())
    message = [str(w.message) for w in caught if "client 2" in str(w.message)]
    assert len(message) == 1
    assert message[0].startswith("round 1, client 2: ")
    assert f"{__file__}:" in message[0]
    assert message[0].endswith("left out of the round (faults.on_client_error: drop)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scale_upload(monkeypatch, torch.nan)
        refused = run_experiment(config, federated())
    assert failed.hashes == refused.hashes
    assert digest(failed.b) == digest(refused.b)
    assert {k: digest(x) for k, x in failed.fed.states.rows.items()} == {
        k: digest(x) for k, x in refused.fed.states.rows.items()
    }
    assert failed.rows[1]["refused"] == [{"client": BAD, "norm": pytest.approx(math.nan, nan_ok=True)} | {
        "bound": failed.rows[1]["refused"][0]["bound"], "error": True
    }]  # fmt: skip


def test_errors_of_all_clients_end_the_run(monkeypatch):
    it = prepare(config_with_all_clients(rounds=9, faults={"on_client_error": "drop"}))
    monkeypatch.setattr(training_loop, "iterate_batches", None)
    message = r"round 2: the code of client 0, 1, .* raised an error; the run ends"
    with pytest.warns(UserWarning, match="no upload is left"), pytest.raises(UserError, match=message):
        it.fed.run()
