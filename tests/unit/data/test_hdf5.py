"""The source `hdf5`: arrays in HDF5 files, and files with a group of arrays for each client."""

import numpy as np
import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.data import streaming
from fedmpi.data.federated import split
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.preprocessing import PredictionRequest
from fedmpi.data.silos import open_silos
from fedmpi.data.sources.hdf5 import hdf5
from fedmpi.data.sources.named_arrays import npz
from fedmpi.data.streaming import Hdf5Arrays, Stream

h5py = pytest.importorskip("h5py")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2


def save(path, arrays, **options):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)


def same(a, b):
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("x", "y"), ("x_test", "y_test")),
        (("train/images", "train/labels"), ("test/images", "test/labels")),
        (("train_set_x", "train_set_y"), ("test_set_x", "test_set_y")),  # of a well-known course
        (("data/train/features", "data/train/target"), ("data/test/features", "data/test/target")),
    ],
)
def test_default_names_of_arrays(tmp_path, train, test):
    """The same data set as from npz."""
    arrays = X[:15], Y[:15], X[15:], Y[15:]
    save(tmp_path / "a.h5", dict(zip((*train, *test), arrays, strict=True)))
    np.savez(tmp_path / "a.npz", **dict(zip(("x", "y", "test_x", "test_y"), arrays, strict=True)))
    same(hdf5(tmp_path, path="a.h5"), npz(tmp_path, path="a.npz"))


def test_names_from_the_config_and_a_separate_test_file(tmp_path):
    save(tmp_path / "train.h5", {"scan": X[:15], "grade": Y[:15].reshape(15, 1, 1), "who": [2, 1, 0] * 5, "x": X})
    save(tmp_path / "test.h5", {"scan": X[15:], "grade": Y[15:].reshape(5, 1, 1), "who": [1, 0, 2, 1, 0]})
    options = {"inputs": "scan", "labels": "grade", "sites": "who"}
    with pytest.warns(UserWarning, match=r"train\.h5: ignored data sets: x;"):
        data = hdf5(tmp_path, path="train.h5", test_path="test.h5", **options)
    assert data.train_x.tolist() == X[:15].tolist()
    assert data.train_y.tolist() == Y[:15].tolist()
    assert data.site.tolist() == [2, 1, 0] * 5
    assert data.test_site.tolist() == [1, 0, 2, 1, 0]
    with pytest.raises(UserError, match=r"no data set 'scans' \(data\.inputs\); its other data sets: scan, who, x"):
        hdf5(tmp_path, path="train.h5", inputs="scans", labels="grade")


def tff(path, clients, x="pixels", **more):
    arrays = {}
    for name, (images, labels) in clients.items():
        arrays |= {f"examples/{name}/{x}": images, f"examples/{name}/label": labels}
        arrays |= {f"examples/{name}/{key}": value for key, value in more.items()}
    save(path, arrays)


def test_federated_emnist(tmp_path):
    """TensorFlow Federated's fed_emnist: floats v / 255, of which bytes are kept."""
    pixels = RNG.integers(0, 256, (6, 28, 28), np.uint8)
    x = pixels.astype(np.float32) / np.float32(255)
    tff(tmp_path / "train.h5", {"f2_1": (x[:1], np.int32([7])), "f10_0": (x[1:4], np.int32([1, 2, 3]))})
    tff(tmp_path / "test.h5", {"f2_1": (x[4:5], np.int32([7])), "f10_0": (x[5:], np.int32([2]))})
    data = hdf5(tmp_path, path="train.h5", test_path="test.h5", classes=10)
    assert data.site_names == ("f2_1", "f10_0")
    assert data.train_x.stored.dtype == torch.uint8
    assert torch.equal(data.train_x.all_inputs()[:, 0], torch.from_numpy(x[:4]))
    assert data.train_y.tolist() == [7, 1, 2, 3]
    request = PredictionRequest(x[1:4])  # as the file holds them, not as they are kept
    new = data.preparation.read_requested_rows(request)
    assert torch.equal(new.x, torch.from_numpy(x[1:4, None]))
    assert data.test_site.tolist() == [0, 1]
    dataset = split(data, "site", None, 0)
    assert [part.tolist() for part in dataset.parts] == [[0], [1, 2, 3]]
    assert dataset.test_sizes.tolist() == [1, 1]


