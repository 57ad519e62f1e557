"""Differential privacy of clients in the round loop: the bound on one client, the noise, and the papers' algorithms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import federated, prepare, settings
from scipy import stats

from fedmpi.engine.local import client_round
from fedmpi.privacy.client_level import clip_vector
from fedmpi.privacy.noise import NoiseKey
from fedmpi.runtime import private_runs

CLIP, Z = 0.3, 0.7
KEY = NoiseKey(b"0123456789abcdef" * 4, "run of the tests")
DP = {"unit": "client", "clip": CLIP, "noise_multiplier": Z, "delta": 0.01}


def make_settings(method="fedavg", net="mlp", dp=None, **changes):
    """Return the settings of a tiny experiment with client-level privacy; all seven clients take part."""
    defaults = {
        "cohort": {"fraction": 1.0, "weighting": "uniform"},
        "evaluate": {"protocol": ["global"]},
        "privacy": {"dp": DP | (dp or {})},
        "rounds": 1,
    }
    merged = {
        name: {**value, **changes.pop(name, {})} if isinstance(value, dict) else changes.pop(name, value)
        for name, value in defaults.items()
    }
    return settings(method, net, **merged, **changes)


def build(config, data=None, key=KEY):
    """Prepare a run whose noise comes from a given key, and record its releases in `it.releases`."""
    it = prepare(config, data)
    it.fed.server.privacy = private_runs.make_release(config, it.experiment.data, it.experiment.messages, key)
    it.releases, release = [], it.fed.server.release_means

    def release_and_record(*arguments):
        released = release(*arguments)
        it.releases.append({name: mean.clone().double() for name, mean in released.means.items()})
        return released

    it.fed.server.release_means = release_and_record
    return it


def run(config, data=None, key=KEY):
    it = build(config, data, key)
    it.reason = it.fed.run()
    return it


def released_vector(it, t=0):
    return torch.cat([mean.flatten() for name, mean in it.releases[t].items() if name != "_unclipped"])


@pytest.fixture
def change_upload(monkeypatch):
    """Return a function that sets what a client sends: a number in all entries before clipping, or nothing."""

    bound_upload = client_round.bound_upload

    def change(client, value):
        def bound(context, row, upload):
            if context.id == client and value is not None:
                row[upload.payload_start :] = value
            bound_upload(context, row, upload)
            if context.id == client and value is None:
                row[upload.payload_start :] = 0

        monkeypatch.setattr(client_round, "bound_upload", bound)

    return change


# ---- the bound on one client ----
@pytest.mark.parametrize(
    ("method", "net", "changes"),
    [
        ("fedavg", "mlp", {}),
        ("scaffold", "mlp", {}),
        ("fedavg", "norm", {}),
        ("scaffold", "norm", {}),
        ("fedavg", "mlp", {"compute": {"clients_per_pass": 4}}),
        ("feddyn", "mlp", {}),
        ("fedavg", "mlp", {"dp": {"adaptive": {"quantile": 0.5, "count_noise": 2.0}}}),
        ("fedavg", "mlp", {"dp": {"weight_cap": 20}, "cohort": {"weighting": "samples"}}),
    ],
)
def test_one_client_moves_the_release_by_at_most_the_clip_norm_times_its_weight(change_upload, method, net, changes):
    config = make_settings(method, net, **changes)
    change_upload(2, None)
    without = run(config)
    weight = float(private_runs.released_weights(config, federated())[2])
    for value in (1e6, -3.0, 1e30):
        change_upload(2, value)
        it = run(config)
        distance = float((released_vector(it) - released_vector(without)).norm())
        assert distance <= CLIP * weight * (1 + 1e-5)  # float32 entries
        assert distance > 0.999 * CLIP * weight
        assert set(it.releases[0]) - {"_unclipped"} == {*it.experiment.messages.method.sends, "_b"}
        if method == "fedavg" and net == "mlp":
            assert float((it.w - without.w).double().norm()) <= CLIP * weight * (1 + 1e-5)


def test_all_parts_of_an_upload_share_the_bound(change_upload):
    """With two huge slots, each gets a part of the clip norm."""
    config = make_settings("scaffold", "norm")
    change_upload(2, None)
    without = run(config)
    change_upload(2, 1e6)
    it = run(config)
    moved = {name: float((it.releases[0][name] - mean).norm()) for name, mean in without.releases[0].items()}
    sizes = {name: mean.numel() for name, mean in without.releases[0].items()}
    assert sizes["_b"] > 0
    for name, norm in moved.items():
        assert norm == pytest.approx(CLIP / 7 * math.sqrt(sizes[name] / sum(sizes.values())), rel=1e-4)


def test_a_client_with_huge_data():
    """Nothing is changed in the engine: the samples of a client are multiplied by 10000."""
    data = federated()
    shards = dict(data.train)
    shards[2] = replace(shards[2], x=shards[2].x * 1e4)
    a, b = run(make_settings(), data), run(make_settings(), replace(data, train=shards))
    assert 0.1 * CLIP / 7 < float((a.w - b.w).double().norm()) <= 2 * CLIP / 7 * (1 + 1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_an_upload_that_is_not_finite_counts_as_zero(change_upload, method, value):
    config = make_settings(method, "norm")
    change_upload(2, None)
    without = run(config)
    change_upload(2, value)
    assert torch.equal(released_vector(run(config)), released_vector(without))


@pytest.mark.parametrize("norm", [1e-3, 0.3, 1.0, 1e6, 1e30, 1e36, 1e38, 3e38, 7e38, 2e39, 3e39, 7e39, 1e40])
def test_the_norm_of_a_clipped_vector(norm):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).double()
    x = (x * (norm / x.norm())).float()
    before = x.clone()
    within = clip_vector(x, torch.tensor(CLIP))
    length = float(x.double().norm())
    assert length <= float(torch.tensor(CLIP))
    assert (within == 0.5) == (float(before.double().norm()) <= float(torch.tensor(CLIP)))
    if within == 0.5:
        assert torch.equal(x, before)
    elif norm < 1e36:
        assert length == pytest.approx(CLIP, rel=1e-6)


# ---- the noise ----
def noise_of(it, t=0):
    """Return the noise of a round in which no client trained (train.lr: 0), as one vector."""
    return released_vector(it, t).numpy()


def silent(**changes):
    return make_settings(train={"lr": 0.0}, **changes)


def chi_square(noise, std):
    """Return the probability that noise with the stated deviation has a more extreme sum of squares."""
    p = stats.chi2.cdf(float((noise**2).sum()) / std**2, len(noise))
    return 2 * min(p, 1 - p)


@pytest.mark.parametrize(
    ("changes", "multiplier"),
    [
        ({}, Z),
        ({"dp": {"adaptive": {"quantile": 0.5, "count_noise": 0.5}}}, (Z**-2 - 1) ** -0.5),
        ({"dp": {"weight_cap": 20}, "cohort": {"weighting": "samples"}}, Z),
        ({"cohort": {"sampling": "poisson", "fraction": 0.6}}, Z),
        ({"cohort": {"fraction": 0.6}}, Z),
    ],
)
def test_the_noise_has_the_stated_variance(changes, multiplier):
    it = run(silent(**changes))
    data, config = it.experiment.data, it.experiment.settings
    sizes = np.minimum(np.array([len(shard) for shard in data.train.values()]), 20) / 20
    members = {1.0: 7, 0.6: 4}[config.cohort.fraction]
    total = members * (sizes.mean() if config.cohort.weighting == "samples" else 1)
    noise = noise_of(it)
    assert len(noise) > 1000
    std = multiplier * CLIP / total
    assert chi_square(noise, std) > 0.01
    assert chi_square(noise, 1.1 * std) < 1e-3 > chi_square(noise, 0.9 * std)
    assert abs(float((it.w - it.w0).double().norm()) - float(np.linalg.norm(noise))) < 1e-5


def test_rounds_and_attempts_have_independent_noise():
    config = silent(rounds=2)
    first = run(config)
    repeated = build(config)
    repeated.fed.server.privacy.budget.rounds = [0, 1]  # releases of an earlier job of the run
    repeated.fed.run()
    other = run(config, key=NoiseKey(b"0123456789abcdef" * 4, "another run"))
    noises = [noise_of(it, t) for it in (first, repeated, other) for t in (0, 1)]
    correlation = np.corrcoef(noises) - np.eye(6)
    assert np.abs(correlation).max() < 4 / math.sqrt(len(noises[0]))
    assert np.array_equal(noises[0], noise_of(run(config)))


# ---- the algorithms of the papers ----
class GivenNoise:
    """Noise vectors that a test chooses."""

    def __init__(self):
        self.drawn = []

    def gaussian(self, n, std, *purpose):
        unit = np.random.default_rng(len(self.drawn)).standard_normal(n)
        self.drawn.append((purpose[0], unit))
        return torch.from_numpy(std * unit)


def softmax_gradient(w, x, y, classes):
    """Return the gradient of the mean cross entropy of a linear model, with weights and biases in one vector."""
    weight, bias = w[:-classes].reshape(classes, -1), w[-classes:]
    scores = x @ weight.T + bias
    p = np.exp(scores - scores.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True) - np.eye(classes)[y]) / len(y)
    return np.concatenate([(p.T @ x).ravel(), p.sum(0)])


@pytest.mark.parametrize("adaptive", [False, True])
def test_three_rounds_of_the_papers(adaptive):
    """DP-FedAvg with fixed-size cohorts (McMahan et al. 2018) and adaptive clipping (Andrew et al. 2021)."""
    lr, clip, quantile, clip_lr, count_noise = 0.1, 0.25, 0.3, 0.4, 1.5
    dp = {"clip": clip, "adaptive": {"quantile": quantile, "lr": clip_lr, "count_noise": count_noise}}
    config = make_settings(
        dp=dp if adaptive else {"clip": clip},
        rounds=3,
        model={"name": "logistic"},
        train={"lr": lr, "batch_size": "full", "momentum": 0.0},
    )
    noise = GivenNoise()
    it = run(config, key=noise)
    drawn, data, w = iter(noise.drawn), it.experiment.data, it.w0.double().numpy()
    z = (Z**-2 - (2 * count_noise) ** -2) ** -0.5 if adaptive else Z
    clips, shares = [], []
    for _ in range(3):
        clips.append(clip)
        total, unclipped = 0, 0
        for shard in data.train.values():
            x, y = shard.x[shard.index].double().flatten(1).numpy(), shard.y[shard.index].numpy()
            update = -lr * softmax_gradient(w, x, y, data.classes)
            norm = np.linalg.norm(update)
            unclipped += norm <= clip
            total = total + update * min(1, clip / norm)
        name, unit = next(drawn)
        assert name == "clients"
        w = w + (total + z * clip * unit[: len(w)]) / 7
        shares.append(unclipped / 7)
        if adaptive:
            name, unit = next(drawn)
            assert name == "clip"
            share = (unclipped - 7 / 2 + count_noise * unit[0]) / 7 + 1 / 2
            clip = clip * math.exp(-clip_lr * (share - quantile))
    assert min(shares) > 0
    assert max(shares) < 1
    np.testing.assert_allclose([row["clip"] for row in it.rows], clips, rtol=1e-5)
    np.testing.assert_allclose(it.w.numpy(), w, atol=2e-6)
    assert next(drawn, None) is None
