"""What is known of each data set: its files, their checksums and addresses, home, licence, reference.

MD5s are those that torchvision checks, where it has the set; CINIC-10's and Tiny-ImageNet's are those that several
public loaders check.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A file, or a folder with so many files below it, relative to data.root; any of `paths` will do."""

    paths: tuple[str, ...]
    md5: str = ""  # of the first path, where it is known
    files: int = 0  # of a folder: how many files lie below it; 0: any number


@dataclass(frozen=True)
class Download:
    """One file to fetch. `into`: it is an archive, whose content goes to that folder; it is deleted afterwards."""

    urls: tuple[str, ...]  # the first that answers is taken
    path: str  # relative to data.root
    md5: str = ""  # "" where nobody has published one
    into: str = ""

    @property
    def gives(self) -> str:
        """The file or folder under data.root that it provides."""
        return self.into or self.path


@dataclass(frozen=True)
class Listing:
    """A data set of `fedmpi data`."""

    samples: str  # "60,000 + 10,000"
    what: str  # "grey 28x28 digits, 10 classes"
    megabytes: int  # of what is fetched, about; 0 where it is not known
    config: str  # under `data:` in a config
    home: str
    licence: str
    reference: str
    parts: tuple[Part, ...]
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # what to do where there is no download: sites that ask for an account or a click


def one(path: str, md5: str = "", *also: str) -> Part:
    return Part((path, *also), md5)


def _idx_parts(folder: str, sums: dict[str, str]) -> tuple[Part, ...]:
    """MNIST's four files: gzipped as they come, or unpacked."""
    raw = f"{folder}/raw"
    return tuple(one(f"{raw}/{name}", md5, f"{raw}/{name.removesuffix('.gz')}") for name, md5 in sums.items())


def _idx_downloads(folder: str, mirrors: tuple[str, ...], sums: dict[str, str]) -> tuple[Download, ...]:
    return tuple(
        Download(tuple(f"{mirror}{name}" for mirror in mirrors), f"{folder}/raw/{name}", md5)
        for name, md5 in sums.items()
    )


def _files(folder: str, sums: dict[str, str]) -> tuple[Part, ...]:
    return tuple(one(f"{folder}/{name}", md5) for name, md5 in sums.items())


def _archive(url: str, md5: str, into: str, folder: str = "", more: tuple[str, ...] = ()) -> tuple[Download, ...]:
    """One archive, which is unpacked to the folder `into`. folder: where it is put; more: other addresses of it."""
    return (Download((url, *more), f"{folder}{url.rpartition('/')[2]}", md5, into),)


def _svhn(samples: str, more: str, megabytes: int, config: str, sums: dict[str, str]) -> Listing:
    home = "http://ufldl.stanford.edu/housenumbers/"
    return Listing(
        samples,
        f"colour 32x32 house numbers, 10 classes{more}",
        megabytes,
        config,
        home,
        "for non-commercial use",
        "Netzer, Wang, Coates, Bissacco, Wu, Ng: Reading digits in natural images. 2011",
        parts=tuple(one(f"SVHN/{file}", md5, file) for file, md5 in sums.items()),
        downloads=tuple(Download((f"{home}{file}",), f"SVHN/{file}", md5) for file, md5 in sums.items()),
    )


MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
MNIST_SUMS = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
FASHION_SUMS = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
EMNIST_SPLITS = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")
CINIC_FILES = 90_000  # of each of its three parts

