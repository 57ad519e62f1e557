"""How images are decoded: more than 8 bits, several pages, transparency, axes; alike in all sources, and on disk."""

import functools
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.data import streaming
from fedmpi.data.sources.pictures.csv_images import csv_images
from fedmpi.data.sources.pictures.decode import DecodeOptions, decode
from fedmpi.data.sources.pictures.image_folder import image_folder
from fedmpi.data.sources.pictures.image_mask import image_mask
from fedmpi.data.sources.pictures.reading import read
from fedmpi.data.streaming import Stream

RNG = np.random.default_rng(0)


def options(size=None, channels=1, **more):
    return DecodeOptions(size, channels, (0.5,), (0.5,), **more)


def pixels(file, **more):
    return decode(file, options(**more)).pixels


def both(files, chosen):
    """The images in memory, after those that stay on disk are found to be the same."""
    held = read(files, chosen)
    with streaming.choosing(True):
        on_disk = read(files, chosen)
    assert isinstance(on_disk, Stream)
    assert torch.equal(on_disk.all(), torch.from_numpy(held))
    return held


# ---- more than 8 bits ----
CT = np.array([[0, 1000, 2047], [3000, 4095, 4096]], np.uint16)  # 12 bits, and one value beyond


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_are_scaled_by_the_given_range_or_the_files_own(tmp_path, ending):
    file = tmp_path / f"a.{ending}"
    Image.fromarray(CT).save(file)
    given = both([file], options(pixel_range=(0, 4095)))
    assert (given.dtype, given.shape) == (np.float32, (1, 1, 2, 3))
    assert np.array_equal(given[0, 0], np.minimum(CT / 4095, 1).astype(np.float32))  # what lies beyond is cut off
    own = both([file], options(channels=3, pixel_range="file"))
    assert np.array_equal(own[0], np.broadcast_to((CT / 4096).astype(np.float32), (3, 2, 3)))
    says = r"mode I;16, not of 8 bits, and hold 0\.\.4096; say data\.pixel_range: \[low, high\].* or file"
    with pytest.raises(UserError, match=says):
        read([file], options())
    with streaming.choosing(True), pytest.raises(UserError, match=says):
        read([file], options())


def test_wide_and_signed_numbers_have_a_range_too(tmp_path):
    hounsfield = np.array([[-1000, -160, 40, 240, 3000]])
    for file, array in (("a.tif", hounsfield.astype(np.int32)), ("b.tif", hounsfield.astype(np.float32))):
        Image.fromarray(array).save(tmp_path / file)
    np.save(tmp_path / "c.npy", hounsfield.astype(np.int16))
    for name in ("a.tif", "b.tif", "c.npy"):  # the abdominal window: (h + 160) / 400, cut off at 0 and 1
        assert pixels(tmp_path / name, pixel_range=(-160, 240)).tolist() == [[[0, 0, 0.5, 1, 1]]]
    Image.fromarray(np.full((2, 2), 7, np.int32)).save(tmp_path / "even.tif")
    assert pixels(tmp_path / "even.tif", pixel_range="file").tolist() == [[[0, 0], [0, 0]]]
    Image.fromarray(np.array([[np.nan, 1]], np.float32)).save(tmp_path / "nan.tif")
    with pytest.raises(UserError, match=r"nan\.tif cannot be read .*a value that is not finite; mend or remove it"):
        read([tmp_path / "nan.tif"], options(pixel_range="file"))


