"""Sources on small files in the real layouts: what they read, and what they say when a file is missing or damaged."""

import gzip
import hashlib
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.common.torchvision_compat import torchvision
from fedmpi.data.download import fetch
from fedmpi.data.download.catalogue import CATALOGUE
from fedmpi.data.federated import split
from fedmpi.data.silos import open_silos
from fedmpi.data.sources.digits import digits
from fedmpi.data.sources.flamby import heart_disease
from fedmpi.data.sources.images.class_images import image_folder
from fedmpi.data.sources.images.public_arrays import cifar100, fashion_mnist, mnist
from fedmpi.data.sources.named_arrays import npz
from fedmpi.data.sources.source_utils import split_train_test


def test_holdout_is_stratified_and_leaves_every_class_one_sample():
    labels = np.array([0] * 50 + [1] * 10 + [2])
    train, test = split_train_test(labels, 0.2)
    assert np.bincount(labels[test], minlength=3).tolist() == [10, 2, 0]
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(61))
    assert len(split_train_test(np.linspace(0, 1, 50), 0.2)[1]) == 10  # numbers are one class
    assert len(split_train_test(labels, 0.0)[1]) == 0


def test_digits(tmp_path):
    data = digits(tmp_path)
    assert data.train_x.shape == (1438, 1, 8, 8)
    assert data.test_x.shape == (359, 1, 8, 8)
    assert (data.train_x.min(), data.train_x.max()) == (0, 1)
    totals = np.array([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])  # scikit-learn's counts
    assert torch.bincount(data.test_y).tolist() == [round(0.2 * n) for n in totals]
    assert torch.equal(digits(tmp_path).test_x, data.test_x)


# ---- idx


def write_idx(path, array, packed):
    data = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


def write_mnist(root, name="MNIST", packed=True):
    """Thirty training pictures and seven for tests; returns images and labels of each part."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 30), ("t10k", 7)):
        arrays[part] = rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n, np.uint8)
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays[part], strict=True):
            write_idx(root / name / "raw" / f"{part}-{kind}-ubyte", array, packed)
    return arrays


@pytest.mark.parametrize(
    ("source", "folder", "packed", "channels", "mean", "std"),
    [(mnist, "MNIST", True, 1, 0.1307, 0.3081), (fashion_mnist, "FashionMNIST", False, 3, 0.2860, 0.3530)],
)
def test_mnist(tmp_path, source, folder, packed, channels, mean, std):
    """Packed or not, in a folder to which nothing is written."""
    arrays = write_mnist(tmp_path, folder, packed)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    data = source(tmp_path, channels=channels)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    for (images, labels), x, y in zip(
        arrays.values(), (data.train_x, data.test_x), (data.train_y, data.test_y), strict=True
    ):
        expected = (torch.from_numpy(images).double() / 255 - mean) / std
        assert all(torch.allclose(x[:, c].double(), expected, atol=1e-6) for c in range(channels))
        assert y.tolist() == labels.tolist()
    assert (data.input_shape, data.classes) == ((channels, 28, 28), 10)


def test_an_existing_data_set_is_not_downloaded_again(tmp_path, monkeypatch):
    calls = []

    def get(urls, to, md5):
        calls.append(to.name)
        write_mnist(tmp_path)

    given = CATALOGUE["mnist"].downloads
    any_content = tuple(each._replace(md5="") for each in given)  # small files cannot have the checksums
    monkeypatch.setitem(CATALOGUE, "mnist", CATALOGUE["mnist"]._replace(downloads=any_content))
    monkeypatch.setattr(fetch, "download_file", get)
    assert len(mnist(tmp_path, download=True).train_y) == 30
    assert len(mnist(tmp_path, download=True).train_y) == 30
    assert sorted(calls) == sorted(each.path.rpartition("/")[2] for each in given)  # once each


# ---- CIFAR


def test_cifar(tmp_path, monkeypatch):
    """In torchvision's layout; a pickle with another checksum is not opened."""
    folder, rng, sums = tmp_path / "cifar-100-python", np.random.default_rng(0), {}
    folder.mkdir()
    for file in ("train", "test", "meta"):
        content = {"data": rng.integers(0, 256, (4, 3072), np.uint8), "fine_labels": rng.integers(0, 100, 4).tolist()}
        data = pickle.dumps({"fine_label_names": [*map(str, range(100))]} if file == "meta" else content)
        (folder / file).write_bytes(data)
        sums[file] = hashlib.md5(data).hexdigest()
    kind = torchvision.datasets.CIFAR100
    monkeypatch.setattr(kind, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(kind, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums["meta"]})
    data = cifar100(tmp_path)
    assert (data.train_x.shape, data.classes) == ((4, 3, 32, 32), 100)
    raw = pickle.loads((folder / "test").read_bytes())
    assert data.test_y.tolist() == raw["fine_labels"]
    mean, std = (np.reshape(numbers, (3, 1, 1)) for numbers in ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)))
    assert np.allclose(data.test_x[2].numpy(), (raw["data"][2].reshape(3, 32, 32) / 255 - mean) / std, atol=1e-5)

    class Opened:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    (folder / "train").write_bytes(pickle.dumps(Opened()))
    with pytest.raises(UserError, match=r"checksums are wrong.*data\.download: true"):
        cifar100(tmp_path)
    assert not (tmp_path / "opened").exists()


