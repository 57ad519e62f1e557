"""FedDisco: clients whose labels are far from uniform get smaller weights, as computed by hand."""

import math

import pytest
import torch
from helpers import run_experiment, settings
from naive import FULL, NET, assert_is_fedavg, descend, gradient, module_of, rows_of
from torch.nn.functional import cross_entropy

from fedmpi.methods.feddisco import FedDisco


def weights_by_hand(counts, n, a, b, metric, normalise):
    """Return p' from label counts and FedAvg's weights n."""
    d = []
    for row in counts:
        share, uniform = [c / sum(row) for c in row], 1 / len(row)
        kl = sum(s * math.log(s / uniform) for s in share if s)
        d.append(kl if metric == "kl" else math.sqrt(sum((s - uniform) ** 2 for s in share)))
    total = sum(d) if normalise and sum(d) else 1
    score = [max(v - a * e / total + b, 0) for v, e in zip(n, d, strict=True)]
    return [v / sum(score) for v in score] if sum(score) else n


def full_gradient(module, x, y):
    """Return the gradient over all samples."""
    return gradient(module, cross_entropy(module(x), y))


@pytest.mark.parametrize(
    ("metric", "normalise", "weighting"), [("kl", True, "samples"), ("kl", False, "uniform"), ("l2", True, "uniform")]
)
def test_three_rounds_equal_a_loop(weighting, metric, normalise):
    """Four of seven clients per round, most of which lack a class; statistics are averaged with FedAvg's weights."""
    options = {"a": 0.9 if normalise else 0.4, "b": 0.02, "metric": metric, "normalise": normalise}
    changes = {"cohort": {"fraction": 0.6, "weighting": weighting}, "train": {**FULL, "epochs": 2}}
    it = run_experiment(settings("feddisco", "norm", model=NET, options=options, **changes))
    module = module_of(it, it.w0, it.b0).train()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    rounds = []
    for row in it.rows:
        samples = [torch.bincount(rows_of(it, k)[1], minlength=4).tolist() for k in row["cohort"]]
        n = [sum(counts) if weighting == "samples" else 1 for counts in samples]
        p = [v / sum(n) for v in n]
        weights = weights_by_hand(samples, p, **options)
        ends = []
        for k in row["cohort"]:
            module.load_state_dict(state)
            descend(module, 2, full_gradient, *rows_of(it, k))
            ends.append({name: value.clone() for name, value in module.state_dict().items()})
        for name, value in state.items():
            if value.is_floating_point():
                share = p if "running" in name else weights
                state[name] = sum(q * end[name] for q, end in zip(share, ends, strict=True))
        assert max(abs(q - v) for q, v in zip(weights, p, strict=True)) > 0.05
        rounds.append(weights)
    assert any(0 in weights for weights in rounds), "or no client's score is below 0"
    for name, value in module_of(it, it.w, it.b).state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"a": 100.0, "normalise": False}},  # no score is above 0
        {"options": {"a": 9.0}, "cohort": {"fraction": 0.15}},  # cohorts of one
        {"options": FedDisco.equals_fedavg_at, "cohort": {"fraction": 0.9, "weighting": "uniform"}},  # 6 (1/6) is not 1
    ],
)
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_neutral_options_give_the_bits_of_fedavg(net, changes):
    assert_is_fedavg("feddisco", net, **changes)
