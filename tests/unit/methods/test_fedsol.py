"""FedSOL: steps equal the algorithm with two passes, and values computed by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, run_experiment, settings
from naive import (
    NET,
    assert_is_fedavg,
    assert_trains_along,
    descend,
    displaced,
    experiment,
    features,
    gradient,
    length,
    module_of,
    rows_of,
)
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedmpi.flat.layout import Segment
from fedmpi.method.base import CLASSES, FEATURES, SGD_STEPS
from fedmpi.methods.fedprox import FedProx
from fedmpi.methods.fedsol import FedSOL

PAPERS = ROOT / "configs" / "papers"
TABLE_10 = f"{PAPERS}/fedsol_table10.py:Objective"


def strengths(module, start, norm="layer"):
    """Return Lambda of (7) for each tensor by name; a layer's tensors have equal names up to the last dot."""
    moved = {name: (p.detach() - start[name]).abs() for name, p in module.named_parameters()}
    layers = {}
    for name, m in moved.items():
        layers.setdefault(name.rpartition(".")[0], []).append(m.flatten())
    lengths = {
        "layer": lambda name, m: torch.cat(layers[name.rpartition(".")[0]]).norm(),
        "tensor": lambda name, m: m.norm(),
        "dim0": lambda name, m: m.norm(dim=0, keepdim=True),
    }
    return {name: m / lengths[norm](name, m).clamp(min=1e-12) for name, m in moved.items()}


def perturb(module, start, g_p, rho, groups="all", norm="layer", adaptive=True):
    """Return eps of (6): along g_p, scaled by Lambda, on the tensors of `groups`; 0 if ||g_p|| < 1e-10."""
    named = dict(zip(start, g_p, strict=True))
    named = {name: g if TARGETS[groups](name) else torch.zeros_like(g) for name, g in named.items()}
    size, share = length(named.values()), strengths(module, start, norm)
    if size < 1e-10:
        return [torch.zeros_like(g) for g in named.values()]
    return [rho * (share[name] if adaptive else 1.0) * g / size for name, g in named.items()]


def distillation(module, teacher, x, tau=3.0):
    """Return L_p of (5)."""
    return kl_div(log_softmax(module(x) / tau, 1), softmax(teacher(x) / tau, 1), reduction="batchmean")


def two_passes(rho, groups="all", norm="layer"):
    """Return a step of (4) to (7) with two full passes; only the first updates batch statistics."""

    def direction(module, received, x, y):
        g_p = gradient(module, distillation(module, received, x))
        start = dict(received.named_parameters())
        with displaced(module, perturb(module, start, g_p, rho, groups, norm)):
            return gradient(module, cross_entropy(module(x), y))

    return direction


TARGETS = {
    "head": lambda name: name.startswith("5."),
    "body": lambda name: not name.startswith("5."),
    "all": lambda name: True,
}


@pytest.mark.parametrize("norm", ["layer", "tensor", "dim0"])
@pytest.mark.parametrize("layers", TARGETS)
def test_five_steps_equal_two_full_passes(client_of, layers, norm):
    """This covers the one-pass form for the head, and that the second pass does not update batch statistics."""
    it = experiment("fedsol", {"rho": 2.0, "layers": layers, "norm": norm})
    direction, received = two_passes(0.0), module_of(it).eval().requires_grad_(False)
    plain = descend(module_of(it), 5, direction, received, *rows_of(it))
    assert_trains_along(it, client_of(it), two_passes(2.0, layers, norm))
    assert (plain[5].weight - it.experiment.net.module[5].weight).abs().max() > 1e-4  # the perturbation matters


def test_the_second_pass_does_not_count_as_a_batch(client_of):
    """With momentum=None statistics are averaged over num_batches_tracked batches."""
    it = experiment("fedsol", {"rho": 2.0, "layers": "all"}, 4, net={**NET, "momentum": None})
    assert_trains_along(it, client_of(it), two_passes(2.0), steps=4)
    assert it.experiment.net.module[1].num_batches_tracked == 4


@pytest.mark.parametrize("layers", TARGETS)
def test_one_step_per_round_equals_fedavg(layers):
    """In the first step of a round w = w0, so Lambda = 0 and eps is exactly 0 for any rho."""
    train = {"batch_size": "full", "epochs": 1}
    _, fedavg = assert_is_fedavg("fedsol", options={"rho": 1e6, "layers": layers}, train=train)
    two = run_experiment(settings("fedsol", options={"rho": 2.0, "layers": layers}, train={**train, "epochs": 2}))
    assert two.hashes != fedavg.hashes


