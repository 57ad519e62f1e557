"""FedSOL against the algorithm written out with two passes, and numbers by hand."""

import copy
from pathlib import Path
from types import SimpleNamespace

import naive
import pytest
import torch
from helpers import ROOT, play, prepare, settings
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedmpi.common.errors import UserError
from fedmpi.flat.layout import Segment
from fedmpi.method.base import CLASSES, FEATURES, SGD_STEPS
from fedmpi.methods.fedprox import FedProx
from fedmpi.methods.fedsol import FedSOL

PAPERS = ROOT / "configs" / "papers"
NET = {"name": f"{Path(__file__).parent / 'nets.py'}:norm64"}
FULL = {"batch_size": "full", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}


TABLE_10 = f"{PAPERS}/fedsol_table10.py:Objective"


def experiment(options, epochs, net=NET, method="fedsol", **changes):
    return prepare(settings(method, "norm", model=net, options=options, train={**FULL, "epochs": epochs}, **changes))


def rows_of(it, k):
    shard = it.made.data.train[k]
    return shard.x[shard.index], shard.y[shard.index]


def strengths(now, start, norm):
    """Lambda of (7) for each of the named tensors; a layer is what stands before the last dot of a name."""
    moved = {name: (p.detach() - start[name]).abs() for name, p in now.items()}
    layers = {}
    for name, m in moved.items():
        layers.setdefault(name.rpartition(".")[0], []).append(m.flatten())
    lengths = {
        "layer": lambda name, m: torch.cat(layers[name.rpartition(".")[0]]).norm(),
        "tensor": lambda name, m: m.norm(),
        "dim0": lambda name, m: m.norm(dim=0, keepdim=True),
    }
    return {name: m / lengths[norm](name, m).clamp(min=1e-12) for name, m in moved.items()}


def by_hand(module, x, y, steps, targets, rho, tau=3.0, norm="layer"):
    """Equations (4) to (7) of the method's file with two full passes; batch statistics belong to the first alone."""
    teacher = copy.deepcopy(module).eval()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    sgd = torch.optim.SGD(module.parameters(), FULL["lr"], FULL["momentum"], weight_decay=FULL["weight_decay"])
    for _ in range(steps):
        with torch.no_grad():
            q = softmax(teacher(x) / tau, 1)
        module.zero_grad()
        kl_div(log_softmax(module(x) / tau, 1), q, reduction="batchmean").backward()
        held = {name: p for name, p in module.named_parameters() if targets(name)}
        g_p = {name: p.grad.clone() for name, p in held.items()}
        length = torch.sqrt(sum(g.square().sum() for g in g_p.values()))
        saved, share = copy.deepcopy(module.state_dict()), strengths(held, start, norm)
        with torch.no_grad():
            for name, p in held.items():
                p += rho * share[name] * g_p[name] / (length + 1e-12)
        module.zero_grad()
        cross_entropy(module(x), y).backward()
        module.load_state_dict(saved)  # weights and all buffers
        sgd.step()
    return module


TARGETS = {
    "head": lambda name: name.startswith("5."),
    "body": lambda name: not name.startswith("5."),
    "all": lambda name: True,
}


@pytest.mark.parametrize("norm", ["layer", "tensor", "dim0"])
@pytest.mark.parametrize("layers", TARGETS)
def test_five_steps_against_two_full_passes(client, layers, norm):
    """The one-pass form of the head, and batch statistics that the second pass does not touch."""
    it = experiment({"rho": 2.0, "layers": layers, "norm": norm}, 5)
    module = by_hand(copy.deepcopy(it.made.net.module), *rows_of(it, 0), 5, TARGETS[layers], 2.0, norm=norm)
    plain = by_hand(copy.deepcopy(it.made.net.module), *rows_of(it, 0), 5, TARGETS[layers], 0.0, norm=norm)
    it.made.method.train(client(it))
    mine, theirs = it.made.net.module.state_dict(), module.state_dict()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-11, msg=name)
    assert (plain[5].weight - module[5].weight).abs().max() > 1e-4  # the perturbation matters


def test_batch_statistics_that_count_batches(client):
    """momentum=None averages over num_batches_tracked batches: the second pass must not count as one."""
    it = experiment({"rho": 2.0, "layers": "all"}, 4, net={**NET, "momentum": None})
    module = by_hand(copy.deepcopy(it.made.net.module), *rows_of(it, 0), 4, TARGETS["all"], 2.0)
    it.made.method.train(client(it))
    torch.testing.assert_close(it.made.net.module[1].running_mean, module[1].running_mean, rtol=0, atol=1e-11)
    assert it.made.net.module[1].num_batches_tracked == 4


