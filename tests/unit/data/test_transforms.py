"""data.augment: each transform equals a loop over single images, in the pipeline and in batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.torchvision_compat import torchvision
from fedmpi.data.batches import Shard, batches
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import add_augmentation, split
from fedmpi.data.lazy_images import LazyImages, make_lazy_images
from fedmpi.data.transforms.base import stored_channels_last, to_memory_format
from fedmpi.data.transforms.color import Normalize
from fedmpi.data.transforms.pipeline import ImagePipeline, make_transform

functional = torchvision.transforms.functional
N = 40
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def make(name, options=None):
    return make_transform(name, options, "data.augment.0", {})


def make_pixels(c=3, h=12, w=9, dtype=torch.float32, n=N):
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, c, h, w), dtype=np.uint8))
    return x if dtype == torch.uint8 else x / 255


def draw_numbers(transform, n=N, seed=0):
    return torch.rand(n, transform.random_numbers, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[False, True], ids=["planes", "channels_last"])
def channels_last(request):
    """Whether images are stored channels-last."""
    return request.param


every_storage = pytest.mark.parametrize(  # each pair of memory format, number of channels and type occurs
    ("channels_last", "channels", "dtype"),
    [(False, 1, torch.float32), (False, 3, torch.uint8), (True, 1, torch.uint8), (True, 3, torch.float32)],
    ids=["planes of floats", "planes of bytes", "grey blocks of bytes", "blocks of floats"],
)


# ---- equality with loops over single images ----
def naive_crop(x, u, p, mode, size):
    c, h, w = x.shape
    out_h, out_w = size or h, size or w
    top, left = int(u[0] * (h + 2 * p - out_h + 1)) - p, int(u[1] * (w + 2 * p - out_w + 1)) - p
    out = torch.zeros(c, out_h, out_w, dtype=x.dtype)
    for i in range(out_h):
        for j in range(out_w):
            y, z = top + i, left + j
            if mode == "reflect":
                y, z = (h - 1 - abs(h - 1 - abs(y))), (w - 1 - abs(w - 1 - abs(z)))
            if 0 <= y < h and 0 <= z < w:
                out[:, i, j] = x[:, y, z]
    return out


@every_storage
@pytest.mark.parametrize(
    "options", [4, {"padding": 2, "size": 7}, {"padding_mode": "reflect"}, {"padding": 0, "size": 9}]
)
def test_random_crop_equals_a_loop(options, channels_last, channels, dtype):
    crop, x = make("random_crop", options), make_pixels(channels, dtype=dtype)
    u = draw_numbers(crop)
    u[0], u[1] = 0, 1 - 2**-24  # the first and the last window
    result = crop(to_memory_format(x, channels_last), u)
    expected = [naive_crop(each, v, crop.padding, crop.padding_mode, crop.size) for each, v in zip(x, u, strict=True)]
    assert torch.equal(result, torch.stack(expected))
    assert result.shape[1:] == crop.output_shape(x.shape[1:])
    assert channels == 1 or stored_channels_last(result) == channels_last


@every_storage
def test_horizontal_flip_equals_a_loop(channels_last, channels, dtype):
    flip, x = make("horizontal_flip", 0.3), make_pixels(channels, dtype=dtype)
    u = draw_numbers(flip)
    expected = [functional.hflip(each) if v < 0.3 else each for each, v in zip(x, u[:, 0], strict=True)]
    assert torch.equal(flip(to_memory_format(x, channels_last), u), torch.stack(expected))
    assert 0 < sum(u[:, 0] < 0.3) < N


@pytest.mark.parametrize(("size", "channels"), [(1, 1), (4, 3), (5, 3), (40, 1)])
def test_cutout_equals_a_loop(size, channels_last, channels):
    cutout, x = make("cutout", size), make_pixels(channels) + 1
    u, expected = draw_numbers(cutout), x.clone()
    for each, (v, w) in zip(expected, u, strict=True):
        y, z = int(v * 12), int(w * 9)
        top, left = max(y - size // 2, 0), max(z - size // 2, 0)
        each[:, top : y - size // 2 + size, left : z - size // 2 + size] = 0
    assert torch.equal(cutout(to_memory_format(x.clone(), channels_last), u), expected)


def test_rotation_equals_torchvision(channels_last):
    """It equals torchvision's rotation, except where rounding in float32 decides between two pixels."""
    rotate, x = make("random_rotation", 30), make_pixels(3, 15, 20)
    u = draw_numbers(rotate)
    expected = [functional.rotate(each, float((2 * v - 1) * 30)) for each, v in zip(x, u[:, 0], strict=True)]
    off = (rotate(to_memory_format(x, channels_last), u) - torch.stack(expected)).abs() > 1e-4
    assert off.float().mean() < 1e-3