def test_eight_bits_with_a_range_are_their_255th_parts(tmp_path):
    array = RNG.integers(0, 256, (4, 5, 3), np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", array.astype(np.float64))
    expected = array.transpose(2, 0, 1) / np.float32(255)
    for name in ("a.png", "a.npy"):
        assert np.array_equal(pixels(tmp_path / name, channels=3, pixel_range=(0, 255)), expected)
    red, green, blue = expected  # ITU-R 601-2
    grey = pixels(tmp_path / "a.npy", pixel_range=(0, 255))
    assert np.allclose(grey, 0.299 * red + 0.587 * green + 0.114 * blue, atol=1e-6)


def test_sixteen_bits_are_resized_as_eight_bits_are_but_for_rounding(tmp_path):
    array = RNG.integers(0, 256, (20, 30), np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    Image.fromarray(array.astype(np.uint16) * 257).save(tmp_path / "b.png")  # 65535 = 255 * 257
    eight, sixteen = pixels(tmp_path / "a.png", size=8), pixels(tmp_path / "b.png", size=8, pixel_range=(0, 65535))
    assert (eight.shape, sixteen.shape) == ((1, 8, 8), (1, 8, 8))
    assert np.abs(sixteen * 255 - eight).max() < 1.5  # PIL rounds after each of its two passes


def colour_png(array):
    """A PNG of 16 bits a channel, which PIL does not write: one chunk of unfiltered rows."""
    height, width, channels = array.shape

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in array)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_sixteen_bits_in_colour_are_refused_not_cut_to_eight(tmp_path, channels):
    file = tmp_path / "a.png"
    file.write_bytes(colour_png(np.full((2, 2, channels), 4095, np.uint16)))
    with pytest.raises(UserError, match=r"16 bits a channel in several channels, .* save it with 8 bits"):
        read([file], options(channels=3, pixel_range=(0, 4095)))


def test_sixteen_bits_of_three_channels_together_are_no_sixteen_bits(tmp_path):
    pixel = struct.pack("<H", 0b11111_000000_00000)  # red, of 5, 6 and 5 bits
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    header = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 16, 3, 4, 0, 0, 0, 0)
    (tmp_path / "a.bmp").write_bytes(b"BM" + struct.pack("<IHHI", 70, 0, 0, 66) + header + masks + 2 * pixel)
    assert pixels(tmp_path / "a.bmp", channels=3).tolist() == [[[255, 255]], [[0, 0]], [[0, 0]]]


def test_a_folder_of_sixteen_bits_is_normalised_and_augmented_as_pixels(tmp_path):
    from fedmpi.data.augment.chosen import augmented, operation
    from fedmpi.data.federated import split

    for k in range(8):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4), 100 * k, np.uint16)).save(tmp_path / "ab"[k % 2] / f"{k}.png")
    data = image_folder(tmp_path, channels=1, mean=(0.25,), std=(2.0,), pixel_range=(0, 1000), test_fraction=0)
    expected = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]) / 10  # the files of a, then those of b
    assert torch.allclose(data.train_x.floats()[:, 0, 0, 0], (expected - 0.25) / 2)
    brighter = [operation("normalise", {"mean": [0.0], "std": [0.5]}, "data.augment.0", {})]
    x = augmented(split(data, "iid", 1, 0), brighter).train[0].x
    assert torch.allclose(x.floats()[:, 0, 0, 0], expected / 0.5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pixel_range": (5, 5)}, r"data\.pixel_range: \[5, 5\]; \[low, high\] with low < high"),
        ({"pixel_range": (9, 1)}, r"data\.pixel_range: \[9, 1\]; \[low, high\] with low < high"),
        ({"background": "wite"}, r"data\.background: 'wite' is no colour; white, black, #204060"),
    ],
)
def test_options_that_make_no_sense_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        options(**given)


def warnings_of(do):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return [str(each.message) for each in caught]


def depths_told(load):
    # Of these images each has one value, of which there are warnings of their own.
    return [said for said in warnings_of(load) if "one value" not in said and "all pixels become" not in said]


def deep_and_plain(folder, sites=("north", "south")):
    """Images of 12 bits at the first site, of 8 bits at the second one; and a CSV file of them."""
    rows = []
    for dtype, site in zip((np.uint16, np.uint8), sites, strict=True):
        for k in range(6):
            home = folder / site / "ab"[k % 2]
            home.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4), 30 * k, dtype)).save(home / f"{k}.png")
            rows.append(f"{site}/{home.name}/{k}.png,{home.name},{site}")
    (folder / "a.csv").write_text("path,label,site\n" + "\n".join(rows))
    return {"channels": 1, "test_fraction": 0.3}


