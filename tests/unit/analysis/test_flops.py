"""Numbers of operations of a local step, compared with formulas for a perceptron and with torch's own counter."""

import pytest
import torch
from helpers import CPU, federated, settings
from torch.utils.flop_counter import FlopCounterMode

from fedmpi.analysis import flops
from fedmpi.analysis.local_models import train_local_models
from fedmpi.comm.base import SingleProcess
from fedmpi.runtime import build

D, H, C = 64, 16, 4  # the perceptron of these tests
F = 2 * (D * H + H * C)  # forward pass of one sample
BACK = 2 * (D * H + 2 * H * C)  # two gradients of weights, one of an input
HEAD = 2 * H * C


@pytest.fixture(scope="module")
def data():
    torch.set_num_threads(1)
    return federated()


def count_operations(method, data, **changes):
    client = int(data.train_sizes.argmax())
    return flops.count_operations(settings(method, **changes), data, CPU, client), client


def test_perturbing_only_the_head_needs_one_pass_through_the_body(data):
    """In addition to FedAvg's passes, the head has two forward passes and one backward pass."""
    operations, _ = count_operations("fedsol", data, options={"layers": "head"})
    # g_p: the head on z, and the gradient of its weights; g_u: the head on z, and FedAvg's complete backward pass
    assert (operations["forward"], operations["backward"], operations["frozen"]) == (F + 2 * HEAD, BACK + HEAD, F)


@pytest.mark.parametrize(("net", "method"), [("cnn", "fedsol"), ("norm", "moon"), ("mlp", "scaffold")])
def test_operations_of_a_round_equal_the_count_of_torch(net, method, data):
    operations, client = count_operations(method, data, net=net)
    experiment = build.make_experiment(settings(method, net), data, CPU)
    fed, trainer = (
        build.make_federation(experiment, SingleProcess(CPU), lambda: False),
        build.make_trainer(experiment, lambda: False),
    )
    trainer.mlp_backward = None
    train_local_models(fed, trainer, [client], 0)
    with FlopCounterMode(display=False) as counter:
        train_local_models(fed, trainer, [client], 0)
    assert operations["round"] * int(data.train_sizes[client]) == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_flops_json_contains_no_secret(tmp_path):
    config = settings("fedavg").model_copy(
        update={"data": settings().data.model_copy(update={"options": {"token": "SECRET123"}})}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "load_all_data", lambda _: (federated(), CPU))
        flops.analyse_flops(config, tmp_path, lambda _: None)
    text = (tmp_path / "flops.json").read_text()
    assert "SECRET123" not in text
    assert '"token"' in text
