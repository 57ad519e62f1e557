"""Models of torchvision, timm and MONAI by name: options, arguments from the data, and messages."""

import sys

import pytest
import torch

from fedmpi import models
from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Selection
from fedmpi.common.torchvision_compat import torchvision
from fedmpi.models import libraries
from fedmpi.runtime import introspection
from fedmpi.runtime.code_trust import find_external_code


def make(name, input_shape, classes, **options):
    torch.manual_seed(0)
    return registry.make_component(models.KIND, Selection(name, options))(input_shape, classes)


def test_a_model_of_torchvision_has_the_weights_that_the_library_gives_it():
    torch.manual_seed(0)
    expected = torchvision.models.resnet18(num_classes=7, width_per_group=64).state_dict()
    state = make("torchvision:resnet18", (3, 32, 32), 7, width_per_group=64).state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("name", "input_shape", "options"),
    [
        ("torchvision:resnet18", (1, 32, 32), {}),
        ("torchvision:vit_b_32", (3, 64, 64), {}),  # the position embedding depends on the size
        ("timm:resnet10t", (2, 32, 32), {}),
        ("timm:vit_tiny_patch16_224", (1, 8, 12), {"patch_size": 4, "depth": 1}),
        ("monai:DenseNet121", (1, 32, 32), {"block_config": [2, 2]}),
        ("monai:DenseNet121", (1, 32, 32, 32), {"block_config": [2, 2]}),
        ("monai:resnet10", (2, 16, 16, 16), {}),
    ],
)
def test_channels_size_and_outputs_come_from_the_data(name, input_shape, options):
    pytest.importorskip(name.partition(":")[0])
    module = make(name, input_shape, 5, **options).eval()
    assert module(torch.zeros(2, *input_shape)).shape == (2, 5)


def test_a_network_of_monai_for_segmentation_has_one_output_per_class_and_pixel():
    pytest.importorskip("monai")
    module = make("monai:UNet", (1, 16, 16), 3, channels=[4, 8], strides=[2])
    assert module(torch.zeros(2, 1, 16, 16)).shape == (2, 3, 16, 16)
    with pytest.raises(UserError, match=r"model\.strides: missing; model monai:UNet requires it"):
        make("monai:UNet", (1, 16, 16), 3, channels=[4, 8])


@pytest.mark.parametrize(
    ("name", "input_shape", "options", "text"),
    [
        ("torchvision:resnet81", (3, 8, 8), {}, r"torchvision has no such model .*; did you mean resnet\d+"),
        ("torchvision:resnet18", (3, 8, 8), {"group": 2}, r"model\.group: unknown key; did you mean 'groups'\?"),
        ("torchvision:resnet18", (3, 8, 8), {"groups": "x"}, r"model\.groups: 'x' is not allowed; must be a whole"),
        ("torchvision:resnet18", (64,), {}, r"resnet18: a sample has the shape \(64,\), but the model needs images"),
        ("torchvision:resnet18", (1, 8, 8, 8), {}, r"is a volume of shape .* the model is for images"),
        ("torchvision:vit_b_32", (3, 64, 32), {}, r"images have 64 x 32 pixels, but must be square"),
        ("torchvision:vit_b_32", (3, 8, 8), {}, r"cannot be made for samples of shape \(3, 8, 8\)"),
        ("timm:resnet10x", (3, 8, 8), {}, r"timm has no such model .*; did you mean resnet10t"),
        ("timm:resnet10t", (3, 8, 8), {"drop_rat": 0.1}, r"model\.drop_rat: unknown key; did you mean 'drop_rate'\?"),
        ("timm:vit_tiny_patch16_224", (3, 64, 64), {"embed_dim": 7}, r"cannot be made .*change the options"),
        ("timm:qwen3_vit_base", (3, 8, 8), {}, r"timm has no such model|sets the number of classes"),
        ("monai:densenet12", (3, 8, 8), {}, r"monai has no such model .*; did you mean"),
    ],
)
def test_a_mistake_is_one_message(name, input_shape, options, text):
    pytest.importorskip(name.partition(":")[0])
    with pytest.raises(UserError, match=text):
        make(name, input_shape, 5, **options)


def test_an_option_whose_default_a_builder_sets_is_not_passed_to_it():
    """The class has 12 heads by default, but the builder of the tiny model sets 3."""
    pytest.importorskip("timm")
    assert make("timm:vit_tiny_patch16_224", (3, 32, 32), 5, depth=1).blocks[0].attn.num_heads == 3


@pytest.mark.parametrize("name", ["timm:resnet18", "hf:bert", "monai:DenseNet121"])
def test_a_package_that_is_not_installed_is_named_with_its_extra(name, monkeypatch):
    prefix = name.partition(":")[0]
    for module in ("timm", "transformers", "monai", "monai.networks.nets"):
        monkeypatch.setitem(sys.modules, module, None)
    libraries.timm_model.cache_clear()
    libraries.monai_model.cache_clear()
    with pytest.raises(UserError, match=rf"needs the package .*; run pip install 'fedmpi\[{prefix}\]'"):
        make(name, (3, 8, 8), 5)


def test_names_of_libraries_are_not_foreign_code():
    names = {"timm:resnet18": False, "hf:/a/b": False, "os:getcwd": True, "own.py:net": True, "timm2:x": True}
    for name, is_external in names.items():
        assert bool(find_external_code({"model": {"name": name}})) == is_external
    assert find_external_code({"task": {"name": "timm:resnet18"}})  # only models have libraries


def test_the_libraries_are_listed_and_a_model_is_described_with_its_options():
    assert set(introspection.list_library_summaries("models")) == {f"{each}:NAME" for each in models.LIBRARIES}
    assert all(introspection.list_library_summaries("models").values())
    (described,) = introspection.describe_components_named("torchvision:resnet18")
    assert [each.name for each in described.options][:2] == ["zero_init_residual", "groups"]
