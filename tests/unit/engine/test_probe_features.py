"""The probe `features` equals plain numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import federated, prepare, settings
from test_diagnostics import run_with_probes
from torch import nn

from fedmpi.analysis.local_models import train_local_models
from fedmpi.common.errors import UserError
from fedmpi.engine.diagnostics.probes import PROBES
from fedmpi.methods import feduv
from fedmpi.runtime import build


def test_a_round_equals_numpy():
    config = settings("fedavg", rounds=1, analysis=["features"], cohort={"fraction": 0.6})
    [row] = run_with_probes(config).files["analysis.jsonl"]
    it = prepare(config)
    trainer = build.make_trainer(it.experiment, lambda: False)
    made, test = train_local_models(it.fed, trainer, row["clients"], 0), it.experiment.data.global_test
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
        z, f = (each.double() for each in found[0])
        q = np.linalg.svd((z - z.mean(0)).numpy())[1]
        q = q / q.sum()
        return {
            "rank": math.exp(-(q * np.log(q)).sum()),
            "uniformity": feduv.uniformity(z).item(),
            "classifier": np.linalg.svd(last.weight.detach().numpy())[1].mean(),
            "deviation": np.std(f.softmax(1).numpy(), 0, ddof=1).mean(),
        }

    local = [seen(w, b) for w, b in zip(made.w, made.b, strict=True)]
    after = seen(made.p.float() @ made.w, made.p.float() @ made.b)
    told = row["features"]
    assert told["samples"] == len(x)
    for name, value in after.items():
        assert told[name] == pytest.approx(value, rel=1e-4)
        assert told[f"{name}_local"] == pytest.approx(np.mean([each[name] for each in local]), rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_features_that_overflow_give_nan_and_the_run_continues():
    """One step is so long that the weights are finite, but the features of a picture are not."""
    it = run_with_probes(settings("fedavg", rounds=1, analysis=list(PROBES), train={"lr": 2e38, "steps": 1}))
    [row] = it.files["analysis.jsonl"]
    assert math.isnan(row["features"]["rank_local"])
    assert np.isnan(row["losses"]["matrix"]).all()
    assert np.isfinite(row["drift"]["norms"]).all()  # of weights alone, in float64


def probabilities(input_shape, classes):
    """Build a model that ends in a softmax: the outputs of its last linear layer are not its outputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes), nn.Softmax(1))


def test_features_need_a_test_set_and_a_head():
    with pytest.raises(UserError, match="features cannot be computed without a global test set"):
        prepare(settings("fedavg", analysis=["features"]), replace(federated(), global_test=None))
    with pytest.raises(UserError, match="analysis: features cannot be computed without a model that ends"):
        prepare(settings("fedavg", analysis=["features"], model={"name": f"{__file__}:probabilities"}))
