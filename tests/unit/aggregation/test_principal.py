"""FedLD's principal directions, compared with the literal algorithm, closed forms and symmetries."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from naive_fedld import principal_mean as literal

from fedmpi.aggregation import rules
from fedmpi.flat import linear


def rows(m, n, seed=0, dtype=torch.float32):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(m, seed=0):
    p = torch.rand(m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    return p / p.sum()


def principal_mean(G, p, keep=0.8, share="l2", correction="text"):
    """FedLD's aggregate of updates G (m, d) with weights p (m,) -> (d,)."""
    return linear.weighted_sum(G, rules.principal_coefficients(linear.gram(G), p, keep, share, correction))


READINGS = [("l2", "text"), ("l2", "axis"), ("sum", "axis")]  # share, correction
OF_CODE = {"share": "sum", "correction": "axis"}


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("m", "d"), [(1, 4), (2, 5), (5, 40), (12, 30), (8, 5), (6, 1)])
def test_principal_mean_equals_the_literal_algorithm(m, d, keep, reading):
    """Updates of sizes over six orders of magnitude, with and without a common part.

    (8, 5) and (6, 1) have fewer dimensions than clients, so that the rank limits the number of directions.
    """
    for seed, (scale, common) in enumerate([(1.0, 0.0), (1e-3, 0.0), (1e3, 0.0), (1.0, 3.0)]):
        G, p = scale * rows(m, d, seed, torch.float64) + common * rows(1, d, 9, torch.float64), weights(m, seed)
        expected = literal(G.numpy(), p.numpy(), keep, *reading)
        tolerance = 1e-10 * np.abs(expected).max()
        np.testing.assert_allclose(principal_mean(G, p, keep, *reading).numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("m", "keep", "num_kept"), [(1, 0.8, 1), (5, 0.8, 4), (12, 0.8, 9), (3, 0.1, 1), (50, 0.58, 29)]
)
def test_number_of_kept_directions(m, keep, num_kept):
    """floor(keep m), at least one; 0.58 * 50, which is 28.999999999999996 in floating point, counts as 29.

    Orthogonal updates of lengths 1..m are their own directions: of g_l only |g_l| omega_l sgn u_l p_l = p_l l omega_l
    remains.
    """
    G = torch.diag(torch.arange(1.0, m + 1, dtype=torch.float64))
    actual = principal_mean(G, torch.full((m,), 1 / m, dtype=torch.float64), keep, **OF_CODE)
    lam = torch.arange(1.0, m + 1, dtype=torch.float64).square()
    expected = torch.arange(1.0, m + 1, dtype=torch.float64) * lam / lam.sum() / m
    expected[: m - num_kept] = 0  # the directions of the shortest updates are dropped
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_orthogonal_updates_have_the_values_computed_by_hand():
    """lam = (2, .5) and omega = (.8, .2) give g_1' = .8 g_1 and g_2' = .2 g_2; the authors' code divides by zero here.

    `text`: each update has one projection, itself, which gets its length back, so g_i' = g_i.
    """
    G, p = torch.tensor([[2.0, 0, 0], [0, 1, 0]], dtype=torch.float64), torch.tensor([0.5, 0.5])
    assert principal_mean(G, p, keep=1.0, **OF_CODE).tolist() == pytest.approx([0.8, 0.1, 0], abs=1e-12)
    assert principal_mean(G, p, keep=1.0).tolist() == pytest.approx([1, 0.5, 0], abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_projections_that_are_zero_up_to_rounding_add_nothing(seed):
    """Three updates lie in one subspace, and two in an orthogonal one, in a random rotation.

    The first three are orthogonal to the directions of the others up to 1e-16. The sign of this value is arbitrary, and
    must not be scaled to the whole length of an update.
    """
    G = torch.zeros(5, 8, dtype=torch.float64)
    G[:3, :3] = torch.tensor([[2.0, 0.3, 0.1], [1, 1, -0.4], [0.2, -1, 0.7]])
    G[3:, 3:5] = torch.tensor([[1.3, 0.2], [-0.5, 0.8]])
    p, Q = weights(5), torch.linalg.qr(rows(8, 8, seed, torch.float64)).Q
    for reading in READINGS:
        expected = torch.from_numpy(literal(G.numpy(), p.numpy(), 1.0, *reading)) @ Q
        torch.testing.assert_close(principal_mean(G @ Q, p, 1.0, *reading), expected, rtol=0, atol=1e-12)


def test_one_client_or_identical_clients_give_their_update():
    """One direction remains, g / ||g||, with omega = 1, because the numerical rank is 1 for any `keep`."""
    g = rows(1, 20, dtype=torch.float64)
    for m in (1, 2, 7):
        for reading in READINGS:
            actual = principal_mean(g.repeat(m, 1), weights(m), 1.0, *reading)
            torch.testing.assert_close(actual, g[0], rtol=0, atol=1e-12)


def test_zero_updates_count_nothing_and_nan_is_propagated():
    """A client that did not move has no influence; nan must not become an error of the eigenvalue routine.

    The engine reports nan with the name of the client.
    """
    assert not principal_mean(torch.zeros(4, 6), weights(4)).any()
    G, p = rows(4, 6, dtype=torch.float64), weights(4)
    G[2] = 0
    np.testing.assert_allclose(principal_mean(G, p).numpy(), literal(G.numpy(), p.numpy()), rtol=0, atol=1e-12)
    G[1, 2] = torch.nan
    assert principal_mean(G, p).isnan().any()


@pytest.mark.parametrize("reading", READINGS)
def test_result_is_invariant_under_symmetries(reading):
    def rule(G, p):
        return principal_mean(G, p, 0.8, *reading)

    G, p = rows(5, 12, dtype=torch.float64), weights(5)
    g = rule(G, p)
    assert g.norm() > 0.1
    Q, _ = torch.linalg.qr(rows(12, 12, 9, torch.float64))
    order = torch.tensor([3, 0, 4, 1, 2])
    for name, result, expected in (
        ("homogeneous", rule(3.7 * G, p), 3.7 * g),
        ("odd", rule(-G, p), -g),
        ("equivariant under rotations", rule(G @ Q, p), g @ Q),
        ("invariant under the clients' order", rule(G[order], p[order]), g),
    ):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize("keep", [0.4, 0.8, 1.0])
def test_lengths_of_the_corrected_updates(keep):
    """`text` and `l2` keep all lengths; `sum` multiplies them by sqrt(sum_{l <= L} omega_l^2) <= 1.

    With a one-hot p, the result is the g_i' of one client.
    """
    G, m = rows(5, 30, dtype=torch.float64), 5
    lam = torch.linalg.eigvalsh(linear.gram(G) / m).flip(0)
    shrink = (lam / lam.sum())[: max(1, int(keep * m))].norm()
    for i in range(m):
        only = torch.eye(m, dtype=torch.float64)[i]
        for reading, factor in zip(READINGS, (1.0, 1.0, shrink), strict=True):
            actual = principal_mean(G, only, keep, *reading)
            torch.testing.assert_close(actual.norm(), factor * G[i].norm(), rtol=1e-12, atol=0)


# ---- properties of `text` that `axis` lacks ----
def test_text_is_continuous_where_axis_jumps():
    """The third update moves through the plane orthogonal to the first direction, where its sign changes.

    With `axis` the result jumps by as much as the length of the update; with `text` it moves as little as the update.
    """
    p, step = torch.full((3,), 1 / 3, dtype=torch.float64), 1e-3

    def aggregate(tilt, reading):
        G = torch.tensor([[3.0, 0, 0], [3, 0.1, 0], [tilt, 1, 0.2]], dtype=torch.float64)
        return principal_mean(G, p, 1.0, *reading)

    tilts = np.arange(-500, 500) * step  # <g_3, v_1> becomes 0 between two of them
    jumps = {}
    for reading in READINGS:
        actual = [aggregate(tilt, reading) for tilt in tilts]
        jumps[reading] = max(float((a - b).norm()) for a, b in pairwise(actual))
    assert jumps["l2", "text"] < 10 * step
    assert jumps["l2", "axis"] > 0.3


@pytest.mark.parametrize("keep", [0.2, 0.8, 1.0])
def test_text_does_not_depend_on_the_basis_of_equal_eigenvalues(keep):
    """For orthogonal updates of equal length, every basis of their space consists of eigenvectors.

    The basis is rotated by changing G in the last digits and by reordering clients. `text` does not change: every
    update is its own projection, also if the number of kept directions cuts through the equal eigenvalues.
    """
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(9, 9, generator=g, dtype=torch.float64)).Q[:4]
    p = weights(4)
    for seed in range(4):
        noise = 1e-14 * torch.randn(4, 9, generator=g.manual_seed(seed), dtype=torch.float64)
        order = torch.randperm(4, generator=g)
        actual = principal_mean((Q + noise)[order], p[order], keep)
        torch.testing.assert_close(actual, p @ Q, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("keep", "num_kept"), [(0.2, 1), (0.4, 4), (0.6, 4), (0.8, 4), (1.0, 5)])