@pytest.mark.parametrize("given", [(0, 4095), (0, 255)])
def test_one_range_for_eight_bits_and_more_is_told_once_with_both_counts(tmp_path, given):
    more = deep_and_plain(tmp_path)
    for said in (
        depths_told(lambda: image_folder(tmp_path, sites=True, pixel_range=given, **more)),
        depths_told(lambda: csv_images(tmp_path, path="a.csv", site_column="site", pixel_range=given, **more)),
        depths_told(lambda: csv_images(tmp_path, path="a.csv", pixel_range=given, **more)),
    ):
        assert len(said) == 1
        assert f"data.pixel_range: [0, {given[1]}] is the range of all pictures, but there are 6 of 8 bits" in said[0]
        assert f"{tmp_path}/south/a/0.png, and 6 of more, such as" in said[0]
        assert f"{tmp_path}/north/a/0.png" in said[0]
        assert "save all of them with one depth, or say data.pixel_range: file" in said[0]
        assert f"255, the largest value of 8 bits, becomes {'0.062' if given[1] == 4095 else '1'};" in said[0]
    assert depths_told(lambda: image_folder(tmp_path, sites=True, pixel_range="file", **more)) == []


def test_a_range_far_beyond_eight_bits_is_told_where_all_files_have_them(tmp_path):
    """Of silos each rank sees the files of its own site alone."""
    more = {"class_names": ["a", "b"], **deep_and_plain(tmp_path)}
    (told,) = depths_told(lambda: image_folder(tmp_path, site="south", pixel_range=(0, 4095), **more))
    assert "but there are 6 of 8 bits" in told
    assert "of more" not in told
    for site, given in (("north", (0, 4095)), ("south", (0, 255)), ("south", (10, 200))):
        load = functools.partial(image_folder, tmp_path, site=site, pixel_range=given, **more)
        assert depths_told(load) == []


def test_unlike_depths_of_images_with_masks_are_told_once(tmp_path):
    deep_and_plain(tmp_path, ("north/images", "south/images"))
    for site in ("north", "south"):
        for file in [*(tmp_path / site).rglob("*.png")]:
            file.rename(tmp_path / site / "images" / f"{file.stem}.png")
        (tmp_path / site / "masks").mkdir()
        for k in range(6):
            Image.fromarray(np.full((4, 4), k % 2, np.uint8)).save(tmp_path / site / "masks" / f"{k}.png")
    (told,) = depths_told(lambda: image_mask(tmp_path, sites=True, classes=2, channels=1, pixel_range=(0, 4095)))
    assert "there are 6 of 8 bits" in told


# ---- several pages ----
PAGES = RNG.integers(0, 256, (3, 4, 5), np.uint8)


@pytest.fixture(params=["tif", "gif", "png", "webp"])
def paged(request, tmp_path):
    file = tmp_path / f"a.{request.param}"
    first, *others = [Image.fromarray(page) for page in PAGES]
    first.save(file, save_all=True, append_images=others, lossless=True, duration=40)
    return file


def test_files_of_several_pages_are_refused_unless_an_option_says_how(paged):
    with pytest.raises(UserError, match=r"it has 3 pages or frames; data\.pages: channels .* first the first alone"):
        read([paged], options())
    with streaming.choosing(True), pytest.raises(UserError, match="it has 3 pages or frames"):
        read([paged], options())
    assert np.array_equal(both([paged], options(pages="first"))[0], PAGES[:1])
    assert np.array_equal(both([paged], options(pages="channels"))[0], PAGES)
    colour = both([paged], options(channels=3, pages="channels"))[0]
    assert np.array_equal(colour, PAGES.repeat(3, axis=0))  # page by page


def test_pages_of_sixteen_bits_share_the_files_range(tmp_path):
    pages = np.stack([np.full((2, 2), value, np.uint16) for value in (100, 300, 500)])
    first, *others = [Image.fromarray(page) for page in pages]
    first.save(tmp_path / "a.tif", save_all=True, append_images=others)
    found = both([tmp_path / "a.tif"], options(pages="channels", pixel_range="file"))
    assert found[0, :, 0, 0].tolist() == [0, 0.5, 1]


def test_unlike_pages_are_refused(tmp_path):
    images = [Image.new("L", (5, 4)), Image.new("L", (5, 4)), Image.new("L", (4, 4))]
    for name, some in (("two.tif", images[:2]), ("three.tif", images[:2] + images[:1]), ("sizes.tif", images[1:])):
        some[0].save(tmp_path / name, save_all=True, append_images=some[1:])
    chosen = options(pages="channels")
    for on_disk in (False, True):
        says = "three.tif has 3 channels in all its pages, .*two.tif has 2: all pictures must have as many"
        with streaming.choosing(on_disk), pytest.raises(UserError, match=says):
            read([tmp_path / "two.tif", tmp_path / "three.tif"], chosen)
    with pytest.raises(UserError, match="its pages are of several sizes, 5x4 and 4x4"):
        read([tmp_path / "sizes.tif"], chosen)
    with pytest.raises(UserError, match=r"data\.mean has 3 numbers; 1 or channels=2 are needed"):
        read([tmp_path / "two.tif"], DecodeOptions(None, 1, (0.1, 0.2, 0.3), (0.5,), pages="channels"))


