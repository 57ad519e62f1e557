"""Operations of a local step: by formula for a perceptron, and as torch's own counter has them."""

import pytest
import torch
from helpers import CPU, federated, settings
from torch.utils.flop_counter import FlopCounterMode

from fedmpi.analysis import flops
from fedmpi.analysis.local_models import train_local_models
from fedmpi.comm.base import SingleProcess
from fedmpi.runtime import build

D, H, C = 64, 16, 4  # the test's perceptron
F = 2 * (D * H + H * C)  # forward, a sample
BACK = 2 * (D * H + 2 * H * C)  # two gradients of weights, one of an input
HEAD = 2 * H * C


@pytest.fixture(scope="module")
def data():
    torch.set_num_threads(1)
    return federated()


def measured(method, data, **changes):
    client = int(data.train_sizes.argmax())
    return flops.count_operations(settings(method, **changes), data, CPU, client), client


def test_the_head_alone_takes_one_pass_through_the_body(data):
    """Beside FedAvg's pass: the head forward twice more and once back, and in that pass back another gradient less."""
    found, _ = measured("fedsol", data, options={"layers": "head"})
    # g_p: the head on z, and its weights' gradient; g_u: the head on z, and all of FedAvg's pass back
    assert (found["forward"], found["backward"], found["frozen"]) == (F + 2 * HEAD, BACK + HEAD, F)


@pytest.mark.parametrize(("net", "method"), [("cnn", "fedsol"), ("norm", "moon"), ("mlp", "scaffold")])
def test_a_round_as_torch_counts_it(net, method, data):
    found, client = measured(method, data, net=net)
    made = build.make_experiment(settings(method, net), data, CPU)
    fed, trainer = (
        build.make_federation(made, SingleProcess(CPU), lambda: False),
        build.make_trainer(made, lambda: False),
    )
    trainer.mlp_backward = None
    train_local_models(fed, trainer, [client], 0)
    with FlopCounterMode(display=False) as counter:
        train_local_models(fed, trainer, [client], 0)
    assert found["round"] * int(data.train_sizes[client]) == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_no_secret_is_written_down(tmp_path):
    config = settings("fedavg").model_copy(
        update={"data": settings().data.model_copy(update={"options": {"token": "SECRET123"}})}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "load_all_data", lambda _: (federated(), CPU))
        flops.analyse_flops(config, tmp_path, lambda _: None)
    text = (tmp_path / "flops.json").read_text()
    assert "SECRET123" not in text
    assert '"token"' in text
