"""Axes of arrays of images and volumes: what the shape says, what is guessed, and what `data.axes` says."""

import numpy as np
import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data import streaming
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.sources.hdf5 import hdf5
from fedmpi.data.sources.named_arrays import npz
from fedmpi.data.streaming import Stream
from fedmpi.runtime.validate import validate_settings

h5py = pytest.importorskip("h5py")

N = 10
RNG = np.random.default_rng(0)
FIRST, LAST = (0, 1, 2, 3), (0, 3, 1, 2)


def save(folder, shape, dtype=np.uint8):
    x = RNG.integers(0, 256, (N, *shape)).astype(dtype)
    np.savez(folder / "a.npz", x=x, y=np.arange(N) % 2)
    return x


def load(folder, **options):
    return npz(folder, path="a.npz", test_fraction=0, **options)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
@pytest.mark.parametrize(
    ("shape", "axes", "order"),
    [
        ((8, 9), None, None),  # the shape leaves no choice
        ((3, 8, 9), None, FIRST),
        ((1, 8, 9), None, FIRST),
        ((8, 9, 3), None, LAST),
        ((1, 5, 6, 7), None, (0, 1, 2, 3, 4)),
        ((5, 6, 7, 3), None, (0, 4, 1, 2, 3)),
        ((7, 7, 7), "NDHW", None),
        ((7, 7, 7), "DHW", None),  # N may be left out
        ((7, 7, 7), "NCHW", FIRST),
        ((8, 8, 5), "HWC", LAST),
        ((6, 5, 5, 2), "NDHWC", (0, 4, 1, 2, 3)),
        ((4, 5, 6, 2), "NWHDC", (0, 4, 3, 2, 1)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_axes_are_derived_from_the_shape_or_set_by_the_config(tmp_path, shape, axes, order, dtype):
    """order None: one channel is put in."""
    x, data = save(tmp_path, shape, dtype), load(tmp_path, axes=axes)
    expected = (x[:, None] if order is None else x.transpose(order)).astype(np.float32)
    assert np.array_equal(data.train_x[:].float().numpy(), expected / np.float32(255 if dtype == np.uint8 else 1))
    assert isinstance(data.train_x, LazyImages) == (dtype == np.uint8)


OPEN = r"a\.npz: x has the shape \(10, .*\), .* ambiguous which axis .*; set data\.axes to NCHW or NHWC"


@pytest.mark.parametrize(
    ("shape", "options", "pattern"),
    [
        *((shape, {}, OPEN) for shape in ((7, 7, 7), (8, 8, 5), (5, 8, 8), (3, 8, 3), (6, 5, 5, 2), (1, 6, 5, 3))),
        ((8, 9, 3), {"axes": "NHWX"}, "data.axes: 'NHWX' is not allowed; must contain the letters N, C, D, H and W"),
        ((8, 9, 3), {"axes": "NHHC"}, "data.axes: 'NHHC' is not allowed; must contain the letters"),
        ((8, 9), {"axes": "NHWC"}, r"x has the shape \(10, 8, 9\), which does not match data.axes: NHWC"),
        (
            (9,),
            {"axes": "NHWC"},
            r"data.axes is for images and volumes, but x has the shape \(10, 9\); remove data.axes",
        ),
        ((4, 5), {"pixel_range": (2, 1)}, r"data\.pixel_range: \[2, 1\]"),
    ],
)
def test_ambiguous_or_wrong_axes_are_refused(tmp_path, shape, options, pattern):
    save(tmp_path, shape)
    with pytest.raises(UserError, match=pattern):
        load(tmp_path, **options)


@pytest.mark.parametrize(("axes", "channels"), [("NDHW", 1), ("NHWC", 6)])
def test_volumes_on_disk_equal_those_in_memory(tmp_path, axes, channels):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = RNG.integers(0, 256, (N, 6, 6, 6), np.uint8), np.arange(N) % 2
    both = []
    for stream in (False, True):
        with streaming.use_streaming_mode(stream):
            both.append(hdf5(tmp_path, path="a.h5", axes=axes, mean=[0.5] * channels, test_fraction=0).train_x)
    in_memory, read = both
    assert isinstance(read.stored, Stream)
    for last in (False, True):
        rows = torch.tensor([3, 1, 4])
        assert torch.equal(in_memory.to("cpu", last).read(rows), read.to("cpu", last).read(rows))
        assert torch.equal(in_memory.to("cpu", last).all_inputs(), read.to("cpu", last).all_inputs())


def test_16_bit_numbers_are_scaled_by_a_range(tmp_path):
    x = RNG.integers(-1000, 3000, (N, 4, 5)).astype(np.int16)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(N) % 2)
    assert np.array_equal(load(tmp_path).train_x.numpy(), x[:, None])  # as they are, without an option
    window = load(tmp_path, pixel_range=(-160, 240), mean=[0.5], std=[0.5]).train_x
    assert np.allclose(window.all_inputs().numpy()[:, 0], np.clip((x + 160) / 400, 0, 1) * 2 - 1, atol=1e-6)
    own = load(tmp_path, pixel_range="file").train_x.all_inputs()
    assert (own.flatten(1).min(1).values.tolist(), own.flatten(1).max(1).values.tolist()) == ([0] * N, [1] * N)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((6, 6, 6), "NDHW", "(1, 6, 6, 6): 1 channel of 6 x 6 x 6 voxels (C, D, H, W)"),
    ],
)
def test_validate_shows_shape_and_axes(tmp_path, shape, axes, expected):
    save(tmp_path, shape)
    data = {"source": "npz", "path": "a.npz", "root": tmp_path, "axes": axes}
    data["partition"] = {"scheme": "iid", "clients": 2}
    settings = {"data": data, "model": {"name": "logistic"}, "method": {"name": "fedavg"}, "rounds": 1}
    assert dict(validate_settings(Settings.model_validate(settings)))["sample"] == expected