# ---- heart disease


def write_heart(path, rows):
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")


def patients(n=20):
    """age 40 + i; chol 0 for even i, else 200 + i; slope 1.1, whose rounded mean over 14 is not 1.1;
    ca missing for all; thal 3; num i mod 2 * 2"""
    return [
        [40 + i, 1, i % 4, 120 + i, 0 if i % 2 == 0 else 200 + i, 0, 0, 100 + i, 0, 0.1 * i, 1.1, "?", 3, 2 * (i % 2)]
        for i in range(n)
    ]


def test_heart_disease_standardises_with_the_training_part(tmp_path):
    write_heart(tmp_path / "processed.va.data", patients())
    data = heart_disease(tmp_path, site="va", test_fraction=0.3)
    assert (len(data.train_y), len(data.test_y)) == (14, 6)
    assert torch.bincount(data.train_y).tolist() == [7, 7]
    age = torch.cat([data.train_x[:, 0], data.test_x[:, 0]])
    assert data.train_x[:, 0].mean().abs() < 1e-6
    assert abs(data.train_x[:, 0].std(correction=0) - 1) < 1e-6
    assert abs(data.test_x[:, 0].std(correction=0) - 1) > 1e-3
    steps = age.sort().values.diff()
    assert torch.allclose(steps, steps[0].expand(19), atol=1e-5)  # test rows by the same mean and deviation
    chol = data.train_x[:, 4]
    assert (chol[data.train_y == 0].abs() < 1e-6).all()  # 0 is missing, so the mean, which is 0
    assert chol[data.train_y == 1].std() > 0.1
    for column in (1, 10, 11, 12):  # constant, constant, wholly missing, constant
        assert (data.train_x[:, column] == 0).all()
        assert (data.test_x[:, column] == 0).all()


def test_heart_disease_sites_are_in_order(tmp_path):
    for k, name in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        write_heart(tmp_path / f"processed.{name}.data", patients(10 * (k + 1)))
    data = heart_disease(tmp_path)
    assert torch.bincount(data.site).tolist() == [8, 16, 24, 32]
    assert torch.bincount(data.test_site).tolist() == [2, 4, 6, 8]
    alone = heart_disease(tmp_path, site="switzerland")
    assert torch.equal(data.train_x[data.site == 2], alone.train_x)
    assert torch.equal(data.test_y[data.test_site == 2], alone.test_y)


# ---- npz


def test_npz_validation_part_is_added_to_the_training_part(tmp_path):
    """Behind the training rows and with their normalisation."""
    x = np.arange(7 * 2 * 2, dtype=np.uint8).reshape(7, 2, 2)
    y = np.array([[0], [1], [2], [1], [0], [3], [1]], dtype=np.uint8)
    parts = {"train": slice(0, 3), "val": slice(3, 5), "test": slice(5, 7)}
    arrays = {f"{part}_{n}": a[rows] for part, rows in parts.items() for n, a in (("images", x), ("labels", y))}
    np.savez(tmp_path / "a.npz", **arrays)
    data = npz(tmp_path, path="a.npz", mean=[0.1], std=[0.5])
    assert data.train_y.tolist() == [0, 1, 2, 1, 0]
    torch.testing.assert_close(data.train_x[:, 0], (torch.from_numpy(x[:5] / 255).float() - 0.1) / 0.5)
    assert (data.test_y.tolist(), data.classes) == ([3, 1], 4)
    rows = {"x": x[:3], "y": y[:3], "val_x": x[3:5], "val_y": y[3:5], "site": [0, 1, 0], "val_site": [2, 1]}
    np.savez(tmp_path / "b.npz", **rows, test_x=x[5:], test_y=y[5:])
    assert npz(tmp_path, path="b.npz").site.tolist() == [0, 1, 0, 2, 1]


