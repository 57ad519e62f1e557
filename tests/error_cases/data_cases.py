"""What is wrong with the files of a data set: (`data` in the config, what lies in the folder, what is said)."""

import gzip
import io
import shutil

import numpy as np
from PIL import Image

X = np.random.default_rng(0).normal(size=(40, 3))
Y = np.arange(40) % 2
NPZ = "source: npz, path: a.npz"


def _with(array, place, value):
    array = np.array(array, dtype=np.result_type(array, type(value)))
    array[place] = value
    return array


def table(more="", **arrays):
    """A table of 40 rows, with arrays put in place of its own or beside them."""
    return f"{NPZ}{more}", lambda folder: np.savez(folder / "a.npz", **{"x": X, "y": Y, **arrays})


def _put(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def _flipped():
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=X, y=Y)
    content = bytearray(buffer.getvalue())
    content[200] ^= 255
    return bytes(content)


UNREAD = r"a\.npz cannot be read as an \.npz file of numeric arrays: "

TABLES = {
    "nan": (*table(x=_with(X, (3, 1), np.nan)), r"a\.npz: x contains nan in row 3; .*correct the value or drop"),
    "beyond float32": (*table(x=_with(X, (3, 1), 1e300)), r"a\.npz: x contains inf in row 3; .*at most 3\.4e38"),
    "objects": (*table(x=np.array([None] * 40)), UNREAD + "it contains arrays of Python objects"),
    "text": (*table(y=Y.astype(str)), r"y contains text .dtype <U21, shape .*; must contain"),
    "one number a row": (*table(x=X[:, 0]), r"a\.npz: x has the shape \(40,\); must be \(n, f\) or"),
    "fewer labels": (*table(y=Y[:30]), r"x has 40 rows, y has 30 rows; the arrays must have one row"),
    "negative labels": (*table(y=Y - 1), r"a\.npz: y contains the label -1 in row 0; labels must be 0, 1"),
    "float labels": (*table(y=Y * 1.0), r"has 1 class, .*store class numbers as integers, .*survival"),
    "one class": (*table(y=Y * 0), r"the data set has 1 class, but at least 2 are needed"),
    "one-hot labels": (*table(y=np.eye(2)[Y]), r"y has the shape \(40, 2\).* one-hot rows with y\.argmax\(1\)"),
    "no test_x": (*table(test_y=Y), r"has no array 'test_x'; its arrays: x, y, test_y"),
    "a fraction beside a test part": (
        *table(", test_fraction: 0.2", test_x=X, test_y=Y),
        r"data\.test_fraction: 0\.2 has no effect, because .*a\.npz already defines the test set; remove data",
    ),
    "one path for all silos": (
        table(", silos: [a.npz, b.npz], share_ranks: true")[0],
        None,
        r"npz: data\.path: 'a\.npz' is the same file for all silos; write \{site\} in place of",
    ),
    "sites from 1": (
        *table(", partition: {scheme: site}", site=Y + 1),
        r"belong to sites \[1, 2\]; .*number the sites without gaps",
    ),
    "x twice": (*table(x_train=X), r"contains both x and x_train, which are two names"),
    "no such file": (NPZ, None, r"file .*a\.npz not found \(data\.root = .*correct data\.root or data\.path"),
    "no path": ("source: npz", None, r"npz: data\.path is not set"),
    "a directory": (NPZ, lambda folder: (folder / "a.npz").mkdir(), r"a\.npz is a directory, not a file"),
    "a damaged file": (NPZ, _put("a.npz", _flipped()), UNREAD),
}


def _idx(kind, shape, content):
    return bytes((0, 0, kind, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape) + content


def _mnist(**files):
    """8 + 8 pictures of 4 x 4 in MNIST's files; in place of one of them (train_images, ...) other bytes."""
    names = {"images": "images-idx3", "labels": "labels-idx1"}
    sound = {"images": _idx(8, (8, 4, 4), bytes(128)), "labels": _idx(8, (8,), bytes(range(8)))}

    def write(folder):
        raw = folder / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "t10k"):
            for kind, name in names.items():
                content = files.get(f"{part}_{kind}", sound[kind])
                packed = content if content[:2] == b"\x1f\x8b" else gzip.compress(content)
                (raw / f"{part}-{name}-ubyte.gz").write_bytes(packed)

    return "source: mnist", write