@pytest.mark.parametrize(
    ("shape", "channels", "options"),
    [
        ((20, 16), 3, {"size": 12, "scale": [0.6, 1.0]}),
        ((8, 8), 1, {"size": 24, "scale": [0.8, 1.2]}),  # areas larger than the image are rejected
        ((40, 10), 3, {"ratio": [0.9, 1.1], "scale": [0.9, 1.0]}),  # no part fits: the central one is used
        ((10, 40), 1, {"ratio": [0.9, 1.1], "scale": [0.9, 1.0]}),
    ],
)
def test_random_resized_crop_equals_torchvision(shape, options, channels_last, channels):
    crop, x = make("random_resized_crop", options), make_pixels(channels, *shape)
    u = draw_numbers(crop)
    result, boxes = crop(to_memory_format(x, channels_last), u), torch.stack(crop.draw_boxes(u, *shape), 1)
    for each, v, box, cropped in zip(x, u, boxes.tolist(), result, strict=True):
        assert box == naive_box(crop, v, *shape)
        expected = functional.resized_crop(each, *box, list(crop.output_shape(x.shape[1:])[1:]), antialias=True)
        torch.testing.assert_close(cropped, expected, atol=2e-6, rtol=0)


def naive_box(crop, u, h, w):
    """Return the box of torchvision's RandomResizedCrop.get_params for given uniform numbers."""
    u = u.double()
    for i in range(10):
        area = h * w * (crop.scale[0] + (crop.scale[1] - crop.scale[0]) * float(u[i]))
        low, high = map(math.log, crop.ratio)
        aspect = math.exp(low + (high - low) * float(u[10 + i]))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= w and 0 < down <= h:
            return [int(u[20] * (h - down + 1)), int(u[21] * (w - across + 1)), down, across]
    down, across = h, w
    if w / h < min(crop.ratio):
        down = round(w / min(crop.ratio))
    elif w / h > max(crop.ratio):
        across = round(h * max(crop.ratio))
    return [(h - down) // 2, (w - across) // 2, down, across]


@pytest.mark.parametrize(
    ("name", "size", "channels"), [("resize", 7, 3), ("resize", 18, 1), ("center_crop", 5, 1), ("center_crop", 8, 3)]
)
def test_resize_and_center_crop_equal_torchvision(name, size, channels_last, channels):
    """They use no random numbers, so that they are applied to test images, too."""
    transform, x = make(name, size), make_pixels(channels)
    expected = functional.resize(x, size, antialias=True) if name == "resize" else functional.center_crop(x, size)
    assert transform.random_numbers == 0
    assert transform.output_shape(x.shape[1:]) == expected.shape[1:]
    torch.testing.assert_close(
        transform(to_memory_format(x, channels_last), draw_numbers(transform)), expected, atol=1e-6, rtol=0
    )


COLOR_FUNCTIONS = {
    "brightness": functional.adjust_brightness,
    "contrast": functional.adjust_contrast,
    "saturation": functional.adjust_saturation,
}


@pytest.mark.parametrize(
    "options", [{"saturation": 0.4}, dict.fromkeys(COLOR_FUNCTIONS, 0.2)], ids=["saturation", "all in turn"]
)
def test_color_jitter_equals_torchvision(options, channels_last):
    jitter, x = make("color_jitter", options), make_pixels()
    u, expected = draw_numbers(jitter), x.clone()
    for i, (name, theirs) in enumerate(COLOR_FUNCTIONS.items()):
        a = options.get(name, 0)
        if a:
            factors = (2 * u[:, i] - 1) * a + 1
            expected = torch.stack(
                [theirs(each, float(factor)) for each, factor in zip(expected, factors, strict=True)]
            )
    torch.testing.assert_close(jitter(to_memory_format(x.clone(), channels_last), u), expected, atol=1e-5, rtol=0)


# ---- pipelines ----
def image_pipeline(*items, **more):
    transforms = [make(*item) if isinstance(item, tuple) else make(item) for item in items]
    return ImagePipeline(bytes=True, normal=Normalize(mean=MEAN, std=STD), transforms=tuple(transforms), **more)


def normalised(x):
    return (x.float().div(255) - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)


def test_bytes_are_read_as_normalised_floats(channels_last):
    x = make_pixels(dtype=torch.uint8)
    images = make_lazy_images(x, MEAN, STD, 3).to("cpu", channels_last)
    expected = normalised(x)
    assert images.shape == expected.shape
    assert torch.equal(images.all_inputs(), expected)
    rows = torch.tensor([5, 0, 5, 39])
    assert torch.equal(images.read(rows), expected[rows])
    assert stored_channels_last(images.read(rows)) == stored_channels_last(images.all_inputs()) == channels_last
    grey = make_lazy_images(x[:, :1], (0.1,), (0.3,), 3).to("cpu", channels_last)
    assert torch.equal(grey.all_inputs(), ((x[:, :1].float() / 255 - 0.1) / 0.3).repeat(1, 3, 1, 1))
    assert stored_channels_last(grey.read(rows)) == channels_last


def test_normalize_replaces_the_normalisation_of_the_source():
    x = make_pixels(dtype=torch.uint8)
    expected = (x.float().div(255) - 0.5) / 0.5
    for options in ("half", {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}):
        assert torch.equal(
            LazyImages(x, image_pipeline("horizontal_flip", ("normalize", options), ("cutout", 4))).all_inputs(),
            expected,
        )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [("cutout", 4), ("color_jitter", {"contrast": 0.1})],
            r"augment\.1: color_jitter needs pixels between 0 and 1; put",
        ),
        ([("cutout", 4), ("normalize", "half")], r"augment\.0: cutout needs normalised pixels; put it after"),
        (
            [("random_crop", {"size": 32})],
            r"data\.augment\.0: random_crop: size 32 exceeds an image of 12 x 9 pixels with a border of 4",
        ),
        (
            ["horizontal_flip", ("center_crop", 10)],
            r"data\.augment\.1: center_crop: size 10 exceeds the 12 x 9 pixels",
        ),
        (
            [("normalize", {"mean": [1, 2], "std": [1, 2]})],
            r"normalize: mean or std has 2 numbers, but images have 3 channels; give 1 or 3",
        ),
        (["normalize"], r"normalize: set either dataset, or mean and std"),
        (["color_jitter"], r"color_jitter: brightness, contrast and saturation are all 0"),
        ([("random_resized_crop", 8)], r"are 8 x 8 pixels in training, but 12 x 9 .*append center_crop: 8"),
    ],
)
def test_unsuitable_transforms_are_errors_before_training(items, message):
    x, y = make_pixels(dtype=torch.uint8), torch.arange(N) % 2
    data = split(Dataset(make_lazy_images(x, MEAN, STD, 3), y, make_lazy_images(x, MEAN, STD, 3), y, 2), "iid", 2, 0)
    with pytest.raises(UserError, match=message):
        add_augmentation(data, image_pipeline(*items).transforms)


