"""FedALA: whole runs equal the paper's algorithm in plain loops."""

import numpy as np
import pytest
import torch
from helpers import run_experiment, settings
from naive import NET, gradient, load_pieces, loss_of, module_of, pieces, rows_of, train_epochs, weighted_mean
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds


def mix(w, mine, W, low):
    """Return the mixture (1) on lists of tensors; tensors before index `low` belong to the body."""
    return [p if i < low else m + (p - m) * c for i, (p, m, c) in enumerate(zip(w, mine, W, strict=True))]


def run_by_hand(it, rate, share, threshold, low):
    """Run the algorithm with plain loops; return w, and w_i and W of each client."""
    module, config, size = module_of(it).train(), it.experiment.settings, it.experiment.settings.train.batch_size
    w = pieces(it, it.w0)
    last, Ws, learned = [w] * 7, [[torch.ones_like(p) for p in w]] * 7, set()
    for t, row in enumerate(it.rows):
        for k in row["cohort"]:
            (x, y), W, losses, u = rows_of(it, k), Ws[k], [], w
            drawn = torch.randperm(len(x), generator=seeds.torch_generator(config.seed, "client", k, "share", t))
            some = max(int(share * len(x)), min(2, len(x)))
            some -= some > 1 and some % size == 1  # no batch of one row
            while any(not torch.equal(m, p) for m, p in zip(last[k], w, strict=True)):
                for rows in drawn[:some].split(size):
                    load_pieces(module, mix(w, last[k], W, low))
                    loss = cross_entropy(module(x[rows]), y[rows])
                    g = gradient(module, loss)
                    W = [(c - rate * d * (p - m)).clamp(0, 1) for c, d, p, m in zip(W, g, w, last[k], strict=True)]
                u = mix(w, last[k], W, low)
                losses.append(loss.item())
                if k in learned or len(losses) == 100 or (len(losses) > 10 and np.std(losses[-10:]) < threshold):
                    learned.add(k)
                    break
            load_pieces(module, u)
            train_epochs(module, (x, y), (t, k, 0), 0.1, batch_size=size, drop_last=config.train.drop_last)
            last[k], Ws[k] = [p.detach().clone() for p in module.parameters()], W
        w = weighted_mean([len(it.experiment.data.train[k]) for k in row["cohort"]], [last[k] for k in row["cohort"]])
    return w, last, Ws


@pytest.mark.parametrize(
    ("options", "train"),
    [
        ({"layers": "head", "share": 0.5}, {}),
        ({"layers": "all", "rate": 0.5, "threshold": 0.02}, {}),
        # of 10 to 50 rows one, whose losses never settle; and who has less than a batch makes no step
        ({"layers": "head", "share": 0.01, "threshold": 0.0}, {"batch_size": 20, "drop_last": True}),
    ],
)
def test_runs_equal_plain_loops(options, train):
    """Four of seven clients take part in a round; W and w_i of the others do not change."""
    options = {"rate": 1.0, "share": 0.8, "threshold": 0.1} | options
    it = run_experiment(settings("fedala", model=NET, options=options, rounds=3, train={"lr": 0.1, **train}))
    low = 4 if options.pop("layers") == "head" else 0  # norm64: two tensors of the convolution, two of the norm
    w, last, W = run_by_hand(it, **options, low=low)
    for k in {k for row in it.rows for k in row["cohort"]}:
        torch.testing.assert_close(pieces(it, it.client_state(k).last), last[k], rtol=0, atol=1e-11)
        torch.testing.assert_close(
            it.client_state(k).W, torch.cat([v.flatten() for v in W[k][low:]]), rtol=0, atol=1e-9
        )
    torch.testing.assert_close(pieces(it, it.w), w, rtol=0, atol=1e-11)
    assert min(v.min() for k in range(7) for v in W[k][low:]) < 0.9
    module = module_of(it, it.w, it.b)
    for line in it.lines[-7:]:
        k = line["client"]
        load_pieces(module, mix(w, last[k], W[k], low))
        assert line["loss"] == pytest.approx(loss_of(module, rows_of(it, k, "test")), abs=1e-9)
    assert it.rows[-1]["up_parameters"] == 4 * (len(it.w) + len(it.b))  # as FedAvg's
