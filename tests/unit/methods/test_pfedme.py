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
