"""FedAvg: its fixed point on quadratics, and what it is for one full batch."""

import json
from pathlib import Path

import pytest
import torch
from helpers import play, settings
from naive import gradient, module_of, rows_of
from quadratics import TWO
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import fedmpi

A, B, ETA, K = (1, 3), (0, 4), 0.05, 10


def after(x, a, b):
    """K exact gradient steps on a (x - b)^2 / 2:  x - b shrinks by 1 - eta a each."""
    return b + (1 - ETA * a) ** K * (x - b)


def test_every_round_and_the_fixed_point_through_the_public_surface(quadratic):
    summary = fedmpi.run(quadratic("fedavg", rounds=40, name="two"))
    rows = [json.loads(line) for line in (Path(summary["directory"]) / "metrics.jsonl").read_text().splitlines()]
    x = 1.0
    for row in rows[:5]:
        x = sum(after(x, a, b) for a, b in zip(A, B, strict=True)) / 2
        assert row["x0"] == pytest.approx(x, abs=1e-12)
    # x* = sum q_i b_i / sum q_i, q_i = 1 - (1 - eta a_i)^K: not the optimum 3, that is client drift
    q = [1 - (1 - ETA * a) ** K for a in A]
    assert summary["last"]["x0"] == pytest.approx(sum(p * b for p, b in zip(q, B, strict=True)) / sum(q), abs=1e-12)
    assert summary["last"]["x0"] == pytest.approx(2.6673303, abs=5e-8)  # the same, by hand


@pytest.mark.parametrize(("weighting", "p"), [("samples", (0.25, 0.75)), ("uniform", (0.5, 0.5))])
def test_weights_of_the_clients(play_quadratic, weighting, p):
    """Client 1 has its row three times: its own optimum stays, its weight by samples is 3/4."""
    it = play_quadratic("fedavg", {**TWO, "copies": [1, 3]}, rounds=1, cohort={"weighting": weighting})
    assert it.w.item() == pytest.approx(p[0] * after(1, 1, 0) + p[1] * after(1, 3, 4), abs=1e-12)


def test_one_full_batch_each_is_a_gradient_step_on_the_union():
    """sum_k (n_k / n) grad F_k = grad of the mean loss over all samples; exact but for float32 sums."""
    it = play(settings("fedavg", rounds=1, cohort={"fraction": 1.0}, train={"batch_size": "full", "momentum": 0.0}))
    module = module_of(it, it.w0)
    x, y = (torch.cat(parts) for parts in zip(*(rows_of(it, k) for k in range(7)), strict=True))
    g = parameters_to_vector(gradient(module, cross_entropy(module(x), y)))
    torch.testing.assert_close(it.w, it.w0 - 0.05 * g, rtol=0, atol=1e-6)
    assert (it.w - it.w0).abs().max() > 1e-3
