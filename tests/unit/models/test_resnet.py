"""Our ResNets are torchvision's, and their options change only what they should."""

import pytest
import torch

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.models.resnet import resnet18, resnet50


@pytest.mark.parametrize("ours", [resnet18, resnet50])
def test_initial_weights_names_and_outputs_equal_torchvisions(ours):
    nets = []
    for make in (lambda: getattr(torchvision.models, ours.__name__)(num_classes=4), lambda: ours((3, 40, 40), 4)):
        torch.manual_seed(3)
        nets.append(make().eval())
    theirs, state = (net.state_dict() for net in nets)
    assert list(state) == list(theirs)
    assert all(torch.equal(state[name], theirs[name]) for name in theirs)
    x = torch.randn(2, 3, 40, 40)
    assert torch.equal(nets[0](x), nets[1](x))


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 2), ("small", 8)])
def test_stem_sets_the_resolution(stem, side):
    """A side of 64 pixels is 64 / 4 = 16 in layer1 (convolution and pool of stride 2) or 64; it is then halved 3 times.

    The first layer has He initialisation by fan out, with standard deviation sqrt(2 / (k * k * 64)).
    """
    torch.manual_seed(0)
    module = resnet18((3, 64, 64), 2, stem=stem).eval()
    sizes = []
    module.layer4.register_forward_hook(lambda _, inputs, output: sizes.append(output.shape[-1]))
    module(torch.zeros(1, 3, 64, 64))
    assert sizes == [side]
    weight = module.conv1.weight
    assert weight.std().item() == pytest.approx((2 / (weight[0, 0].numel() * 64)) ** 0.5, rel=0.05)


def test_bn_nostats_uses_batch_statistics_in_evaluations():
    module = resnet18((3, 16, 16), 2, stem="small", norm="bn_nostats")
    assert list(module.buffers()) == []
    x = torch.randn(3, 3, 16, 16)
    assert torch.equal(module.train()(x), module.eval()(x))


@pytest.mark.parametrize("norm", ["bn", "bn_nostats", "gn"])
def test_projection_head_has_the_normalisation_of_the_model(norm):
    model = resnet18((3, 16, 16), 10, "small", norm, projection=True)
    assert bool([*model.buffers()]) == (norm == "bn")
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