@pytest.mark.parametrize(
    ("x", "item", "message"),
    [
        (
            torch.rand(N, 5),
            "horizontal_flip",
            r"data\.augment\.0: horizontal_flip needs images \(C, H, W\), .* has the shape \(5,\)",
        ),
        (
            make_pixels(),
            ("color_jitter", {"contrast": 0.1}),
            r"color_jitter needs pixels between 0 and 1, but the data source",
        ),
    ],
)
def test_augmentation_needs_images(x, item, message):
    y = torch.arange(N) % 2
    with pytest.raises(UserError, match=message):
        add_augmentation(split(Dataset(x, y, x, y, 2), "iid", 2, 0), image_pipeline(item).transforms)


@pytest.mark.parametrize("item", ["horizontal_flip", ("center_crop", 8)])
def test_transforms_that_move_pixels_are_errors_if_targets_are_masks(item):
    """Otherwise a model would be trained on wrong targets without any message."""
    x, masks = make_pixels(dtype=torch.uint8), torch.zeros(N, 12, 9, dtype=torch.int64)
    data = split(
        Dataset(make_lazy_images(x, MEAN, STD, 3), masks, make_lazy_images(x, MEAN, STD, 3), masks, 2), "iid", 2, 0
    )
    with pytest.raises(UserError, match=r"moves pixels, but the targets are masks \(12 x 9\)"):
        add_augmentation(data, image_pipeline(item).transforms)
    assert (
        add_augmentation(data, image_pipeline(("color_jitter", {"contrast": 0.1}), ("cutout", 3)).transforms)
        .train[0]
        .random_numbers_per_sample
        == 5
    )


