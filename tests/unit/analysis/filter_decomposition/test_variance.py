"""The variance of aggregated kernels: measured beside a run that does not notice, and against runs of their own."""

from dataclasses import replace

import pytest
import torch
from helpers import CPU, federated, play, settings

from fedmpi.analysis.filter_decomposition import variance
from fedmpi.analysis.filter_decomposition.kernels import atom_layers
from fedmpi.analysis.filter_decomposition.products import replicate_variance
from fedmpi.comm.base import Solo
from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.runtime import build


def experiment(config):
    torch.set_num_threads(1)
    return build.experiment(config, federated(), CPU)


@pytest.mark.parametrize("net", ["cnn", "norm"])
def test_the_run_itself_is_that_of_a_plain_run(net):
    """Clients keep their coefficients here and send them two rounds later, so a state that was touched would show."""
    config = settings("fedatom", net, rounds=4, options={"atoms": 3, "period": 3, "alpha_fast": "keep"})
    found = []
    facts = variance.measure(experiment(config), 2, found.append)
    assert facts["sha256"] == play(config).hashes[-1]
    assert [row["round"] for row in found] == [0, 1, 2, 3]
    assert facts["rounds"] == found
    assert all(row["kernel_mean"] > 0 and row["product_mean"] > 0 and row["clients"] > 0 for row in found)


def test_replicates_are_rounds_with_another_seed():
    """The server's kernels after one round from the same initial model, in runs with the replicates' seeds."""
    made = experiment(settings("fedatom", "norm", rounds=1, options={"atoms": 3}))
    w, b = made.model.w.clone(), made.model.b.clone()
    row = variance.measure(made, 3)["rounds"][0]
    W = []
    for number in range(3):
        made.model.load(w, b)
        other = made.settings.model_copy(update={"seed": seeds.derive(made.settings.seed, "replicate", number)})
        fed = build.federation(replace(made, settings=other), Solo(CPU), lambda: False)
        fed.run()
        W.append(
            torch.cat(
                [(alpha @ D).flatten() for alpha, D in (x.factors(fed.server.w[None]) for x in atom_layers(made))]
            )
        )
    assert row["product_mean"] == pytest.approx(replicate_variance(torch.stack(W)), rel=1e-4)  # the server adds in fp32


def test_one_client_a_round_makes_both_averages_its_own_kernels():
    config = settings("fedatom", "norm", rounds=1, options={"atoms": 3}, cohort={"fraction": 0.01})
    (row,) = variance.measure(experiment(config), 3)["rounds"]
    assert row["kernel_mean"] == pytest.approx(row["product_mean"], rel=1e-9)
    assert row["clients"] == pytest.approx(0, abs=1e-20)


def test_every_second_round():
    config = settings("fedatom", "norm", rounds=4, options={"atoms": 3}, evaluate={"every": 2})
    assert [row["round"] for row in variance.measure(experiment(config), 2)["rounds"]] == [0, 2]


def test_no_round_is_a_mistake():
    with pytest.raises(UserError, match="rounds: 0 leaves no round to measure"):
        variance.measure(experiment(settings("fedatom", "norm", rounds=0)), 2)
