"""FedDisco: weights that count against clients whose labels are far from uniform."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import play, settings
from naive import FULL, NET, assert_is_fedavg, descend, gradient, module_of, rows_of
from torch.nn.functional import cross_entropy

from fedmpi.flat.packing import Views
from fedmpi.method import Uploads
from fedmpi.methods.feddisco import FedDisco

COUNTS = torch.tensor([[50, 50], [90, 10], [50, 0]])  # p = .4, .4, .2


def new_weights(counts, cohort=None, **options):
    """p' of a cohort, by default all of these clients: the direction of unit updates."""
    counts = torch.as_tensor(counts)
    cohort = cohort or list(range(len(counts)))
    n = counts[cohort].sum(1).double()
    updates = Uploads(cohort, n, n / n.sum(), Views({"dw": torch.eye(len(n), dtype=torch.float64)}))
    return FedDisco(**options).aggregate(SimpleNamespace(label_counts=counts), updates)[0].tolist()


def by_hand(counts, n, a, b, metric, normalise):
    """p' from label counts and FedAvg's weights n, plain numbers."""
    d = []
    for row in counts:
        share, uniform = [c / sum(row) for c in row], 1 / len(row)
        kl = sum(s * math.log(s / uniform) for s in share if s)
        d.append(kl if metric == "kl" else math.sqrt(sum((s - uniform) ** 2 for s in share)))
    total = sum(d) if normalise and sum(d) else 1
    score = [max(v - a * e / total + b, 0) for v, e in zip(n, d, strict=True)]
    return [v / sum(score) for v in score] if sum(score) else n


@pytest.mark.parametrize(
    ("counts", "changes", "expected"),
    [
        # d = 0, .3468340, .6531660: scores .5, .3265830, -.0265830
        (COUNTS, {}, [0.6048999371683729, 0.3951000628316271, 0]),
        # the distances as they are: .5, .5 - .2 sqrt 2, .3 - .25 sqrt 2 < 0; normalised 0, 4/9, 5/9: 1/2, 5/18, 1/45
        (COUNTS, {"metric": "l2", "normalise": False}, [0.6971971263449016, 0.3028028736550984, 0]),
        (COUNTS, {"metric": "l2"}, [5 / 8, 25 / 72, 1 / 36]),
        # a = 0 is FedAvg without b, and with b = .1 halfway to equal weights: (.5, .5, .3) / 1.3
        (COUNTS, {"a": 0.0, "b": 0.0}, [0.4, 0.4, 0.2]),
        (COUNTS, {"a": 0.0}, [5 / 13, 5 / 13, 3 / 13]),
        # all uniform, d = 0: (.85, .35) / 1.2. All alike, d = 1/2: (.6, .1) / .7, FedAvg for b = a / K
        ([[150, 150], [50, 50]], {}, [17 / 24, 7 / 24]),
        ([[270, 30], [90, 10]], {}, [6 / 7, 1 / 7]),
        # one class each, ten in all: .75 - .5 ln 10 + .1 and .25 - .5 ln 10 + .1 are below 0, so p; normalised .6 : .1
        ([[300, *[0] * 9], [*[0] * 9, 100]], {"normalise": False}, [0.75, 0.25]),
        ([[300, *[0] * 9], [*[0] * 9, 100]], {}, [6 / 7, 1 / 7]),
        # alone: 1 whatever the score, here below 0; uniform, though 49 (1 / 49) is not 1 in float64
        ([[7, 3]], {"a": 9.0}, [1]),
        ([[3] * 49, [1] * 49], {}, [17 / 24, 7 / 24]),
    ],
)
def test_weights_by_hand(counts, changes, expected):
    assert new_weights(counts, **changes) == pytest.approx(expected, abs=1e-14)


def full_gradient(module, x, y):
    return gradient(module, cross_entropy(module(x), y))


@pytest.mark.parametrize(
    ("metric", "normalise", "weighting"), [("kl", True, "samples"), ("kl", False, "uniform"), ("l2", True, "uniform")]
)
def test_three_rounds_against_a_loop(weighting, metric, normalise):
    """Four of seven clients a round, most of them without some class; statistics are averaged with FedAvg's weights."""
    options = {"a": 0.9 if normalise else 0.4, "b": 0.02, "metric": metric, "normalise": normalise}
    changes = {"cohort": {"fraction": 0.6, "weighting": weighting}, "train": {**FULL, "epochs": 2}}
    it = play(settings("feddisco", "norm", model=NET, options=options, **changes))
    module = module_of(it, it.w0, it.b0).train()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    rounds = []
    for row in it.rows:
        samples = [torch.bincount(rows_of(it, k)[1], minlength=4).tolist() for k in row["cohort"]]
        n = [sum(counts) if weighting == "samples" else 1 for counts in samples]
        p = [v / sum(n) for v in n]
        weights = by_hand(samples, p, **options)
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
        {"options": FedDisco.neutral, "cohort": {"fraction": 0.9, "weighting": "uniform"}},  # 6 (1/6) is not 1
    ],
)
@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_fedavg_bit_for_bit(net, changes):
    assert_is_fedavg("feddisco", net, **changes)
