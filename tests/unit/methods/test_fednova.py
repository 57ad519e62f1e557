"""FedNova: moves divided by the steps that made them."""

import pytest
import torch
from helpers import federated, play, settings
from naive import assert_is_fedavg
from quadratics import TWO

SAME = {**TWO, "copies": [2, 10]}  # one sample a step: 2 and 10 steps, the same gradient in each


def test_one_round_of_unequal_steps(play_quadratic):
    """Numbers computed in numpy, float64: K = (2, 10), equal weights, from x = 1."""
    train = {"epochs": 1, "batch_size": 1}
    assert play_quadratic("fednova", SAME, rounds=1, train=train).w.item() == pytest.approx(1.5765630, abs=5e-8)
    assert play_quadratic("fedavg", SAME, rounds=1, train=train).w.item() == pytest.approx(2.1559384, abs=5e-8)


def test_equal_steps_are_fedavg_bit_for_bit():
    """Full batches: everybody makes as many steps, with momentum too. Weights are by samples, so p are odd numbers."""
    _, fedavg = assert_is_fedavg("fednova", "norm", train={"batch_size": "full", "epochs": 3})
    assert play(settings("fednova", "norm")).hashes != fedavg.hashes


def shares(it):
    """p of the round's cohort and a, the weights of its steps."""
    n = torch.tensor([float(it.made.data.train_sizes[k]) for k in it.rows[0]["cohort"]], dtype=torch.float64)
    return n / n.sum(), it.uploads.a.double()


def test_the_form_of_the_fedsol_authors():
    """w = (1 - c1 c2) w_g + sum_k (c1 p_k / a_k) w_k,  c1 = sum p a,  c2 = sum p / a."""
    it = play(settings("fednova", rounds=1))
    (p, a), start = shares(it), it.w0.double()
    assert len(set(a.tolist())) > 1
    c1, c2 = p @ a, (p / a).sum()
    expected = (1 - c1 * c2) * start + (c1 * p / a) @ (start + it.uploads.dw.double())
    torch.testing.assert_close(it.w.double(), expected, rtol=0, atol=1e-6)


def test_a_client_without_a_step_adds_nothing():
    """Fewer samples than a batch and drop_last: a_k = 0 and dw = 0; d_k counts as 0."""
    it = play(settings("fednova", rounds=1, cohort={"fraction": 1.0}, train={"batch_size": 30, "drop_last": True}))
    p, a = shares(it)
    assert 0 < (a == 0).sum() < 7
    d = -it.uploads.dw.double() / a.clamp(min=1)[:, None] * (a > 0)[:, None]
    torch.testing.assert_close(it.w.double(), it.w0 - (p @ a) * (p @ d), rtol=0, atol=1e-6)


def by_hand(rounds, bowls=((1.0, 0.0), (3.0, 4.0)), steps=(2, 10), eta=0.05, x=1.0):
    """With the corrected gradient, plain numbers, p = 1/2."""
    d, d_k = 0.0, [0.0, 0.0]
    for _ in range(rounds):
        received = x
        for k, (a, b) in enumerate(bowls):
            y = received
            for _ in range(steps[k]):
                y -= eta * (a * (y - b) - d_k[k] + d)
            d_k[k] = (received - y) / (steps[k] * eta)
        d = sum(d_k) / 2
        x = received - eta * (sum(steps) / 2) * d
    return x, d, d_k


def test_corrected_gradients(play_quadratic):
    train, corrected = {"epochs": 1, "batch_size": 1}, {"ccvr": True}
    for rounds in (1, 4):
        it = play_quadratic("fednova", SAME, rounds=rounds, train=train, options=corrected)
        x, d, d_k = by_hand(rounds)
        assert it.w.item() == pytest.approx(x, abs=1e-12)
        assert it.fed.server.state.d.item() == pytest.approx(d, abs=1e-11)
        assert [it.kept(k).d_k.item() for k in (0, 1)] == pytest.approx(d_k, abs=1e-11)
    # d_k holds the last correction too, so it tends to half of client k's gradient: nearer to the optimum, not there
    x, plain = (play_quadratic("fednova", SAME, rounds=200, train=train, options=o).w.item() for o in (corrected, {}))
    assert 0.01 < abs(x - 3) < abs(plain - 3)


def test_without_correction_nothing_is_kept():
    it = play(settings("fednova", rounds=1), federated())
    assert (it.made.messages.client_state.size, it.made.messages.server_state.size) == (0, 0)
