"""FedNova: moves divided by the steps that made them."""

import pytest
import torch
from helpers import federated, play, settings
from quadratics import TWO

SAME = {**TWO, "copies": [2, 10]}  # one sample a step: 2 and 10 steps, the same gradient in each


def test_one_round_of_unequal_steps(play_quadratic):
    """Numbers computed in numpy, float64: K = (2, 10), equal weights, from x = 1."""
    train = {"epochs": 1, "batch_size": 1}
    assert play_quadratic("fednova", SAME, rounds=1, train=train).w.item() == pytest.approx(1.5765630, abs=5e-8)
    assert play_quadratic("fedavg", SAME, rounds=1, train=train).w.item() == pytest.approx(2.1559384, abs=5e-8)


def test_equal_steps_are_fedavg_bit_for_bit():
    """Full batches: everybody makes as many steps, with momentum too. Weights are by samples, so p are odd numbers."""
    train = {"batch_size": "full", "epochs": 3}
    mine, theirs = (play(settings(name, "norm", train=train)) for name in ("fednova", "fedavg"))
    assert mine.hashes == theirs.hashes
    assert play(settings("fednova")).hashes != play(settings("fedavg")).hashes


def test_the_form_of_the_fedsol_authors():
    """w = (1 - c1 c2) w_g + sum_k (c1 p_k / a_k) w_k,  c1 = sum p a,  c2 = sum p / a."""
    it = play(settings("fednova", rounds=1))
    up, members = it.uploads, it.rows[0]["cohort"]
    n = torch.tensor([float(it.made.data.train_sizes[k]) for k in members], dtype=torch.float64)
    p, a, start = n / n.sum(), up.a.double(), it.w0.double()
    assert len(set(a.tolist())) > 1
    c1, c2 = p @ a, (p / a).sum()
    expected = (1 - c1 * c2) * start + (c1 * p / a) @ (start + up.dw.double())
    torch.testing.assert_close(it.w.double(), expected, rtol=0, atol=1e-6)


def test_a_client_without_a_step_adds_nothing():
    """Fewer samples than a batch and drop_last: a_k = 0 and dw = 0; d_k counts as 0."""
    it = play(settings("fednova", rounds=1, cohort={"fraction": 1.0}, train={"batch_size": 30, "drop_last": True}))
    up = it.uploads
    assert (up.a == 0).any()
    assert not (up.a == 0).all()
    sizes = torch.from_numpy(it.made.data.train_sizes).double()
    p, a = sizes / sizes.sum(), up.a.double()
    d = torch.where(a[:, None] > 0, -up.dw.double() / a.clamp(min=1)[:, None], torch.zeros(()).double())
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
    train = {"epochs": 1, "batch_size": 1}
    for rounds in (1, 4):
        it = play_quadratic("fednova", SAME, rounds=rounds, train=train, options={"ccvr": True})
        x, d, d_k = by_hand(rounds)
        assert it.w.item() == pytest.approx(x, abs=1e-12)
        assert it.fed.server.state.d.item() == pytest.approx(d, abs=1e-11)
        rows = [it.kept(k).d_k.item() for k in sorted(it.fed.states.rows)]
        assert rows == pytest.approx(d_k, abs=1e-11)
    # d_k holds the last correction too, so it tends to half of client k's gradient: nearer to the optimum, not there
    far, plain = (
        play_quadratic("fednova", SAME, rounds=200, train=train, options=o).w.item() for o in ({"ccvr": True}, {})
    )
    assert abs(far - 3) < abs(plain - 3)
    assert abs(far - 3) > 0.01


def test_without_correction_nothing_is_kept():
    it = play(settings("fednova", rounds=1), federated())
    assert (it.made.messages.client_state.size, it.made.messages.server_state.size) == (0, 0)