@pytest.mark.parametrize("adaptive", [True, False])
def test_rounding_noise_gives_no_perturbation(client_of, adaptive):
    """||g_p|| < 1e-10 is noise, which the fixed variant would scale up to length rho."""
    client = client_of(experiment("fedsol", epochs=1))
    noise = torch.full_like(client.w, 1e-13)
    client.w.add_(1)
    assert not FedSOL(rho=2.0, adaptive=adaptive, layers="all").perturbation(client, noise).any()


# ---- the perturbation alone ----
def client_at(w, w0):
    """Return a client at w whose model is one 2 x 2 head."""
    segment = Segment("weight", (2, 2), 0, "head")
    w, w0 = (torch.tensor(v, dtype=torch.float64).flatten() for v in (w, w0))
    return SimpleNamespace(w=w, w0=w0, segments=lambda groups=None: [segment])


# |w - w0| = [[0, 1], [2, 3]]: over its norm sqrt 14, or column by column over 2 and sqrt 10.
# g_p = [[.1, .2], [.2, .4]] has norm .5, so rho / ||g_p|| = 4 for rho = 2.
@pytest.mark.parametrize(
    ("norm", "strengths"),
    [
        ("layer", [0, 0.267261, 0.534522, 0.801784]),
        ("tensor", [0, 0.267261, 0.534522, 0.801784]),
        ("dim0", [0, 0.316228, 1, 0.948683]),
    ],
)
def test_perturbations_equal_values_by_hand(norm, strengths):
    client = client_at([[1.0, 2], [3, 4]], [[1.0, 1], [1, 1]])
    g_p = torch.tensor([0.1, 0.2, 0.2, 0.4], dtype=torch.float64)
    eps = FedSOL(rho=2.0, norm=norm).perturbation(client, g_p)
    assert eps.tolist() == pytest.approx([4 * s * g for s, g in zip(strengths, g_p.tolist(), strict=True)], abs=2e-6)


# ---- Table 10 ----
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("objective", ["A0", "A1", "A2", "A3", "A4", "A5", "A6"])
def test_the_ablations_of_table_10_equal_their_formulas(client_of, objective, adaptive):
    """The formulas are those of the table, A4 without Lambda, with four steps on all layers.

    Batch statistics come from passes at w. At w0, where L_p has its minimum, there is no perturbation.
    """
    rho, beta = 0.5, 0.6
    sol = {"name": "fedsol", "rho": rho, "layers": "all", "adaptive": adaptive}
    it = experiment(TABLE_10, {"fedsol": sol, "objective": objective, "beta": beta}, 4)

    def direction(module, received, x, y):
        start = dict(received.named_parameters())

        def at(eps, *terms, beta=1.0):
            """Sum of the terms' gradients at w + eps, that of L_p times beta."""
            with displaced(module, eps):
                losses = {"CE": cross_entropy(module(x), y), "L_p": beta * distillation(module, received, x)}
                return gradient(module, sum(losses[name] for name in terms))

        here = [torch.zeros_like(p) for p in module.parameters()]
        moved = any(not torch.equal(p, start[name]) for name, p in module.named_parameters())
        e_p = perturb(module, start, at(here, "L_p"), rho, adaptive=adaptive) if moved else here
        e_c = perturb(module, start, at(here, "L_p", "CE"), rho, adaptive=False)
        parts = {
            "A0": [(here, "CE")],
            "A1": [(e_p, "CE")],
            "A2": [(here, "CE"), (e_p, "L_p")],
            "A3": [(e_p, "CE", "L_p")],
            "A4": [(e_c, "CE", "L_p")],
            "A5": [(here, "CE", "L_p")],
            "A6": [(e_p, "CE"), (here, "L_p")],
        }[objective]
        terms = [sum(each) for each in zip(*(at(*part, beta=beta) for part in parts), strict=True)]
        with torch.no_grad():
            module(x)  # moves the statistics
        return terms

    assert_trains_along(it, client_of(it), direction, steps=4)


# ---- Table 4: other proximal terms ----