def test_the_teacher_is_the_received_model(client):
    """In evaluation mode with the received batch statistics, whoever's teacher it was before; the student moves."""
    it = experiment({"rho": 2.0}, 2, rounds=2)
    it.fed.run()
    x, _ = rows_of(it, 0)
    k = client(it, 0, round_=2)
    received = copy.deepcopy(it.made.net.module).eval()
    it.made.method.train(k)
    _, teacher = k.frozen(x)
    assert torch.equal(teacher, received(x))
    assert not torch.equal(it.made.net.module.eval()(x), teacher)
    assert (k.b0 - it.b0).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"rho": 0.0}, {"rho": 0.0, "layers": "all", "adaptive": False}])
def test_without_perturbation_it_is_fedavg(options):
    mine, theirs = play(settings("fedsol", "norm", options=options)), play(settings("fedavg", "norm"))
    assert mine.hashes == theirs.hashes


@pytest.mark.parametrize("layers", TARGETS)
def test_one_step_a_round_is_fedavg(layers):
    """At the first step of a round w = w0, so Lambda = 0 and eps is 0 exactly, however large rho."""
    train = {"batch_size": "full", "epochs": 1}
    mine = play(settings("fedsol", "mlp", options={"rho": 1e6, "layers": layers}, train=train))
    theirs = play(settings("fedavg", "mlp", train=train))
    assert mine.hashes == theirs.hashes
    two = play(settings("fedsol", "mlp", options={"rho": 2.0, "layers": layers}, train={**train, "epochs": 2}))
    more = play(settings("fedavg", "mlp", train={**train, "epochs": 2}))
    assert two.hashes != more.hashes


@pytest.mark.parametrize("adaptive", [True, False])
def test_no_perturbation_from_rounding_noise(client, adaptive):
    """||g_p|| < 1e-10 is noise: the fixed variant would blow it up to length rho."""
    it = experiment({}, 1)
    k, method = client(it), FedSOL(rho=2.0, adaptive=adaptive, layers="all")
    noise = torch.full_like(k.w, 1e-13)
    k.w.add_(1)
    assert not method.perturbation(k, noise).any()


# ---- the perturbation alone ----
def standing_at(w, w0):
    """A client with one 2 x 2 head."""
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
def test_strengths_by_hand(norm, strengths):
    k = standing_at([[1.0, 2], [3, 4]], [[1.0, 1], [1, 1]])
    g_p = torch.tensor([0.1, 0.2, 0.2, 0.4], dtype=torch.float64)
    eps = FedSOL(rho=2.0, norm=norm).perturbation(k, g_p)
    assert eps.tolist() == pytest.approx([4 * s * g for s, g in zip(strengths, g_p.tolist(), strict=True)], abs=2e-6)
    if norm == "layer":
        assert eps.tolist() == pytest.approx([0, 0.213809, 0.427618, 1.282854], abs=1e-6)


# ---- Table 10 ----
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("objective", ["A0", "A1", "A2", "A3", "A4", "A5", "A6"])
def test_the_ablations_of_table_10(client, objective, adaptive):
    """As the table prints them, A4 without Lambda; four steps on all layers. Batch statistics come from passes at w.
    At w0 L_p is least, so that there is nothing to perturb along; as a term of the loss it is what the network says."""
    rho, tau, beta = 0.5, 3.0, 0.6
    sol = {"name": "fedsol", "rho": rho, "layers": "all", "adaptive": adaptive}
    it = experiment({"fedsol": sol, "objective": objective, "beta": beta}, 4, method=TABLE_10)
    x, y = rows_of(it, 0)
    module = copy.deepcopy(it.made.net.module)
    teacher, start = copy.deepcopy(module).eval(), {n: p.detach().clone() for n, p in module.named_parameters()}

    def at(eps, *terms, beta=1.0):
        """Sum of the terms' gradients at w + eps, that of L_p times beta."""
        with naive.displaced(module, eps):
            f = module(x)
            losses = {
                "CE": cross_entropy(f, y),
                "L_p": kl_div(log_softmax(f / tau, 1), softmax(teacher(x) / tau, 1).detach(), reduction="batchmean"),
            }
            losses["L_p"] = beta * losses["L_p"]
            return naive.gradient(module, sum(losses[name] for name in terms))

    def eps(g, adaptive):
        named = dict(module.named_parameters())
        share = strengths(named, start, "layer")
        size = naive.length(g)
        moved = [share[name] if adaptive else 1.0 for name in named]
        return [rho * m * piece / size if size > 1e-10 else 0 * piece for m, piece in zip(moved, g, strict=True)]

    def direction():
        here = [torch.zeros_like(p) for p in module.parameters()]
        moved = any(not torch.equal(p, start[name]) for name, p in module.named_parameters())
        e_p, e_c = eps(at(here, "L_p"), adaptive) if moved else here, eps(at(here, "L_p", "CE"), False)
        parts = {
            "A0": [(here, "CE")],
            "A1": [(e_p, "CE")],
            "A2": [(here, "CE"), (e_p, "L_p")],
            "A3": [(e_p, "CE", "L_p")],
            "A4": [(e_c, "CE", "L_p")],
            "A5": [(here, "CE", "L_p")],
            "A6": [(e_p, "CE"), (here, "L_p")],
        }[objective]
        pieces = [sum(each) for each in zip(*(at(*part, beta=beta) for part in parts), strict=True)]
        with torch.no_grad():
            module(x)  # moves the statistics
        return pieces

    naive.descend(module, 4, direction)
    it.made.method.train(client(it))
    naive.assert_same(it, module)


