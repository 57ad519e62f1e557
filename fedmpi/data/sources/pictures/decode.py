"""Decode one image, a file or the bytes of one, with the same options whichever source names it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageOps
from pydantic import Field

from fedmpi.common.errors import UserError

Size = Annotated[int, Field(ge=1, le=4096)]
PixelRange = Literal["file"] | tuple[float, float]
Pages = Literal["refuse", "first", "channels"]
Axes = Literal["HWC", "CHW"]

MODES = {1: "L", 3: "RGB"}
GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue (ITU-R 601-2), which PIL's conversion to L has, too
ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
WHOLE_FIRST = ("MPO", "PSD")  # their first frame is the image, the others are previews and layers

HOW_TO_SCALE = (
    "say data.pixel_range: [low, high], the range of all files (12 bits are [0, 4095]), which become 0 and 1; or file, "
    "for the range of each"
)


class OptionNeededError(ValueError):
    """The image is sound, but an option has to say how it is read."""


@dataclass(frozen=True)
class DecodeOptions:
    """How images are read. Equal options give equal pixels, to the bit, in all sources.

    Attributes:
        size: pixels of a side, to which each image is scaled and cut at its centre; None: as it is.
        channels: 1 grey, 3 colour.
        mean, std: by which pixels in 0..1 are normalised: one number, or one a channel.
        pixel_range: (low, high), which become 0 and 1, what lies beyond is cut off; "file": the least and the largest
            value of each file. None: 0..255, which takes 8 bits a pixel.
        pages: what is done with files of several pages or frames: refused, read as their first page, or as the channels
            of all pages, one page after the other.
        background: a colour of PIL's ("white", "#204060") over which transparent pixels are blended.
        axes: of .npy files with three axes; None: the only reading that has 1 or 3 channels (or 4 at the end: alpha).

    Raises:
        UserError: numbers of `mean`, `std` or `pixel_range`, or a colour, that make no sense.
    """

    size: int | None
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixel_range: PixelRange | None = None
    pages: Pages = "refuse"
    background: str = "white"
    axes: Axes | None = None

    def __post_init__(self) -> None:
        if self.pages != "channels":
            self.check_channels(self.channels)
        check_range(self.pixel_range)
        try:
            ImageColor.getrgb(self.background)
        except ValueError as error:
            named = "white, black, #204060 and the like are colours"
            raise UserError(f"data.background: {self.background!r} is no colour; {named}") from error

    def check_channels(self, channels: int) -> None:
        """Raise UserError unless `mean` and `std` fit images of so many channels."""
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, channels):
                raise UserError(f"data.{name} has {len(numbers)} numbers; 1 or channels={channels} are needed")


def check_range(pixel_range: PixelRange | None) -> None:
    """Raise UserError unless low < high."""
    if isinstance(pixel_range, tuple) and not pixel_range[0] < pixel_range[1]:
        raise UserError(f"data.pixel_range: {list(pixel_range)}; [low, high] with low < high, or file, is needed")


def is_picture(file: Path) -> bool:
    """Whether a file has the ending of an image; hidden ones (._dog.jpg of a Mac) are none."""
    return file.suffix.lower() in Image.registered_extensions() and not file.name.startswith(".")


class DecodedImage(NamedTuple):
    pixels: np.ndarray  # (C, H, W): uint8, or with a pixel range float32 in 0..1
    blended: bool  # whether transparent pixels were blended over the background


def decode(file: Path | bytes, options: DecodeOptions) -> DecodedImage:
    """Read an image: its pixels, of its pages if `options.pages` says so.

    file: an image that PIL reads, its bytes, or a .npy file, (H, W) or with 1, 3 or 4 channels.
    Raises ValueError, OSError or what else a decoder makes of a damaged file.
    """
    if isinstance(file, Path) and file.suffix == ".npy":
        array = _load_array(file, options)
        if options.pixel_range is not None:
            return DecodedImage(_scaled(_with_channels(array.transpose(2, 0, 1), options.channels), options), False)
        array = array.astype(np.uint8)
        return _decode_pages(Image.fromarray(array[..., 0] if array.shape[2] == 1 else array), options)
    with _open(file) as image:
        _check(image, options)
        return _decode_pages(image, options)


def probe(file: Path, options: DecodeOptions) -> tuple[tuple[int, int, int], bool]:
    """Shape (C, H, W) of the decoded file, and whether it may hold transparent pixels, from its header alone."""
    if file.suffix == ".npy":
        found = decode(file, options)
        return found.pixels.shape, found.blended
    with _open(file) as image:
        _check(image, options)
        width, height = (options.size, options.size) if options.size else image.size
        return (options.channels * _pages(image, options), height, width), _has_alpha(image)


def count_channels(file: Path | bytes) -> Literal[1, 3]:
    """1 for a grey image, 3 for any other one."""
    with _open(file) as image:
        return 1 if image.mode in ("1", "L") or _is_deep(image) else 3


def holds_bytes(file: Path | bytes) -> bool:
    """Whether the pixels of an image have 8 bits, by its header alone."""
    if isinstance(file, Path) and file.suffix == ".npy":
        return bool(np.load(file, allow_pickle=False, mmap_mode="r").dtype == np.uint8)
    with _open(file) as image:
        return not _is_deep(image)


def _open(file: Path | bytes) -> Image.Image:
    return Image.open(io.BytesIO(file) if isinstance(file, bytes) else file)


def _check(image: Image.Image, options: DecodeOptions) -> None:
    """Raise ValueError if the header says that the image cannot be decoded with these options."""
    pages = getattr(image, "n_frames", 1)
    if pages > 1 and image.format not in WHOLE_FIRST and options.pages == "refuse":
        how = "data.pages: channels reads all of them, as channels, and first the first alone"
        raise OptionNeededError(f"it has {pages} pages or frames; {how}")
    if _is_deep(image):
        if options.pixel_range is None:
            values = np.asarray(image)
            said = f"its pixels are of mode {image.mode}, not of 8 bits, and hold {values.min()}..{values.max()}"
            raise OptionNeededError(f"{said}; {HOW_TO_SCALE}")
        if "transparency" in image.info:
            raise ValueError(f"its pixels are of mode {image.mode}, and some are transparent; save it without that")
    elif any(";16" in raw and not raw.startswith("BGR") for raw in _raw_modes(image)):
        how = "save it with 8 bits a channel, or as a .npy file and say data.pixel_range"
        raise OptionNeededError(f"it has 16 bits a channel in several channels, of which 8 would be read; {how}")


def _raw_modes(image: Image.Image) -> list[str]:
    """How the file stores its pixels, which PIL's mode does not tell: 'RGB;16B' is read as 'RGB'."""
    tiles = getattr(image, "tile", ())
    arguments = tiles[0][3] if tiles else ""
    return [each for each in (arguments if isinstance(arguments, tuple) else (arguments,)) if isinstance(each, str)]