def run_by_hand(prox, rounds, eta=0.05, steps=10, rho=0.3, mu=0.7, alpha=1.0, x=1.0):
    """Run two one-dimensional clients: eps is rho times the sign of the term's gradient, 0 in the first step."""
    c, own = 0.0, [0.0, 0.0]
    for _ in range(rounds):
        ends, before = [], own
        for k, (a, b) in enumerate(((1.0, 0.0), (3.0, 4.0))):
            y = x
            for _ in range(steps):
                g_p = {
                    "fedprox": mu * (y - x),
                    "scaffold": c - own[k],
                    "fednova": c - own[k],
                    "feddyn": alpha * (y - x) - own[k],
                }[prox]
                y -= eta * a * (y + (rho * math.copysign(bool(g_p), g_p) if y != x else 0.0) - b)
            ends.append(y)
        # The steps are not corrected: their mean is the mean gradient. FedDyn's own update would add alpha times every
        # drift; its h stays what it is.
        own = [0.0 if prox == "fedprox" else (x - y) / (steps * eta) for y in ends]
        changes = (
            [alpha * (x - y) for y in ends] if prox == "feddyn" else [n - o for n, o in zip(own, before, strict=True)]
        )
        c = sum(own) / 2 if prox == "fednova" else c + sum(changes) / 2
        x = sum(ends) / 2 - (c / alpha if prox == "feddyn" else 0.0)
    return x, c, own


PROX = {
    "fedprox": {"name": "fedprox", "mu": 0.7},
    "scaffold": f"{PAPERS}/fedsol_table4.py:ScaffoldTerm",
    "fednova": f"{PAPERS}/fedsol_table4.py:FedNovaTerm",
    "feddyn": {"name": f"{PAPERS}/fedsol_table4.py:FedDynTerm", "alpha": 1.0},
}


@pytest.mark.parametrize("prox", PROX)
def test_perturbation_along_other_regularizers(play_quadratic, prox):
    """State and server step are those of the other method; the local gradient is the plain one at w + eps."""
    options = {"rho": 0.3, "layers": "all", "prox": PROX[prox]}
    for rounds in (1, 2, 5):
        it = play_quadratic("fedsol", rounds=rounds, options=options)
        x, c, own = run_by_hand(prox, rounds)
        assert it.w.item() == pytest.approx(x, abs=1e-12)
        slots = {"scaffold": ("c", "c_i"), "fednova": ("d", "d_k"), "feddyn": ("h", "g_k")}.get(prox)
        if slots:
            assert getattr(it.fed.server.state, slots[0]).item() == pytest.approx(c, abs=1e-11)
            rows = [it.client_state(k) for k in sorted(it.fed.states.rows)]
            assert [getattr(row, slots[1]).item() for row in rows] == pytest.approx(own, abs=1e-11)


@pytest.mark.parametrize("layers", TARGETS)
def test_perturbation_along_moons_contrastive_term(client_of, layers):
    """The last model differs from the received one."""
    it = experiment(f"{PAPERS}/fedsol_table4.py:AlongMOON", {"rho": 2.0, "layers": layers, "mu": 0.5})
    client = client_of(it)
    client.state.last.add_(0.1)
    last = module_of(it, client.state.last, client.state.last_b).eval()

    def direction(module, received, x, y):
        z, _ = features(module, x)
        anchors = [features(model, x)[0].detach() for model in (received, last)]
        near, far = (torch.cosine_similarity(z, anchor, dim=1) / 0.5 for anchor in anchors)
        g_p = gradient(module, 0.5 * (near.exp() / (near.exp() + far.exp())).log().mean().neg())
        with displaced(module, perturb(module, dict(received.named_parameters()), g_p, 2.0, layers)):
            return gradient(module, cross_entropy(module(x), y))

    assert_trains_along(it, client, direction)
    _, uploaded = it.experiment.method.upload(client)
    assert torch.equal(uploaded["last"], client.w)  # MOON's memory goes on


def test_requirements_are_those_of_the_regularizer():
    """A regression without features is accepted if no part of the method needs features."""
    assert FedSOL().needs == {SGD_STEPS, FEATURES, CLASSES}
    assert FedSOL(layers="all").needs == {SGD_STEPS, CLASSES}
    assert FedSOL(layers="all", prox=FedProx()).needs == {SGD_STEPS}
    assert FedSOL.needs == {SGD_STEPS, FEATURES, CLASSES}


def test_at_w0_is_false_after_any_change_of_w(client_of):
    """It is true until the first step, unless another model is loaded or a hook has written to the weights."""
    it = experiment("fedavg")
    client, seen = client_of(it), []

    def loss(client, x, y):
        seen.append(client.at_w0)
        return client.task_loss(client.logits(x), x, y)

    client.grad(*rows_of(it), at=client.w0 + 1, loss=loss)
    client.grad(*rows_of(it), loss=loss)
    client.fit(start=client.w0 + 1, epochs=1)
    assert (seen, client.at_w0) == ([False, True], True)
    client.fit(epochs=1)
    assert not client.at_w0
    client = client_of(it)
    client.w.add_(1)
    assert not client.at_w0
