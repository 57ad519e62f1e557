"""Clients that are trained at once (compute.clients_per_pass) send what they send one by one, up to rounding.

The tolerance, relative to an upload's length, is TOLERANCE per round; over methods and nets at most 3e-6 was measured
in one round. Other batches, another order, a step too many or too few change uploads by more than a hundredth.
"""

import warnings
from dataclasses import dataclass

import pytest
import torch
from helpers import federated, prepare, run_experiment, small_settings
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.engine.packed.chain import LowRankTensor
from fedmpi.engine.packed.packed_fit import PackedFit
from fedmpi.method import FLAT, SHARED, Method, Slots, SlotValues, State
from fedmpi.methods import registry

TOLERANCE = 1e-5
PHASES, STEPS = "overrides the hook train", "overrides the hook step"
WHY_NOT = {  # methods that do not pack, and what they say
    **dict.fromkeys(("apfl", "fedasam", "fedsam", "fedsol", "gradproj", "perfedavg", "pfedme"), STEPS),
    **dict.fromkeys(("ccvr", "ditto", "fedatom", "fedatom_personal", "fedpac", "fedrep"), PHASES),
    "fedsr": "random",
}


@pytest.fixture
def pack_sizes(monkeypatch):
    """Record the sizes of the groups that were trained at once."""
    sizes, call = [], PackedFit.__call__

    def counted(self):
        call(self)
        sizes.append(len(self.clients))

    monkeypatch.setattr(PackedFit, "__call__", counted)
    return sizes


def last_uploads(it):
    """Return the uploads of the last round, (m, row), without loss, seconds and flag."""
    packing = it.experiment.messages.upload_layout(it.rows[-1]["round"]).packing
    return it.fed.transport.buffers.get("rows", len(it.rows[-1]["cohort"]), packing.size)[:, 3:]


def relative_difference(a, b):
    """Return the largest relative difference of two runs' last uploads, losses, models and client states."""
    x, y = (last_uploads(it) for it in (a, b))
    found = [float(((x - y).norm(dim=1) / x.norm(dim=1).clamp(min=1e-12)).max())] if x.shape[1] else []
    found.append(float((a.w - b.w).norm() / (a.w - a.w0).norm().clamp(min=1e-12)))
    for k, row in a.fed.states.rows.items():
        if len(row):
            found.append(float((row - b.fed.states.rows[k]).norm() / row.norm().clamp(min=1e-12)))
    losses = [(p["train_loss"], q["train_loss"]) for p, q in zip(a.rows, b.rows, strict=True) if "train_loss" in p]
    return max(found + [abs(p - q) / (abs(p) + 1e-12) for p, q in losses])


def run_both(method="fedavg", net="mlp", pack=3, data=None, **changes):
    """Run with clients one by one, and with `pack` at once."""
    changes = {"rounds": 2, "evaluate": {"protocol": ["global"], "every": 5}, **changes}
    config = small_settings(method, net, **changes)
    at_once = config.model_copy(update={"compute": config.compute.model_copy(update={"clients_per_pass": pack})})
    return run_experiment(config, data), run_experiment(at_once, data)


# ---- which methods ----
@pytest.mark.parametrize("method", sorted(set(registry) - set(WHY_NOT)))
def test_methods_are_packed_without_changes_of_their_code(method, pack_sizes):
    one, several = run_both(method)
    assert pack_sizes == [3, 1] * 2 or pack_sizes == [3] * 2, "four of seven clients a round: three at once, one alone"
    assert relative_difference(one, several) < 2 * TOLERANCE


@pytest.mark.parametrize("method", WHY_NOT)
def test_other_methods_state_why_they_are_not_packed(method, pack_sizes):
    """A number is an error before training; auto warns once and changes no bit."""
    one = small_settings(method, rounds=1)
    with pytest.raises(
        UserError, match=rf"compute\.clients_per_pass: 3.*{WHY_NOT[method]}.*set compute\.clients_per_pass: 1"
    ):
        run_experiment(small_settings(method, rounds=1, compute={"clients_per_pass": 3}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        auto = run_experiment(small_settings(method, rounds=1, compute={"clients_per_pass": "auto"}))
    assert [
        str(w.message).count("compute.clients_per_pass: auto")
        for w in told
        if "compute.clients_per_pass" in str(w.message)
    ] == [1]
    assert auto.hashes == run_experiment(one).hashes
    assert not pack_sizes


# ---- batches ----
TRAIN = {
    "two epochs, momentum, weight decay": {"epochs": 2, "momentum": 0.9, "weight_decay": 1e-2},
    "plain, weight decay": {"momentum": 0.0, "weight_decay": 1e-2, "batch_size": 7},
    "whole shards": {"batch_size": "full", "epochs": 3},
    "full batches only": {"drop_last": True, "batch_size": 16},
    "single samples": {"batch_size": 1, "momentum": 0.0, "lr": 0.01},
    "no step": {"epochs": 0},
}
SEQUENCE = {"name": "test_packed:sequence"}
NETS = {"mlp": {}, "sequence": {"model": SEQUENCE}, "convolutions": {"model": {"name": "helpers:conv_net"}}}


def sequence(input_shape, classes):
    """Build a chain with a layer without bias and one that is not trained."""
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12, bias=False), nn.Tanh(), nn.Sequential(nn.Linear(12, 9)), nn.Linear(9, classes)
    )
    net[3][0].requires_grad_(False)
    return net


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedlc"])
def test_each_client_makes_its_own_steps_on_its_own_batches(method, net, pack_sizes):
    """Clients have 10 to 50 samples: batches of different sizes, and different numbers of steps."""
    for name, train in TRAIN.items():
        one, several = run_both(method, pack=7, cohort={"fraction": 1.0}, train=train, **NETS[net])
        assert relative_difference(one, several) < 2 * TOLERANCE, name
        assert (one.w != one.w0).any() == (train.get("epochs") != 0)
    assert pack_sizes == [7] * 2 * len(TRAIN)