def _is_deep(image: Image.Image) -> bool:
    """Whether its pixels have 16 or 32 bits, which PIL would cut off at 255."""
    return image.mode[0] in "IF"


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ALPHA or "transparency" in image.info


def _pages(image: Image.Image, options: DecodeOptions) -> int:
    several = options.pages == "channels" and image.format not in WHOLE_FIRST
    return getattr(image, "n_frames", 1) if several else 1


def _decode_pages(image: Image.Image, options: DecodeOptions) -> DecodedImage:
    parts: list[np.ndarray] = []
    blended = False
    for page in range(_pages(image, options)):
        if page:
            image.seek(page)
        opaque, was_blended = (image, False) if _is_deep(image) else _blend(image, options.background)
        blended |= was_blended
        shown = opaque if _is_deep(opaque) else opaque.convert(MODES[options.channels])
        if options.size is not None and options.pixel_range is None:
            shown = ImageOps.fit(shown, (options.size, options.size), Image.Resampling.BILINEAR)
        pixels = np.asarray(shown)
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        parts.append(_with_channels(pixels, options.channels))
        if parts[-1].shape != parts[0].shape:
            sizes = " and ".join(f"{part.shape[2]}x{part.shape[1]}" for part in (parts[0], parts[-1]))
            raise ValueError(f"its pages are of several sizes, {sizes}")
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return DecodedImage(whole if options.pixel_range is None else _scaled(whole, options), blended)


