"""Axes of arrays of images and volumes: what the shape says, what is guessed, and what `data.axes` says."""

import warnings

import h5py
import numpy as np
import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data import streaming
from fedmpi.data.pictures import Pictures
from fedmpi.data.sources.hdf5 import hdf5
from fedmpi.data.sources.named_arrays import npz
from fedmpi.data.streaming import Stream
from fedmpi.runtime.validate import validate_settings

N = 10
RNG = np.random.default_rng(0)
FIRST, LAST = (0, 1, 2, 3), (0, 3, 1, 2)


def save(folder, shape, dtype=np.uint8, **more):
    x = RNG.integers(0, 256, (N, *shape)).astype(dtype)
    np.savez(folder / "a.npz", x=x, y=np.arange(N) % 2, **more)
    return x


def load(folder, **options):
    return npz(folder, path="a.npz", test_fraction=0, **options)


def expected(x, order):
    """With its channels first; order None: one channel is put in."""
    x = x[:, None] if order is None else x.transpose(order)
    return x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((8, 9), None),
        ((3, 8, 9), FIRST),
        ((1, 8, 9), FIRST),
        ((8, 9, 3), LAST),
        ((1, 5, 6, 7), (0, 1, 2, 3, 4)),
        ((5, 6, 7, 3), (0, 4, 1, 2, 3)),
    ],
)
def test_axes_that_the_shape_leaves_no_choice_of(tmp_path, shape, order, dtype):
    x = save(tmp_path, shape, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load(tmp_path)
    assert np.array_equal(data.train_x[:].float().numpy(), expected(x, order))
    assert isinstance(data.train_x, Pictures) == (dtype == np.uint8)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
@pytest.mark.parametrize(
    ("shape", "axes", "order", "words"),
    [
        ((7, 7, 7), "NDHW", None, "1 channel of 7 x 7 x 7 voxels"),  # it was 7 channels
        ((8, 8, 5), "NHWC", LAST, "5 channels of 8 x 8 pixels"),  # it was 8 channels of 8 x 5
        ((5, 8, 8), "NCHW", FIRST, "5 channels of 8 x 8 pixels"),
        ((3, 8, 3), "NCHW", FIRST, "3 channels of 8 x 3 pixels"),
        ((6, 5, 5, 2), "NDHWC", (0, 4, 1, 2, 3), "2 channels of 6 x 5 x 5 voxels"),
        ((2, 6, 5, 5), "NCDHW", (0, 1, 2, 3, 4), "2 channels of 6 x 5 x 5 voxels"),
    ],
)
def test_guessed_axes_are_told_and_confirmed(tmp_path, shape, axes, order, words, dtype):
    x = save(tmp_path, shape, dtype)
    with pytest.warns(UserWarning, match=f"which is read as {axes}, {words}; data.axes: {axes} confirms it") as told:
        guessed = load(tmp_path)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = [load(tmp_path, axes=axes), load(tmp_path, axes=axes[1:])]
    for data in (guessed, *said):
        assert np.array_equal(data.train_x[:].float().numpy(), expected(x, order))


def test_any_order_of_axes_can_be_said(tmp_path):
    x = save(tmp_path, (4, 5, 6, 2), np.float32)
    assert np.array_equal(load(tmp_path, axes="NWHDC").train_x.numpy(), x.transpose(0, 4, 3, 2, 1))
    x = save(tmp_path, (7, 7, 7))
    assert np.array_equal(load(tmp_path, axes="NCHW").train_x.floats().numpy(), expected(x, FIRST))


@pytest.mark.parametrize(
    ("shape", "axes", "says"),
    [
        ((8, 9, 3), "NHWX", "data.axes: 'NHWX'; the letters N, C, D, H and W in the order"),
        ((8, 9, 3), "NHHC", "data.axes: 'NHHC'; the letters"),
        ((8, 9), "NHWC", r"x has the shape \(10, 8, 9\), which does not have the axes NHWC"),
        ((9,), "NHWC", r"x has the shape \(10, 9\); data.axes is for images and volumes: leave it out"),
    ],
)
def test_axes_that_the_array_does_not_have_are_refused(tmp_path, shape, axes, says):
    save(tmp_path, shape)
    with pytest.raises(UserError, match=says):
        load(tmp_path, axes=axes)


@pytest.mark.parametrize("axes", ["NDHW", "NHWC"])
def test_volumes_stay_on_disk_alike(tmp_path, axes):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = RNG.integers(0, 256, (N, 6, 6, 6), np.uint8), np.arange(N) % 2
    found = []
    for stream in (False, True):
        with streaming.choosing(stream):
            mean = [0.5] * (1 if axes == "NDHW" else 6)
            found.append(hdf5(tmp_path, path="a.h5", axes=axes, mean=mean, test_fraction=0).train_x)
    held, read = found
    assert isinstance(read.stored, Stream)
    rows = torch.tensor([3, 1, 4])
    for last in (False, True):
        assert torch.equal(held.to("cpu", last).read(rows), read.to("cpu", last).read(rows))
        assert torch.equal(held.to("cpu", last).floats(), read.to("cpu", last).floats())


def test_numbers_of_sixteen_bits_are_scaled_by_a_range(tmp_path):
    x = RNG.integers(-1000, 3000, (N, 4, 5)).astype(np.int16)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(N) % 2)
    assert np.array_equal(load(tmp_path).train_x.numpy(), x[:, None])  # as they are, without an option
    window = load(tmp_path, pixel_range=(-160, 240), mean=[0.5], std=[0.5]).train_x
    assert np.allclose(window.floats().numpy()[:, 0], np.clip((x + 160) / 400, 0, 1) * 2 - 1, atol=1e-6)
    own = load(tmp_path, pixel_range="file").train_x.floats()
    assert (own.flatten(1).min(1).values.tolist(), own.flatten(1).max(1).values.tolist()) == ([0] * N, [1] * N)
    with pytest.raises(UserError, match=r"data\.pixel_range: \[2, 1\]"):
        load(tmp_path, pixel_range=(2, 1))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((8, 8, 5), "(5, 8, 8): 5 channels of 8 x 8 pixels (C, H, W)"),
        ((6, 6, 6), "(1, 6, 6, 6): 1 channel of 6 x 6 x 6 voxels (C, D, H, W)"),
        ((9,), "(9,)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*which is read as")
def test_validate_shows_shape_and_axes(tmp_path, shape, says):
    save(tmp_path, shape)
    data = {"source": "npz", "path": "a.npz", "root": tmp_path, "partition": {"scheme": "iid", "clients": 2}}
    settings = {"data": data, "model": {"name": "logistic"}, "method": {"name": "fedavg"}, "rounds": 1}
    assert dict(validate_settings(Settings.model_validate(settings)))["sample"] == says
