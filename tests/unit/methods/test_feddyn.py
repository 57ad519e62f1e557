"""FedDyn: traces by hand, its fixed point, h as the mean of g_k."""

import pytest
import torch
from helpers import federated, play, prepare, settings

from fedmpi.runtime import build_data

EXACT = {"epochs": 60, "lr": 0.3}  # |1 - .3 (1 + .1)|^60 = 4e-11 is left of the inner problem


def states(it):
    """h, (N, d) g_k"""
    rows = [it.kept(k).g_k for k in sorted(it.fed.states.rows)]
    return it.fed.server.state.h, torch.stack(rows)


def test_exact_inner_solutions(play_quadratic):
    """Numbers computed in numpy: alpha = .1 from x = 1. Client k's answer is (a b + g + alpha x) / (a + alpha)."""
    it = play_quadratic("feddyn", rounds=1, train=EXACT)
    moved = it.uploads.dw.flatten() + 1
    assert moved.tolist() == pytest.approx([0.0909091, 3.9032258], abs=5e-8)
    assert it.w.item() == pytest.approx(2.9941349, abs=5e-8)
    assert play_quadratic("feddyn", rounds=2, train=EXACT).w.item() == pytest.approx(2.2316716, abs=5e-8)


def test_the_fixed_point_is_the_optimum(play_quadratic):
    """3, where FedAvg stops at 2.667: exact inner solutions or the ten steps of 3.1 alike. With alpha = .1 it would
    take 213 rounds to come so near."""
    options = {"alpha": 1.0}
    exact = {"epochs": 30, "lr": 0.3}  # |1 - .3 (1 + 1)|^30 = 1e-12
    assert play_quadratic("feddyn", rounds=30, train=exact, options=options).w.item() == pytest.approx(3, abs=1e-6)
    it = play_quadratic("feddyn", rounds=60, options=options)
    assert it.w.item() == pytest.approx(3, abs=1e-6)
    h, g_k = states(it)
    assert h.item() == pytest.approx(0, abs=1e-6)
    assert g_k.flatten().tolist() == pytest.approx([3, -3], abs=1e-6)  # grad f_k at the optimum
    assert play_quadratic("fedavg", rounds=40).w.item() == pytest.approx(2.6673303, abs=5e-8)


def test_the_optimum_stays(quadratic, client):
    """From x = 3 with g_k = grad f_k(3) = (3, -3), so h = 0: nobody moves."""
    config = quadratic("feddyn", start=(3.0,), rounds=3)
    it = prepare(config, build_data.partitioned(config))
    for k, g in enumerate((3.0, -3.0)):
        client(it, k).state.g_k.fill_(g)
    it.fed.run()
    assert it.w.item() == 3
    assert states(it)[1].flatten().tolist() == [3, -3]


@pytest.mark.parametrize("fraction", [0.6, 1.0])
def test_h_is_the_mean_of_g_k(fraction):
    """Over all N clients, whoever took part; weighted by samples or not."""
    it = play(settings("feddyn", rounds=4, cohort={"fraction": fraction}))
    h, g_k = states(it)
    assert h.abs().max() > 0.001
    torch.testing.assert_close(h, g_k.sum(0) / 7, rtol=0, atol=1e-6)


def test_one_client_extrapolates(play_quadratic):
    """N = 1: after round 1, w = 2 w_1 - w_g."""
    bowl = {"a": [[3.0]], "b": [[4.0]], "copies": [1]}
    it = play_quadratic("feddyn", bowl, rounds=1)
    w_1 = 1 + it.uploads.dw.item()
    assert it.w.item() == pytest.approx(2 * w_1 - 1, abs=1e-12)


def test_the_mean_reported_in_place_of_w(play_quadratic, client):
    """The same rounds; the global model is sum_k p_k w_k, from which clients reckon back to the same start."""
    mean = 0.0
    for t in (1, 2, 5):
        w, avg = (play_quadratic("feddyn", rounds=t, options={"report": name}) for name in ("w", "avg"))
        h, g_k = states(w)
        assert avg.w.item() == pytest.approx((w.w + h / 0.1).item(), abs=1e-12)
        assert abs(avg.w.item() - w.w.item()) > 0.01
        for mine, other in zip(states(avg), (h, g_k), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        mean = avg.w.item()
    up = w.uploads.dw.mean()
    start = play_quadratic("feddyn", rounds=4).w.item()
    assert mean == pytest.approx(start + up.item(), abs=1e-12)
    k = client(avg, 0, 5)
    assert avg.made.method.receive(k).item() == pytest.approx(w.w.item(), abs=1e-12)
    assert avg.made.method.weights(k).item() == pytest.approx(mean, abs=1e-12)


def test_weights_by_samples():
    """The mean in (4) has the cohort's weights, h's step has not."""
    it = play(settings("feddyn", rounds=1), federated())
    up, members = it.uploads, it.rows[0]["cohort"]
    n = torch.tensor([float(it.made.data.train_sizes[k]) for k in members])
    h = -0.1 / 7 * up.dw.sum(0)
    expected = it.w0 + (n / n.sum()) @ up.dw - h / 0.1
    torch.testing.assert_close(it.w, expected, rtol=0, atol=1e-6)