# ---- hooks ----
@dataclass(frozen=True)
class ReadsEverything(Method):
    """A method whose hooks read every member of a packed client, and store, send and add up what they read."""

    client_state = Slots(last=FLAT)
    sends = Slots(dw=SHARED, sums=FLAT)
    accumulators = Slots(sums=FLAT)

    def initial_weights(self, k):
        k.accumulators.sums.add_(1)
        return k.received + 1e-3 * torch.randn_like(k.received)

    def loss(self, k, x, y):
        z, f = k.forward(x)
        z0, f0 = k.reference_forward(x)
        again = k.logits(x + 0.1)
        pull = (f - f0).square().mean() + (z - z0).square().mean() * k.lr + 0.1 * again.square().mean()
        own = (k.label_counts / k.label_counts.sum()).to(f.dtype)
        k.accumulators.sums.add_(k.w.detach() - k.state.last, alpha=1 / (1 + k.epoch + k.last_epoch + k.round))
        return k.task_loss(f + own, x, y) + pull

    def correct_gradient(self, k, g):
        head = k.extract_group("head", k.w - k.received)
        return k.replace_group("head", k.extract_group("head", g) + 0.1 * head, into=g) + 0.01 * (k.w - k.w0) / (
            1 + (k.w - k.w0).norm()
        )

    def upload(self, k):
        noise = torch.randn_like(k.w)  # goes on where `initial_weights` has stopped drawing
        return SlotValues(sums=k.accumulators.sums + noise), State(last=k.w / max(k.steps, 1) + k.gradient_weight)


def test_hooks_see_the_same_as_when_clients_are_trained_one_by_one(pack_sizes):
    for net in NETS.values():
        one, several = run_both(
            "test_packed:ReadsEverything", data=federated(), pack=7, cohort={"fraction": 1.0}, **net
        )
        assert relative_difference(one, several) < 5 * TOLERANCE
    assert pack_sizes == [7, 7] * 3


# ---- what is told before anything runs ----
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"net": "norm"}, "buffers"),
        ({"model": {"name": "test_packed:with_dropout"}}, "dropout"),
        ({"compute": {"clients_per_pass": 4, "precision": "bf16"}}, "bf16"),
        ({"compute": {"clients_per_pass": 4, "compile": True}}, "compile"),
    ],
)
def test_unsupported_settings_are_rejected(changes, said, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")  # the message is the same with and without a compiler
    net = changes.pop("net", "mlp")
    with pytest.raises(UserError, match=rf"compute\.clients_per_pass: 4.*{said}.*set compute\.clients_per_pass: 1"):
        prepare(small_settings("fedavg", net, **{"compute": {"clients_per_pass": 4}, **changes}))


def with_dropout(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.1), nn.Linear(8, classes))


WIDE = {"model": {"name": "mlp", "hidden": [500, 600]}, "pack": 7, "cohort": {"fraction": 1.0}}


@pytest.mark.parametrize(
    ("method", "train", "tensors"),
    [
        ("fedavg", {}, 1),
        ("fedavg", {"batch_size": 16, "drop_last": True, "epochs": 2}, 1),
        ("fedexp", {}, 1),
        ("fedavg", {"epochs": 9}, 0),
        ("fedavg", {"momentum": 0.5}, None),
        ("fedavg", {"weight_decay": 0.1}, None),
        ("fedprox", {}, None),
        ("fedlc", {}, None),
        ("fedper", {}, None),
    ],
)
def test_low_rank_weights_are_used_for_few_samples(monkeypatch, method, train, tensors):
    """Wide layers and few samples use low-rank weights, more samples dense ones; None: the step is made under vmap."""
    fits, call = [], PackedFit.__call__
    monkeypatch.setattr(PackedFit, "__call__", lambda self: fits.append(self.steps) or call(self))
    faults = {"on_bad_update": "drop"}  # the server holds all rows, for `relative_difference` to look at
    one, several = run_both(method, **WIDE, faults=faults, train={"momentum": 0.0, **train})
    assert relative_difference(one, several) < 2 * TOLERANCE
    layers = [[each for each in getattr(steps, "layers", ()) if each] for steps in fits]
    kept = [sum(isinstance(w, LowRankTensor) for w, _ in each) if each else None for each in layers]
    assert kept == [tensors] * 2
