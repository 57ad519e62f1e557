"""How images are decoded: more than 8 bits, several pages, transparency, axes; alike in all sources, and on disk."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.data import streaming
from fedmpi.data.federated import add_augmentation, split
from fedmpi.data.sources.images.class_images import image_folder
from fedmpi.data.sources.images.decode import DecodeOptions, decode_image
from fedmpi.data.sources.images.read_images import decode_images
from fedmpi.data.streaming import Stream
from fedmpi.data.transforms.pipeline import make_transform

RNG = np.random.default_rng(0)


def options(size=None, channels=1, **more):
    return DecodeOptions(size, channels, (0.5,), (0.5,), **more)


def pixels(file, **more):
    return decode_image(file, options(**more))


def both(files, chosen):
    """The images in memory, after those that stay on disk are found to be the same."""
    in_memory = decode_images(files, chosen)
    with streaming.use_streaming_mode(True):
        on_disk = decode_images(files, chosen)
    assert isinstance(on_disk, Stream)
    assert torch.equal(on_disk.read_all(), torch.from_numpy(in_memory))
    return in_memory


def refused(files, chosen, pattern):
    for on_disk in (False, True):
        with streaming.use_streaming_mode(on_disk), pytest.raises(UserError, match=pattern):
            decode_images(files, chosen)


# ---- more than 8 bits ----
CT = np.array([[0, 1000, 2047], [3000, 4095, 4096]], np.uint16)  # 12 bits, and one value beyond


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_16_bit_images_are_scaled_by_a_range_or_the_range_of_the_file(tmp_path, ending):
    file = tmp_path / f"a.{ending}"
    Image.fromarray(CT).save(file)
    given = both([file], options(pixel_range=(0, 4095)))
    assert (given.dtype, given.shape) == (np.float32, (1, 1, 2, 3))
    assert np.array_equal(given[0, 0], np.minimum(CT / 4095, 1).astype(np.float32))  # what lies beyond is cut off
    own = both([file], options(channels=3, pixel_range="file"))
    assert np.array_equal(own[0], np.broadcast_to((CT / 4096).astype(np.float32), (3, 2, 3)))
    refused([file], options(), r"mode I;16\); set data\.pixel_range to \[low, high\].* or to file")


def test_32_bit_and_signed_numbers_are_scaled_by_a_range(tmp_path):
    hounsfield = np.array([[-1000, -160, 40, 240, 3000]])
    for file, array in (("a.tif", hounsfield.astype(np.int32)), ("b.tif", hounsfield.astype(np.float32))):
        Image.fromarray(array).save(tmp_path / file)
    np.save(tmp_path / "c.npy", hounsfield.astype(np.int16))
    for name in ("a.tif", "b.tif", "c.npy"):  # the abdominal window: (h + 160) / 400, cut off at 0 and 1
        assert pixels(tmp_path / name, pixel_range=(-160, 240)).tolist() == [[[0, 0, 0.5, 1, 1]]]
    Image.fromarray(np.full((2, 2), 7, np.int32)).save(tmp_path / "even.tif")
    assert pixels(tmp_path / "even.tif", pixel_range="file").tolist() == [[[0, 0], [0, 0]]]
    Image.fromarray(np.array([[np.nan, 1]], np.float32)).save(tmp_path / "nan.tif")
    with pytest.raises(
        UserError, match=r"nan\.tif cannot be read .*a value that is not finite; correct or remove the file"
    ):
        decode_images([tmp_path / "nan.tif"], options(pixel_range="file"))


def test_8_bit_images_with_range_0_to_255_are_divided_by_255(tmp_path):
    array = RNG.integers(0, 256, (4, 5, 3), np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", array.astype(np.float64))
    expected = array.transpose(2, 0, 1) / np.float32(255)
    for name in ("a.png", "a.npy"):
        assert np.array_equal(pixels(tmp_path / name, channels=3, pixel_range=(0, 255)), expected)
    red, green, blue = expected  # ITU-R 601-2
    grey = pixels(tmp_path / "a.npy", pixel_range=(0, 255))
    assert np.allclose(grey, 0.299 * red + 0.587 * green + 0.114 * blue, atol=1e-6)


def test_a_folder_of_16_bit_images_is_normalised_and_augmented(tmp_path):
    for k in range(8):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4), 100 * k, np.uint16)).save(tmp_path / "ab"[k % 2] / f"{k}.png")
    data = image_folder(tmp_path, channels=1, mean=(0.25,), std=(2.0,), pixel_range=(0, 1000), test_fraction=0)
    expected = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]) / 10  # the files of a, then those of b
    assert torch.allclose(data.train_x.all_inputs()[:, 0, 0, 0], (expected - 0.25) / 2)
    brighter = [make_transform("normalize", {"mean": [0.0], "std": [0.5]}, "data.augment.0", {})]
    x = add_augmentation(split(data, "iid", 1, 0), brighter).train[0].x
    assert torch.allclose(x.all_inputs()[:, 0, 0, 0], expected / 0.5)


# ---- several pages ----
@pytest.mark.parametrize("ending", ["tif", "gif"])
def test_files_with_several_pages_are_refused(tmp_path, ending):
    file, pages = tmp_path / f"a.{ending}", RNG.integers(0, 256, (3, 4, 5), np.uint8)
    first, *others = [Image.fromarray(page) for page in pages]
    first.save(file, save_all=True, append_images=others, duration=40)
    refused([file], options(), r"it has 3 pages or frames; save each of them as a separate file")


def test_previews_in_a_camera_file_do_not_count_as_pages(tmp_path):
    image = Image.fromarray(RNG.integers(0, 256, (16, 16, 3), np.uint8))
    image.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[image.resize((8, 8))])
    with Image.open(tmp_path / "a.jpg") as opened:
        assert (opened.format, opened.n_frames) == ("MPO", 2)
        expected = np.asarray(opened).transpose(2, 0, 1)
    assert np.array_equal(both([tmp_path / "a.jpg"], options(channels=3))[0], expected)


# ---- transparency ----
@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_transparent_pixels_are_blended_over_white(tmp_path, mode):
    """A black picture whose content is in its alpha channel: 0, 51, 204, 255."""
    alpha = np.array([[0, 51], [204, 255]], np.uint8)
    layers = [np.zeros_like(alpha)] * (len(mode) - 1)
    Image.fromarray(np.stack([*layers, alpha], axis=2)).save(tmp_path / "a.png")
    for channels in (1, 3):
        expected = [[[255, 204], [51, 0]]] * channels  # 255 (1 - alpha)
        assert both([tmp_path / "a.png"], options(channels=channels))[0].tolist() == expected
    half = decode_images([tmp_path / "a.png"], options(pixel_range=(0, 255)))
    assert np.array_equal(half[0, 0], np.array([[255, 204], [51, 0]], np.float32) / np.float32(255))


def test_an_alpha_channel_without_a_transparent_pixel_changes_nothing(tmp_path):
    array = RNG.integers(0, 256, (4, 5, 4), np.uint8)
    array[..., 3] = 255
    Image.fromarray(array).save(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", array)
    for name in ("a.png", "a.npy"):
        assert np.array_equal(both([tmp_path / name], options(channels=3))[0], array[..., :3].transpose(2, 0, 1))


# ---- axes of .npy files ----
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 5), (3, 4, 5)),
        ((4, 5, 3), (3, 4, 5)),
        ((3, 4, 5), (3, 4, 5)),  # channels first
        ((1, 4, 5), (3, 4, 5)),
        ((3, 5, 3), (3, 3, 5)),  # either would do
        ((4, 5, 13), "must have 1, 3 or 4 channels"),
    ],
)
def test_axes_of_npy_files(tmp_path, shape, expected):
    np.save(tmp_path / "a.npy", RNG.integers(0, 250, shape))
    if isinstance(expected, str):
        refused([tmp_path / "a.npy"], options(channels=3), expected)
        return
    array = np.load(tmp_path / "a.npy")
    image = both([tmp_path / "a.npy"], options(channels=3))[0]
    assert image.shape == expected
    first = array if array.ndim == 2 else array[..., 0] if shape[2] == 3 else array[0]
    assert np.array_equal(image[0], first)
