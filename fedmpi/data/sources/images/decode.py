"""Decode an image from a file or from its bytes, with the same options for all data sources."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field

from fedmpi.common.errors import UserError

Size = Annotated[int, Field(ge=1, le=4096)]
PixelRange = Literal["file"] | tuple[float, float]

PIL_MODES = {1: "L", 3: "RGB"}
GREY_WEIGHTS = (0.299, 0.587, 0.114)  # weights of red, green and blue (ITU-R 601-2), as in PIL's conversion to L
ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
FORMATS_WITH_PREVIEWS = (
    "MPO",
    "PSD",
)  # formats in which the first frame is the image, and the others are previews or layers


@dataclass(frozen=True)
class DecodeOptions:
    """The options for decoding images. Equal options give bitwise identical pixels in all sources.

    Attributes:
        size: width and height in pixels to which images are scaled and centre-cropped; None: no scaling.
        channels: 1 for grey, 3 for colour.
        mean, std: the values with which pixels in 0..1 are normalised, one number or one per channel.
        pixel_range: (low, high), the values that are mapped to 0 and 1 (values outside this range are clipped), or
            "file", to use the smallest and largest value of each file. None: (0, 255), for images with 8 bits per
            pixel.

    Raises:
        UserError: `mean`, `std` or `pixel_range` has invalid values.
    """

    size: int | None
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixel_range: PixelRange | None = None

    def __post_init__(self) -> None:
        check_pixel_range_option(self.pixel_range)
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, self.channels):
                raise UserError(
                    f"data.{name} has {len(numbers)} numbers; must have 1 or {self.channels} (data.channels)"
                )


def check_pixel_range_option(pixel_range: PixelRange | None) -> None:
    """Raise UserError unless low < high in the option data.pixel_range."""
    if isinstance(pixel_range, tuple) and not pixel_range[0] < pixel_range[1]:
        raise UserError(
            f"data.pixel_range: {list(pixel_range)} is not allowed; must be [low, high] with low < high, or file"
        )


def is_image_file(file: Path) -> bool:
    """Return whether a file has an image extension and is not hidden; macOS's ._dog.jpg, for example, is hidden."""
    return file.suffix.lower() in Image.registered_extensions() and not file.name.startswith(".")


def decode_image(file: Path | bytes, options: DecodeOptions) -> np.ndarray:
    """Decode an image.

    Args:
        file: an image that PIL can read, its bytes, or a .npy file with shape (H, W) or with 1, 3 or 4 channels.
        options: size, channels and pixel range.

    Returns:
        (C, H, W) uint8, or float32 in 0..1 if `options` sets a pixel range.

    Raises:
        UserError: the image needs an option that is not set. For a damaged file, the decoder raises other errors.
    """
    if isinstance(file, Path) and file.suffix == ".npy":
        array = _load_npy(file)
        if options.pixel_range is not None:
            return _scale_and_resize(array.transpose(2, 0, 1), options)
        low, high = array.min(), array.max()
        if not (low >= 0 and high <= 255) or (high <= 1 and (array % 1).any()):
            raise _pixel_range_error(f"it contains values from {low} to {high}, but pixels must be from 0 to 255")
        pixels = array.astype(np.uint8)
        return _to_array(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), options)
    with _open_image(file) as image:
        _check_image(image, options)
        return _to_array(image, options)


def read_image_shape(file: Path, options: DecodeOptions) -> tuple[int, ...]:
    """Return the shape (C, H, W) of the result of `decode_image`, read from the header; raise the same errors."""
    if file.suffix == ".npy":
        return decode_image(file, options).shape
    with _open_image(file) as image:
        _check_image(image, options)
        width, height = (options.size, options.size) if options.size else image.size
        return options.channels, height, width


def _open_image(file: Path | bytes) -> Image.Image:
    """Open an image with PIL, which decodes its pixels only when they are used."""
    return Image.open(io.BytesIO(file) if isinstance(file, bytes) else file)


def _check_image(image: Image.Image, options: DecodeOptions) -> None:
    """Raise UserError for an image with several frames, or with more than 8 bits per pixel but no pixel range."""
    pages = getattr(image, "n_frames", 1)
    if pages > 1 and image.format not in FORMATS_WITH_PREVIEWS:
        raise UserError(f"it has {pages} pages or frames; save each of them as a separate file")
    if _has_deep_pixels(image) and options.pixel_range is None:
        raise _pixel_range_error(f"it has more than 8 bits per pixel (mode {image.mode})")


def _pixel_range_error(reason: str) -> UserError:
    """Return the error for an image that needs `data.pixel_range`."""
    how = "[low, high], the values that become 0 and 1 in all files ([0, 4095] for 12 bits), or to file, which takes"
    return UserError(f"{reason}; set data.pixel_range to {how} the smallest and largest value of each file")


def _has_deep_pixels(image: Image.Image) -> bool:
    """Return whether pixels have 16 or 32 bits; PIL would clip their values to 255."""
    return image.mode[0] in "IF"


def _to_array(image: Image.Image, options: DecodeOptions) -> np.ndarray:
    """Convert an image to the array (C, H, W) that `decode_image` returns."""
    if _has_deep_pixels(image):
        return _scale_and_resize(np.asarray(image)[None], options)
    image = _blend_over_white(image).convert(PIL_MODES[options.channels])
    if options.size is not None and options.pixel_range is None:
        image = ImageOps.fit(image, (options.size, options.size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return pixels if options.pixel_range is None else _scale_and_resize(pixels, options)


def _blend_over_white(image: Image.Image) -> Image.Image:
    """Blend transparent pixels over white; return an image without transparency unchanged."""
    if image.mode not in ALPHA_MODES and "transparency" not in image.info:
        return image
    layer = image.convert("RGBA")
    if layer.getchannel("A").getextrema()[0] == 255:
        return image
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _scale_and_resize(values: np.ndarray, options: DecodeOptions) -> np.ndarray:
    """Scale values (C, H, W) from the pixel range to float32 in 0..1, then resize and crop them to `options.size`."""
    assert options.pixel_range is not None
    if len(values) != options.channels:
        values = values.repeat(3, axis=0) if options.channels == 3 else np.tensordot(GREY_WEIGHTS, values, 1)[None]
    pixels = scale_to_unit_range(values, options.pixel_range)
    if options.size is None:
        return pixels
    size = (options.size, options.size)
    planes = (ImageOps.fit(Image.fromarray(plane), size, Image.Resampling.BILINEAR) for plane in pixels)
    return np.stack([np.asarray(plane) for plane in planes])


def scale_to_unit_range(values: np.ndarray, pixel_range: PixelRange) -> np.ndarray:
    """Map the pixel range (low, high) linearly to 0..1, and return float32; values outside the range are clipped.

    Raises ValueError if a value is not finite.
    """
    wide = values.astype(np.float64)
    if not np.isfinite(wide).all():
        raise ValueError("it contains a value that is not finite")
    low, high = (wide.min(), wide.max()) if pixel_range == "file" else pixel_range
    return np.clip((wide - low) / ((high - low) or 1), 0, 1).astype(np.float32)


def _load_npy(file: Path) -> np.ndarray:
    """Load a .npy file as (H, W, C); in the file, channels may also be the first axis."""
    array = np.load(file, allow_pickle=False)
    if array.dtype.kind not in "uif" or array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(f"it is {array.dtype} of shape {array.shape}; must be numbers of shape (H, W) or (H, W, 3)")
    if array.ndim == 2:
        return array[..., None]
    if array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in (1, 3, 4):
        raise ValueError(f"it has the shape {array.shape}; must have 1, 3 or 4 channels (the fourth is alpha)")
    return array
