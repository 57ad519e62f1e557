"""FedAvg, FedProx, SCAFFOLD, FedDyn, FedNova and FedCM on quadratics, where each round and the limit are known."""

import pytest
import torch
from helpers import run_experiment, settings
from naive import assert_is_fedavg, gradient, module_of, rows_of
from quadratics import TWO
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from fedmpi.engine import scheduler

ETA = 0.05


# ---- the algorithms in plain numbers, as the papers print them ----
class FedAvg:
    """x: the global model, c: what the server keeps, own: what the clients keep."""

    slots: tuple[str, str] | None = None  # the names of c and own

    def __init__(self, clients, **options):
        self.c, self.own, self.clients = 0.0, [0.0] * clients, clients
        vars(self).update(options)

    def gradient(self, k, g, move):
        """Of a local step; move: how far the client is from x."""
        return g

    def finish(self, k, move, steps):
        """The client's round is over."""

    def step(self, p, moves, steps):
        """How far x moves, for clients' weights p, moves and numbers of steps."""
        return sum(q * m for q, m in zip(p, moves, strict=True))


class FedProx(FedAvg):
    def gradient(self, k, g, move):
        return g + self.mu * move


class Scaffold(FedAvg):
    slots = "c", "c_i"
    changes = 0.0

    def gradient(self, k, g, move):
        return g - self.own[k] + self.c

    def finish(self, k, move, steps):
        change = -self.c - move / (steps * ETA)
        self.own[k] += change
        self.changes += change

    def step(self, p, moves, steps):
        self.c, self.changes = self.c + self.changes / self.clients, 0.0
        return super().step(p, moves, steps)


class FedDyn(FedAvg):
    slots = "h", "g_k"

    def gradient(self, k, g, move):
        return g - self.own[k] + self.alpha * move

    def finish(self, k, move, steps):
        self.own[k] -= self.alpha * move

    def step(self, p, moves, steps):
        self.c -= self.alpha / self.clients * sum(moves)
        return super().step(p, moves, steps) - self.c / self.alpha


class FedNova(FedAvg):
    def step(self, p, moves, steps):
        tau = sum(q * K for q, K in zip(p, steps, strict=True))
        return tau * sum(q * m / K for q, m, K in zip(p, moves, steps, strict=True))


class CorrectedFedNova(FedNova):
    slots = "d", "d_k"

    def gradient(self, k, g, move):
        return g - self.own[k] + self.c

    def finish(self, k, move, steps):
        self.own[k] = -move / (steps * ETA)

    def step(self, p, moves, steps):
        self.c = sum(-q * m / (K * ETA) for q, m, K in zip(p, moves, steps, strict=True))
        return super().step(p, moves, steps)


class FedCM(FedAvg):
    def gradient(self, k, g, move):
        return self.alpha * g + (1 - self.alpha) * self.c

    def step(self, p, moves, steps):
        self.c = sum(-q * m / (K * ETA) for q, m, K in zip(p, moves, steps, strict=True))
        return super().step(p, moves, steps)


def trace(naive, bowls, rounds, steps, n=None, seed=0, fraction=1.0, x=1.0):
    """x after each round; n: the clients' samples, where they weigh."""
    xs = []
    for t in range(rounds):
        members, moves = scheduler.draw_cohort(seed, t, len(bowls), fraction), []
        for k in members:
            (a, b), y = bowls[k], x
            for _ in range(steps[k]):
                y -= ETA * naive.gradient(k, a * (y - b), y - x)
            moves.append(y - x)
            naive.finish(k, y - x, steps[k])
        weights = [n[k] if n else 1 for k in members]
        x += naive.step([w / sum(weights) for w in weights], moves, [steps[k] for k in members])
        xs.append(x)
    return xs


FOUR = ((1.0, 0.0), (3.0, 4.0), (2.0, -1.0), (0.5, 7.0))


