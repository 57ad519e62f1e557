"""Our ResNets against torchvision's own."""

import pytest
import torch
from helpers import settings
from torch import nn

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.models.resnet import resnet8, resnet18, resnet50
from fedmpi.runtime import fitting


def test_same_draws_and_names_as_torchvision():
    torch.manual_seed(3)
    ours = resnet18((3, 64, 64), 7).state_dict()
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18(weights=None, num_classes=7).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_interchange():
    theirs = torchvision.models.resnet50(weights=None, num_classes=4).eval()
    ours = resnet50((3, 40, 40), 4).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 40, 40)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 2), ("small", 8)])
def test_stem_sets_the_resolution(stem, side):
    """64 pixels a side reach layer1 as 64 / 4 = 16 (convolution s2, pool s2) or as 64; layer4 halves three times."""
    module = resnet18((3, 64, 64), 2, stem=stem).eval()
    sizes = []
    module.layer4.register_forward_hook(lambda _, inputs, output: sizes.append(output.shape[-1]))
    module(torch.zeros(1, 3, 64, 64))
    assert sizes == [side]


def test_small_stem_is_drawn_like_torchvisions():
    """He initialisation, fan out: standard deviation sqrt(2 / (3 * 3 * 64)); 1,728 draws, so within 5 percent."""
    torch.manual_seed(0)
    weight = resnet18((3, 32, 32), 2, stem="small").conv1.weight
    assert weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)


def test_bn_nostats_uses_the_batch_in_evaluation_too():
    module = resnet18((3, 16, 16), 2, stem="small", norm="bn_nostats")
    assert list(module.buffers()) == []
    x = torch.randn(3, 3, 16, 16)
    assert torch.equal(module.train()(x), module.eval()(x))


def test_gn_does_not_look_at_the_batch():
    torch.manual_seed(0)
    module = resnet18((3, 16, 16), 2, stem="small", norm="gn").double().train()
    assert list(module.buffers()) == []
    assert {part.num_groups for part in module.modules() if isinstance(part, nn.GroupNorm)} == {32}
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    alone = torch.cat([module(row[None]) for row in x])
    torch.testing.assert_close(module(x), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["bn", "bn_nostats", "gn", "ln"])
def test_a_projection_is_normalised_as_the_rest(norm):
    """Beside gn it had batch statistics, which travel."""
    small, large = resnet8((3, 16, 16), 10, norm, True), resnet18((3, 16, 16), 10, "small", norm, projection=True)
    for model in (small, large):
        assert bool([*model.buffers()]) == (norm == "bn")
        assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


def test_figures_that_depend_on_the_batch_are_told():
    config = settings(model={"name": "resnet8", "norm": "bn_nostats"})
    with pytest.warns(UserWarning, match=r"bn_nostats.*: figures depend on evaluate\.batch_size and on the order"):
        fitting.check_buffers(config, resnet8((1, 8, 8), 10, "bn_nostats"))