PUBLIC: dict[str, Listing] = {
    "mnist": Listing(
        "60,000 + 10,000",
        "grey 28x28 handwritten digits, 10 classes",
        12,
        "source: mnist",
        "http://yann.lecun.com/exdb/mnist/",
        "none stated at its home; usually given as CC BY-SA 3.0",
        "LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. Proc. IEEE 1998",
        parts=_idx_parts("MNIST", MNIST_SUMS),
        downloads=_idx_downloads("MNIST", MNIST, MNIST_SUMS),
    ),
    "fashion_mnist": Listing(
        "60,000 + 10,000",
        "grey 28x28 pictures of clothing, 10 classes",
        31,
        "source: fashion_mnist",
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT",
        "Xiao, Rasul, Vollgraf: Fashion-MNIST. 2017, arXiv 1708.07747",
        parts=_idx_parts("FashionMNIST", FASHION_SUMS),
        downloads=_idx_downloads("FashionMNIST", FASHION, FASHION_SUMS),
    ),
    "emnist": Listing(
        "697,932 + 116,323 (byclass, bymerge); 112,800 + 18,800 (balanced); 124,800 + 20,800 (letters); "
        "240,000 + 40,000 (digits); 60,000 + 10,000 (mnist)",
        "grey 28x28 letters and digits; 62, 47, 47, 26, 10, 10 classes",
        562,
        "source: emnist, split: balanced",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        "none stated; published by NIST",
        "Cohen, Afshar, Tapson, van Schaik: EMNIST. 2017, arXiv 1702.05373",
        parts=tuple(
            Part(tuple(f"EMNIST/raw/emnist-{split}-{part}-{kind}-ubyte{end}" for end in (".gz", "")))
            for split in EMNIST_SPLITS
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ),
        downloads=_archive(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "58c8d27c78d21e728a6bc7b3cc06412e",
            "EMNIST/raw",
            "EMNIST/",
        ),
    ),
    "cifar10": Listing(
        "50,000 + 10,000",
        "colour 32x32 pictures, 10 classes",
        170,
        "source: cifar10",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "none stated; cite the report",
        "Krizhevsky: Learning multiple layers of features from tiny images. 2009",
        parts=_files(
            "cifar-10-batches-py",
            {
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
                "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
            },
        ),
        downloads=_archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-batches-py",
        ),
    ),
    "cifar100": Listing(
        "50,000 + 10,000",
        "colour 32x32 pictures, 100 classes",
        169,
        "source: cifar100",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "none stated; cite the report",
        "Krizhevsky: Learning multiple layers of features from tiny images. 2009",
        parts=_files(
            "cifar-100-python",
            {
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                "meta": "7973b15100ade9c7d40fb424638fde48",
            },
        ),
        downloads=_archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python",
        ),
    ),
    "svhn": _svhn(
        "73,257 + 26,032",
        "",
        246,
        "source: svhn",
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
    ),
    "svhn_extra": _svhn(
        "531,131 more for training",
        " (the easier ones)",
        1329,
        "source: svhn, extra: true",
        {"extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7"},
    ),
    "stl10": Listing(
        "5,000 + 8,000",
        "colour 96x96 pictures, 10 classes (its 100,000 without labels are not read)",
        2640,
        "source: stl10",
        "https://cs.stanford.edu/~acoates/stl10/",
        "none stated; the pictures are ImageNet's",
        "Coates, Lee, Ng: An analysis of single-layer networks in unsupervised feature learning. AISTATS 2011",
        parts=_files(
            "stl10_binary",
            {
                "train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
                "train_y.bin": "5a34089d4802c674881badbb80307741",
                "test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
                "test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
            },
        ),
        downloads=_archive(
            "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
            "91f7769df0f17e558f3565bffb0c7dfb",
            "stl10_binary",
        ),
    ),
    "cinic10": Listing(
        "90,000 + 90,000 (valid) + 90,000",
        "colour 32x32 pictures of CIFAR-10's 10 classes, from CIFAR-10 and ImageNet",
        688,
        "source: cinic10",
        "https://datashare.ed.ac.uk/handle/10283/3192",
        "CC BY 4.0",
        "Darlow, Crowley, Antoniou, Storkey: CINIC-10 is not ImageNet or CIFAR-10. 2018, arXiv 1810.03505",
        parts=tuple(Part((f"CINIC-10/{part}",), files=CINIC_FILES) for part in ("train", "valid", "test")),
        downloads=_archive(
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            "6ee4d0c996905fe93221de577967a372",
            "CINIC-10",
            more=("https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",),
        ),
    ),
    "tiny_imagenet": Listing(
        "100,000 + 10,000",
        "colour 64x64 pictures, 200 classes (its val part is the test part; test has no labels)",
        248,
        "source: tiny_imagenet",
        "http://cs231n.stanford.edu/",
        "none stated; ImageNet's terms of access: research, not commercial",
        "Le, Yang: Tiny ImageNet visual recognition challenge. CS 231N, Stanford 2015",
        parts=(
            one("tiny-imagenet-200/wnids.txt"),
            one("tiny-imagenet-200/val/val_annotations.txt"),
            Part(("tiny-imagenet-200/train",), files=100_200),  # each class has a file of boxes, too
            Part(("tiny-imagenet-200/val/images",), files=10_000),
        ),
        downloads=_archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", "tiny-imagenet-200"
        ),
    ),
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
        "9,991: " + ", ".join(f"{name} {n:,}" for name, n in PACS.items()),
        "colour 227x227 pictures of four styles, which are the sites; 7 classes",
        0,
        "source: pacs, partition: {scheme: site}",
        "https://dali-dl.github.io/project_iccv2017.html",
        "none stated",
        "Li, Yang, Song, Hospedales: Deeper, broader and artier domain generalization. ICCV 2017",
        parts=tuple(Part(tuple(f"{at}/{name}" for at in PACS_FOLDERS), files=n) for name, n in PACS.items()),
        by_hand="Google Drive asks for a click: take PACS.zip from its home (or where DomainBed and Dassl.pytorch "
        "link to) and unpack it, so that PACS/art_painting, PACS/cartoon, PACS/photo and PACS/sketch hold a folder for "
        "each class. For `split: files` put the authors' *_kfold.txt beside the four folders, or into splits/ beside "
        "images/.",
    ),
    "office_home": Listing(
        "15,588: " + ", ".join(f"{name} {n:,}" for name, n in HOME.items()),
        "colour pictures of four styles, which are the sites; 65 classes",
        0,
        "source: office_home, partition: {scheme: site}",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "for research, not commercial",
        "Venkateswara, Eusebio, Chakraborty, Panchanathan: Deep hashing network for unsupervised domain adaptation. "
        "CVPR 2017",
        parts=tuple(Part(tuple(f"{at}/{name}" for at in HOME_FOLDERS), files=n) for name, n in HOME.items()),
        by_hand="Google Drive asks for a click: take OfficeHomeDataset_10072016.zip from its home and unpack "
        "it, so that OfficeHomeDataset_10072016/ holds Art, Clipart, Product and Real World.",
    ),
    "ham10000": Listing(
        "10,015",
        "colour 600x450 pictures of skin lesions, 7 classes, of four sources, which are the sites",
        0,
        "source: ham10000, partition: {scheme: site}",
        "https://doi.org/10.7910/DVN/DBW86T",
        "CC BY-NC 4.0; terms to be accepted at its home",
        "Tschandl, Rosendahl, Kittler: The HAM10000 dataset. Scientific Data 2018",
        parts=(
            Part(
                tuple(f"{at}/{file}" for at in HAM_FOLDERS for file in ("HAM10000_metadata.csv", "HAM10000_metadata"))
            ),
            Part(tuple(HAM_FOLDERS)),
        ),
        by_hand="Harvard Dataverse asks to accept its terms: take HAM10000_metadata (a CSV with the column `dataset`, "
        "which Kaggle's copy lacks), HAM10000_images_part_1.zip and _part_2.zip, and unpack them to HAM10000/.",
    ),
    "retina": Listing(
        "what its train.csv and test.csv name",
        "colour 256x256 fundus pictures, 2 classes, divided among 5 clients in three ways",
        0,
        "source: retina, split: split_1, partition: {scheme: site}",
        SSL_FL,
        "that of Kaggle's Diabetic Retinopathy Detection",
        "Yan, Qu, Wei, Huang, Shen, Rubin, Xing, Zhou: Label-efficient self-supervised federated learning for tackling "
        "data heterogeneity in medical imaging. IEEE TMI 2023",
        parts=(
            *(one(f"Retina/{file}") for file in ("labels.csv", "test.csv", "train", "test")),
            *(one(f"Retina/5_clients/{split}") for split in ("split_1", "split_2", "split_3")),
        ),
        by_hand="Google Drive asks for a click: take Retina from the table at its home and unpack it to Retina/.",
    ),
    "covid_fl": Listing(
        "what its train.csv and test.csv name",
        "chest X-ray pictures, 3 classes, of twelve sites",
        0,
        "source: covid_fl, partition: {scheme: site}",
        SSL_FL,
        "those of its sources: BIMCV, Cohen, Eurorad, GZ, ml-workgroup, RICORD, RSNA, SIRM",
        "Yan, Qu, Wei, Huang, Shen, Rubin, Xing, Zhou: Label-efficient self-supervised federated learning for tackling "
        "data heterogeneity in medical imaging. IEEE TMI 2023",
        parts=(
            *(one(f"COVID-FL/{file}") for file in ("labels.csv", "test.csv", "train", "test")),
            *(one(f"COVID-FL/12_clients/split_real/{site}.csv") for site in COVID_SITES),
        ),
        by_hand="Google Drive asks for a click: take COVID-FL from the table at its home and unpack it to COVID-FL/.",
    ),
}