@pytest.mark.parametrize(
    ("method", "naive", "options", "sampling"),
    [
        ("fedavg", FedAvg, {}, "all"),
        ("fedavg", FedAvg, {}, "by samples"),
        ("fedprox", FedProx, {"mu": 1.0}, "all"),
        ("scaffold", Scaffold, {}, "two of four"),
        ("feddyn", FedDyn, {"alpha": 1.0}, "two of four"),
        ("fednova", FedNova, {}, "unequal steps"),
        ("fednova", CorrectedFedNova, {"ccvr": True}, "unequal steps"),
        ("fedcm", FedCM, {"alpha": 0.3}, "all"),
        ("fedcm", FedCM, {"alpha": 0.3}, "unequal steps"),
    ],
)
def test_rounds_and_states(play_quadratic, method, naive, options, sampling):
    """Two of four: who is absent keeps its state, and the server's moves by a mean over all clients. Unequal steps: one
    sample a step. By samples: a client has its row three times, so its own optimum stays and its weight is 3/4."""
    bowls = FOUR if sampling == "two of four" else FOUR[:2]
    copies = {"two of four": [1, 2, 3, 4], "unequal steps": [2, 10], "by samples": [1, 3]}.get(sampling, [1, 1])
    changes = {"seed": 5, "cohort": {"fraction": 0.5 if len(bowls) == 4 else 1.0}}
    if sampling == "unequal steps":
        changes["train"] = {"epochs": 1, "batch_size": 1}
    if sampling == "by samples":
        changes["cohort"]["weighting"] = "samples"
    tree = {"a": [[a] for a, _ in bowls], "b": [[b] for _, b in bowls], "copies": copies}
    it = play_quadratic(method, tree, rounds=7, options=options, **changes)
    by_hand = naive(len(bowls), **options)
    steps, n = copies if sampling == "unequal steps" else [10] * 4, copies if sampling == "by samples" else None
    xs = trace(by_hand, bowls, 7, steps, n, 5, changes["cohort"]["fraction"])
    assert [row["x0"] for row in it.rows] == pytest.approx(xs, abs=1e-12)
    if by_hand.slots:
        server, own = by_hand.slots
        assert getattr(it.fed.server.state, server).item() == pytest.approx(by_hand.c, abs=1e-11)
        assert [getattr(it.client_state(k), own).item() for k in range(len(bowls))] == pytest.approx(
            by_hand.own, abs=1e-11
        )
    if method == "fedcm":
        assert it.fed.server.state.delta.item() == pytest.approx(by_hand.c, abs=1e-12)


# ---- limits ----
BY_SAMPLES = {"cohort": {"weighting": "samples"}}
EXACT = {"train": {"epochs": 30, "lr": 0.3}}  # |1 - .3 (1 + 1)|^30 = 1e-12


@pytest.mark.parametrize(
    ("method", "options", "rounds", "changes", "limit", "tolerance"),
    [
        # x* = sum q_i b_i / sum q_i, q_i = 1 - (1 - eta a_i)^K: not the optimum 3, that is client drift
        ("fedavg", {}, 40, {}, 2.6673303, 5e-8),
        # q_i = a_i / (a_i + mu) (1 - (1 - eta (a_i + mu))^K)
        ("fedprox", {"mu": 1.0}, 80, {}, 2.6909822, 5e-8),
        ("scaffold", {}, 100, {}, 3, 1e-9),
        ("feddyn", {"alpha": 1.0}, 60, {}, 3, 1e-6),
        ("feddyn", {"alpha": 1.0}, 30, EXACT, 3, 1e-6),
        # p = (1, 3)/4: x* = sum p a b / sum p a = (3/4 * 3 * 4) / (1/4 * 1 + 3/4 * 3), c the weighted mean of the c_i
        ("scaffold", {"mean_c": "weighted"}, 200, BY_SAMPLES, 3.6, 1e-9),
    ],
)
def test_fixed_points(play_quadratic, method, options, rounds, changes, limit, tolerance):
    bowls = {**TWO, "copies": [1, 3]} if changes == BY_SAMPLES else TWO
    it = play_quadratic(method, bowls, rounds=rounds, options=options, **changes)
    assert it.w.item() == pytest.approx(limit, abs=tolerance)
    if limit == 3:  # what clients keep are their gradients at the optimum, whose mean is 0
        server, own = {"scaffold": ("c", "c_i"), "feddyn": ("h", "g_k")}[method]
        assert getattr(it.fed.server.state, server).item() == pytest.approx(0, abs=1e-6)
        assert [getattr(it.client_state(k), own).item() for k in (0, 1)] == pytest.approx([3, -3], abs=1e-6)


def test_one_round_of_unequal_steps(play_quadratic):
    """Numbers computed in numpy, float64: K = (2, 10), equal weights, from x = 1."""
    changes = {"rounds": 1, "train": {"epochs": 1, "batch_size": 1}}
    for method, x in (("fednova", 1.5765630), ("fedavg", 2.1559384)):
        it = play_quadratic(method, {**TWO, "copies": [2, 10]}, **changes)
        assert it.w.item() == pytest.approx(x, abs=5e-8)


# ---- networks ----
def shares(it):
    """p of the round's cohort, by samples."""
    n = torch.tensor([float(it.experiment.data.train_sizes[k]) for k in it.rows[0]["cohort"]], dtype=torch.float64)
    return n / n.sum()