def test_the_previews_of_a_camera_are_no_pages(tmp_path):
    image = Image.fromarray(RNG.integers(0, 256, (16, 16, 3), np.uint8))
    image.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[image.resize((8, 8))])
    with Image.open(tmp_path / "a.jpg") as opened:
        assert (opened.format, opened.n_frames) == ("MPO", 2)
        expected = np.asarray(opened).transpose(2, 0, 1)
    for how in ("refuse", "channels"):
        assert np.array_equal(both([tmp_path / "a.jpg"], options(channels=3, pages=how))[0], expected)


# ---- transparency ----
def layer(mode):
    """A black picture whose content is in its alpha channel: 0, 51, 204, 255."""
    alpha = np.array([[0, 51], [204, 255]], np.uint8)
    parts = [np.zeros_like(alpha)] * (len(mode) - 1)
    return Image.fromarray(np.stack([*parts, alpha], axis=2))


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_transparent_pixels_are_blended_over_the_background(tmp_path, mode):
    layer(mode).save(tmp_path / "a.png")
    for channels in (1, 3):
        with pytest.warns(UserWarning, match="blended over white; data.background names another colour"):
            found = both([tmp_path / "a.png"], options(channels=channels))
        assert found[0].tolist() == [[[255, 204], [51, 0]]] * channels  # 255 (1 - alpha)
    with pytest.warns(UserWarning, match="blended over #ff0000"):
        red = both([tmp_path / "a.png"], options(channels=3, background="#ff0000"))
    assert red[0].tolist() == [[[255, 204], [51, 0]], [[0, 0]] * 2, [[0, 0]] * 2]
    with pytest.warns(UserWarning, match="blended over black"):
        assert not both([tmp_path / "a.png"], options(background="black")).any()
    with pytest.warns(UserWarning, match="blended"):
        half = read([tmp_path / "a.png"], options(pixel_range=(0, 255)))
    assert np.array_equal(half[0, 0], np.array([[255, 204], [51, 0]], np.float32) / np.float32(255))


