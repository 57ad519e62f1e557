"""The probes `orthogonality` and `layers` equal plain loops and do not change training."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import images, prepare, record, settings
from test_diagnostics import run_with_probes
from torch.nn.functional import cross_entropy, kl_div

from fedmpi.common.errors import UserError
from fedmpi.data.batches import batches
from fedmpi.data.federated import split
from fedmpi.runtime import build

METHODS = {"fedavg": {}, "fedprox": {"mu": 1.0}, "fedsol": {"rho": 2.0}}


def flat(tensors):
    """Return tensors as one vector."""
    return torch.cat([t.detach().flatten() for t in tensors])


def l_p(module, teacher, x):
    """Return the proximal loss L_p."""
    with torch.no_grad():
        q = (teacher(x) / 3).softmax(1)
    return kl_div((module(x) / 3).log_softmax(1), q, reduction="batchmean")


def g_u(method, module, teacher, x, y):
    """Return the direction of the step; the head of the mlp is its last two tensors."""
    named, start = list(module.parameters()), [p.detach() for p in teacher.parameters()]
    g = torch.autograd.grad(cross_entropy(module(x), y), named)
    moved = [p.detach() - p0 for p, p0 in zip(named, start, strict=True)]
    if method == "fedprox":
        return [a + 1.0 * b for a, b in zip(g, moved, strict=True)]
    if method == "fedavg" or not flat(moved).any():
        return g
    slopes = torch.autograd.grad(l_p(module, teacher, x), named)[-2:]
    lam = [m.abs() / flat(moved[-2:]).norm() for m in moved[-2:]]
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p, strength, slope in zip(list(other.parameters())[-2:], lam, slopes, strict=True):
            p += 2.0 * strength * slope / flat(slopes).norm()
    return torch.autograd.grad(cross_entropy(other(x), y), list(other.parameters()))


def compute_by_hand(method, module, rows, config, generator):
    """Return L_p and cosines before each step of one client, and L_p after the last."""
    teacher, train = copy.deepcopy(module), config.train
    sgd = torch.optim.SGD(module.parameters(), train.lr, train.momentum, weight_decay=train.weight_decay)
    losses, cosines, heads = [], [], []
    for x, y in batches(rows, train.batch_size, generator):
        u = g_u(method, module, teacher, x, y)
        value = l_p(module, teacher, x)
        p = torch.autograd.grad(value, list(module.parameters()))
        losses.append(value.item())
        cosines.append(torch.cosine_similarity(flat(u).double(), flat(p).double(), dim=0).item())
        heads.append(torch.cosine_similarity(flat(u[-2:]).double(), flat(p[-2:]).double(), dim=0).item())
        for parameter, g in zip(module.parameters(), u, strict=True):
            parameter.grad = g.clone()
        sgd.step()
    x = rows.x[rows.index]
    return SimpleNamespace(losses=losses, cosines=cosines[1:], heads=heads[1:], end=l_p(module, teacher, x).item())


@pytest.mark.parametrize("method", METHODS)
def test_a_round_equals_step_by_step_computation(method):
    config = settings(method, rounds=1, analysis=["orthogonality"], options=METHODS[method])
    [row] = run_with_probes(config).files["analysis.jsonl"]
    told, it = row["orthogonality"], prepare(config)
    trainer, hands = build.make_trainer(it.experiment, lambda: False), []
    for k in row["clients"]:
        it.experiment.model.load(it.w0, it.b0)
        order, _ = trainer.make_generators(0, k, 0)
        hands.append(
            compute_by_hand(method, copy.deepcopy(it.experiment.net.module), it.experiment.data.train[k], config, order)
        )
    near = {"rel": 2e-3, "abs": 1e-6}
    assert min(len(hand.losses) for hand in hands) > 1
    assert told["losses"] == pytest.approx([hand.end for hand in hands], **near)
    assert told["loss"] == pytest.approx(sum(hand.end for hand in hands) / len(hands), **near)
    for key, name in (("cosines", "cosine"), ("heads", "head")):
        means = [sum(values) / len(values) for values in (getattr(hand, key) for hand in hands)]
        assert told[key] == pytest.approx(means, **near)
        assert told[name] == pytest.approx(sum(means) / len(means), **near)
    longest = max(len(hand.losses) for hand in hands)
    assert len(told["step_losses"]) == longest
    for i in range(longest):
        have = [hand for hand in hands if len(hand.losses) > i]
        assert told["step_losses"][i] == pytest.approx(sum(h.losses[i] for h in have) / len(have), **near)
        if i:
            mean = sum(h.cosines[i - 1] for h in have) / len(have)
            assert told["step_cosines"][i] == pytest.approx(mean, **near)
    assert told["step_losses"][0] == 0
    assert told["step_cosines"][0] != told["step_cosines"][0]  # nan: there is no gradient yet


@pytest.mark.parametrize("method", ["fedavg", "fedsol", "moon"])
def test_the_probe_changes_no_local_model(method):
    """In this net dropout draws and batch statistics change; the measured models are those of the run."""
    config = settings(method, "norm", rounds=2, analysis=["drift"], evaluate={"every": 1})
    plain, seen = (
        run_with_probes(config),
        run_with_probes(config.model_copy(update={"analysis": ["orthogonality", "drift"]})),
    )
    drifts = [[row["drift"] for row in it.files["analysis.jsonl"]] for it in (plain, seen)]
    assert drifts[0] == drifts[1]
    assert record(seen) == record(plain)
    assert all(-1 <= row["orthogonality"]["cosine"] <= 1 for row in seen.files["analysis.jsonl"])


def test_orthogonality_needs_a_classification():
    data = images()
    wanted = replace(data, train_y=data.train_y.float(), test_y=data.test_y.float(), classes=1)
    parts = split(wanted, "iid", 4, 0, "global")
    with pytest.raises(
        UserError, match="orthogonality cannot be computed without classes, which task regression does not"
    ):
        prepare(settings("fedavg", analysis=["orthogonality"], task={"name": "regression"}), parts)