def test_a_crop_with_a_size_sets_the_input_shape():
    y = torch.arange(N) % 2
    for x in (make_lazy_images(make_pixels(dtype=torch.uint8), MEAN, STD, 3), make_pixels()):
        data = add_augmentation(
            split(Dataset(x, y, x, y, 2), "iid", 2, 0), [make("random_crop", {"size": 7}), make("center_crop", 7)]
        )
        assert data.input_shape == (3, 7, 7)
        shard = data.train[0]
        trained = [each for each, _ in batches(shard, 3, None, augment=torch.Generator().manual_seed(0))]
        tested = [each for each, _ in batches(shard, 3, None)]
        assert {each.shape[1:] for each in trained + tested} == {(3, 7, 7)}
        assert not torch.equal(torch.cat(trained), torch.cat(tested))


# ---- batches ----
@pytest.mark.parametrize("size", [1, 7, None])
def test_augmentation_does_not_depend_on_the_batch_size(size):
    images = LazyImages(
        make_pixels(dtype=torch.uint8),
        image_pipeline(("random_crop", 2), "horizontal_flip", ("random_rotation", 20), ("cutout", 3)),
    )
    shard = Shard(images, torch.arange(N), torch.arange(3, 30))

    def epoch(size, *seeds):
        one, two = (torch.Generator().manual_seed(seed) for seed in seeds)
        result = list(batches(shard, size, one, augment=two))
        return torch.cat([x for x, _ in result]), torch.cat([y for _, y in result])

    x, rows = epoch(size, 1, 2)
    again, same = epoch(9 if size else None, 1, 2)
    assert torch.equal(rows, same)
    torch.testing.assert_close(x, again, atol=1e-6, rtol=0)
    other, same = epoch(size, 1, 3)
    assert torch.equal(rows, same), "augmentation must not change the order of samples"
    assert not torch.equal(x, other)
    plain = torch.cat([x for x, _ in batches(shard, size, None)])
    assert torch.equal(plain, normalised(images.stored[3:30])), "no random transform is applied in evaluations"


def test_test_images_become_floats_and_training_images_remain_bytes(channels_last):
    x, y = make_lazy_images(make_pixels(dtype=torch.uint8), MEAN, STD, 3), torch.arange(N) % 2
    tests = make_lazy_images(make_pixels(dtype=torch.uint8, n=10), MEAN, STD, 3)
    moved = split(Dataset(x, y, tests, y[:10], 2), "iid", 2, 0).to("cpu", channels_last)
    assert isinstance(moved.train[0].x, LazyImages)
    assert moved.train[0].x is moved.train[1].x
    assert isinstance(moved.global_test.x, Tensor)
    assert moved.global_test.x is moved.test[1].x
    assert torch.equal(moved.global_test.x, normalised(tests.stored))
    assert stored_channels_last(moved.global_test.x) == stored_channels_last(moved.train[0].x.stored) == channels_last
    assert replace(moved).x_dtype == torch.float32