# ---- Table 4: other proximal terms ----
def sign(value):
    return (value > 0) - (value < 0)


def by_hand_along(prox, rounds, eta=0.05, steps=10, rho=0.3, mu=0.7, alpha=1.0, x=1.0):
    """Two one-dimensional clients, where eps is rho times the sign of the term's gradient, 0 at the first step."""
    c, own = 0.0, [0.0, 0.0]
    for _ in range(rounds):
        ends, changes = [], []
        for k, (a, b) in enumerate(((1.0, 0.0), (3.0, 4.0))):
            y = x
            for _ in range(steps):
                g_p = {
                    "fedprox": mu * (y - x),
                    "scaffold": c - own[k],
                    "fednova": c - own[k],
                    "feddyn": alpha * (y - x) - own[k],
                }[prox]
                y -= eta * a * (y + (rho * sign(g_p) if y != x else 0.0) - b)
            ends.append(y)
            new = {
                "fedprox": 0.0,
                "scaffold": (x - y) / (steps * eta),  # the steps are not corrected: their mean is the mean gradient
                "fednova": (x - y) / (steps * eta),
                "feddyn": (x - y) / (steps * eta),  # FedDyn's own would add alpha times every drift
            }[prox]
            changes.append(-alpha * (y - x) if prox == "feddyn" else new - own[k])  # FedDyn's h stays what it is
            own[k] = new
        c = sum(own) / 2 if prox == "fednova" else c + sum(changes) / 2  # FedDyn's h
        x = sum(ends) / 2 - (c / alpha if prox == "feddyn" else 0.0)
    return x, c, own


PROX = {
    "fedprox": {"name": "fedprox", "mu": 0.7},
    "scaffold": f"{PAPERS}/fedsol_table4.py:ScaffoldTerm",
    "fednova": f"{PAPERS}/fedsol_table4.py:FedNovaTerm",
    "feddyn": {"name": f"{PAPERS}/fedsol_table4.py:FedDynTerm", "alpha": 1.0},
}
OWN = {"fedprox": ("fedprox", {}), "scaffold": ("scaffold", {}), "fednova": ("fednova", {"ccvr": True})}
OWN["feddyn"] = ("feddyn", {"alpha": 1.0})


@pytest.mark.parametrize("prox", ["fedprox", "scaffold", "fednova", "feddyn"])
def test_along_other_terms(play_quadratic, prox):
    """States and server are the other method's, the local gradient is the plain one at w + eps."""
    options = {"rho": 0.3, "layers": "all", "prox": PROX[prox]}
    for rounds in (1, 2, 5):
        it = play_quadratic("fedsol", rounds=rounds, options=options)
        x, c, own = by_hand_along(prox, rounds)
        assert it.w.item() == pytest.approx(x, abs=1e-12)
        slots = {"scaffold": ("c", "c_i"), "fednova": ("d", "d_k"), "feddyn": ("h", "g_k")}.get(prox)
        if slots:
            assert getattr(it.fed.server.state, slots[0]).item() == pytest.approx(c, abs=1e-11)
            rows = [it.kept(k) for k in sorted(it.fed.states.rows)]
            assert [getattr(row, slots[1]).item() for row in rows] == pytest.approx(own, abs=1e-11)


@pytest.mark.parametrize("prox", ["scaffold", "feddyn"])
def test_client_states_are_gradients_however_long_it_runs(play_quadratic, prox):
    """Clients whose optima differ drift in every round; what they keep is their steps' mean gradient all the same.
    At rest the two are opposite. The method's own update, meant for its own steps, would grow by a drift a round."""
    options = {"rho": 0.3, "layers": "all", "prox": PROX[prox]}
    slot = {"scaffold": "c_i", "feddyn": "g_k"}[prox]
    for rounds in (20, 50):
        it = play_quadratic("fedsol", rounds=rounds, options=options)
        one, other = (getattr(it.kept(k), slot).item() for k in range(2))
        x = it.w.item()
        for k, (a, b) in enumerate(((1.0, 0.0), (3.0, 4.0))):
            ends = [a * (y + e - b) for y in (x, x + it.uploads.dw[k].item()) for e in (-0.3, 0.3)]
            assert min(ends) <= (one, other)[k] <= max(ends)  # of gradients between where it starts and where it ends
        assert one == pytest.approx(-other, abs=1e-3)
        assert abs(one) == pytest.approx(1.8391, abs=1e-3)  # FedDyn's own update: 4.598 after 50 rounds


