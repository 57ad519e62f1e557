"""What is known of each data set: its files, their addresses and checksums, home and licence. docs/data.md has more.

MD5s are those that torchvision and MedMNIST check; CINIC-10's and Tiny-ImageNet's are those that several public loaders
check.
"""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A file, or a folder with so many files below it, relative to data.root; any of `paths` will do."""

    paths: tuple[str, ...]
    files: int = 0  # of a folder; 0: any number


class Download(NamedTuple):
    """One file to fetch. `into`: it is an archive, whose content goes to that folder; it is deleted afterwards."""

    urls: tuple[str, ...]  # the first that answers is taken
    path: str  # relative to data.root
    md5: str
    into: str = ""


class Listing(NamedTuple):
    """A data set of `fedmpi data`."""

    what: str  # "grey 28x28 digits, 10 classes"
    config: str  # under `data:` in a config
    home: str
    licence: str
    parts: tuple[Part, ...]
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # what to do where there is no download: sites that ask for an account or a click


def _idx(folder: str, mirrors: tuple[str, ...], md5s: tuple[str, ...]) -> tuple[tuple[Part, ...], tuple[Download, ...]]:
    """MNIST's four files: gzipped as they come, or unpacked."""
    parts, downloads = [], []
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    for name, md5 in zip(names, md5s, strict=True):
        path = f"{folder}/raw/{name}"
        parts.append(Part((f"{path}.gz", path)))
        downloads.append(Download(tuple(f"{mirror}{name}.gz" for mirror in mirrors), f"{path}.gz", md5))
    return tuple(parts), tuple(downloads)


def _files(folder: str, names: str) -> tuple[Part, ...]:
    return tuple(Part((f"{folder}/{name}",)) for name in names.split())


def _archive(url: str, md5: str, into: str) -> tuple[Download, ...]:
    return (Download((url,), url.rpartition("/")[2], md5, into),)


CIFAR_HOME = "https://www.cs.toronto.edu/~kriz"
SVHN_HOME = "http://ufldl.stanford.edu/housenumbers/"
SVHN = {"train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373", "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3"}
EMNIST_SPLITS = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")

