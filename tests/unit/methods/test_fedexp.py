"""FedExP: the extrapolated server step by hand, and the mean of two iterates that is reported."""

from types import SimpleNamespace

import pytest
import torch
from naive import assert_is_fedavg

from fedmpi.engine import scheduler
from fedmpi.flat.packing import Views
from fedmpi.method import State, Uploads
from fedmpi.methods.fedexp import FedExP

# Four clients that pull four ways: a, b, samples.
BOWLS = ([[1, 2], [3, 1], [2, 2], [1, 1]], [[4, 0], [-2, 1], [0, -3], [1, 5]], [3, 1, 2, 2])


@pytest.mark.parametrize(
    ("updates", "n", "eps", "eta", "w"),
    [
        # mean |D_i|^2 = (4 + 1) / 2, D = (1, .5), |D|^2 = 1.25: 2.5 / 2.5
        ([[2, 0], [0, 1]], None, 1e-15, 1, [1, 0.5]),
        # (4 + 2) / 2 = 3, D = (.5, .5), |D|^2 = .5: 3 / 1, with eps = .1 3 / 1.2
        ([[2, 0], [-1, 1]], None, 1e-15, 3, [1.5, 1.5]),
        ([[2, 0], [-1, 1]], None, 0.1, 2.5, [1.25, 1.25]),
        # 3 : 1 in both places: .75 * 4 + .25 * 2 = 3.5, D = (1.25, .25), |D|^2 = 1.625: 3.5 / 3.45 and 3.5 / 3.65,
        # which is less than 1
        ([[2, 0], [-1, 1]], [3, 1], 0.1, 1.0144927536231885, [1.2681159420289856, 0.2536231884057971]),
        ([[2, 0], [-1, 1]], [3, 1], 0.2, 1, [1.25, 0.25]),
        # M orthogonal updates of one length: 1 / (2 / M) = M / 2
        (torch.eye(4).tolist(), None, 1e-15, 2, [0.5] * 4),
        ([[3, 4]], None, 1e-3, 1, [3, 4]),  # a cohort of one: half of |D|^2 / (|D|^2 + eps)
        ([[3, 4], [3, 4], [3, 4]], [1, 2, 5], 1e-3, 1, [3, 4]),
        ([[0, 0], [0, 0]], None, 1e-3, 1, [0, 0]),
        ([[1, 0], [-1, 0]], None, 1e-3, 500, [0, 0]),  # D = 0: 1 / (2 * .001), of nothing
    ],
)
def test_by_hand(updates, n, eps, eta, w):
    """Of updates (local - global) of clients with n samples each."""
    seen, n = {}, torch.tensor(n or [1.0] * len(updates), dtype=torch.float64)
    updates = Uploads(range(len(n)), n, n / n.sum(), Views({"dw": torch.tensor(updates, dtype=torch.float64)}))
    server = SimpleNamespace(round=0, state=State(), figures=seen.update)
    direction, _ = FedExP(eps=eps).aggregate(server, updates)
    assert seen["server_step"].item() == pytest.approx(eta, rel=1e-12)
    assert direction.tolist() == pytest.approx(w, abs=1e-12)


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
