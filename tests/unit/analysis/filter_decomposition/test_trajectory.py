"""Ways over one landscape: the run is that of a plain run, the points are what they are said to be."""

import pytest
import torch
from helpers import CPU, federated, play, settings

from fedmpi.analysis import figures
from fedmpi.analysis.filter_decomposition import trajectory
from fedmpi.common.errors import UserError
from fedmpi.runtime import build

ASKED = trajectory.Asked(first=1, last=3, samples=10**6, grid=3)


def config(method, **more):
    options = {"options": {"atoms": 3}} if method == "fedatom" else {}
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


def test_what_is_measured_and_drawn(tmp_path):
    made, plain = experiment(config("fedatom")), experiment(config("fedavg"))
    facts = trajectory.measure(made, plain, ASKED)
    own, other = facts["ways"]["fedatom"], facts["ways"]["fedavg"]
    assert own["loss"][0] == pytest.approx(other["loss"][0], rel=1e-5)  # both begin with the same kernels
    assert own["loss"][-1] != pytest.approx(other["loss"][-1], rel=1e-3)
    assert (len(own["at"]), len(facts["rounds"])) == (4, 2)
    assert own["at"][-1] == pytest.approx([0, 0], abs=1e-9)
    assert "2" in trajectory.lines(facts)[-3].split()[0]
    assert figures.save(figures.trajectory(facts), tmp_path / "a.png").stat().st_size > 10_000


def test_mistakes():
    plain = experiment(config("fedavg"))
    with pytest.raises(UserError, match="no filter atoms to look at"):
        trajectory.measure(plain, plain, ASKED)
    with pytest.raises(UserError, match=r"--first 2 --last 9: rounds of the 3"):
        trajectory.measure(experiment(config("fedatom")), plain, trajectory.Asked(2, 9))
