"""Data sets that anybody may download. MD5s are those that torchvision checks, where it has the set; CINIC-10's and
Tiny-ImageNet's are those that several public loaders check."""

from __future__ import annotations

from fedmpi.data.fetching.listing import Download, Listing, Part, one


def _parts(folder: str, sums: dict[str, str]) -> tuple[Part, ...]:
    """MNIST's four files: gzipped as they come, or unpacked."""
    raw = f"{folder}/raw"
    return tuple(one(f"{raw}/{name}", md5, f"{raw}/{name.removesuffix('.gz')}") for name, md5 in sums.items())


def _downloads(folder: str, mirrors: tuple[str, ...], sums: dict[str, str]) -> tuple[Download, ...]:
    return tuple(
        Download(tuple(f"{mirror}{name}" for mirror in mirrors), f"{folder}/raw/{name}", md5)
        for name, md5 in sums.items()
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

SETS: dict[str, Listing] = {
    "mnist": Listing(
        "60,000 + 10,000",
        "grey 28x28 handwritten digits, 10 classes",
        12,
        "source: mnist",
        "http://yann.lecun.com/exdb/mnist/",
        "none stated at its home; usually given as CC BY-SA 3.0",
        "LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. Proc. IEEE 1998",
        parts=_parts("MNIST", MNIST_SUMS),
        downloads=_downloads("MNIST", MNIST, MNIST_SUMS),
    ),
    "fashion_mnist": Listing(
        "60,000 + 10,000",
        "grey 28x28 pictures of clothing, 10 classes",
        31,
        "source: fashion_mnist",
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT",
        "Xiao, Rasul, Vollgraf: Fashion-MNIST. 2017, arXiv 1708.07747",
        parts=_parts("FashionMNIST", FASHION_SUMS),
        downloads=_downloads("FashionMNIST", FASHION, FASHION_SUMS),
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
        downloads=(
            Download(
                ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
                "EMNIST/gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                "EMNIST/raw",
            ),
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
        parts=tuple(
            one(f"cifar-10-batches-py/{name}", md5)
            for name, md5 in (
                ("data_batch_1", "c99cafc152244af753f735de768cd75f"),
                ("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
                ("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
                ("data_batch_4", "634d18415352ddfa80567beed471001a"),
                ("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
                ("test_batch", "40351d587109b95175f43aff81a1287e"),
                ("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
            )
        ),
        downloads=(
            Download(
                ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
                "cifar-10-python.tar.gz",
                "c58f30108f718f92721af3b95e74349a",
                "cifar-10-batches-py",
            ),
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
        parts=tuple(
            one(f"cifar-100-python/{name}", md5)
            for name, md5 in (
                ("train", "16019d7e3df5f24257cddd939b257f8d"),
                ("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
                ("meta", "7973b15100ade9c7d40fb424638fde48"),
            )
        ),
        downloads=(
            Download(
                ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
                "cifar-100-python.tar.gz",
                "eb9058c3a382ffc7106e4002c42a8d85",
                "cifar-100-python",
            ),
        ),
    ),
    **{
        name: Listing(
            samples,
            f"colour 32x32 house numbers, 10 classes{more}",
            megabytes,
            config,
            "http://ufldl.stanford.edu/housenumbers/",
            "for non-commercial use",
            "Netzer, Wang, Coates, Bissacco, Wu, Ng: Reading digits in natural images. 2011",
            parts=tuple(one(f"SVHN/{file}", md5, file) for file, md5 in files.items()),
            downloads=tuple(
                Download((f"http://ufldl.stanford.edu/housenumbers/{file}",), f"SVHN/{file}", md5)
                for file, md5 in files.items()
            ),
        )
        for name, samples, more, megabytes, config, files in (
            (
                "svhn",
                "73,257 + 26,032",
                "",
                246,
                "source: svhn",
                {
                    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
                    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
                },
            ),
            (
                "svhn_extra",
                "531,131 more for training",
                " (the easier ones)",
                1329,
                "source: svhn, extra: true",
                {"extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7"},
            ),
        )
    },
    "stl10": Listing(
        "5,000 + 8,000",
        "colour 96x96 pictures, 10 classes (its 100,000 without labels are not read)",
        2640,
        "source: stl10",
        "https://cs.stanford.edu/~acoates/stl10/",
        "none stated; the pictures are ImageNet's",
        "Coates, Lee, Ng: An analysis of single-layer networks in unsupervised feature learning. AISTATS 2011",
        parts=tuple(
            one(f"stl10_binary/{name}", md5)
            for name, md5 in (
                ("train_X.bin", "918c2871b30a85fa023e0c44e0bee87f"),
                ("train_y.bin", "5a34089d4802c674881badbb80307741"),
                ("test_X.bin", "7f263ba9f9e0b06b93213547f721ac82"),
                ("test_y.bin", "36f9794fa4beb8a2c72628de14fa638e"),
            )
        ),
        downloads=(
            Download(
                ("http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",),
                "stl10_binary.tar.gz",
                "91f7769df0f17e558f3565bffb0c7dfb",
                "stl10_binary",
            ),
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
        downloads=(
            Download(
                (
                    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                    "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                ),
                "CINIC-10.tar.gz",
                "6ee4d0c996905fe93221de577967a372",
                "CINIC-10",
            ),
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
        downloads=(
            Download(
                ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                "tiny-imagenet-200.zip",
                "90528d7ca1a48142e341f4ef8d21d0de",
                "tiny-imagenet-200",
            ),
        ),
    ),
}
