"""pFedMe: Moreau envelopes and personal models equal the paper's algorithm in plain loops."""

import pytest
import torch
from helpers import run_experiment, settings
from naive import NET, batches, gradient, load_pieces, module_of, pieces, weighted_mean
from torch.nn.functional import cross_entropy


def run_by_hand(it, lam, personal_lr, steps, start, decay, beta):
    """Run algorithm 1 on lists of tensors; return (w, {client: theta})."""
    module, train = module_of(it).train(), it.experiment.settings.train
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
        means = weighted_mean([len(it.experiment.data.train[k]) for k in row["cohort"]], ends)
        w = [(1 - beta) * a + beta * b for a, b in zip(w, means, strict=True)]
    return w, theta


@pytest.mark.parametrize(("start", "decay"), [("theta", 0.0), ("w", 0.0), ("theta", 0.1)])
def test_rounds_of_a_network_equal_plain_loops(start, decay):
    """Batches of 10, two epochs, four of seven clients per round, beta 1.5; all K steps of (2) use one batch."""
    options = {"lam": 5.0, "personal_lr": 0.08, "steps": 3, "start": start, "decay": decay}
    train = {"lr": 0.05, "batch_size": 10, "epochs": 2}
    it = run_experiment(settings("pfedme", model=NET, options=options, train=train, server={"lr": 1.5}))
    w, theta = run_by_hand(it, **options, beta=1.5)
    torch.testing.assert_close(pieces(it, it.w), w, rtol=0, atol=1e-12)
    assert 4 < len(theta) <= 7
    for k in it.fed.states.rows:
        expected = theta.get(k, pieces(it, it.w0))
        torch.testing.assert_close(pieces(it, it.client_state(k).theta), expected, rtol=0, atol=1e-12)
