"""Our ResNets against torchvision's own."""

import pytest
import torch

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.models.resnet import resnet18, resnet50


@pytest.mark.parametrize("ours", [resnet18, resnet50])
def test_draws_names_and_outputs_are_torchvisions(ours):
    nets = []
    for make in (lambda: getattr(torchvision.models, ours.__name__)(num_classes=4), lambda: ours((3, 40, 40), 4)):
        torch.manual_seed(3)
        nets.append(make().eval())
    theirs, found = (net.state_dict() for net in nets)
    assert list(found) == list(theirs)
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)
    x = torch.randn(2, 3, 40, 40)
    assert torch.equal(nets[0](x), nets[1](x))


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 2), ("small", 8)])
def test_stem_sets_the_resolution(stem, side):
    """64 pixels a side reach layer1 as 64 / 4 = 16 (convolution s2, pool s2) or as 64; layer4 halves three times.

    He initialisation, fan out: standard deviation sqrt(2 / (k * k * 64)); 1,728 draws or more, so within 5 percent."""
    torch.manual_seed(0)
    module = resnet18((3, 64, 64), 2, stem=stem).eval()
    sizes = []
    module.layer4.register_forward_hook(lambda _, inputs, output: sizes.append(output.shape[-1]))
    module(torch.zeros(1, 3, 64, 64))
    assert sizes == [side]
    weight = module.conv1.weight
    assert weight.std().item() == pytest.approx((2 / (weight[0, 0].numel() * 64)) ** 0.5, rel=0.05)


def test_bn_nostats_uses_the_batch_in_evaluation_too():
    module = resnet18((3, 16, 16), 2, stem="small", norm="bn_nostats")
    assert list(module.buffers()) == []
    x = torch.randn(3, 3, 16, 16)
    assert torch.equal(module.train()(x), module.eval()(x))


@pytest.mark.parametrize("norm", ["bn", "bn_nostats", "gn"])
def test_a_projection_is_normalised_as_the_rest(norm):
    model = resnet18((3, 16, 16), 10, "small", norm, projection=True)
    assert bool([*model.buffers()]) == (norm == "bn")
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
