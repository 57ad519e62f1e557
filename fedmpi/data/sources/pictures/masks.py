"""Masks in picture files: a number a pixel, which no conversion may change."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

from fedmpi.common.errors import UserError
from fedmpi.common.places import other_spelling
from fedmpi.data.sources.pairs import Pair


def endings() -> tuple[str, ...]:
    """Endings of the files that are read as pictures and masks."""
    return (*Image.registered_extensions(), ".npy")


def read_mask(pair: Pair) -> np.ndarray:
    """(H, W) the numbers that the mask of a pair holds: of a picture with a palette its indices, of one with several
    channels that are equal one of them. Raises UserError for a file that holds no such numbers."""
    try:
        if pair.mask.suffix == ".npy":
            array = np.load(pair.mask, allow_pickle=False)
        else:
            with Image.open(pair.mask) as image:
                pages = getattr(image, "n_frames", 1)
                if pages > 1:
                    raise ValueError(f"it has {pages} pages or frames")
                array = np.asarray(image)
                array = _opaque(array) if image.mode in ("LA", "RGBA") else array
    except FileNotFoundError as error:
        raise pair.error(f"there is no mask {pair.mask}{other_spelling(pair.mask)}") from error
    except Exception as error:  # what a damaged file makes of a decoder is not to be foreseen
        raise pair.error(f"{pair.mask} cannot be read as a mask: {error}; mend or remove it") from error
    if array.ndim == 3 and array.shape[2] in (1, 3) and (array == array[..., :1]).all():
        array = array[..., 0]
    if array.ndim != 2 or array.dtype.kind not in "buif":
        raise _no_mask(pair, f"{array.dtype} of shape {array.shape}")
    return array


def fit_mask(mask: np.ndarray, size: int) -> np.ndarray:
    """A mask (H, W) scaled and cut at its centre to size x size, as pictures are, without new numbers."""
    image = Image.fromarray(mask.astype(np.int32))
    return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.NEAREST))


def _opaque(array: np.ndarray) -> np.ndarray:
    """The channels without alpha. Raises ValueError where some of it is transparent."""
    if (array[..., -1] != 255).any():
        raise ValueError("some of its pixels are transparent")
    return array[..., :-1]


def _no_mask(pair: Pair, found: str) -> UserError:
    return pair.error(
        f"{pair.mask} is {found}; a mask holds one number a pixel, that of its class: save its colours as such numbers"
    )