def test_all_directions_of_a_tie_are_kept(keep, num_kept):
    """Lengths 3, 2, 2, 2, 1 along axes give lam = (9, 4, 4, 4, 1) / 5; L = 2 is within the tie, so all 2s are kept."""
    p = torch.full((5,), 0.2, dtype=torch.float64)
    actual = principal_mean(torch.diag(torch.tensor([3.0, 2, 2, 2, 1], dtype=torch.float64)), p, keep)
    expected = [length / 5 if i < num_kept else 0.0 for i, length in enumerate((3, 2, 2, 2, 1))]
    assert actual.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("angle", [0.2, 0.7, 1.2])
def test_two_updates_at_an_angle_have_the_values_computed_by_hand(angle):
    """Unit updates at angles +-t to v_1: lam = (cos^2 t, sin^2 t), <g_i, v_1> = cos t, <g_i, v_2> = +-sin t.

    If one direction is kept (t < 45 degrees), both become v_1. If both are kept, u = (cos^3 t, +-sin^3 t), rescaled to
    length one; Eq. 7 gives (cos^2 t, +-sin^2 t) divided by sqrt(cos^4 t + sin^4 t) with l2, and by 1 with sum. The mean
    is along v_1.
    """
    C, S = np.cos(angle / 2), np.sin(angle / 2)
    G = torch.tensor([[C, S], [C, -S]], dtype=torch.float64)
    for keep, reading, along in (
        (0.8, ("l2", "text"), 1.0),
        (1.0, ("l2", "text"), C**3 / np.hypot(C**3, S**3)),
        (1.0, ("l2", "axis"), C**2 / np.hypot(C**2, S**2)),
        (1.0, ("sum", "axis"), C**2),
    ):
        actual = principal_mean(G, torch.full((2,), 0.5), keep, *reading)
        assert actual.tolist() == pytest.approx([along, 0], abs=1e-12)