def _blend(image: Image.Image, background: str) -> tuple[Image.Image, bool]:
    """The image over the background, and whether any of its pixels is transparent; without one it is left as it is."""
    if not _has_alpha(image):
        return image, False
    layer = image.convert("RGBA")
    if layer.getchannel("A").getextrema()[0] == 255:
        return image, False
    below = Image.new("RGBA", layer.size, (*ImageColor.getrgb(background)[:3], 255))
    return Image.alpha_composite(below, layer).convert("RGB"), True


def _with_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """(1, H, W) repeated, or (3, H, W) as grey, where the other number of channels is asked for."""
    if len(pixels) == channels:
        return pixels
    return pixels.repeat(3, axis=0) if channels == 3 else np.tensordot(GREY, pixels, 1)[None]


def _scaled(values: np.ndarray, options: DecodeOptions) -> np.ndarray:
    """(C, H, W) float32 in 0..1: by the pixel range, then scaled and cut at the centre to `options.size`."""
    assert options.pixel_range is not None
    pixels = scale(values, options.pixel_range)
    if options.size is None:
        return pixels
    size = (options.size, options.size)
    planes = (ImageOps.fit(Image.fromarray(plane), size, Image.Resampling.BILINEAR) for plane in pixels)
    return np.stack([np.asarray(plane) for plane in planes])


def scale(values: np.ndarray, pixel_range: PixelRange) -> np.ndarray:
    """Map numbers to float32 in 0..1: low becomes 0, high 1, what lies beyond is cut off. Raises ValueError for NaN."""
    wide = values.astype(np.float64)
    if not np.isfinite(wide).all():
        raise ValueError("it holds a value that is not finite")
    low, high = (wide.min(), wide.max()) if pixel_range == "file" else pixel_range
    return np.clip((wide - low) / ((high - low) or 1), 0, 1).astype(np.float32)


def _load_array(file: Path, options: DecodeOptions) -> np.ndarray:
    """(H, W, C) numbers of a .npy file, C 1, 3 or 4."""
    array = np.load(file, allow_pickle=False)
    if array.dtype.kind not in "uif" or array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(f"it is {array.dtype} of shape {array.shape}; (H, W) or (H, W, 3) numbers are needed")
    if array.ndim == 2:
        array = array[..., None]
    elif (options.axes or _axes(array.shape)) == "CHW":
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in ((1, 3, 4) if options.pixel_range is None else (1, 3)):
        raise ValueError(
            f"it has {array.shape[2]} channels; 1, 3 or (of 8 bits) 4, the last of which is alpha, are read"
        )
    low, high = array.min(), array.max()
    fractions = high <= 1 and (array % 1).any()
    if options.pixel_range is None and (not (low >= 0 and high <= 255) or fractions):
        said = f"it holds {low}..{high}; pixels are 0..255"
        raise OptionNeededError(f"{said}; {HOW_TO_SCALE}") if np.isfinite(high - low) else ValueError(said)
    return array


def _axes(shape: tuple[int, ...]) -> Axes:
    """The only reading that has 1 or 3 channels, or 4 at the end."""
    if shape[0] in (1, 3) and shape[2] in (1, 3, 4):
        raise OptionNeededError(f"it has the shape {shape}, with channels first or last; say data.axes: HWC or CHW")
    return "CHW" if shape[0] in (1, 3) else "HWC"
