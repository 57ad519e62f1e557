"""The data source `nifti`: volumes with masks in NIfTI files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate, pad

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.preprocessing import NewRows, PredictionRequest, Preparation, check_path, to_paths
from fedmpi.data.sources.labelled_files import (
    LabelledFile,
    MaskValues,
    PairPatterns,
    check_same_size,
    dataset_from_files,
    find_image_mask_pairs,
)

Voxels = Annotated[int, Field(ge=1, le=4096)]
Millimetres = Annotated[float, Field(gt=0)]
Intensity = Literal["standardise", "stored"] | tuple[float, float]


def nifti(
    root: Path,
    *,
    site: str | None = None,
    path: str = ".",
    sites: bool = True,
    image_pattern: str = "*_image.nii.gz",
    mask_pattern: str = "*_mask.nii.gz",
    classes: Annotated[int, Field(ge=2, le=65536)] | None = None,
    mask_values: Annotated[tuple[int, ...], Field(min_length=2)] | None = None,
    spacing: tuple[Millimetres, Millimetres, Millimetres] | None = None,
    size: tuple[Voxels, Voxels, Voxels] | None = None,
    intensity: Intensity = "standardise",
    test_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None,
) -> Dataset:
    """NIfTI volumes and their masks: root/path/SITE/NAME_image.nii.gz and NAME_mask.nii.gz; needs nibabel.

    The data set is for the task segmentation. A sample is (C, X, Y, Z), where the channels are the fourth axis of the
    file, if it has one; its mask is (X, Y, Z). Axes are swapped and mirrored by the affine matrix of the file, so that
    X, Y and Z point to the patient's right, front and head (RAS+). The folder of a site may contain train/, val/ (added
    to the training part) and test/.

    path: the folder, relative to data.root.
    sites: true if each folder in root/path is a site, for `scheme: site`; in silo mode, each silo is such a folder.
    image_pattern: the file pattern of the images in the folder of a site; * stands for the name that an image and its
    mask share.
    mask_pattern: the file pattern of the masks in the folder of a site; * stands for the same name.
    classes: the number of classes if masks contain class numbers, with 0 for the background.
    mask_values: if masks contain other values, the value of each class. A value that is neither listed here nor equal
    to task.ignore raises an error.
    spacing: the voxel size along X, Y and Z in millimetres to which volumes are resampled, with linear interpolation
    for images and nearest-neighbour interpolation for masks.
    size: the number of voxels along X, Y and Z to which volumes are centre-cropped or padded (images with their lowest
    intensity, masks with class 0); without it all files must have the same size.
    intensity: how intensities are scaled: standardise (each channel of each volume gets mean 0 and standard deviation
    1), [low, high] (this range is mapped to 0..1, and values outside it are clipped) or stored (as in the file).
    test_fraction: the fraction of each site's pairs that is held out as the test part if there is no folder test, with
    the same pairs for every seed; default 0.2.
    """
    _require_nibabel()
    if isinstance(intensity, tuple) and not intensity[0] < intensity[1]:
        raise UserError(f"data.intensity: {list(intensity)} is not allowed; must be [low, high] with low < high")
    numbers = MaskValues("nifti", classes, mask_values)
    patterns = PairPatterns(image_pattern, mask_pattern)
    samples = find_image_mask_pairs("nifti", root, path, patterns, sites, site)
    preparation = VolumePreparation(spacing, size, intensity, image_pattern)

    def read(pairs_of_site: Sequence[LabelledFile], train: np.ndarray, test: np.ndarray) -> Dataset:
        volumes: list[Tensor] = []
        masks: list[Tensor] = []
        for pair in pairs_of_site:
            image, mask, spacing_mm = _load_pair(pair)
            volumes.append(preparation.prepare_image(image, spacing_mm))
            masks.append(preparation.prepare_mask(numbers.to_classes(mask, pair), spacing_mm))
            _check_same_shape(volumes, pairs_of_site)
        x, y = torch.stack(volumes), torch.stack(masks)
        return Dataset(x[train], y[train], x[test], y[test], numbers.num_classes, preparation=preparation)

    return dataset_from_files(samples, read, "nifti", silo=site, test_fraction=test_fraction)


def _require_nibabel() -> None:
    """Raise UserError if nibabel is not installed."""
    if find_spec("nibabel") is None:
        raise UserError("data.source: nifti needs nibabel, which is not installed; pip install nibabel")


@dataclass(frozen=True)
class VolumePreparation(Preparation):
    """The conversion of volumes to model inputs; the fields are options of `nifti`."""

    spacing: tuple[float, float, float] | None
    size: tuple[int, int, int] | None
    intensity: Intensity
    image_pattern: str

    kind: ClassVar[str] = "volumes"

    def prepare_image(self, image: Tensor, spacing: Sequence[float]) -> Tensor:
        """Scale the intensities of an image, resample it, and crop or pad it.

        Args:
            image: (C, X, Y, Z).
            spacing: the voxel size along X, Y and Z in millimetres.

        Returns:
            (C, X', Y', Z') float32.
        """
        x = self._resample(_scale_intensity(image, self.intensity), spacing, "trilinear")
        return self._crop_or_pad(x, x.amin((1, 2, 3)))

    def prepare_mask(self, mask: Tensor, spacing: Sequence[float]) -> Tensor:
        """Resample, crop or pad the class numbers (X, Y, Z) of a mask; see `prepare_image` for `spacing`."""
        return self._crop_or_pad(self._resample(mask[None], spacing, "nearest-exact"), mask.new_zeros(1))[0]

    def read_requested_rows(self, request: PredictionRequest) -> NewRows:
        """Return the prepared volumes of a request."""
        _require_nibabel()
        if request.ids:
            raise UserError("--id: NIfTI files have no columns to copy; remove --id")
        files, names = self._list_requested_files(request)
        volumes: list[Tensor] = []
        for file in files:
            volumes.append(self.prepare_image(*_load_image(LabelledFile(file))[:2]))
            _check_same_shape(volumes, list(map(LabelledFile, files)))
        return NewRows({"file": np.array(names, dtype=object)}, torch.stack(volumes))

    def _list_requested_files(self, request: PredictionRequest) -> tuple[list[Path], list[str]]:
        """Return the files of a request, and the name of each file in the table of predictions."""
        takes = "a NIfTI file, a folder of them, or a list of files"
        if isinstance(request.rows, Sequence) and not isinstance(request.rows, str):
            return to_paths(request.rows, takes), [str(file) for file in request.rows]
        path = check_path(request, folder=True, takes=takes)
        if path.is_file():
            return [path], [path.name]
        files = sorted(path.glob(self.image_pattern)) or sorted([*path.rglob("*.nii"), *path.rglob("*.nii.gz")])
        if not files:
            raise UserError(f"{path} contains no file {self.image_pattern}, *.nii or *.nii.gz")
        return files, [file.relative_to(path).as_posix() for file in files]

    def _resample(self, x: Tensor, spacing: Sequence[float], mode: str) -> Tensor:
        """Resample (C, X, Y, Z) to the voxel size `self.spacing`, without changing the dtype."""
        if self.spacing is None:
            return x
        shape = [max(round(n * a / b), 1) for n, a, b in zip(x.shape[1:], spacing, self.spacing, strict=True)]
        return x if shape == list(x.shape[1:]) else interpolate(x[None].double(), shape, mode=mode)[0].to(x.dtype)

    def _crop_or_pad(self, x: Tensor, fill: Tensor) -> Tensor:
        """Crop or pad (C, X, Y, Z) at the centre to `self.size`; fill: the padding value of each channel, (C,)."""
        if self.size is None:
            return x
        missing = [want - n for want, n in zip(self.size, x.shape[1:], strict=True)]
        borders = [border for n in reversed(missing) for border in (n // 2, n - n // 2)]
        return torch.stack([pad(each, borders, value=value) for each, value in zip(x, fill.tolist(), strict=True)])


def _load_pair(pair: LabelledFile) -> tuple[Tensor, np.ndarray, tuple[float, ...]]:
    """Load an image (C, X, Y, Z), its mask (X, Y, Z), and the voxel size along X, Y and Z in millimetres.

    Raises:
        UserError: a file cannot be read, or an image and its mask have different grids.
    """
    x, spacing, image = _load_image(pair)
    mask, _, numbers = _open_volume(pair, pair.mask)
    if len(mask.shape) not in (3, 4) or mask.shape[3:] not in ((), (1,)):
        raise pair.make_error(f"{pair.mask} has the shape {tuple(mask.shape)}; must be (X, Y, Z)")
    check_same_size(pair, image.shape[:3], mask.shape[:3])
    corners = np.array([[*corner, 1] for corner in np.ndindex(2, 2, 2)]) * [*image.shape[:3], 1]
    distance = np.linalg.norm((corners @ (image.affine - mask.affine).T)[:, :3], axis=1).max()
    if not distance <= min(image.header.get_zooms()[:3]) / 2:
        raise pair.make_error(
            f"{pair.file} and its mask {pair.mask} lie on different grids (by their affine matrices, "
            f"{distance:.3g} mm apart); resample one of them to the grid of the other, or correct its header"
        )
    return x, numbers.reshape(x.shape[1:]), spacing


def _load_image(pair: LabelledFile) -> tuple[Tensor, tuple[float, ...], Any]:
    """Load an image (C, X, Y, Z) float32.

    Returns:
        The image; its voxel size along X, Y and Z in mm; and the object that nibabel returns for the file.
    """
    image, turned, numbers = _open_volume(pair, pair.file)
    x = numbers.astype(np.float32)
    if x.ndim not in (3, 4) or not np.isfinite(x).all():
        problem = f"has the shape {numbers.shape}" if x.ndim not in (3, 4) else "contains a value that is not finite"
        raise pair.make_error(f"{pair.file} {problem}; must contain finite values (X, Y, Z) or (X, Y, Z, channels)")
    x = x[None] if x.ndim == 3 else np.moveaxis(x, 3, 0)
    spacing = tuple(float(width) for width in turned.header.get_zooms()[:3])
    return torch.from_numpy(np.ascontiguousarray(x)), spacing, image


def _open_volume(pair: LabelledFile, file: Path) -> tuple[Any, Any, np.ndarray]:
    """Return a NIfTI image as stored, the image with its axes in RAS+ order, and the voxel values in that order."""
    import nibabel  # imported here, because that takes a third of a second

    try:
        stored: Any = nibabel.load(file)
        turned = nibabel.as_closest_canonical(stored)
        return stored, turned, np.asarray(turned.dataobj)
    except Exception as error:  # a damaged file can raise many errors
        raise pair.make_error(f"{file} cannot be read as NIfTI: {error}; correct or remove the file") from error


def _check_same_shape(volumes: Sequence[Tensor], pairs: Sequence[LabelledFile]) -> None:
    """Raise UserError unless the volume read last has the same shape as the first one.

    pairs: the files from which the volumes were read, in the same order, for the message.
    """
    if volumes[-1].shape != volumes[0].shape:
        pair = pairs[len(volumes) - 1]
        shapes = " and ".join(" x ".join(map(str, each.shape)) for each in (volumes[0], volumes[-1]))
        raise pair.make_error(
            f"{pairs[0].file} and {pair.file} have different shapes, {shapes} (channels, X, Y, Z); set data.size to "
            "the size to which volumes are cropped and padded"
        )


def _scale_intensity(image: Tensor, intensity: Intensity) -> Tensor:
    """Scale the intensities of an image (C, X, Y, Z); a constant channel is standardised to 0."""
    if intensity == "stored":
        return image
    if intensity == "standardise":
        std, mean = torch.std_mean(image.double(), (1, 2, 3), correction=0, keepdim=True)
        return ((image - mean) / torch.where(std > 0, std, 1)).float()
    low, high = intensity
    return ((image - low) / (high - low)).clamp(0, 1)
