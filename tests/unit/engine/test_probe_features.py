"""Probe `features`: formulas against loops and closed forms, a round against plain numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import federated, prepare, settings
from test_probes import watched
from torch import nn

from fedmpi.analysis.local_models import local_models
from fedmpi.common.errors import UserError
from fedmpi.engine.probes import features
from fedmpi.engine.probes.probes import PROBES
from fedmpi.methods import feduv
from fedmpi.runtime import build


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_outputs_by_hand():
    f = 2 * normal(30, 4)
    told = features.output_statistics(normal(30, 6, seed=1), f, normal(4, 6, seed=2), 4)
    P = torch.stack([row.exp() / row.exp().sum() for row in f])
    deviations = torch.tensor([np.std(P[:, c].numpy(), ddof=1) for c in range(4)])
    assert told["predicted"].tolist() == pytest.approx(P.mean(0).tolist())
    assert told["deviation"].item() == pytest.approx(deviations.mean().item())
    lacking = (0.5 - deviations).clamp(min=0).mean()  # V of FedUV, 1/sqrt(4)
    assert feduv.variance(f.softmax(1)).item() == pytest.approx(lacking.item())
    W = normal(4, 6, seed=2).numpy()
    assert told["classifier"].tolist() == pytest.approx(np.sqrt(np.sort(np.linalg.eigvalsh(W @ W.T))[::-1]).tolist())


def test_of_many_classes_and_of_numbers_less_is_told():
    many = features.output_statistics(normal(50, 3), normal(50, 40), normal(40, 3), 40)
    assert set(many) == {"rank", "energy", "uniformity", "spectrum", "classifier", "deviation"}
    assert "deviation" not in features.output_statistics(normal(50, 3), normal(50, 1), None, 0)
    long = features.output_statistics(normal(90, 80), normal(90, 60), normal(60, 80), 60)
    assert len(long["spectrum"]) == len(long["classifier"]) == features.VALUES


def test_a_round_against_numpy():
    config = settings("fedavg", rounds=1, analysis=["features"], cohort={"fraction": 0.6})
    [row] = watched(config).files["analysis.jsonl"]
    it = prepare(config)
    trainer = build.make_trainer(it.made, lambda: False)
    members = row["clients"]
    made, test = local_models(it.fed, trainer, members, 0), it.made.data.global_test
    x = test.x[test.index]

    def seen(w, b):
        trainer.model.load(w, b)
        layers = list(trainer.model.module.eval().modules())
        last = [layer for layer in layers if isinstance(layer, nn.Linear)][-1]
        found = []
        hook = last.register_forward_hook(lambda _, inputs, out: found.append((inputs[0], out)))
        with torch.no_grad():
            trainer.model.module(x)
        hook.remove()
        z, f = found[0]
        return z.double(), f.double(), last.weight.detach().double().clone()

    local = [seen(w, b) for w, b in zip(made.w, made.b, strict=True)]
    after = seen(made.p.float() @ made.w, made.p.float() @ made.b)
    told = row["features"]
    assert told["samples"] == len(x)
    z, f, W = after
    centred = (z - z.mean(0)).numpy() / math.sqrt(len(z))
    assert told["spectrum"] == pytest.approx(np.linalg.svd(centred)[1].tolist(), rel=1e-4, abs=1e-5)
    assert told["classifier"] == pytest.approx(np.linalg.svd(W.numpy())[1].tolist(), rel=1e-4)
    assert told["deviation"] == pytest.approx(f.softmax(1).std(0).mean().item(), rel=1e-4)
    energies = [features.energy(z).item() for z, _, _ in local]
    assert told["energy_local"] == pytest.approx(np.mean(energies), rel=1e-4)
    heads = [np.linalg.svd(W.numpy())[1] for _, _, W in local]
    assert told["classifier_local"] == pytest.approx(np.mean(heads, 0).tolist(), rel=1e-4)
    for k, (_, f, _) in enumerate(local):
        assert told["predicted"][k] == pytest.approx(f.softmax(1).mean(0).tolist(), abs=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_features_that_overflow_leave_gaps_and_the_run_goes_on():
    """One step so long that the weights are still numbers, and what they make of a picture is not."""
    it = watched(settings("fedavg", rounds=1, analysis=list(PROBES), train={"lr": 2e38, "steps": 1}))
    [row] = it.files["analysis.jsonl"]
    assert math.isnan(row["features"]["rank_local"])
    assert np.isnan(row["losses"]["matrix"]).all()
    assert np.isfinite(row["drift"]["norms"]).all()  # of weights alone, in float64


def probabilities(input_shape, classes):
    """Ends in a softmax: what its last linear layer gives are not its outputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes), nn.Softmax(1))


def test_what_they_need():
    with pytest.raises(UserError, match="features needs a global test set"):
        prepare(settings("fedavg", analysis=["features"]), replace(federated(), global_test=None))
    with pytest.raises(UserError, match="analysis: features needs a model that ends in a linear layer"):
        prepare(settings("fedavg", analysis=["features"], model={"name": f"{__file__}:probabilities"}))
