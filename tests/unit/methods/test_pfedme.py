"""pFedMe: Moreau envelopes by hand, against the paper's loops, and what becomes of theta."""

import pytest
import torch
from helpers import play, settings
from naive import NET, batches, gradient, load_pieces, module_of, pieces, weighted_mean
from torch.nn.functional import cross_entropy

# f = (theta - 1)^2 / 2 from 0, lam 2, lr and personal_lr .1, K = 2, R = 2:  theta <- .7 theta + .1 + .2 w,
# w <- w - .2 (w - theta)
UNIT = {"a": [[1.0]], "b": [[1.0]], "copies": [1]}
HAND = {"lam": 2.0, "personal_lr": 0.1, "steps": 2}
SAME = {"a": [[1.0], [1.0]], "b": [[1.0], [1.0]], "copies": [1, 3]}


def small(play_quadratic, bowls=UNIT, rounds=2, **changes):
    changes["options"] = HAND | changes.get("options", {})
    changes["train"] = {"lr": 0.1, "epochs": 2, **changes.get("train", {})}
    changes["evaluate"] = {"protocol": ["global", "personal"]}
    return play_quadratic("pfedme", bowls, (0.0,), rounds=rounds, **changes)


def thetas(it, t):
    return [line["x0"] for line in it.lines if line["round"] == t and line["protocol"] == "personal"]


@pytest.mark.parametrize(
    ("options", "w", "theta"),
    [
        # theta .1, .17, w .034; .2258, .26486, w .080172; then from there .1721548, .23654276, w .111446152 and
        # .2878691624, .32379764408
        ({}, (0.080172, 0.153916450416), (0.26486, 0.32379764408)),
        # theta .1, .17, w .034; from w again: .1306, .19822, w .034 - .2 (.034 - .19822) = .066844
        ({"start": "w"}, (0.066844, 0.129219879664), (0.19822, 0.25181418232)),
    ],
)
def test_two_rounds_by_hand(play_quadratic, options, w, theta):
    """The global model is w, the personal one is the last theta."""
    it = small(play_quadratic, options=options)
    assert [row["x0"] for row in it.rows] == pytest.approx(w, abs=1e-14)
    for t in range(2):
        assert thetas(it, t) == pytest.approx([theta[t]], abs=1e-14)


@pytest.mark.parametrize(
    ("beta", "weighting", "expected"),
    [
        # A client with c takes w to w + .080172 (c - w), see above. c = 1, -1 with 3 and 1 rows: their mean is .5, so
        # w <- w + beta .080172 (.5 - w);  with equal weights it is 0, and w stays there
        (2.0, "samples", [0.080172, 0.147488900832]),
        (2.0, "uniform", [0.0, 0.0]),
    ],
)
def test_beta_of_the_server(play_quadratic, beta, weighting, expected):
    """Beta beyond 1 goes past the mean of the clients' models."""
    two = {"a": [[1.0], [1.0]], "b": [[1.0], [-1.0]], "copies": [3, 1]}
    it = small(play_quadratic, two, server={"lr": beta}, cohort={"weighting": weighting})
    assert [row["x0"] for row in it.rows] == pytest.approx(expected, abs=1e-14)


def test_many_inner_steps_are_the_proximal_map(play_quadratic):
    """theta = (1 + lam w) / (1 + lam), so w_R = 1 - (1 - lr lam / (1 + lam))^R = 1 - (13/15)^3 with lr .2."""
    it = small(play_quadratic, rounds=1, train={"lr": 0.2, "epochs": 3}, options={"steps": 400})
    assert it.w.item() == pytest.approx(1 - (13 / 15) ** 3, abs=1e-14)
    assert thetas(it, 0) == pytest.approx([(1 + 2 * (1 - (13 / 15) ** 2)) / 3], abs=1e-14)


def test_who_makes_no_step_keeps_theta(play_quadratic):
    """drop_last leaves client 0 without a batch: it sends w, its theta is the initial model; w' = (w + w_1) / 2."""
    it = small(play_quadratic, SAME, rounds=1, train={"batch_size": 2, "drop_last": True})
    assert it.w.item() == pytest.approx(0.080172 / 2, abs=1e-14)
    assert thetas(it, 0) == pytest.approx([0, 0.26486], abs=1e-14)


def by_hand(it, lam, personal_lr, steps, start, decay, beta):
    """Algorithm 1 on lists of tensors: (w, {client: theta})."""
    module, train = module_of(it).train(), it.made.settings.train
    w, theta = pieces(it, it.w0), {}
    for row in it.rows:
        ends = []
        for k in row["cohort"]:
            mine, own = w, w
            for x, y in batches(it, k, row["round"]):
                own = mine if start == "w" else own
                for _ in range(steps):
                    load_pieces(module, own)
                    g = gradient(module, cross_entropy(module(x), y))
                    pull = [d + lam * (o - m) + decay * o for o, d, m in zip(own, g, mine, strict=True)]
                    own = [o - personal_lr * d for o, d in zip(own, pull, strict=True)]
                mine = [m - train.lr * lam * (m - o) for m, o in zip(mine, own, strict=True)]
            theta[k] = own
            ends.append(mine)
        means = weighted_mean([len(it.made.data.train[k]) for k in row["cohort"]], ends)
        w = [(1 - beta) * a + beta * b for a, b in zip(w, means, strict=True)]
    return w, theta


@pytest.mark.parametrize(("start", "decay"), [("theta", 0.0), ("w", 0.0), ("theta", 0.1)])
def test_rounds_of_a_network_against_the_loops(start, decay):
    """Batches of 10, two epochs, four of seven clients a round, beta 1.5; one batch for all K steps of (2)."""
    options = {"lam": 5.0, "personal_lr": 0.08, "steps": 3, "start": start, "decay": decay}
    train = {"lr": 0.05, "batch_size": 10, "epochs": 2}
    it = play(settings("pfedme", model=NET, options=options, train=train, server={"lr": 1.5}))
    w, theta = by_hand(it, **options, beta=1.5)
    torch.testing.assert_close(pieces(it, it.w), w, rtol=0, atol=1e-12)
    assert 4 < len(theta) <= 7
    for k in it.fed.states.rows:
        expected = theta.get(k, pieces(it, it.w0))
        torch.testing.assert_close(pieces(it, it.kept(k).theta), expected, rtol=0, atol=1e-12)
