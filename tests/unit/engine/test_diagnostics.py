"""The probes of `analysis` equal naive computations and do not change the run."""

from dataclasses import replace

import pytest
import torch
from helpers import federated, prepare, record, run_experiment, settings, small_settings
from test_transport import run_on_ranks
from torch.nn import functional as F

from fedmpi.analysis.local_models import train_local_models
from fedmpi.common.errors import UserError
from fedmpi.engine.diagnostics import round_metrics
from fedmpi.engine.diagnostics.probes import PROBES
from fedmpi.engine.evaluate import evaluate_model
from fedmpi.methods import registry
from fedmpi.runtime import build

ALL = list(PROBES)
KEEP_PARTS = ("fedper", "fedrep", "fedbn", "ditto")


def run_with_probes(config, data=None):
    """Run the settings with all probes."""
    it = prepare(config, data)
    it.fed.run()
    return it


def whole(method):
    made = prepare(small_settings(method)).experiment
    return made.messages.shared.selects_all


# ---- a round, by hand ----
def test_a_round_equals_plain_loops():
    config = settings("fedavg", rounds=1, analysis=ALL, cohort={"fraction": 0.6})
    [row] = run_with_probes(config).files["analysis.jsonl"]
    it = prepare(config)
    trainer = build.make_trainer(it.experiment, lambda: False)
    members = row["clients"]
    made, data = train_local_models(it.fed, trainer, members, 0), it.experiment.data
    w0, p = it.fed.server.w.clone(), made.p
    mean = (p.float() @ made.w), (p.float() @ made.b)

    def loss(w, b, shard):
        trainer.model.load(w, b)
        module = trainer.model.module.eval()
        with torch.no_grad():
            return F.cross_entropy(module(shard.x[shard.index]), shard.y[shard.index]).item()

    M = torch.tensor([[loss(w, b, data.train[j]) for w, b in zip(made.w, made.b, strict=True)] for j in members])
    torch.testing.assert_close(torch.as_tensor(row["losses"]["matrix"]).float(), M, atol=1e-5, rtol=1e-4)
    of_global = torch.tensor([loss(*mean, data.train[j]) for j in members])
    torch.testing.assert_close(torch.as_tensor(row["losses"]["global"]).float(), of_global, atol=1e-5, rtol=1e-4)
    d = (made.w - w0).double()
    assert row["drift"]["norms"] == pytest.approx(d.norm(dim=1).tolist(), rel=1e-6)

    test = data.global_test
    for k, (w, b) in enumerate(zip(made.w, made.b, strict=True)):
        trainer.model.load(w, b)
        assert row["knowledge"]["local"][k] == pytest.approx(evaluate_model(trainer, test, 100).metrics["accuracy"])
        rest = [i for i in range(len(members)) if i != k]
        q = (p[rest] / p[rest].sum()).float()
        gain = loss(q @ made.w[rest], q @ made.b[rest], test) - loss(*mean, test)
        assert row["contribution"]["gain"][k] == pytest.approx(gain, abs=1e-5)
    trainer.model.load(*mean)
    assert row["knowledge"]["after"] == pytest.approx(evaluate_model(trainer, test, 100).metrics["accuracy"])


# ---- it changes nothing, and ranks change nothing in it ----
@pytest.mark.parametrize("method", sorted(set(registry) - {"fedsr"}))
def test_probes_do_not_change_the_bits_of_a_run(method):
    if not whole(method):
        with pytest.raises(UserError, match=r"analysis: drift .* keep parts"):
            prepare(small_settings(method, analysis=["drift"]))
        return
    config = small_settings(method, rounds=2)
    analysis = ["losses", "drift", "features", "orthogonality", "layers"]
    assert record(run_with_probes(config.model_copy(update={"analysis": analysis}))) == record(run_experiment(config))


@pytest.mark.parametrize("server", [{}, {"trains_clients": True}, {"placement": "sharded"}])
def test_several_ranks_measure_the_same_as_one_process(server):
    config = settings("scaffold", rounds=3, analysis=ALL, evaluate={"every": 2}, server=server)
    alone = run_with_probes(config)
    assert [row["round"] for row in alone.files["analysis.jsonl"]] == [1, 2]
    spread = run_on_ranks(config, 3)[0]
    assert repr(spread.files["analysis.jsonl"]) == repr(alone.files["analysis.jsonl"])
    assert record(spread)["rows"] == record(alone)["rows"]
    plain = run_on_ranks(config.model_copy(update={"analysis": []}), 3)[0]
    assert [row["sent_bytes"] for row in spread.rows] == [row["sent_bytes"] for row in plain.rows]


def test_sites_without_a_common_test_set():
    data = replace(federated(), global_test=None)
    config = settings("fedavg", rounds=1, analysis=["losses", "drift", "contribution", "orthogonality", "layers"])
    [row] = run_with_probes(config, data).files["analysis.jsonl"]
    gains = torch.tensor(row["contribution"]["gain"])
    assert len(gains) == len(row["clients"])
    assert gains.isfinite().all()
    with pytest.raises(UserError, match="knowledge cannot be computed without a global test set"):
        prepare(settings("fedavg", analysis=["knowledge"]), data)


@pytest.mark.parametrize(
    "faults", [{"on_lost_rank": "drop"}, {"on_client_error": "drop"}, {"on_bad_update": "drop", "max_norm": 9}]
)
def test_probes_reject_rounds_that_may_lose_clients(faults):
    with pytest.raises(UserError, match="needs all clients of a round"):
        prepare(settings("fedavg", analysis=["drift"], faults=faults))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("feddyn", {"options": {"report": "avg"}}),
        ("fedexp", {"options": {"report": "average"}}),
    ],
)
def test_updates_are_relative_to_the_clients_initial_weights(method, changes):
    """These are not the global model if a method sends or computes other weights."""
    config = settings(method, analysis=["drift", "layers"], **{"rounds": 4, "cohort": {"fraction": 1}, **changes})
    config = config.model_copy(update={"record": config.record.model_copy(update={"updates": "gram"})})
    it = run_with_probes(config)
    for row, line in zip(it.files["analysis.jsonl"], it.updates, strict=True):
        assert row["drift"]["norms"] == pytest.approx(line["norms"], rel=1e-4)
        assert row["drift"]["cosine"] == pytest.approx(line["cosine_mean"], abs=1e-4)
        layers, whole = (torch.tensor(row[name][of]) for name, of in (("layers", "norm"), ("drift", "norms")))
        assert layers.square().sum() <= whole.square().mean() * (1 + 1e-6)
    assert repr(run_on_ranks(config, 3)[0].files["analysis.jsonl"]) == repr(it.files["analysis.jsonl"])


def test_clients_with_update_zero_are_in_no_pair():
    still = round_metrics.gram_statistics(torch.tensor([[1.0, -0.5, 0.0], [-0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert (still["cosine"], still["conflicts"]) == (-0.5, 1.0)
    nobody = round_metrics.gram_statistics(torch.zeros(3, 3))
    assert (nobody["divergence"], nobody["cosine"], nobody["conflicts"]) == (0.0, None, None)