def test_a_transparent_entry_of_a_palette_and_a_transparent_colour(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putdata([0, 1])
    palette.save(tmp_path / "a.png", transparency=0)
    grey = Image.fromarray(np.array([[7, 9]], np.uint8))
    grey.save(tmp_path / "b.png", transparency=7)
    with pytest.warns(UserWarning, match="blended over white"):
        assert both([tmp_path / "a.png"], options(channels=3))[0].tolist() == [[[255, 10]], [[255, 20]], [[255, 30]]]
    with pytest.warns(UserWarning, match="blended over white"):
        assert both([tmp_path / "b.png"], options())[0].tolist() == [[[255, 9]]]


def test_an_alpha_channel_without_a_transparent_pixel_changes_nothing(tmp_path):
    array = RNG.integers(0, 256, (4, 5, 4), np.uint8)
    array[..., 3] = 255
    Image.fromarray(array).save(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("a.png", "a.npy"):
            assert np.array_equal(both([tmp_path / name], options(channels=3))[0], array[..., :3].transpose(2, 0, 1))


def test_transparency_is_told_once_for_all_sites(tmp_path):
    rows = []
    for k in range(8):
        layer("RGBA").save(tmp_path / f"{k}.png")
        rows.append(f"{k}.png,{k % 2},{k // 4}")
    (tmp_path / "a.csv").write_text("path,label,site\n" + "\n".join(rows))
    said = warnings_of(lambda: csv_images(tmp_path, path="a.csv", site_column="site", test_fraction=0))
    assert said == [
        f"data: transparent pixels of 8 pictures (the first: {tmp_path}/a.csv, line 2: {tmp_path}/0.png) are blended "
        "over white; data.background names another colour"
    ]


def told(files, **given):
    return warnings_of(lambda: read(files, options(**given)))


def test_images_of_one_value_are_counted(tmp_path):
    for k, high in enumerate((9, 0, 9, 0)):
        Image.fromarray(np.array([[0, high]], np.uint8)).save(tmp_path / f"{k}.png")
    files = [tmp_path / f"{k}.png" for k in range(4)]
    said = (
        f"data: all pixels of 2 pictures (the first: {tmp_path}/1.png) have one value; is the file what it should be?"
    )
    assert told(files) == [said]
    assert told([files[0], files[2]]) == []


def test_a_pixel_range_that_does_not_fit_is_warned_of(tmp_path):
    """Counted are values at the upper end: what lies below a window, such as air in CT, is cut off on purpose."""
    np.save(tmp_path / "a.npy", np.array([[-1000, -900, 100, 200]], np.int16))
    assert told([tmp_path / "a.npy"], pixel_range=(0, 255)) == []
    (said,) = told([tmp_path / "a.npy"], pixel_range=(-1000, 65535))
    assert "data.pixel_range: [-1000, 65535]: all pixels become 0 to 0.018, a small part of 0 to 1; say the" in said
    (said,) = told([tmp_path / "a.npy"], pixel_range=(-1000, 50))
    assert "50 % of all pixels are at its upper end or beyond, and become 1" in said


# ---- axes of .npy files ----
@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((4, 5), None, (3, 4, 5)),
        ((4, 5, 3), None, (3, 4, 5)),
        ((3, 4, 5), None, (3, 4, 5)),  # it was (3, 3, 4): the first three columns as colours
        ((1, 4, 5), None, (3, 4, 5)),
        ((3, 5, 3), "HWC", (3, 3, 5)),
        ((3, 5, 3), "CHW", (3, 5, 3)),
        ((3, 5, 3), None, r"has the shape \(3, 5, 3\), with channels first or last; say data\.axes: HWC or CHW"),
        ((4, 5, 13), None, "it has 13 channels; 1, 3 or"),
        ((4, 5, 3), "CHW", "it has 4 channels; 1, 3 or"),
    ],
)
def test_axes_of_arrays(tmp_path, shape, axes, expected):
    np.save(tmp_path / "a.npy", RNG.integers(0, 250, shape))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            read([tmp_path / "a.npy"], options(channels=3, axes=axes, pixel_range=(0, 255)))
        return
    array = np.load(tmp_path / "a.npy")
    found = both([tmp_path / "a.npy"], options(channels=3, axes=axes))[0]
    assert found.shape == expected
    first = array if array.ndim == 2 else array[..., 0] if (axes or "HWC") == "HWC" and shape[2] == 3 else array[0]
    assert np.array_equal(found[0], first)


# ---- all sources ----
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("kind", ["grey", "colour", "16 bits", "alpha", "pages"])
def test_sources_read_the_same_bits(tmp_path, kind, size):
    chosen = {"channels": 3, "size": size}
    chosen |= {"16 bits": {"pixel_range": (0, 3000)}, "pages": {"pages": "channels"}}.get(kind, {})
    rows = []
    for k in range(8):
        (tmp_path / "images" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        name = f"images/{'ab'[k % 2]}/{k}.{'tif' if kind == 'pages' else 'png'}"
        shape = {"grey": (6, 5), "16 bits": (6, 5), "colour": (6, 5, 3), "alpha": (6, 5, 4), "pages": (6, 5)}[kind]
        images = [Image.fromarray(RNG.integers(0, 256, shape).astype(np.uint8)) for _ in range(2)]
        if kind == "16 bits":
            images[0] = Image.fromarray(RNG.integers(0, 4096, shape).astype(np.uint16))
        more = {"save_all": True, "append_images": images[1:]} if kind == "pages" else {}
        images[0].save(tmp_path / name, **more)
        rows.append(f"{name},{'ab'[k % 2]}")
    (tmp_path / "a.csv").write_text("path,label\n" + "\n".join(sorted(rows)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = csv_images(tmp_path, path="a.csv", test_fraction=0, **chosen).train_x
        other = image_folder(tmp_path, path="images", test_fraction=0, **chosen).train_x
        with streaming.choosing(True):
            on_disk = csv_images(tmp_path, path="a.csv", test_fraction=0, **chosen).train_x
    assert isinstance(on_disk.stored, Stream)
    for each in (other, on_disk):
        assert torch.equal(one.floats(), each.floats())