PACKED = gzip.compress(_idx(8, (8, 4, 4), bytes(128)))
ANEW = r"delete the file, and download it again: .*set data\.download: true"
IDX = {
    "idx: half a .gz": (*_mnist(train_images=PACKED[: len(PACKED) // 2]), rf"cannot be read: .*{ANEW}"),
    "idx: a label of 200": (
        *_mnist(train_labels=_idx(8, (8,), bytes([0] * 7 + [200]))),
        r"label 200 in row 7; .*from 0 to 9",
    ),
    "idx: fewer labels": (*_mnist(train_labels=_idx(8, (7,), bytes(7))), r"contains 7 labels for 8 images"),
    "idx: root is a file": (
        "source: mnist, download: true, root: run.yaml",
        None,
        r"data\.root: .*run\.yaml is a file; set data\.root to a writable directory",
    ),
    "cifar: another pickle": (
        "source: cifar10",
        lambda folder: (
            (folder / "cifar-10-batches-py").mkdir() or _put("cifar-10-batches-py/data_batch_1", b"x")(folder)
        ),
        r"their checksums are wrong .*set data\.download: true",
    ),
}

PATIENT = "40,1,2,120,200,0,0,150,0,1.0,1,0,3,{}\n"


def _patients(last):
    """Four hospitals of 20 patients, the last one with one more."""

    def write(folder):
        for name in ("cleveland", "hungarian", "switzerland", "va"):
            patients = "".join(PATIENT.format(i % 2) for i in range(20))
            (folder / f"processed.{name}.data").write_text(patients + last * (name == "va"))

    return "source: heart_disease", write


AT = r"processed\.va\.data, line 21: "
NEEDED = r".*must have 13 values, each a number of at most .* or \? .*, and then a diagnosis from 0 to 4"
HEART = {
    "csv: inf": (*_patients(PATIENT.replace("120", "inf").format(1)), AT + NEEDED),
}


def _pictures(change=lambda folder: None):
    def write(folder):
        for name in "ab":
            (folder / "train" / name).mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (9, 9), (i * 9, 0, 0)).save(folder / "train" / name / f"{i}.png")
        change(folder)

    return write


def _png(width, height):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def _csv(text):
    """Twelve pictures, and a CSV of `path,label,hospital`; TABLE in the text stands for its twelve rows."""

    def write(folder):
        rows = []
        for i in range(12):
            Image.new("RGB", (9, 9), (i * 9, 0, 0)).save(folder / f"{i}.png")
            rows.append(f"{i}.png,{'ab'[i % 2]},{'nm'[i // 6]}\n")
        content = text.replace("TABLE", "path,label,hospital\n" + "".join(rows))
        (folder / "a.csv").write_text(content)

    return write


CSV = "source: csv_images, path: a.csv, site_column: hospital"
TABLE_OF_FILES = {
    "csv of files: no column": (
        f"{CSV}, label_column: class",
        _csv("TABLE"),
        r"a\.csv has no column 'class' \(data\.label_column\); allowed: hospital, label, path",
    ),
    "csv of files: no picture": (
        CSV,
        _csv("TABLEz.png,a,n\n"),
        r"a\.csv, line 14: image .*z\.png not found; correct the row, or data\.root",
    ),
    "csv of files: a class that is none": (
        f"{CSV}, class_names: [a, c]",
        _csv("TABLE"),
        r"a\.csv, line 9: class 'b' in column 'label' is not one of data\.class_names \(a, c\)",
    ),
    "csv of files: a picture twice": (
        CSV,
        _csv("TABLE./3.png,a,m\n"),
        r"a\.csv, line 14: image 3\.png is already listed in .*a\.csv, line 5; remove one of the two rows",
    ),
    "csv of files: one class": (
        CSV,
        _csv("path,label,hospital\n0.png,a,n\n1.png,a,n\n"),
        r"a\.csv: column 'label' contains only one class, 'a'",
    ),
    "csv of files: a fraction beside parts": (
        f"{CSV}, split_column: part, test_fraction: 0.3",
        _csv("path,label,hospital,part\n0.png,a,n,train\n1.png,b,n,test\n"),
        r"data\.test_fraction: 0\.3 has no effect, because data\.split_column \('part'\) already defines the test set",
    ),
}


FOLDER = "source: image_folder, size: 8"
PICTURES = {
    "pictures: no train": (
        FOLDER,
        lambda folder: (folder / "test").mkdir(),
        r"contains test/, but no train/",
    ),
    "pictures: several sizes": (
        "source: image_folder",
        _pictures(_put("train/b/5.png", _png(9, 10))),
        r"b/5\.png has 9x10 pixels, but .*a/0\.png has 9x9; set data\.size",
    ),
    "pictures: another test class": (
        FOLDER,
        _pictures(lambda folder: (folder / "test" / "z").mkdir(parents=True)),
        r"test: folder 'z' is not one of the classes a, b",
    ),
    "pictures: a fraction beside a test part": (
        f"{FOLDER}, test_fraction: 0.2",
        _pictures(lambda folder: shutil.copytree(folder / "train", folder / "test")),
        r"data\.test_fraction: 0\.2 has no effect, because the folder 'test' already defines the test set",
    ),
}
