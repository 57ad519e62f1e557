"""FedDyn: traces by hand, its fixed point, h as the mean of g_k."""

import pytest
import torch
from helpers import play, settings


def states(it):
    """h, (N, d) g_k"""
    rows = [it.kept(k).g_k for k in sorted(it.fed.states.rows)]
    return it.fed.server.state.h, torch.stack(rows)


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


@pytest.mark.parametrize("fraction", [0.6, 1.0])
def test_h_is_the_mean_of_g_k(fraction):
    """Over all N clients, whoever took part; weighted by samples or not."""
    it = play(settings("feddyn", rounds=4, cohort={"fraction": fraction}))
    h, g_k = states(it)
    assert h.abs().max() > 0.001
    torch.testing.assert_close(h, g_k.sum(0) / 7, rtol=0, atol=1e-6)


def test_the_mean_reported_in_place_of_w(play_quadratic, client_of):
    """The same rounds; the global model is sum_k p_k w_k, from which clients reckon back to the same start."""
    for t in (1, 2, 5):
        w, avg = (play_quadratic("feddyn", rounds=t, options={"report": name}) for name in ("w", "avg"))
        assert avg.w.item() == pytest.approx((w.w + states(w)[0] / 0.1).item(), abs=1e-12)
        assert abs(avg.w.item() - w.w.item()) > 0.01
        for mine, other in zip(states(avg), states(w), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    start = play_quadratic("feddyn", rounds=4).w.item()
    assert avg.w.item() == pytest.approx(start + w.uploads.dw.mean().item(), abs=1e-12)
    client = client_of(avg, 0, 5)
    assert avg.made.method.receive(client).item() == pytest.approx(w.w.item(), abs=1e-12)
    assert avg.made.method.weights(client).item() == pytest.approx(avg.w.item(), abs=1e-12)


def test_weights_by_samples():
    """The mean in (4) has the cohort's weights, h's step has not."""
    it = play(settings("feddyn", rounds=1))
    dw = it.uploads.dw
    n = torch.tensor([float(it.made.data.train_sizes[k]) for k in it.rows[0]["cohort"]])
    h = -0.1 / 7 * dw.sum(0)
    torch.testing.assert_close(it.w, it.w0 + (n / n.sum()) @ dw - h / 0.1, rtol=0, atol=1e-6)
