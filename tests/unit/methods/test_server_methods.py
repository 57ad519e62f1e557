"""Server steps of FedGH, FedLD and FedExP, in full rounds and by hand."""

import numpy as np
import pytest
import torch
from helpers import CPU, prepare, run_experiment, settings
from naive import assert_is_fedavg
from naive_conflicts import literal_hierarchy, literal_pairs
from naive_fedld import principal_mean as literal

from fedmpi.comm.base import SingleProcess
from fedmpi.common.errors import UserError
from fedmpi.engine import scheduler


# ---- FedGH ----
def test_a_server_round_of_fedgh():
    it = run_experiment(settings("fedgh", rounds=1, train={"epochs": 3}, cohort={"fraction": 1.0}))
    G, n = it.uploads.dw.double().numpy(), it.experiment.data.train_sizes
    assert (G @ G.T < 0).any(), "or no pair conflicts"
    expected = it.w0.double().numpy() + n / n.sum() @ np.array(literal_pairs(G))
    np.testing.assert_allclose(it.w.double().numpy(), expected, rtol=0, atol=1e-6)


def test_fedgh_equals_fedavg_with_the_rule_harmonize():
    rule, train = {"rule": "harmonize"}, {"epochs": 3}
    mine, plain = run_experiment(settings("fedgh", train=train)), run_experiment(settings("fedavg", train=train))
    assert run_experiment(settings("fedavg", server=rule, train=train)).hashes == mine.hashes != plain.hashes
    assert run_experiment(settings("scaffold", server=rule)).reason == "finished"


def test_three_rounds_of_the_hierarchical_variant():
    """It works tensor by tensor; round 0 is the plain unweighted mean, and the history follows with weight .99."""
    it = prepare(settings("fedgh", options={"variant": "hierarchical"}, train={"epochs": 2}))
    tensors = [(s.start, s.stop) for s in it.experiment.model.layout.segments]
    history, changes = None, []
    step = it.fed.server.step

    def checked(t, lr, updates, *rest):
        nonlocal history
        before, G = it.w.double().clone(), updates.dw.double().numpy().copy()
        metrics = step(t, lr, updates, *rest)
        if history is None:
            direction = history = G.mean(0)
        else:
            direction = np.concatenate([literal_hierarchy(G[:, a:b], history[a:b]) for a, b in tensors])
            history = 0.99 * history + 0.01 * direction
        np.testing.assert_allclose((it.w.double() - before).numpy(), direction, rtol=0, atol=1e-6)
        np.testing.assert_allclose(it.fed.server.state.history.double().numpy(), history, rtol=0, atol=1e-6)
        changes.append(np.abs(direction - G.mean(0)).max())
        return metrics

    it.fed.server.step = checked
    it.fed.run()
    assert len(changes) == 3
    assert min(changes[1:]) > 1e-4, "or nothing conflicted"


# ---- FedLD ----
EVERYONE = {"cohort": {"fraction": 1.0}}


RULE = {"server": {"rule": {"name": "principal", "correction": "axis", "share": "sum"}}}


@pytest.mark.parametrize(
    ("variant", "share", "correction"), [("text", "l2", "text"), ("printed", "l2", "axis"), (None, "sum", "axis")]
)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_full_round_of_fedld_equals_the_papers_steps(variant, share, correction, weighting):
    """Checks two readings of the method, and the rule alone with the authors' weights of directions."""
    cohort = {"fraction": 0.6, "weighting": weighting}
    chosen = {"method": "fedavg", **RULE} if variant is None else {"method": "fedld", "options": {"variant": variant}}
    it = run_experiment(settings(net="cnn", rounds=1, cohort=cohort, **chosen))
    G = it.uploads.dw.double().numpy()
    n = it.experiment.data.train_sizes[it.rows[0]["cohort"]].astype(float)
    p = n / n.sum() if weighting == "samples" else np.full(4, 1 / 4)
    assert G.shape == (4, it.w.numel())
    expected = literal(G, p, 0.8, share, correction)
    moved = (it.w.double() - it.w0.double()).numpy()
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-7)
    assert np.abs(expected - p @ G).max() > 1e-4  # not the mean


def test_variant_code_equals_the_authors_code():
    """Round 0 is the plain mean; later rounds use the authors' rule, tensor by tensor."""
    options, fedavg = {"margin": 0.0, "variant": "code"}, run_experiment(settings("fedavg", rounds=1, **EVERYONE))
    it = run_experiment(settings("fedld", rounds=2, options=options, **EVERYONE))
    assert it.hashes[0] == fedavg.hashes[0]
    G, n, moved = it.uploads.dw.double().numpy(), it.experiment.data.train_sizes, it.w.double() - fedavg.w.double()
    for s in it.experiment.model.layout.segments:
        expected = literal(G[:, s.start : s.stop], n / n.sum(), 0.8, "sum", "axis")
        np.testing.assert_allclose(moved[s.start : s.stop].numpy(), expected, rtol=0, atol=1e-7)


def test_divergence_names_the_client():
    """The error is not one of the eigenvalue solver."""
    config = settings("fedld", train={"lr": 1e30}, **EVERYONE)
    with pytest.raises(UserError, match=r"round 0: client .* sent values that are not finite"):
        run_experiment(config, comm=SingleProcess(CPU))


# ---- FedExP ----
# Four clients that pull four ways: a, b, samples.
BOWLS = ([[1, 2], [3, 1], [2, 2], [1, 1]], [[4, 0], [-2, 1], [0, -3], [1, 5]], [3, 1, 2, 2])


def run_fedexp_by_hand(rounds, eps, uniform, seed, fraction, eta=0.05, steps=10):
    """Run the algorithm as its paper prints it, with updates global - local: [(w, eta_g)] after each round."""
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
def test_fedexp_reports_the_mean_of_the_last_two_models(play_quadratic, client_of, weighting, eps, fraction):
    """Metrics and the clients' models are those of that mean, at first of w_1; training continues from w."""
    expected = run_fedexp_by_hand(5, eps, weighting == "uniform", 3, fraction)
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
        assert it.experiment.method.initial_weights(client).tolist() == pytest.approx(w.tolist(), abs=1e-10)


@pytest.mark.parametrize("changes", [{"options": {"eps": 1e30}}, {"cohort": {"fraction": 0.15}}])
@pytest.mark.parametrize("net", ["norm", "mlp"])
def test_a_server_step_of_one_has_the_bits_of_fedavg(net, changes):
    """The cases are an eps that is large compared with the updates, and a cohort of one."""
    mine, _ = assert_is_fedavg("fedexp", net, **changes)
    assert [row["server_step"] for row in mine.rows] == [1, 1, 1]