def test_floats_of_one_client_make_all_images_floats(tmp_path):
    x = RNG.integers(0, 256, (2, 4, 4)).astype(np.float32) / np.float32(255)
    other = np.full((1, 4, 4), 0.1234, np.float32)
    tff(tmp_path / "a.h5", {"a": (x, [0, 1]), "b": (other, [1])})
    data = hdf5(tmp_path, path="a.h5", test_fraction=0)
    assert not isinstance(data.train_x, LazyImages)
    assert torch.equal(data.train_x[:, 0], torch.from_numpy(np.concatenate([x, other])))


def test_federated_cifar100(tmp_path):
    """Its test clients are others with the same names, so the test part is nobody's."""
    images = RNG.integers(0, 256, (4, 32, 32, 3), np.uint8)
    more = {"coarse_label": np.array([5, 5])}
    tff(tmp_path / "train.h5", {"0": (images[:2], [3, 4]), "1": (images[2:], [5, 0])}, "image", **more)
    tff(tmp_path / "test.h5", {"0": (images[:2], [3, 4])}, "image", **more)
    data = hdf5(tmp_path, path="train.h5", test_path="test.h5", classes=100)
    assert data.input_shape == (3, 32, 32)
    assert data.site.tolist() == [0, 0, 1, 1]
    assert data.test_site is None


def test_one_group_per_site(tmp_path):
    """test_fraction is held out of each class of each site."""
    save(tmp_path / "a.h5", {"south/x": X, "south/y": Y, "north/x": X[:10], "north/y": Y[:10]})
    data = hdf5(tmp_path, path="a.h5")
    assert data.site_names == ("north", "south")
    for k, (train, test) in enumerate(((8, 2), (16, 4))):
        assert torch.bincount(data.train_y[data.site == k]).tolist() == [train // 2] * 2
        assert torch.bincount(data.test_y[data.test_site == k]).tolist() == [test // 2] * 2


def test_one_file_per_silo(tmp_path):
    for name in ("north", "south"):
        save(tmp_path / f"{name}.h5", {"x": X, "y": Y})
    opened = open_silos(hdf5, tmp_path, ["north", "south"], [1], path="{site}.h5")
    same(opened[1], hdf5(tmp_path, path="south.h5"))
    with pytest.raises(UserError, match=r"data\.path: 'a\.h5' is the same file for all silos"):
        hdf5(tmp_path, site="north", path="a.h5")


@pytest.mark.parametrize(
    ("options", "by_client"), [({}, True), ({"chunks": (2, 6, 5, 3), "compression": "gzip"}, False)]
)
def test_images_on_disk_equal_those_in_memory(tmp_path, options, by_client):
    """Of every layout in the file, rows in any order; the bits are those of images in memory."""
    images, labels = RNG.integers(0, 256, (9, 6, 5, 3), np.uint8), np.arange(9) % 2
    cut = {"b/x": images[:5], "a/x": images[5:]} if by_client else {"x": images}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in cut.items():
            file.create_dataset(name, data=array, **options)
        for name, array in ({"b/y": labels[:5], "a/y": labels[5:]} if by_client else {"y": labels}).items():
            file.create_dataset(name, data=array)
    in_memory = hdf5(tmp_path, path="a.h5")
    with streaming.use_streaming_mode(True):
        data = hdf5(tmp_path, path="a.h5")
    assert isinstance(data.train_x.stored, Stream)
    assert isinstance(data.train_x.stored.source.array, Hdf5Arrays)
    same(in_memory, data)
    rows = torch.tensor([3, 0, 3, 5])
    assert torch.equal(data.train_x.read(rows), in_memory.train_x.read(rows))


@pytest.mark.parametrize(
    ("arrays", "pattern"),
    [
        ({"a": X}, r"a\.h5 has no data set for x \(known names: x, images, .*; its other data sets: a"),
        ({"x": X, "images": X, "y": Y}, r"/images and /x could both be x; set data\.inputs"),
        ({"x": X, "y": Y[:7]}, r"x has 20 rows, y has 7 rows; the arrays must have one row per sample"),
        ({"a/x": X, "a/y": Y, "b/x": X}, r"x has 40 rows, y has 20 rows"),
        ({"a/x": X, "a/y": Y, "b/x": X[:, :2], "b/y": Y}, r"/b/x has the shape \(20, 2\), and /a/x has \(20, 3\)"),
        (
            {"x": ["a", "b"], "y": [0, 1]},
            r"a\.h5: x contains no numbers \(dtype object, shape \(2,\)\); must contain numbers",
        ),
        ({"x": np.float32(1), "y": Y}, r"/x has the shape \(\)"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, arrays, pattern):
    save(tmp_path / "a.h5", arrays)
    with pytest.raises(UserError, match=pattern):
        hdf5(tmp_path, path="a.h5")