@pytest.mark.parametrize("layers", TARGETS)
def test_along_moons_term(client, layers):
    """The contrastive term's gradient on the perturbed tensors; a last model unlike the received one."""
    it = prepare(
        settings(
            f"{PAPERS}/fedsol_table4.py:AlongMOON",
            "norm",
            model=NET,
            options={"rho": 2.0, "layers": layers, "mu": 0.5},
            train={**FULL, "epochs": 5},
        )
    )
    x, y = rows_of(it, 0)
    module = copy.deepcopy(it.made.net.module)
    received, start = copy.deepcopy(module).eval(), {n: p.detach().clone() for n, p in module.named_parameters()}
    k = client(it)
    k.state.last.add_(0.1)
    last = copy.deepcopy(module)
    last.load_state_dict(it.made.model.state_dict(k.state.last, k.state.last_b))
    last.eval()
    held = [TARGETS[layers](name) for name, _ in module.named_parameters()]

    def direction():
        z, _ = naive.features(module, x)
        anchors = [naive.features(model, x)[0].detach() for model in (received, last)]
        near, far = (torch.cosine_similarity(z, anchor, dim=1) / 0.5 for anchor in anchors)
        term = (near.exp() / (near.exp() + far.exp())).log().mean().neg()
        g_p = [g * on for g, on in zip(naive.gradient(module, 0.5 * term), held, strict=True)]
        size = naive.length(g_p)
        share = strengths(dict(module.named_parameters()), start, "layer").values()
        eps = [2.0 * m * g / size if size > 1e-10 else 0 * g for m, g in zip(share, g_p, strict=True)]
        with naive.displaced(module, eps):
            return naive.gradient(module, cross_entropy(module(x), y))

    naive.descend(module, 5, direction)
    state = it.made.method.train(k)
    _, kept = it.made.method.upload(k)
    naive.assert_same(it, module)
    assert not state
    assert torch.equal(kept["last"], k.w)  # MOON's memory goes on


@pytest.mark.parametrize("prox", PROX)
def test_it_sends_and_keeps_what_the_other_method_does(prox):
    mine, (name, options) = prepare(settings("fedsol", options={"prox": PROX[prox]})), OWN[prox]
    theirs = prepare(settings(name, options=options))
    mine, theirs = mine.made.messages, theirs.made.messages
    assert mine.announcement().packing.shapes == theirs.announcement().packing.shapes
    assert mine.upload(0).packing.shapes == theirs.upload(0).packing.shapes
    for name in ("client_state", "server_state", "scratch", "per_client"):
        assert getattr(mine, name).shapes == getattr(theirs, name).shapes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prox": "fedavg"}, "not FedAvg"),
        ({"prox": "scaffold"}, "not Scaffold.*fedsol_table4.py"),  # a correction, and no regularizer
        ({"prox": "feddyn"}, "not FedDyn.*fedsol_table4.py"),  # whose g_k presumes its own steps
        ({"objective": "A3"}, "method.objective: is an option of configs/papers/fedsol_table10.py:Objective"),
    ],
)
def test_what_does_not_go_together(options, said):
    with pytest.raises(UserError, match=said):
        prepare(settings("fedsol", options=options))


def test_it_needs_what_the_term_needs():
    """A regression without features will do where nothing asks for them."""
    assert FedSOL().needs == {SGD_STEPS, FEATURES, CLASSES}
    assert FedSOL(layers="all").needs == {SGD_STEPS, CLASSES}
    assert FedSOL(layers="all", prox=FedProx()).needs == {SGD_STEPS}
    assert FedSOL.needs == {SGD_STEPS, FEATURES, CLASSES}


def test_at_w0_is_known_without_looking(client):
    """Until the first step, and not while the model is elsewhere or after somebody has written to its weights."""
    it = naive.experiment("fedavg")
    k, seen = client(it), []

    def loss(k, x, y):
        seen.append(k.at_w0)
        return k.task_loss(k.logits(x), x, y)

    with k.elsewhere(k.w0 + 1):
        assert not k.at_w0
    assert k.at_w0
    x, y = naive.rows_of(it)
    k.grad(x, y, at=k.w0 + 1, loss=loss)
    k.grad(x, y, loss=loss)
    assert seen == [False, True]
    assert k.at_w0
    k.fit(start=k.w0 + 1, epochs=1)
    assert k.at_w0
    k.fit(epochs=1)
    assert not k.at_w0
    k = client(it)
    k.w.add_(1)
    assert not k.at_w0
