"""FedExP: the extrapolated server step against a loop, and the mean of two iterates that is reported."""

import pytest
import torch
from naive import assert_is_fedavg

from fedmpi.engine import scheduler

# Four clients that pull four ways: a, b, samples.
BOWLS = ([[1, 2], [3, 1], [2, 2], [1, 1]], [[4, 0], [-2, 1], [0, -3], [1, 5]], [3, 1, 2, 2])


def by_hand(rounds, eps, uniform, seed, fraction, eta=0.05, steps=10):
    """The algorithm as its paper prints it, updates as global - local: [(w, eta_g)] after each round."""
    a, b, n = (torch.tensor(v, dtype=torch.float64) for v in BOWLS)
    w, out = torch.zeros(2, dtype=torch.float64), []
    for t in range(rounds):
        S = scheduler.draw_cohort(seed, t, 4, fraction)
        p = torch.full_like(n[S], 1 / len(S)) if uniform else n[S] / n[S].sum()
        y = w.expand(len(S), 2)
        for _ in range(steps):
            y = y - eta * a[S] * (y - b[S])
        mean = p @ (w - y)
        eta_g = max(1.0, (p @ (w - y).norm(dim=1) ** 2 / (2 * (mean.norm() ** 2 + eps))).item())
        w = w - eta_g * mean
        out.append((w, eta_g))
    return out


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(("eps", "fraction"), [(0.5, 1.0), (0.2, 0.5), (0.2, 0.75)])
def test_rounds_and_what_is_reported(play_quadratic, client_of, weighting, eps, fraction):
    """Metrics, and what clients use, are of the mean of the last two w, at first of w_1; training goes on from w."""
    expected = by_hand(5, eps, weighting == "uniform", 3, fraction)
    assert max(step for _, step in expected) > 1.2
    same = {"seed": 3, "rounds": 5, "cohort": {"fraction": fraction, "weighting": weighting}}
    same["evaluate"] = {"protocol": ["global", "personal"]}
    for report in ("last", "average"):
        tree = dict(zip(("a", "b", "copies"), BOWLS, strict=True))
        it = play_quadratic("fedexp", tree, (0.0, 0.0), options={"eps": eps, "report": report}, **same)
        assert [row["server_step"] for row in it.rows] == pytest.approx([step for _, step in expected], rel=1e-10)
        for t, (w, _) in enumerate(expected):
            before = w if report == "last" or t == 0 else expected[t - 1][0]
            shown = pytest.approx(((before + w) / 2).tolist(), abs=1e-10)
            lines = [it.rows[t], *(line for line in it.lines if line["round"] == t)]
            assert len(lines) == 5
            assert all([line["x0"], line["x1"]] == shown for line in lines)
        client = client_of(it, 1, 5)
        assert client.received.tolist() == it.w.tolist() == shown
        assert it.made.method.receive(client).tolist() == pytest.approx(w.tolist(), abs=1e-10)


@pytest.mark.parametrize("changes", [{"options": {"eps": 1e30}}, {"cohort": {"fraction": 0.15}}])
@pytest.mark.parametrize("net", ["norm", "mlp"])
def test_where_the_step_is_one_it_is_fedavg_bit_for_bit(net, changes):
    """An eps that is large beside the updates, and a cohort of one."""
    mine, _ = assert_is_fedavg("fedexp", net, **changes)
    assert [row["server_step"] for row in mine.rows] == [1, 1, 1]