# ---- image folder


def write_pictures(folder, colours, each=5):
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for i in range(each):
            Image.new("RGB", (12, 8), colour).save(folder / name / f"{i}.png")
        (folder / name / "notes.txt").write_text("not a picture")


def test_image_folder(tmp_path):
    write_pictures(tmp_path / "train", {"red": (255, 0, 0), "blue": (0, 0, 255)})
    data = image_folder(tmp_path, size=4)
    assert (data.train_x.shape, data.test_x.shape) == ((8, 3, 4, 4), (2, 3, 4, 4))
    assert data.train_y.tolist() == [0] * 4 + [1] * 4  # blue, red
    assert data.train_x[0, :, 2, 2].tolist() == [-1, -1, 1]
    write_pictures(tmp_path / "test", {"red": (255, 255, 255)}, each=3)
    grey = {"size": 4, "channels": 1, "mean": (0.0,), "std": (1.0,)}
    data = image_folder(tmp_path, **grey)
    assert (data.train_x.shape, data.test_y.tolist(), data.test_x.unique().tolist()) == ((10, 1, 4, 4), [1] * 3, [1])
    write_pictures(tmp_path / "val", {"blue": (9, 9, 9)}, each=2)
    joined = image_folder(tmp_path, **grey)
    assert joined.train_y.tolist() == [*data.train_y.tolist(), 0, 0]
    assert torch.equal(joined.train_x[:10], data.train_x[:10])
    (tmp_path / "test").rename(tmp_path / "testing")
    assert image_folder(tmp_path, **grey).test_y.tolist() == [1] * 3


def test_image_folder_has_torchvisions_classes_and_order(tmp_path):
    write_pictures(tmp_path / "train", {"b": (255, 0, 0), "a": (0, 0, 255), "c": (0, 9, 0)})
    theirs = torchvision.datasets.ImageFolder(tmp_path / "train")
    assert image_folder(tmp_path, test_fraction=0.0).train_y.tolist() == theirs.targets
    (tmp_path / "train" / "d").mkdir()
    assert image_folder(tmp_path, size=4).classes == 4
    (tmp_path / "train" / "d" / "x.png").symlink_to("../../elsewhere/x.png")  # as of git-annex, DVC
    with pytest.raises(UserError, match=r"image .*x\.png not found"):
        image_folder(tmp_path, size=4)


def write_sites(folder):
    """north has cats and dogs in class folders, south dogs in train/ and test/; the grey says which picture it is."""
    greys = {"north/cat": 0, "north/dog": 10, "south/train/dog": 20, "south/test/dog": 30}
    for name, grey in greys.items():
        (folder / name).mkdir(parents=True)
        for k in range(5):
            Image.new("L", (6, 6), grey + k).save(folder / name / f"{k}.png")


def test_image_folder_of_sites(tmp_path):
    """A folder for each site, of either form, pooled for `scheme: site` or opened as silos, with the same split."""
    write_sites(tmp_path / "hospitals")
    (tmp_path / "hospitals/.cache").mkdir()
    grey = {"path": "hospitals", "channels": 1, "mean": (0.0,), "std": (1 / 255,)}
    data = image_folder(tmp_path, sites=True, **grey)
    assert data.site_names == ("north", "south")
    assert (data.site.tolist(), data.test_site.tolist()) == ([0] * 8 + [1] * 5, [0] * 2 + [1] * 5)
    assert data.train_y.tolist() == [0] * 4 + [1] * 9
    greys = data.train_x[:, 0, 0, 0].round().int().tolist()
    assert [grey // 10 for grey in greys] == [0] * 4 + [1] * 4 + [2] * 5
    assert split(data, "site", None, seed=0).label_counts.tolist() == [[4, 4], [0, 5]]
    options = {**grey, "class_names": ("cat", "dog")}
    silos = open_silos(image_folder, tmp_path, ("south", "north"), [1], **options)
    assert torch.equal(silos[1].train_x, data.train_x[:8])
    (tmp_path / "hospitals/south/train").rename(tmp_path / "hospitals/south/dogs")  # now it looks like classes
    (tmp_path / "hospitals/south/test").rename(tmp_path / "hospitals/south/cats")
    with pytest.raises(
        UserError, match=r"the folders in .*hospitals contain images only in subfolders.*data\.sites: true"
    ):
        image_folder(tmp_path, path="hospitals")
    with pytest.raises(UserError, match=r"folder .*hospitals/west not found \(data\.silos\); .*: north, south"):
        image_folder(tmp_path, site="west", **options)
