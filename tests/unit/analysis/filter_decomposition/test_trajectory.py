"""Ways over one landscape: the run is that of a plain run, the points are what they are said to be."""

import pytest
import torch
from helpers import CPU, federated, play, settings
from torch.nn import functional as F

from fedmpi.analysis import figures
from fedmpi.analysis.filter_decomposition import drawing, trajectory
from fedmpi.comm.backends.solo import Solo
from fedmpi.common.errors import UserError
from fedmpi.config.schema import CohortSettings
from fedmpi.runtime import build

ASKED = trajectory.Asked(first=1, last=3, samples=10**6, grid=3)


def config(method, **more):
    options = {"options": {"atoms": 3, "personal": False}} if method == "fedatom" else {}
    return settings(method, "cnn", rounds=3, cohort={"fraction": 0.5}, **options, **more)


def experiment(of):
    torch.set_num_threads(1)
    return build.experiment(of, federated(), CPU)


@pytest.fixture(scope="module")
def walked():
    made = experiment(config("fedatom"))
    w0, b0 = made.model.w.clone(), made.model.b.clone()
    way, clients, sha256 = trajectory.walk(made, ASKED)
    return made, (w0, b0), way, clients, sha256


def test_the_run_is_that_of_a_plain_run(walked):
    *_, sha256 = walked
    assert sha256 == play(config("fedatom")).hashes[-1]


def test_the_mean_of_all_products_is_the_next_model(walked):
    """Eq. 10: theta_{t+1} = sum_ij p_i p_j alpha_i x D_j, for the rest is the aggregate's in each of them."""
    made, _, way, clients, _ = walked
    assert list(clients) == [1, 2]
    for t, found in clients.items():
        sizes = {k: float(made.data.train_sizes[k]) for k, _, _, _ in found}
        p = {k: n / sum(sizes.values()) for k, n in sizes.items()}
        assert len(found) == len(p) ** 2 > 4
        mean = sum(p[i] * p[j] * v.double() for i, j, v, _ in found)
        torch.testing.assert_close(mean, way[t + 1].double(), rtol=1e-4, atol=1e-6)
        for _, _, v, apart in found:
            assert apart == pytest.approx((v - way[t + 1]).norm().item(), rel=1e-4)


def test_the_loss_of_a_point_is_that_of_its_model(walked):
    """Also of the network with atoms that it stands for."""
    made, (w0, b0), way, _, _ = walked
    loss = trajectory.Points(made, 10**6)
    x, y = loss.shard.x[loss.shard.index], loss.shard.y[loss.shard.index]
    made.model.load(w0, b0)
    with torch.no_grad():
        expected = F.cross_entropy(made.model.module.eval()(x), y).item()
    assert loss(way[0]) == pytest.approx(expected, rel=1e-5)
    assert loss(way[-1]) != pytest.approx(expected, rel=1e-3)


def test_the_plane_against_a_naive_projection():
    g = torch.Generator().manual_seed(0)
    models = torch.randn(6, 40, generator=g)
    plane = trajectory.Plane(models[-1], models)
    cov = torch.cov(models.double().T)
    values, vectors = torch.linalg.eigh(cov)
    assert plane.explained == pytest.approx((values[-2:].sum() / values.sum()).item())
    for i, direction in enumerate((vectors[:, -1], vectors[:, -2])):
        expected = (models.double() - models[-1].double()) @ direction
        found = torch.tensor(plane(models), dtype=torch.float64)[:, i]
        torch.testing.assert_close(found * (found @ expected).sign(), expected)
    ground = plane.landscape(lambda v: v.double().square().sum().item(), models, 3)
    at = plane.origin + ground["x"][2] * plane.v[0] + ground["y"][0] * plane.v[1]
    assert ground["loss"][0][2] == pytest.approx(at.square().sum().item(), rel=1e-5)
    found = torch.tensor(plane(models))
    assert ground["x"][0] < found[:, 0].min() < found[:, 0].max() < ground["x"][2]


def test_what_is_measured_and_drawn(tmp_path):
    made, plain = experiment(config("fedatom")), experiment(config("fedavg"))
    facts = trajectory.measure(made, plain, ASKED)
    own, other = facts["ways"]["fedatom"], facts["ways"]["fedavg"]
    assert own["loss"][0] == pytest.approx(other["loss"][0], rel=1e-5)  # both begin with the same kernels
    assert own["loss"][-1] != pytest.approx(other["loss"][-1], rel=1e-3)
    assert (len(own["at"]), len(facts["rounds"])) == (4, 2)
    assert own["at"][-1] == pytest.approx([0, 0], abs=1e-9)
    assert "2" in trajectory.lines(facts)[-3].split()[0]
    assert figures.save(drawing.trajectory(facts), tmp_path / "a.png").stat().st_size > 10_000


def test_mistakes():
    plain = experiment(config("fedavg"))
    with pytest.raises(UserError, match="no filter atoms to look at"):
        trajectory.measure(plain, plain, ASKED)
    with pytest.raises(UserError, match=r"--first 2 --last 9: rounds of the 3"):
        trajectory.measure(experiment(config("fedatom")), plain, trajectory.Asked(2, 9))


def test_the_cohort_is_that_of_the_run():
    """Also where clients are drawn in cycles."""
    made = experiment(config("fedatom").model_copy(update={"cohort": CohortSettings(fraction=0.3, draw="cycles")}))
    fed = build.federation(made, Solo(CPU), lambda: False)
    found = trajectory.products(made, fed, 1)
    assert {i for i, *_ in found} == set(fed.roster.cohort(1))
