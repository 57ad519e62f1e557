"""FedFomo: usefulness, mixtures and choices by hand, and whole runs against the paper's algorithm in plain loops."""

import numpy as np
import pytest
import torch
from helpers import prepare, settings
from naive import NET, loss_of, module_of, rows_of

from fedmpi.common import seeds
from fedmpi.runtime import build_data


def tensor(*values):
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def quadratic_clients(quadratic):
    """Return a function that prepares quadratic clients with validation rows; a client's rows are all equal."""

    def make(a, b, copies, start, options, **changes):
        sites = {"a": [list(row) for row in a], "b": [list(row) for row in b], "copies": copies}
        changes["evaluate"] = {"protocol": ["personal"]}
        config = quadratic("fedfomo", sites, start, options=options, **changes)
        held = config.data.model_copy(update={"validation": 0.5})
        # `prepare` holds the rows out
        return prepare(config.model_copy(update={"data": held}), build_data.build_partitioned_data(config))

    return make


def test_losses_equal_those_of_evaluation(client_of):
    """They use validation rows and running statistics, and change neither weights, statistics nor mode."""
    it = prepare(settings("fedfomo", model=NET, options={"models": 2, "explore": 0.0}))
    last = it.fed.server.state.last
    last += 0.1 * torch.randn(last.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    client = client_of(it, 3)
    it.experiment.method.initial_weights(client)
    assert torch.equal(client.w, it.w)
    assert torch.equal(client.b, it.b)
    assert it.experiment.net.module.training
    assert client.downloads.who.tolist() == [0, 1]  # P is 0
    losses = [loss_of(module_of(it, w), rows_of(it, 3, "validation")) for w in (it.w, last[0], last[1])]
    u = [(losses[0] - losses[i + 1]) / (last[i] - it.w0).norm().item() for i in range(2)]
    assert client.accumulators.u.tolist() == pytest.approx(u, abs=1e-12)


A = np.array([(1.0, 0.5), (1.5, 1.0), (2.0, 0.25), (0.5, 3.0), (1.0, 1.0)])
B = np.array([(1, 0), (1.25, 0.5), (-1, 0), (-1.5, 0.25), (0, 2)])


def run_by_hand(it, models, base, explore, decay):
    """Run the algorithm with numpy and 10 steps of .05; return the clients' models and P."""
    N, P = len(A), np.zeros((len(A), len(A)))
    trained, before, sent = ([np.array([0.5, 0.5])] * N for _ in range(3))
    for t, row in enumerate(it.rows):
        for i in row["cohort"]:
            others, picked = [n for n in np.argsort(-P[i], kind="stable") if n != i], []
            g = seeds.torch_generator(0, "server", "pick", t, i)
            for _ in range(min(models, N - 1)):
                by_chance = torch.rand((), generator=g).item() < explore - decay * t
                picked.append(others.pop(torch.randint(len(others), (), generator=g).item() if by_chance else 0))
            at = trained[i] if base == "trained" else before[i]
            f = [(A[i] * (x - B[i]) ** 2).sum() / 2 for x in (at, trained[i], *(sent[n] for n in picked))]
            moves = [trained[i] - at, *(sent[n] - at for n in picked)]
            u = np.array([(f[0] - f[j + 1]) / np.linalg.norm(m) if m.any() else 0.0 for j, m in enumerate(moves)])
            P[i, picked] += u[1:]
            helps = np.maximum(u, 0)
            before[i] = at + (helps @ np.array(moves) / helps.sum() if helps.any() else 0)
            trained[i] = B[i] + (1 - 0.05 * A[i]) ** 10 * (before[i] - B[i])
        for i in row["cohort"]:
            sent[i] = trained[i]
    return trained, P


@pytest.mark.parametrize(
    ("base", "models", "explore", "fraction"),
    [("trained", 2, 0.5, 0.6), ("mixed", 2, 0.5, 0.6), ("trained", 9, 0.3, 0.4), ("mixed", 1, 0.0, 1.0)],
)
def test_runs_equal_plain_loops(quadratic_clients, base, models, explore, fraction):
    """Clients that were not sampled yet count with the initial model; the trained model is evaluated."""
    options = {"models": models, "base": base, "explore": explore, "decay": 0.1}
    it = quadratic_clients(
        A.tolist(), B.tolist(), [2, 4, 2, 6, 3], (0.5, 0.5), options, rounds=6, cohort={"fraction": fraction}
    )
    it.fed.run()
    trained, P = run_by_hand(it, **options)
    assert it.fed.server.state.P.numpy() == pytest.approx(P, abs=1e-10)
    found = [[line["x0"], line["x1"]] for line in it.lines if line["round"] == 5]
    assert np.array(found) == pytest.approx(np.array(trained), abs=1e-12)


def test_a_client_without_steps_sends_its_mixture(quadratic_clients):
    """drop_last leaves client 0, which has one training row, without a batch: f_0 = x^2 / 2 at x = 1.

    After round 0 client 1 is at 4 - 3 .85^10 = 3.41, which does not help, and client 2 at .95^10 = .599, which client 0
    takes over. The only row of client 3 is not held out: without a validation loss it mixes nothing.
    """
    options, train = {"models": 3, "explore": 0.0}, {"batch_size": 2, "drop_last": True}
    it = quadratic_clients(
        [[1], [3], [1], [1]], [[0], [4], [0], [4]], [2, 4, 4, 1], (1.0,), options, train=train, rounds=2
    )
    it.fed.run()
    assert [line["x0"] for line in it.lines if line["client"] == 0] == pytest.approx([1, 0.95**10], abs=1e-12)
    assert it.fed.server.state.last[0].item() == pytest.approx(0.95**10, abs=1e-12)
    assert it.fed.server.state.last[3].item() == 1
    assert it.fed.server.state.P.isfinite().all()
