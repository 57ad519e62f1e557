"""The source `nifti`: volumes and masks on one grid, turned, resampled and cropped alike."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from fedmpi.common.errors import UserError
from fedmpi.data.preprocessing import PredictionRequest, preparation_from_dict
from fedmpi.data.sources.nifti import nifti

nibabel = pytest.importorskip("nibabel")
SHAPE = (6, 5, 4)


def volume(k, shape=SHAPE):
    return np.random.default_rng(k).normal(20, 300, shape).round().astype(np.int16)


def mask(k, shape=SHAPE):
    return np.random.default_rng(100 + k).integers(0, 3, shape, dtype=np.uint8)


def save(array, file, affine=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), file)


def write(folder, names, first=0, affine=None, shape=SHAPE):
    for k, name in enumerate(names, first):
        save(volume(k, shape), folder / f"{name}_image.nii.gz", affine)
        save(mask(k, shape), folder / f"{name}_mask.nii.gz", affine)


def test_sites_are_folders_of_volumes_with_masks(tmp_path):
    write(tmp_path / "north", "abc")
    write(tmp_path / "south", ["d1", "d2", "d10"], first=3)
    data = nifti(tmp_path, classes=3, intensity="stored", test_fraction=0.0)
    assert data.site_names == ("north", "south")
    assert data.site.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(data.train_x[:, 0].numpy(), np.stack([volume(k) for k in range(6)]))  # d2 before d10
    assert np.array_equal(data.train_y.numpy(), np.stack([mask(k) for k in range(6)]))
    assert (data.classes, data.input_shape, data.train_y.dtype) == (3, (1, *SHAPE), torch.int64)
    alone = nifti(tmp_path, site="south", classes=3, intensity="stored", test_fraction=0.34)
    assert (len(alone.train_y), len(alone.test_y)) == (2, 1)


def test_the_folders_of_the_medical_decathlon(tmp_path):
    """imagesTr/NAME.nii.gz and labelsTr/NAME.nii.gz, of several channels."""
    image = np.stack([volume(0), volume(1)], 3)
    save(image, tmp_path / "imagesTr" / "brain_1.nii.gz")
    save(mask(0), tmp_path / "labelsTr" / "brain_1.nii.gz")
    patterns = {"image_pattern": "imagesTr/*.nii.gz", "mask_pattern": "labelsTr/*.nii.gz"}
    data = nifti(tmp_path, sites=False, classes=3, intensity="stored", **patterns)
    assert data.input_shape == (2, *SHAPE)
    assert np.array_equal(data.train_x[0].numpy(), image.transpose(3, 0, 1, 2))


# The patient's right, front and head are +x, +y and +z: an array whose first axis goes to the left and whose others
# are exchanged.
LEFT_UP_FRONT = np.array([[-2.0, 0, 0, 7], [0, 0, 3, -5], [0, 1, 0, 2], [0, 0, 0, 1]])


def test_axes_are_reoriented_to_the_patient(tmp_path):
    write(tmp_path / "a", "x", affine=LEFT_UP_FRONT)
    data = nifti(tmp_path, classes=3, intensity="stored")
    turned = [array[::-1].transpose(0, 2, 1) for array in (volume(0), mask(0))]
    assert np.array_equal(data.train_x[0, 0].numpy(), turned[0])
    assert np.array_equal(data.train_y[0].numpy(), turned[1])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_volumes_are_cropped_and_padded_at_the_centre(tmp_path, axis):
    write(tmp_path / "a", "x")
    size = [4, 4, 4]
    size[axis] = SHAPE[axis] + 3
    data = nifti(tmp_path, classes=3, intensity="stored", size=tuple(size))
    x, y = volume(0), mask(0)
    for k, (want, n) in enumerate(zip(size, SHAPE, strict=True)):
        if want < n:
            cut = [slice(None)] * 3
            cut[k] = slice((n - want + 1) // 2, (n - want + 1) // 2 + want)
            x, y = x[tuple(cut)], y[tuple(cut)]
        else:
            more = [(0, 0)] * 3
            more[k] = ((want - n) // 2, want - n - (want - n) // 2)
            x, y = np.pad(x, more, constant_values=volume(0).min()), np.pad(y, more)
    assert np.array_equal(data.train_x[0, 0].numpy(), x)
    assert np.array_equal(data.train_y[0].numpy(), y)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"spacing": (1.0, 1.0, 1.0)}, (12, 15, 4)),  # voxels of 2 x 3 x 1 mm
        ({"spacing": (4.0, 3.0, 0.5)}, (3, 5, 8)),
        ({"spacing": (4.0, 3.0, 1.0), "size": (3, 5, 5)}, (3, 5, 5)),
    ],
)
def test_volumes_are_resampled(tmp_path, options, shape):
    write(tmp_path / "a", "x", affine=np.diag([2.0, 3, 1, 1]))
    data = nifti(tmp_path, classes=3, intensity="stored", **options)
    assert tuple(data.train_x.shape[2:]) == tuple(data.train_y.shape[1:]) == shape
    assert set(data.train_y.unique().tolist()) <= {0, 1, 2}
    if shape == (3, 5, 8):
        x = torch.from_numpy(volume(0)).double()[None, None]
        torch.testing.assert_close(data.train_x.double(), interpolate(x, shape, mode="trilinear"), rtol=1e-6, atol=1e-3)
    if shape == (12, 15, 4):
        assert np.array_equal(data.train_y[0].numpy(), mask(0).repeat(2, 0).repeat(3, 1))


def test_intensities_are_standardised_clipped_or_unchanged(tmp_path):
    write(tmp_path / "a", "x")
    save(np.full(SHAPE, 7, np.int16), tmp_path / "a" / "flat_image.nii.gz")
    save(mask(9), tmp_path / "a" / "flat_mask.nii.gz")
    flat, x = nifti(tmp_path, classes=3, test_fraction=0.0).train_x[:, 0]
    assert not flat.any()
    v = volume(0).astype(np.float64)
    assert np.allclose(x.numpy(), (v - v.mean()) / v.std(), atol=1e-5)
    _, x = nifti(tmp_path, classes=3, test_fraction=0.0, intensity=(-100.0, 300.0)).train_x[:, 0]
    assert np.allclose(x.numpy(), np.clip((v + 100) / 400, 0, 1), atol=1e-6)


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("change", "options", "pattern"),
    [
        (lambda p: save(mask(0, (6, 5, 3)), p / "x_mask.nii.gz"), {}, r"different sizes, 6 x 5 x 4 and 6 x 5 x 3"),
        (
            lambda p: save(mask(0), p / "x_mask.nii.gz", np.diag([-1.0, 1, 1, 1])),
            {},
            r"lie on different grids \(by their affine matrices, 12 mm apart\)",  # the far corner is 6 mm off
        ),
        (lambda p: write(p, "y", shape=(3, 5, 4)), {}, r"shapes, 1 x 6 x 5 x 4 and 1 x 3 x 5 x 4 .*set data\.size"),
        (lambda p: save(mask(0) * 2, p / "x_mask.nii.gz"), {}, r"x_mask\.nii\.gz contains 4; allowed: 0, 1, 2"),
        (
            lambda p: save(mask(0) / 2, p / "x_mask.nii.gz"),
            {},
            r"x_mask\.nii\.gz contains numbers that are not integers",
        ),
        (lambda p: save(np.full(SHAPE, math.nan), p / "x_image.nii.gz"), {}, r"contains a value that is not finite"),
        (lambda p: save(volume(0, (6, 5, 4, 2, 2)), p / "x_image.nii.gz"), {}, r"has the shape \(6, 5, 4, 2, 2\)"),
        (lambda p: cut_off(p / "x_image.nii.gz"), {}, r"x_image\.nii\.gz cannot be read as NIfTI"),
        (
            lambda p: None,
            {"intensity": (5.0, 5.0)},
            r"data\.intensity: \[5\.0, 5\.0\] is not allowed; must be \[low, high\] with low < high",
        ),
        (lambda p: None, {"classes": None}, r"contains 0, 1, 2; allowed: none; set data\.classes"),
        (
            lambda p: None,
            {"path": "a"},
            r"needs one folder per site, but .*a contains no folders; set data\.sites: false",
        ),
    ],
)
def test_an_invalid_volume_is_reported_with_its_file(tmp_path, change, options, pattern):
    write(tmp_path / "a", "x")
    change(tmp_path / "a")
    with pytest.raises(UserError, match=pattern):
        nifti(tmp_path, **{"classes": 3, **options})


def test_new_volumes_are_prepared_like_training_volumes(tmp_path):
    """With the options of the training, which a run stores as JSON; the masks beside them are no images."""
    write(tmp_path / "a", "xy", affine=LEFT_UP_FRONT)
    data = nifti(tmp_path, classes=3, spacing=(2.0, 1.0, 2.0), size=(5, 5, 9), test_fraction=0.0)
    stored = preparation_from_dict(json.loads(json.dumps(data.preparation.to_dict())))
    new = stored.read_requested_rows(PredictionRequest(tmp_path / "a"))
    assert torch.equal(new.x, data.train_x)
    assert new.ids["file"].tolist() == ["x_image.nii.gz", "y_image.nii.gz"]
    assert torch.equal(
        stored.read_requested_rows(PredictionRequest(tmp_path / "a" / "y_image.nii.gz")).x, data.train_x[1:]
    )
    with pytest.raises(UserError, match="x_mask does not exist"):
        stored.read_requested_rows(PredictionRequest(tmp_path / "a" / "x_mask"))
