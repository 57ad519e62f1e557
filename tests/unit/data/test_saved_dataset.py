"""The source `saved_dataset`: folders as `save_to_disk` of Hugging Face's datasets writes them."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.data.sources.images.class_images import csv_images
from fedmpi.data.sources.tables.saved_dataset import saved_dataset

arrow = pytest.importorskip("pyarrow")
RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 4096, (8, 5, 6)).astype(np.uint16)  # of 12 bits
GREY = DEEP[0].astype(np.uint8)


def save(folder, columns, names=None, files=1):
    """data-0000k-of-0000n.arrow in the streaming format, state.json and dataset_info.json."""
    folder.mkdir(parents=True, exist_ok=True)
    table = arrow.table(columns)
    entries = [{"filename": f"data-{k:05d}-of-{files:05d}.arrow"} for k in range(files)]
    for k, entry in enumerate(entries):
        begin, end = k * len(table) // files, (k + 1) * len(table) // files
        with arrow.ipc.new_stream(str(folder / entry["filename"]), table.schema) as file:
            file.write_table(table.slice(begin, end - begin))
    (folder / "state.json").write_text(json.dumps({"_data_files": entries}))
    label = {"_type": "ClassLabel", "names": names} if names else {"_type": "Value", "dtype": "int64"}
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"label": label}}))


def save_splits(folder, **splits):
    for name, columns in splits.items():
        save(folder / name, columns)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


def encoded(*pages, kind="PNG"):
    """A cell of the type Image with these pixels, one array a page."""
    file = io.BytesIO()
    images = [Image.fromarray(each) for each in pages]
    images[0].save(file, kind, **({"save_all": True, "append_images": images[1:]} if kind == "TIFF" else {}))
    return {"bytes": file.getvalue(), "path": None}


def read(root, **options):
    return saved_dataset(root, **{"path": "d", "test_fraction": 0, **options})


def test_lists_of_one_split_in_several_files(tmp_path):
    x = RNG.normal(size=(20, 3)).astype(np.float32)
    sites = ["b", "a"] * 10
    save(tmp_path / "d", {"x": list(x), "label": [k % 2 for k in range(20)], "who": sites}, ["cat", "dog"], files=3)
    data = read(tmp_path, input_column="x", site_column="who", test_fraction=0.2)
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((16, 3), (4, 3), 2)
    assert sorted(torch.cat([data.train_x, data.test_x])[:, 0].tolist()) == sorted(x[:, 0].tolist())
    assert data.site_names == ("a", "b")
    assert torch.equal(data.site, 1 - data.train_y)  # "b" has the labels 0


def test_symbols_and_nested_lists(tmp_path):
    save(tmp_path / "d", {"ids": [[1, 2, 3], [4, 5, 6]], "m": [[[1], [2]], [[3], [4]]], "label": [0.5, 1.5]})
    data = read(tmp_path, input_column="ids", symbols=True)
    assert (data.train_x.dtype, data.train_x.tolist()) == (torch.int64, [[1, 2, 3], [4, 5, 6]])
    assert (data.train_y.tolist(), data.classes) == ([0.5, 1.5], 1)
    assert read(tmp_path, input_column="m").train_x.tolist() == [[[1], [2]], [[3], [4]]]


def test_all_names_of_splits_are_recognised(tmp_path):
    names = ["train", "valid", "dev", "validation", "test", "unlabelled"]
    splits = {name: {"x": [[k + 0.0, 4.0], [7.0, 5.0]], "label": ["b", "a"]} for k, name in enumerate(names)}
    save_splits(tmp_path / "d", **splits)
    options = {"input_column": "x", "test_fraction": None}
    with pytest.warns(UserWarning, match=r"ignored splits: unlabelled; known names: train, .*dev, test"):
        data = read(tmp_path, **options)
    assert data.train_x.tolist() == [pair for k in range(4) for pair in ([k, 4], [7, 5])]
    assert (data.test_x.tolist(), data.test_y.tolist()) == ([[4, 4], [7, 5]], [1, 0])
    save_splits(tmp_path / "d", a=splits["train"], test=splits["test"])
    with pytest.raises(UserError, match="has no split 'train'; its splits: a, test"):
        read(tmp_path, **options)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"x": [[1.0, 2.0], [1.0, 2.0, 3.0]]},
            r"d, row 1: column 'x' contains 3 values, but 2 in row 0; pad or truncate",
        ),
        ({"x": [[1.0, 2.0], None]}, "row 1: column 'x' contains 0 values"),
        ({"x": [1.0, None]}, "row 1: x contains a missing or non-finite value"),
        ({"x": ["a", "b"]}, "column 'x' is string; must contain numbers, lists of numbers, or images"),
        ({"x": [1.0, 2.0], "label": [0, 2]}, r"row 1: column 'label' contains the label 2; labels must be from 0 to 1"),
        ({"x": [1.0, 2.0], "label": [0, None]}, "row 1: the cell in column 'label' is empty"),
        ({"y": [1.0, 2.0]}, r"d has no column 'x' \(data\.input_column\); .*label, y"),
        # ---- pictures
        ({"x": [encoded(GREY), encoded(GREY[:4])]}, r"row 1: .* has 6x4 pixels, but .*row 0.* has 6x5; set data\.size"),
        ({"x": [encoded(GREY), {"bytes": b"x", "path": None}]}, "row 1: column 'x' cannot be read as"),
        ({"x": [encoded(GREY), {"bytes": None, "path": None}]}, "row 1: .* contains no image; drop"),
        ({"x": [encoded(each, kind="TIFF") for each in DEEP[:2]]}, r"row 0: .*mode I;16.*set data\.pixel_range"),
        ({"x": [encoded(GREY, GREY, kind="TIFF")] * 2}, "row 0: column 'x' .* it has 2 pages or frames"),
    ],
)
def test_an_invalid_dataset_is_refused(tmp_path, columns, message):
    save(tmp_path / "d", {"label": [0, 1], **columns}, ["cat", "dog"])
    with pytest.raises(UserError, match=message):
        read(tmp_path, input_column="x")


def test_class_names_are_not_missing_values_and_large_integers_are_not_rounded(tmp_path):
    sites = [2**60, 2**60 + 1, 2**60, 2**60 + 1]
    save(tmp_path / "d", {"x": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 2, 0], "who": sites}, ["none", "favor", "NA"])
    data = read(tmp_path, input_column="x", site_column="who")
    assert data.train_y.tolist() == [0, 1, 2, 0]
    assert data.site_names == (str(2**60), str(2**60 + 1))


# ---- pictures ----
KINDS = {
    "colour": ([[each] for each in RNG.integers(0, 256, (8, 5, 6, 3), np.uint8)], {}),
    "deep": ([[each] for each in DEEP], {"pixel_range": (0, 4095)}),
    "own range": ([[each] for each in DEEP], {"pixel_range": "file", "size": 3}),
    "layers": ([[each] for each in RNG.integers(0, 256, (8, 5, 6, 4), np.uint8)], {}),
}


@pytest.mark.filterwarnings("ignore:data. pictures with transparent pixels")
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_decoded_like_those_of_other_sources(tmp_path, kind):
    images, options = KINDS[kind]
    cells = [encoded(*pages, kind="TIFF") for pages in images]
    save(tmp_path / "d", {"image": cells, "label": [0, 1] * 4})
    for k, cell in enumerate(cells):
        (tmp_path / f"{k}.tif").write_bytes(cell["bytes"])
    (tmp_path / "a.csv").write_text("path,label\n" + "".join(f"{k}.tif,{k % 2}\n" for k in range(8)))
    options = {"channels": 3 if kind in ("layers", "colour") else 1, **options}
    data = read(tmp_path, input_column="image", mean=(0.5,), std=(0.5,), test_fraction=0.2, **options)
    expected = csv_images(tmp_path, path="a.csv", **options)
    for a, b in ((data.train_x, expected.train_x), (data.test_x, expected.test_x)):
        assert torch.equal(a.all_inputs(), b.all_inputs())


def test_images_stored_as_paths(tmp_path):
    pixels = RNG.integers(0, 256, (2, 5, 6), np.uint8)
    for k, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / f"{k}.png")
    rows = [{"bytes": None, "path": str(tmp_path / "0.png")}, {"bytes": None, "path": "../1.png"}]
    save(tmp_path / "d", {"image": rows, "label": [0, 1]})
    assert np.array_equal(read(tmp_path, input_column="image", channels=1).train_x.stored.numpy()[:, 0], pixels)


# ---- nested lists ----
def nested(kind, levels):
    return nested(arrow.list_(kind), levels - 1) if levels else kind


@pytest.mark.parametrize(
    ("shape", "axes", "order"),
    [
        ((32, 32, 3), None, (0, 3, 1, 2)),  # Array3D as pictures are; it was read as 32 channels
        ((3, 32, 32), None, (0, 1, 2, 3)),
        ((8, 9, 2), "HWC", (0, 3, 1, 2)),
        ((8, 9, 2), "NWHC", (0, 3, 2, 1)),
    ],
)
def test_nested_lists_have_axes(tmp_path, shape, axes, order):
    x = RNG.integers(0, 256, (4, *shape), np.uint8)
    save(tmp_path / "d", {"x": arrow.array(x.tolist(), type=nested(arrow.uint8(), 3)), "label": [0, 1, 0, 1]})
    data = read(tmp_path, input_column="x", axes=axes)
    assert np.array_equal(data.train_x.all_inputs().numpy(), x.transpose(order) / np.float32(255))
