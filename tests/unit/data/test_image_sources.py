"""Sources of pictures on small files in the exact layout of each set: pixels, labels, sites, messages."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import io
from test_sources import write_idx

from fedmpi import config
from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.common.torchvision_compat import torchvision
from fedmpi.data.download.catalogue import CATALOGUE, MEDMNIST
from fedmpi.data.federated import split
from fedmpi.data.silos import open_silos
from fedmpi.data.sources.images.public_arrays import EMNIST_CLASSES as EMNIST
from fedmpi.data.sources.images.public_arrays import emnist, medmnist, stl10, svhn
from fedmpi.data.sources.images.public_files import CINIC_CLASSES as CINIC
from fedmpi.data.sources.images.public_files import HAM_SOURCES as SOURCES
from fedmpi.data.sources.images.public_files import cinic10, ham10000, office_home, pacs, retina, tiny_imagenet
from fedmpi.runtime import build_data

RNG = np.random.default_rng(0)
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")  # as the authors number them


def noise(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def plain(path, value, side=8):
    """A picture of one grey: the number is read back from any format and size."""
    save(path, np.full((side, side, 3), value, np.uint8))


def value(x, mean, std):
    """The grey in front of the standardisation, of pictures (n, C, H, W): (n,)."""
    first = x[:, 0].double() * std + mean
    return (first.flatten(1).mean(1) * 255).round().int().tolist()


def assert_standardised(actual, image, mean, std):
    """`found` (3, H, W) is `image` (H, W, 3), bytes, standardised channel by channel."""
    x = torch.from_numpy(image.transpose(2, 0, 1) / 255.0)
    expected = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(actual, expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_error_for_missing_files_names_them_and_the_fetch_command(tmp_path, name):
    listing = CATALOGUE[name]
    text = f"data: {{{listing.config}, root: {tmp_path}"
    (tmp_path / "run.yaml").write_text(
        text + ("" if "partition" in text else ", partition: {scheme: iid, clients: 2}") + "}\n"
        "model: {name: logistic}\nmethod: {name: fedavg}\n"
    )
    with pytest.raises(MissingDataError) as caught:
        build_data.make_source(config.load(tmp_path / "run.yaml"))(tmp_path)
    command = f"fedmpi data {'fetch' if listing.downloads else 'check'} {name} --root {tmp_path}"
    for word in (command, "correct data.root", listing.parts[0].paths[0].partition("/")[0]):
        assert word in str(caught.value)


# ---- arrays


def write_emnist(root, name, first=0, classes=3):
    raw, arrays = root / "EMNIST/raw", {}
    for part, n in (("train", 12), ("test", 5)):
        arrays[part] = noise(n, 28, 28), (np.arange(n) % classes + first).astype(np.uint8)
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays[part], strict=True):
            write_idx(raw / f"emnist-{name}-{part}-{kind}-ubyte", array, packed=False)
    return arrays


def test_emnist(tmp_path):
    arrays = write_emnist(tmp_path, "letters", first=1)
    data = emnist(tmp_path, split="letters")
    assert (data.train_x.shape, data.classes) == ((12, 1, 28, 28), 26)
    images, labels = arrays["train"]
    assert data.train_y.tolist() == (labels - 1).tolist()  # a is 1 in the file
    upright = torch.from_numpy(images[3].T / 255.0)  # the file has it on its side
    torch.testing.assert_close(data.train_x[3, 0].double(), (upright - 0.1307) / 0.3081, atol=1e-5, rtol=0)
    theirs = torchvision.datasets.EMNIST(tmp_path, "letters", train=False)
    assert (theirs.targets - 1).tolist() == data.test_y.tolist()
    assert {name: len(dataset) for name, dataset in theirs.classes_split_dict.items()} == EMNIST | {"letters": 27}
    write_emnist(tmp_path, "balanced", first=46, classes=2)
    with pytest.raises(
        UserError, match=r"emnist-balanced-train-labels.* label 47 in row 1; labels must be from 0 to 46"
    ):
        emnist(tmp_path)


def write_svhn(root, part, n):
    x, y = noise(32, 32, 3, n), np.array([[k % 10 + 1] for k in range(n)], np.uint8)
    root.mkdir(exist_ok=True)
    io.savemat(root / f"{part}_32x32.mat", {"X": x, "y": y})
    return x


def test_svhn(tmp_path):
    x = write_svhn(tmp_path, "train", 12)
    write_svhn(tmp_path / "SVHN", "test", 3)  # either place
    data = svhn(tmp_path)
    assert data.train_y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]  # 10 is the digit 0
    assert_standardised(data.train_x[5], x[..., 5], (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))


def test_stl10(tmp_path):
    folder, images = tmp_path / "stl10_binary", {}
    folder.mkdir()
    for part, n in (("train", 4), ("test", 2)):
        images[part] = noise(n, 96, 96, 3)
        images[part].transpose(0, 3, 2, 1).tofile(folder / f"{part}_X.bin")  # channel by channel, column by column
        (np.arange(n, dtype=np.uint8) + 7).tofile(folder / f"{part}_y.bin")
    data = stl10(tmp_path)
    assert (data.train_y.tolist(), data.test_y.tolist(), data.classes) == ([6, 7, 8, 9], [6, 7], 10)
    assert_standardised(data.train_x[2], images["train"][2], (0.5,) * 3, (0.5,) * 3)
    at = folder / "train_X.bin"
    at.write_bytes(at.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=r"train_X\.bin cannot be read: it contains 110,591 bytes for 4 labels; must be 27,648"
    ):
        stl10(tmp_path)


def write_medmnist(root, name, size=28, **put):
    classes, channels, *_ = MEDMNIST[name]
    shape, labels = ((size, size, 3) if channels == 3 else (size, size)), 1
    if name == "chestmnist":
        classes, labels = 2, 14
    arrays = {}
    for part, n in (("train", 6), ("val", 4), ("test", 3)):
        arrays[f"{part}_images"] = noise(n, *shape)
        arrays[f"{part}_labels"] = RNG.integers(0, classes, (n, labels)).astype(np.uint8)
    (root / "medmnist").mkdir(exist_ok=True)
    file = f"{name}.npz" if size == 28 else f"{name}_{size}.npz"
    np.savez(root / "medmnist" / file, **(arrays | put))
    return arrays


@pytest.mark.parametrize("name", ["pneumoniamnist", "pathmnist"])  # grey, in colour
def test_medmnist(tmp_path, name):
    classes, channels, *_ = MEDMNIST[name]
    arrays = write_medmnist(tmp_path, name)
    data = medmnist(tmp_path, set=name)
    assert (data.train_x.shape, data.test_x.shape) == ((10, channels, 28, 28), (3, channels, 28, 28))
    assert (classes, channels) == (data.classes, data.input_shape[0]) == {"pathmnist": (9, 3)}.get(name, (2, 1))
    labels = np.concatenate([arrays["train_labels"], arrays["val_labels"]])
    assert data.train_y.tolist() == labels[:, 0].tolist()
    last = torch.from_numpy(arrays["val_images"][-1] / 255.0 * 2 - 1).float().reshape(28, 28, channels).permute(2, 0, 1)
    torch.testing.assert_close(data.train_x[-1], last, atol=1e-5, rtol=0)
    without_val = medmnist(tmp_path, set=name, val="leave", channels=3)
    assert (len(without_val.train_y), without_val.train_x.shape[1]) == (6, 3)
    assert torch.equal(without_val.train_x[:, -1], data.train_x[:6, -1])


# ---- folders


def test_cinic10(tmp_path):
    for p, part in enumerate(("train", "valid", "test")):
        for k, name in enumerate(CINIC):
            save(tmp_path / "CINIC-10" / part / name / f"n{k}.png", np.full((32, 32, 3), 20 * p + k, np.uint8))
    data = cinic10(tmp_path)
    assert data.train_y.tolist() == data.test_y.tolist() == list(range(10))
    assert value(data.train_x, 0.4789, 0.2421) == list(range(10))
    assert value(data.test_x, 0.4789, 0.2421) == list(range(40, 50))
    with_val = cinic10(tmp_path, val="join")
    assert value(with_val.train_x, 0.4789, 0.2421) == [*range(10), *range(20, 30)]
    assert with_val.train_y.tolist() == [*range(10)] * 2
    plain(tmp_path / "CINIC-10/train/cat/odd.png", 0, side=33)
    assert len(cinic10(tmp_path).train_y) == 11  # scaled to 32


def write_tiny(root):
    home = root / "tiny-imagenet-200"
    names = ["n03", "n01", "n02"]
    for k, name in enumerate(names):
        for i in range(2):
            plain(home / f"train/{name}/images/{name}_{i}.JPEG", 10 * k + i, 64)
        (home / f"train/{name}/{name}_boxes.txt").write_text("x\t0\t0\t62\t62\n")
    (home / "wnids.txt").write_text("\n".join(names) + "\n")
    lines = [f"val_{i}.JPEG\t{name}\t0\t32\t44\t62\n" for i, name in enumerate(("n02", "n03", "n01", "n02"))]
    (home / "val/images").mkdir(parents=True)
    (home / "val/val_annotations.txt").write_text("".join(lines))
    for i in range(4):
        plain(home / f"val/images/val_{i}.JPEG", 100 + i, 64)
    plain(home / "test/images/test_0.JPEG", 0, 64)
    return home


def test_tiny_imagenet(tmp_path):
    home = write_tiny(tmp_path)
    data = tiny_imagenet(tmp_path)
    assert data.train_y.tolist() == [0, 0, 1, 1, 2, 2]  # n01, n02, n03
    assert value(data.train_x, 0.485, 0.229) == [10, 11, 20, 21, 0, 1]
    assert data.test_y.tolist() == [1, 2, 0, 1]
    assert value(data.test_x, 0.485, 0.229) == [100, 101, 102, 103]
    assert (data.input_shape, data.classes) == ((3, 64, 64), 3)
    (home / "val/images/val_2.JPEG").unlink()
    with pytest.raises(UserError, match=r"val_annotations\.txt, line 3: image .*val_2\.JPEG not found"):
        tiny_imagenet(tmp_path)
    (home / "val/val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n")
    with pytest.raises(UserError, match=r"line 1: 'val_0\.JPEG.* is not a file name followed by a class of wnids\.txt"):
        tiny_imagenet(tmp_path)


# ---- domains


def write_pacs(root, home="PACS"):
    """Five pictures of each class and domain; the grey is 10 x domain + class."""
    for d, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
        for k, name in enumerate(PACS):
            for i in range(5):
                plain(root / home / domain / name / f"pic_{i:03}.png", 10 * d + k)


def greys(data):
    return value(data.train_x, 0.485, 0.229)


def test_pacs_domains_are_the_sites(tmp_path):
    """Pooled, and as silos, which open no other folder than their own."""
    home = "pacs/images"
    write_pacs(tmp_path, home)
    data = pacs(tmp_path, size=8)
    assert data.site_names == ("art_painting", "cartoon", "photo", "sketch")
    assert torch.bincount(data.site).tolist() == [28] * 4
    assert torch.bincount(data.test_site).tolist() == [7] * 4
    assert greys(data) == (10 * data.site + data.train_y).tolist()
    assert value(data.test_x, 0.485, 0.229) == (10 * data.test_site + data.test_y).tolist()
    assert (split(data, "site", None, seed=0).label_counts == 4).all()
    (tmp_path / home / "photo/dog/pic_000.png").write_bytes(b"no picture")
    opened = open_silos(pacs, tmp_path, ("sketch", "photo"), [0], size=8)
    assert torch.equal(opened[0].train_x, data.train_x[data.site == 3])
    assert opened[0].site is None
    with pytest.raises(UserError, match=r"photo/dog/pic_000\.png cannot be read as an image"):
        pacs(tmp_path, size=8)
    with pytest.raises(UserError, match="unknown site 'art'; allowed: art_painting, cartoon, photo, sketch"):
        pacs(tmp_path, site="art")


def test_office_home(tmp_path):
    home = tmp_path / "OfficeHomeDataset_10072016"
    for d, folder in enumerate(("Art", "Clipart", "Product", "RealWorld")):
        for k in range(65):
            (home / folder / f"class_{k:02}").mkdir(parents=True)
        for k in (0, 30, 64):
            for i in range(5):
                plain(home / folder / f"class_{k:02}" / f"{i:05}.jpg", 60 * d + i)
    data = office_home(tmp_path, size=8)
    assert data.site_names == ("art", "clipart", "product", "real_world")
    assert (data.classes, data.train_y.unique().tolist()) == (65, [0, 30, 64])
    assert torch.bincount(data.site).tolist() == [12] * 4
    assert [grey // 60 for grey in greys(data)] == data.site.tolist()
    (home / "Art/Zebra").mkdir()
    with pytest.raises(UserError, match=r"Art contains 66 class folders, but office_home has 65"):
        office_home(tmp_path, site="art")


# ---- tables of files


def write_ham(root, more="", header="lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"):
    """Forty pictures of 20 lesions; the grey is 60 x source + lesion."""
    lines = [header]
    for n in range(80):
        lesion, source = n // 4, n % 2 + 2 * (n // 4 % 2)
        image = f"ISIC_{n:07}"
        plain(root / f"HAM10000/HAM10000_images_part_{1 + n % 2}/{image}.jpg", 60 * source + lesion, 16)
        row = f"HAM_{source}{lesion:06},{image},{'nv' if lesion % 3 else 'mel'},histo,80.0,male,scalp,{SOURCES[source]}"
        lines.append(row)
    (root / "HAM10000/HAM10000_metadata.csv").write_text("\n".join(lines) + "\n" + more)


def test_ham10000_sites_are_sources_and_lesions_are_not_split(tmp_path):
    write_ham(tmp_path)
    data = ham10000(tmp_path, size=8, test_fraction=0.3)
    assert data.site_names == SOURCES == ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
    assert (torch.bincount(data.site) + torch.bincount(data.test_site)).tolist() == [20] * 4
    train, test = greys(data), value(data.test_x, 0.485, 0.229)
    assert [grey // 60 for grey in train] == data.site.tolist()
    assert data.train_y.tolist() == [5 if grey % 60 % 3 else 4 for grey in train]  # nv, mel
    assert len(test) > 10
    assert not set(train) & set(test)  # no lesion on both sides
    alone = ham10000(tmp_path, site="rosendahl", size=8, test_fraction=0.3)
    assert torch.equal(alone.train_x, data.train_x[data.site == 2])
    assert torch.equal(alone.test_y, data.test_y[data.test_site == 2])


def write_ssl_fl(home, folder, sites, classes, ending):
    """Each site has four pictures; picture k of site s has the grey 10 s + k and the class k mod classes."""
    labels = []
    for part in (folder, "train", "test"):
        (home / part).mkdir(parents=True)

    def put(part, name, grey, label):
        image = np.full((10, 12, 3), grey)
        if ending == ".npy":
            np.save(home / part / name, image.astype(float))
        else:
            save(home / part / name, image.astype(np.uint8))
        labels.append(f"{name},{label:.1f}")
        return name

    for s, site in enumerate(sites):
        mine = [put("train", f"{site}_{k}{ending}", 10 * s + k, k % classes) for k in range(4)]
        (home / folder / f"{site}.csv").write_text("\r\n".join([*mine, mine[0]]) + "\r\n")  # one is named twice
    names = [put("test", f"test_{k}{ending}", 200 + k, k % classes) for k in range(5)]
    (home / "test.csv").write_text("\n".join(names))
    (home / "labels.csv").write_text("\n".join(labels))


def test_retina(tmp_path):
    home, sites = tmp_path / "Retina", [f"client_{k}" for k in range(1, 6)]
    write_ssl_fl(home, "5_clients/split_2", sites, 2, ".npy")
    data = retina(tmp_path, split="split_2", size=8)
    assert (data.classes, data.input_shape, data.site_names) == (2, (3, 8, 8), tuple(sites))
    assert data.site.tolist() == [k for k in range(5) for _ in range(4)]
    assert value(data.train_x, 0.5007, 0.0342) == [10 * s + k for s in range(5) for k in range(4)]
    assert value(data.test_x, 0.5007, 0.0342) == [200, 201, 202, 203, 204]
    assert data.train_y.tolist() == [0, 1, 0, 1] * 5
    alone = retina(tmp_path, site="client_3", split="split_2", size=8)
    assert torch.equal(alone.train_x, data.train_x[data.site == 2])
    assert torch.equal(alone.test_x, data.test_x)  # common to all
    np.save(home / "train/client_2_1.npy", np.full((9, 9, 3), 0.5))
    with pytest.raises(
        UserError, match=r"client_2\.csv, line 2: .*client_2_1\.npy cannot be read.*pixels must be from 0 to 255"
    ):
        retina(tmp_path, split="split_2")