PUBLIC: dict[str, Listing] = {
    "mnist": Listing(
        "grey 28x28 handwritten digits, 10 classes",
        "source: mnist",
        "http://yann.lecun.com/exdb/mnist/",
        "none stated at its home; usually given as CC BY-SA 3.0",
        *_idx(
            "MNIST",
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    "fashion_mnist": Listing(
        "grey 28x28 pictures of clothing, 10 classes",
        "source: fashion_mnist",
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT",
        *_idx(
            "FashionMNIST",
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    "emnist": Listing(
        "grey 28x28 letters and digits; 62, 47, 47, 26, 10, 10 classes",
        "source: emnist, split: balanced",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        "none stated; published by NIST",
        tuple(
            Part(tuple(f"EMNIST/raw/emnist-{split}-{part}-{kind}-ubyte{end}" for end in (".gz", "")))
            for split in EMNIST_SPLITS
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ),
        _archive(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", "EMNIST/raw"
        ),
    ),
    "cifar10": Listing(
        "colour 32x32 pictures, 10 classes",
        "source: cifar10",
        f"{CIFAR_HOME}/cifar.html",
        "none stated; cite the report",
        _files(
            "cifar-10-batches-py",
            "data_batch_1 data_batch_2 data_batch_3 data_batch_4 data_batch_5 test_batch batches.meta",
        ),
        _archive(f"{CIFAR_HOME}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"),
    ),
    "cifar100": Listing(
        "colour 32x32 pictures, 100 classes",
        "source: cifar100",
        f"{CIFAR_HOME}/cifar.html",
        "none stated; cite the report",
        _files("cifar-100-python", "train test meta"),
        _archive(f"{CIFAR_HOME}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"),
    ),
    "svhn": Listing(
        "colour 32x32 house numbers, 10 classes",
        "source: svhn",
        SVHN_HOME,
        "for non-commercial use",
        tuple(Part((f"SVHN/{file}", file)) for file in SVHN),
        tuple(Download((f"{SVHN_HOME}{file}",), f"SVHN/{file}", md5) for file, md5 in SVHN.items()),
    ),
    "stl10": Listing(
        "colour 96x96 pictures, 10 classes (its 100,000 without labels are not read)",
        "source: stl10",
        "https://cs.stanford.edu/~acoates/stl10/",
        "none stated; the pictures are ImageNet's",
        _files("stl10_binary", "train_X.bin train_y.bin test_X.bin test_y.bin"),
        _archive(
            "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
            "91f7769df0f17e558f3565bffb0c7dfb",
            "stl10_binary",
        ),
    ),
    "cinic10": Listing(
        "colour 32x32 pictures of CIFAR-10's 10 classes, from CIFAR-10 and ImageNet",
        "source: cinic10",
        "https://datashare.ed.ac.uk/handle/10283/3192",
        "CC BY 4.0",
        tuple(Part((f"CINIC-10/{part}",), 90_000) for part in ("train", "valid", "test")),
        _archive(
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            "6ee4d0c996905fe93221de577967a372",
            "CINIC-10",
        ),
    ),
    "tiny_imagenet": Listing(
        "colour 64x64 pictures, 200 classes (its val part is the test part; test has no labels)",
        "source: tiny_imagenet",
        "http://cs231n.stanford.edu/",
        "none stated; ImageNet's terms of access: research, not commercial",
        (
            *_files("tiny-imagenet-200", "wnids.txt val/val_annotations.txt"),
            Part(("tiny-imagenet-200/train",), 100_200),  # each class has a file of boxes, too
            Part(("tiny-imagenet-200/val/images",), 10_000),
        ),
        _archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", "tiny-imagenet-200"
        ),
    ),
}


# ---- MedMNIST v2 and MedMNIST+, as in medmnist/info.py, version 3.0.2 ----
class MedMNIST(NamedTuple):
    """One set of MedMNIST. md5: by the sizes of SIZES."""

    classes: int
    channels: int
    samples: tuple[int, int, int]  # training, validation, test
    md5: tuple[str, ...]


SIZES = (28, 64, 128, 224)
# name, classes, channels, samples (training, validation, test), MD5 of the files for 28, 64, 128, 224 pixels
_ROWS = """
pathmnist       9 3   89996  10004   7180  a8b06965200029087d5bd730944a56c1 55aa9c1e0525abe5a6b9d8343a507616
                                         ac42d08fb904d92c244187169d1fd1d9 2c51a510bcdc9cf8ddb2af93af1eadec
chestmnist     14 1   78468  11219  22433  02c8a6516a18b556561a56cbdd36c4a8 9de6cd0b934ebb5b7426cfba5efbae16
                                         db107e5590b27930b62dbaf558aebee3 45bd33e6f06c3e8cdb481c74a89152aa
dermamnist      7 3    7007   1003   2005  0744692d530f8e62ec473284d019b0c7 b70a2f5635c6199aeaa28c31d7202e1f
                                         2defd784463fa5243564e855ed717de1 8974907d8e169bef5f5b96bc506ae45d
octmnist        4 1   97477  10832   1000  c68d92d5b585d8d81f7112f81e2d0842 e229e9440236b774d9f0dfef9d07bdaf
                                         0a97e76651ace45c5d943ee3f65b63ae abc493b6d529d5de7569faaef2773ba3
pneumoniamnist  2 1    4708    524    624  28209eda62fecd6e6a2d98b1501bb15f 8f4eceb4ccffa70c672198ea285246c6
                                         05b46931834c231683c68f40c47b2971 d6a3c71de1b945ea11211b03746c1fe1
retinamnist     5 3    1080    120    400  bd4c0672f1bba3e3a89f0e4e876791e4 afda852cc34dcda56f86ad2b2457dbcc
                                         e48e916a24454daf90583d4e6efb1a18 eae7e3b6f3fcbda4ae613ebdcbe35348
breastmnist     2 1     546     78    156  750601b1f35ba3300ea97c75c52ff8f6 742edef2a1fd1524b2efff4bd7ba9364
                                         363e4b3f8d712e9b5de15470a2aaadf1 b56378a6eefa9fed602bb16d192d4c8b
bloodmnist      8 3   11959   1712   3421  7053d0359d879ad8a5505303e11de1dc 2b94928a2ae4916078ca51e05b6b800b
                                         adace1e0ed228fccda1f39692059dd4c b718ff6835fcbdb22ba9eacccd7b2601
tissuemnist     8 1  165466  23640  47280  ebe78ee8b05294063de985d821c1c34b 123ece2eba09d0aa5d698fda57103344
                                         61b955355d7425a89687b06cca3ce0c2 b077128c4a949f0a4eb01517f9037b9c
organamnist    11 1   34561   6491  17778  68e3f8846a6bd62f0c9bf841c0d9eacc 2dcccc29b88e6da5a01161ef20cda288
                                         eeae80d0a227a8d099027e1b3cfd3b60 50747347e05c87dd3aaf92c49f9f3170
organcmnist    11 1   12975   2392   8216  b9ceb9546e10131b32923c5bbeaea2b1 3ce34a8724ea6f548e6db4744d03b6a9
                                         773c1f009daa3fe5d9a2a201b2a7ed94 050f5e875dc056f6768abf94ec9995d1
organsmnist    11 1   13932   2452   8827  9ab87b696fb54e2a387ebe992d6ed5f1 53a6d115339d874c25e309a994ff46d3
                                         ded0c5fa01a95dc4978b956f613e9b8e b354719e553fbbb2513d5533f52a4cb1
"""


def _medmnist_table() -> dict[str, MedMNIST]:
    cells, table = _ROWS.split(), {}
    for start in range(0, len(cells), 10):
        name, classes, channels, *samples = cells[start : start + 6]
        training, validation, test = map(int, samples)
        md5 = tuple(cells[start + 6 : start + 10])
        table[name] = MedMNIST(int(classes), int(channels), (training, validation, test), md5)
    return table


MEDMNIST = _medmnist_table()


def medmnist_file(name: str, size: int) -> str:
    """`pathmnist` and 28 -> pathmnist; other sizes: pathmnist_64."""
    return name if size == SIZES[0] else f"{name}_{size}"


def _medmnist(name: str, size: int, md5: str) -> Listing:
    row, file = MEDMNIST[name], f"{medmnist_file(name, size)}.npz"
    labels = "labels a picture" if name == "chestmnist" else "classes"
    url = f"https://zenodo.org/records/10519652/files/{file}?download=1"
    return Listing(
        f"{'colour' if row.channels == 3 else 'grey'} {size}x{size} medical pictures, {row.classes} {labels}",
        f"source: medmnist, set: {name}" + ("" if size == SIZES[0] else f", size: {size}"),
        "https://medmnist.com/",
        "CC BY-NC 4.0" if name == "dermamnist" else "CC BY 4.0",
        (Part((f"medmnist/{file}", file)),),
        (Download((url,), f"medmnist/{file}", md5),),
    )


MEDMNIST_SETS = {
    medmnist_file(name, size): _medmnist(name, size, md5)
    for name, row in MEDMNIST.items()
    for size, md5 in zip(SIZES, row.md5, strict=True)
}


# ---- data sets that lie behind an account, a click or terms to be accepted ----
SSL_FL = "https://github.com/rui-yan/SSL-FL/tree/main/data"
COVID_SITES = (
    *("bimcv", "cohen", "eurorad", "gz", "ml-workgroup", "ricord_c"),
    *("rsna-0", "rsna-1", "rsna-2", "rsna-3", "rsna-4", "sirm"),
)
PACS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
PACS_FOLDERS = ("PACS", "PACS/kfold", "pacs/images", "pacs/images/kfold", "kfold")
HOME_FOLDERS = ("OfficeHomeDataset_10072016", "office_home", "OfficeHome")
HOME = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}
HAM_FOLDERS = ("HAM10000", "ham10000")
HAM_TABLES = ("HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")

BY_HAND: dict[str, Listing] = {
    "pacs": Listing(
        "colour 227x227 pictures of four styles, which are the sites; 7 classes",
        "source: pacs, partition: {scheme: site}",
        "https://dali-dl.github.io/project_iccv2017.html",
        "none stated",
        tuple(Part(tuple(f"{at}/{name}" for at in PACS_FOLDERS), n) for name, n in PACS.items()),
        by_hand="Google Drive asks for a click: take PACS.zip from its home (or where DomainBed and Dassl.pytorch "
        "link to) and unpack it, so that PACS/art_painting, PACS/cartoon, PACS/photo and PACS/sketch hold a folder for "
        "each class.",
    ),
    "office_home": Listing(
        "colour pictures of four styles, which are the sites; 65 classes",
        "source: office_home, partition: {scheme: site}",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "for research, not commercial",
        tuple(Part(tuple(f"{at}/{name}" for at in HOME_FOLDERS), n) for name, n in HOME.items()),
        by_hand="Google Drive asks for a click: take OfficeHomeDataset_10072016.zip from its home and unpack "
        "it, so that OfficeHomeDataset_10072016/ holds Art, Clipart, Product and Real World.",
    ),
    "ham10000": Listing(
        "colour 600x450 pictures of skin lesions, 7 classes, of four sources, which are the sites",
        "source: ham10000, partition: {scheme: site}",
        "https://doi.org/10.7910/DVN/DBW86T",
        "CC BY-NC 4.0; terms to be accepted at its home",
        (Part(tuple(f"{at}/{file}" for at in HAM_FOLDERS for file in HAM_TABLES)), Part(HAM_FOLDERS)),
        by_hand="Harvard Dataverse asks to accept its terms: take HAM10000_metadata (a CSV with the column `dataset`, "
        "which Kaggle's copy lacks), HAM10000_images_part_1.zip and _part_2.zip, and unpack them to HAM10000/.",
    ),
    "retina": Listing(
        "colour 256x256 fundus pictures, 2 classes, divided among 5 clients in three ways",
        "source: retina, split: split_1, partition: {scheme: site}",
        SSL_FL,
        "that of Kaggle's Diabetic Retinopathy Detection",
        _files("Retina", "labels.csv test.csv train test 5_clients/split_1 5_clients/split_2 5_clients/split_3"),
        by_hand="Google Drive asks for a click: take Retina from the table at its home and unpack it to Retina/.",
    ),
    "covid_fl": Listing(
        "chest X-ray pictures, 3 classes, of twelve sites",
        "source: covid_fl, partition: {scheme: site}",
        SSL_FL,
        "those of its sources: BIMCV, Cohen, Eurorad, GZ, ml-workgroup, RICORD, RSNA, SIRM",
        (
            *_files("COVID-FL", "labels.csv test.csv train test"),
            *(Part((f"COVID-FL/12_clients/split_real/{site}.csv",)) for site in COVID_SITES),
        ),
        by_hand="Google Drive asks for a click: take COVID-FL from the table at its home and unpack it to COVID-FL/.",
    ),
}

SETS: dict[str, Listing] = PUBLIC | MEDMNIST_SETS | BY_HAND