def test_one_full_batch_each_is_a_gradient_step_on_the_union():
    """sum_k (n_k / n) grad F_k = grad of the mean loss over all samples; exact but for float32 sums."""
    it = run_experiment(
        settings("fedavg", rounds=1, cohort={"fraction": 1.0}, train={"batch_size": "full", "momentum": 0.0})
    )
    module = module_of(it, it.w0)
    x, y = (torch.cat(parts) for parts in zip(*(rows_of(it, k) for k in range(7)), strict=True))
    g = parameters_to_vector(gradient(module, cross_entropy(module(x), y)))
    torch.testing.assert_close(it.w, it.w0 - 0.05 * g, rtol=0, atol=1e-6)
    assert (it.w - it.w0).abs().max() > 1e-3


@pytest.mark.parametrize("train", [{}, {"batch_size": 30, "drop_last": True}])
def test_fednova_in_the_form_of_the_fedsol_authors(train):
    """w = (1 - c1 c2) w_g + sum_k (c1 p_k / a_k) w_k,  c1 = sum p a,  c2 = sum p / a. A client with fewer samples than
    a batch makes no step with drop_last: a_k = 0, and its w_k counts as w_g."""
    it = run_experiment(settings("fednova", rounds=1, cohort={"fraction": 1.0}, train=train))
    p, a, start = shares(it), it.uploads.a.double(), it.w0.double()
    assert len(set(a.tolist())) > 1
    assert bool((a == 0).any()) == bool(train)
    share = torch.where(a > 0, (p @ a) * p / a, 0.0)
    expected = (1 - share.sum()) * start + share @ (start + it.uploads.dw.double())
    torch.testing.assert_close(it.w.double(), expected, rtol=0, atol=1e-6)
    assert (it.experiment.messages.client_state.size, it.experiment.messages.server_state.size) == (0, 0)


def test_equal_steps_of_fednova_are_fedavg_bit_for_bit():
    """Full batches: everybody makes as many steps, with momentum too. Weights are by samples, so p are odd numbers."""
    _, fedavg = assert_is_fedavg("fednova", "norm", train={"batch_size": "full", "epochs": 3})
    assert run_experiment(settings("fednova", "norm")).hashes != fedavg.hashes


def test_momentum_counts_how_often_a_gradient_enters(play_quadratic):
    """A constant gradient g enters w with a = (K - r (1 - r^K) / (1 - r)) / (1 - r), FedNova's a_k: SCAFFOLD's (2)
    gives g itself. Almost constant: curvature 1e-6 at distance 1e6."""
    bowl = {"a": [[1e-6]], "b": [[1e6]], "copies": [1]}
    it = play_quadratic("scaffold", bowl, (0.0,), rounds=1, train={"momentum": 0.9})
    a = (10 - 0.9 * (1 - 0.9**10) / 0.1) / 0.1
    assert it.w.item() == pytest.approx(0.05 * a, rel=1e-4)  # against the gradient -1
    assert it.client_state(0).c_i.item() == pytest.approx(-1.0, rel=1e-4)


@pytest.mark.parametrize("fraction", [0.6, 1.0])
def test_h_of_feddyn_is_the_mean_of_g_k(fraction):
    """Over all N clients, whoever took part; the mean in (4) has the cohort's weights, h's step has not."""
    it = run_experiment(settings("feddyn", rounds=4, cohort={"fraction": fraction}))
    h = it.fed.server.state.h
    assert h.abs().max() > 0.001
    torch.testing.assert_close(h, sum(it.client_state(k).g_k for k in it.fed.states.rows) / 7, rtol=0, atol=1e-6)
    it = run_experiment(settings("feddyn", rounds=1, cohort={"fraction": fraction}))
    dw = it.uploads.dw
    expected = it.w0 + shares(it).float() @ dw + dw.sum(0) / 7
    torch.testing.assert_close(it.w, expected, rtol=0, atol=1e-6)


def test_feddyn_reports_the_mean_in_place_of_w(play_quadratic, client_of):
    """The same rounds; the global model is sum_k p_k w_k, from which clients reckon back to the same start."""
    for t in (1, 2, 5):
        w, avg = (play_quadratic("feddyn", rounds=t, options={"report": name}) for name in ("w", "avg"))
        h = w.fed.server.state.h
        assert avg.w.item() == pytest.approx((w.w + h / 0.1).item(), abs=1e-12)
        assert abs(avg.w.item() - w.w.item()) > 0.01
        torch.testing.assert_close(avg.fed.server.state.h, h, rtol=0, atol=1e-12)
        for k in (0, 1):
            torch.testing.assert_close(avg.client_state(k).g_k, w.client_state(k).g_k, rtol=0, atol=1e-12)
    client = client_of(avg, 0, 5)
    assert avg.experiment.method.initial_weights(client).item() == pytest.approx(w.w.item(), abs=1e-12)
    assert avg.experiment.method.personal_weights(client).item() == pytest.approx(avg.w.item(), abs=1e-12)
