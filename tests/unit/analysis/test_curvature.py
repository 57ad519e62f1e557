"""Eigenvalues of the Hessian and the loss landscape, compared with known ones."""

import pytest
import torch
from helpers import CPU, federated, settings
from torch.nn import functional as F

from fedmpi.analysis import charts, curvature
from fedmpi.runtime import build


def random():
    return torch.Generator().manual_seed(0)


def test_eigenpairs_are_those_of_the_matrix():
    A = torch.randn(40, 40, generator=random(), dtype=torch.float64)
    A = A + A.T
    eigenvalues, eigenvectors = curvature.compute_largest_eigenpairs(lambda v: A @ v, A[0], 3, random())
    values, vectors = torch.linalg.eigh(A)
    torch.testing.assert_close(eigenvalues, values.flip(0)[:3], rtol=1e-3, atol=0)
    assert (eigenvectors[0] @ vectors[:, -1]).abs() == pytest.approx(1, abs=1e-3)
    every, _ = curvature.compute_largest_eigenpairs(lambda v: A[:2, :2] @ v, A[0, :2], 5, random())
    torch.testing.assert_close(every, torch.linalg.eigvalsh(A[:2, :2]).flip(0))


@pytest.fixture
def experiment():
    torch.set_num_threads(1)
    return build.make_experiment(settings("fedavg", model={"name": "logistic"}), federated(), CPU)


def test_curvature_of_softmax_regression_is_that_of_its_hessian(experiment):
    loss = curvature.SubsetLoss(experiment, 10**6)
    assert len(loss.shard) == experiment.data.train_sizes.sum()
    x, y = loss.shard.x[loss.shard.index].flatten(1), loss.shard.y[loss.shard.index]
    w = 0.3 * torch.randn(experiment.model.w.numel(), generator=random())
    names = [s.name for s, _ in experiment.model.segment_parameters]
    shapes = [p.shape for _, p in experiment.model.segment_parameters]

    def loss_at(flat):
        parts = dict(zip(names, (s.view(flat) for s, _ in experiment.model.segment_parameters), strict=True))
        W, b = (next(v for v in parts.values() if v.ndim == n) for n in (2, 1))
        return F.cross_entropy(x @ W.T + b, y)

    H = torch.autograd.functional.hessian(loss_at, w)
    assert len(shapes) == 2
    v = torch.randn(w.numel(), generator=random())
    torch.testing.assert_close(loss.hessian_vector_product(w, v), H @ v, rtol=1e-4, atol=1e-5)
    assert loss(w) == pytest.approx(loss_at(w).item(), rel=1e-5)
    experiment.model.load(w)
    facts = curvature.measure_curvature(experiment, curvature.CurvatureOptions(10**6, top=3, grid=5, span=0.5))
    values, vectors = torch.linalg.eigh(H.double())
    assert facts["eigenvalues"] == pytest.approx(values.flip(0)[:3].tolist(), rel=1e-3)
    eigenvectors = vectors[:, -1].float()
    expected = sorted(loss_at(w + s * 0.5 * eigenvectors).item() for s in (-1, 1))
    assert sorted([facts["loss"][2][0], facts["loss"][2][-1]]) == pytest.approx(expected, rel=1e-3)
    assert facts["loss"][2][2] == pytest.approx(loss_at(w).item(), rel=1e-5)


def test_the_subset_of_samples_is_reproducible(experiment):
    few, again = curvature.SubsetLoss(experiment, 20), curvature.SubsetLoss(experiment, 20)
    assert torch.equal(few.shard.index, again.shard.index)
    assert len(set(few.shard.index.tolist())) == 20


def test_the_landscape_is_plotted(experiment, tmp_path):
    facts = curvature.measure_curvature(experiment, curvature.CurvatureOptions(50, top=1, grid=3))
    assert len(facts["eigenvalues"]) == 1
    path = charts.write_chart(curvature.plot_landscape(facts), tmp_path / "a.png", "loss")
    assert path.stat().st_size > 1000
