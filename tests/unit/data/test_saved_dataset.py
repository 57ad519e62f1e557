"""The source `saved_dataset`: folders as `save_to_disk` of Hugging Face's datasets writes them."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.data.sources.pictures.csv_images import csv_images
from fedmpi.data.sources.tables.saved_dataset import saved_dataset

arrow = pytest.importorskip("pyarrow")
RNG = np.random.default_rng(0)


def save(folder, columns, names=None, files=1):
    """data-0000k-of-0000n.arrow in the streaming format, state.json and dataset_info.json."""
    folder.mkdir(parents=True, exist_ok=True)
    table = arrow.table(columns)
    said = [f"data-{k:05d}-of-{files:05d}.arrow" for k in range(files)]
    for k, name in enumerate(said):
        rows = range(k * len(table) // files, (k + 1) * len(table) // files)
        part = table.slice(rows.start, len(rows))
        with arrow.ipc.new_stream(str(folder / name), table.schema) as file:
            file.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in said]}))
    label = {"_type": "ClassLabel", "names": names} if names else {"_type": "Value", "dtype": "int64"}
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"label": label}}))


def test_lists_of_one_split_in_several_files(tmp_path):
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    sites = ["b", "a"] * 10
    save(tmp_path / "d", {"x": list(x), "label": [k % 2 for k in range(20)], "who": sites}, ["cat", "dog"], files=3)
    data = saved_dataset(tmp_path, path="d", input_column="x", site_column="who", test_fraction=0.2)
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((16, 3), (4, 3), 2)
    assert sorted(torch.cat([data.train_x, data.test_x])[:, 0].tolist()) == sorted(x[:, 0].tolist())
    assert data.site_names == ("a", "b")
    assert torch.equal(data.site, 1 - data.train_y)  # "b" has the labels 0


def test_splits_and_columns_side_by_side(tmp_path):
    columns = {"a": [1.0, 2.0, 3.0], "b": [4, 5, 6], "label": ["x", "y", "x"]}
    for name in ("train", "validation", "test"):
        save(tmp_path / "d" / name, columns)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    data = saved_dataset(tmp_path, path="d", input_column=["a", "b"])
    assert data.train_x.tolist() == [[1, 4], [2, 5], [3, 6]] * 2
    assert data.test_y.tolist() == [0, 1, 0]


def picture(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def test_pictures(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), np.uint8)
    save(tmp_path / "d", {"image": [picture(p) for p in pixels], "label": [0, 1, 0, 1]})
    data = saved_dataset(tmp_path, path="d", input_column="image", test_fraction=0)
    assert torch.equal(data.train_x.floats(), torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(255)))
    rows = [picture(p) for p in (pixels[0], pixels[1][:4])]
    save(tmp_path / "d", {"image": rows, "label": [0, 1]})
    with pytest.raises(UserError, match=r"row 1: column 'image' is 6x4, picture 0 is 6x5: give data\.size"):
        saved_dataset(tmp_path, path="d", input_column="image")
    save(tmp_path / "d", {"image": [picture(pixels[0]), {"bytes": b"x", "path": None}], "label": [0, 1]})
    with pytest.raises(UserError, match="row 1: column 'image' cannot be read as a picture"):
        saved_dataset(tmp_path, path="d", input_column="image")


def test_symbols_and_nested_lists(tmp_path):
    save(tmp_path / "d", {"ids": [[1, 2, 3], [4, 5, 6]], "m": [[[1], [2]], [[3], [4]]], "label": [0.5, 1.5]})
    data = saved_dataset(tmp_path, path="d", input_column="ids", symbols=True, test_fraction=0)
    assert (data.train_x.dtype, data.train_x.tolist()) == (torch.int64, [[1, 2, 3], [4, 5, 6]])
    assert (data.train_y.tolist(), data.classes) == ([0.5, 1.5], 1)
    nested = saved_dataset(tmp_path, path="d", input_column="m", test_fraction=0)
    assert nested.train_x.tolist() == [[[1], [2]], [[3], [4]]]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": [[1.0, 2.0], [1.0, 2.0, 3.0]]}, r"d, row 1: column 'x' holds 3 values, 2 in row 0: pad or cut"),
        ({"x": [[1.0, 2.0], None]}, "row 1: column 'x' holds 0 values"),
        ({"x": [1.0, None]}, "row 1: x holds a value that is not finite, or nothing"),
        ({"x": ["a", "b"]}, "column 'x' is string; numbers, lists of them, or pictures"),
        ({"x": [1.0, 2.0], "label": [0, 2]}, r"row 1: column 'label' holds the label 2; 0\.\.1 are allowed"),
        ({"x": [1.0, 2.0], "label": [0, None]}, "row 1: column 'label' is empty"),
        ({"y": [1.0, 2.0]}, r"d has no column 'x' \(data\.input_column\); .*label, y"),
    ],
)
def test_refused(tmp_path, columns, words):
    save(tmp_path / "d", {"label": [0, 1], **columns}, ["cat", "dog"])
    with pytest.raises(UserError, match=words):
        saved_dataset(tmp_path, path="d", input_column="x")


def test_missing_and_damaged_files(tmp_path):
    save(tmp_path / "d", {"x": [1.0, 2.0], "label": [0, 1]}, files=2)
    last, state = tmp_path / "d" / "data-00001-of-00002.arrow", tmp_path / "d" / "state.json"
    for damage, says in (
        (lambda: last.write_bytes(b"no arrow"), "its arrow files cannot be read"),
        (last.unlink, r"data-00001-of-00002\.arrow is not there; save it anew"),
        (lambda: state.write_text("{"), r"state\.json cannot be read"),
    ):
        damage()
        with pytest.raises(UserError, match=says):
            saved_dataset(tmp_path, path="d", input_column="x")


def test_class_names_are_no_gaps_and_large_integers_stay_apart(tmp_path):
    sites = [2**60, 2**60 + 1, 2**60, 2**60 + 1]
    columns = {"x": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 2, 0], "who": sites}
    save(tmp_path / "d", columns, ["none", "favor", "NA"])
    data = saved_dataset(tmp_path, path="d", input_column="x", site_column="who", test_fraction=0)
    assert data.train_y.tolist() == [0, 1, 2, 0]
    assert data.site_names == (str(2**60), str(2**60 + 1))


def tiff(images):
    file = io.BytesIO()
    images[0].save(file, "TIFF", save_all=True, append_images=images[1:])
    return file.getvalue()


DEEP = RNG.integers(0, 4096, (8, 5, 6)).astype(np.uint16)  # of 12 bits
KINDS = {
    "deep": ([[Image.fromarray(each)] for each in DEEP], {"pixel_range": (0, 4095)}),
    "own range": ([[Image.fromarray(each)] for each in DEEP], {"pixel_range": "file", "size": 3}),
    "layers": ([[Image.fromarray(each)] for each in RNG.integers(0, 256, (8, 5, 6, 4), np.uint8)], {}),
    "pages": (
        [list(map(Image.fromarray, each)) for each in RNG.integers(0, 256, (8, 2, 5, 6), np.uint8)],
        {"pages": "channels"},
    ),
}


@pytest.mark.filterwarnings("ignore:data. pictures with transparent pixels")
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_decoded_as_those_of_other_sources(tmp_path, kind):
    images, options = KINDS[kind]
    content = [tiff(each) for each in images]
    save(tmp_path / "d", {"image": [{"bytes": each, "path": None} for each in content], "label": [0, 1] * 4})
    for k, each in enumerate(content):
        (tmp_path / f"{k}.tif").write_bytes(each)
    (tmp_path / "a.csv").write_text("path,label\n" + "".join(f"{k}.tif,{k % 2}\n" for k in range(8)))
    found = saved_dataset(tmp_path, path="d", input_column="image", mean=(0.5,), std=(0.5,), **options)
    channels = 3 if kind == "layers" else 1  # as the first picture
    expected = csv_images(tmp_path, path="a.csv", channels=channels, **options)
    for a, b in ((found.train_x, expected.train_x), (found.test_x, expected.test_x)):
        assert torch.equal(a.floats(), b.floats())


def test_pictures_that_need_an_option_say_so(tmp_path):
    """Those of the mode I;16 were white."""
    for kind, says in (("deep", r"mode I;16, .*say data\.pixel_range"), ("pages", "it has 2 pages or frames")):
        rows = [{"bytes": tiff(each), "path": None} for each in KINDS[kind][0]]
        save(tmp_path / "d", {"image": rows, "label": [0, 1] * 4})
        with pytest.raises(UserError, match=rf"d, row 0: column 'image' cannot be read.* {says}"):
            saved_dataset(tmp_path, path="d", input_column="image")
    save(
        tmp_path / "d",
        {"image": [{"bytes": tiff([Image.fromarray(each)]), "path": None} for each in DEEP], "label": [0, 1] * 4},
    )
    x = saved_dataset(tmp_path, path="d", input_column="image", pixel_range=(0, 4095), test_fraction=0).train_x
    assert np.array_equal(x.floats().numpy()[:, 0], (DEEP / 4095).astype(np.float32))


def test_pictures_that_are_named_only(tmp_path):
    pixels = RNG.integers(0, 256, (2, 5, 6), np.uint8)
    for k, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / f"{k}.png")
    rows = [{"bytes": None, "path": str(tmp_path / "0.png")}, {"bytes": None, "path": "../1.png"}]
    save(tmp_path / "d", {"image": rows, "label": [0, 1]})
    data = saved_dataset(tmp_path, path="d", input_column="image", test_fraction=0)
    assert np.array_equal(data.train_x.stored.numpy()[:, 0], pixels)
    save(tmp_path / "d", {"image": [rows[0], {"bytes": None, "path": None}], "label": [0, 1]})
    with pytest.raises(UserError, match="row 1: column 'image' holds no picture; drop the row"):
        saved_dataset(tmp_path, path="d", input_column="image")


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
    said = {"axes": axes} if axes else {}
    data = saved_dataset(tmp_path, path="d", input_column="x", test_fraction=0, **said)
    assert data.train_x.shape == x.transpose(order).shape
    assert np.array_equal(data.train_x.floats().numpy(), x.transpose(order) / np.float32(255))


def test_guessed_axes_are_told(tmp_path):
    x = RNG.normal(size=(4, 8, 9, 2))
    save(tmp_path / "d", {"x": arrow.array(x.tolist()), "label": [0, 1, 0, 1]})
    with pytest.warns(UserWarning, match=r"x has the shape \(4, 8, 9, 2\), which is read as NHWC, 2 channels of 8 x 9"):
        data = saved_dataset(tmp_path, path="d", input_column="x", test_fraction=0)
    assert np.array_equal(data.train_x.numpy(), x.transpose(0, 3, 1, 2).astype(np.float32))


def test_validation_splits_by_all_their_names(tmp_path):
    names = ["train", "valid", "dev", "validation", "test", "unlabelled"]
    for k, name in enumerate(names):
        save(tmp_path / "d" / name, {"x": [k + 0.0], "label": ["b", "a"][k % 2 : k % 2 + 1]})
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    with pytest.warns(UserWarning, match=r"not read: the split unlabelled of .*; parts are named train, .*dev, test"):
        data = saved_dataset(tmp_path, path="d", input_column="x")
    assert (data.train_x.tolist(), data.test_x.tolist()) == ([[0], [1], [2], [3]], [[4]])
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["dev", "train", "test"]}))
    save(tmp_path / "d" / "train", {"x": [0.0, 7.0], "label": ["a", "b"]})
    data = saved_dataset(tmp_path, path="d", input_column="x", val="leave")
    assert (data.train_x.tolist(), data.test_x.tolist()) == ([[0], [7]], [[4]])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["a", "test"]}')
    with pytest.raises(UserError, match="has no split 'train', but a, test"):
        saved_dataset(tmp_path, path="d", input_column="x")


@pytest.mark.parametrize(
    ("column", "key", "value"),
    [
        ("image", "axes", "HWC"),
        ("image", "symbols", True),
        ("x", "size", 4),
        ("x", "pages", "first"),
        ("x", "background", "red"),
        ("x", "axes", "HWC"),
        ("x", "pixel_range", (0, 1)),
    ],
)
def test_options_that_change_nothing_are_refused(tmp_path, column, key, value):
    pixels = RNG.integers(0, 256, (2, 5, 6), np.uint8)
    save(tmp_path / "d", {"image": [picture(p) for p in pixels], "x": [1.0, 2.0], "label": [0, 1]})
    with pytest.raises(UserError, match=rf"data\.{key}.* leave it out"):
        saved_dataset(tmp_path, path="d", input_column=column, **{key: value})


def test_a_column_that_numbers_the_rows_is_warned_of(tmp_path):
    a = np.random.default_rng(0).normal(size=30)
    save(tmp_path / "d", {"id": list(range(30)), "a": a, "label": [0, 1] * 15})
    with pytest.warns(UserWarning, match="column 'id' numbers the rows"):
        saved_dataset(tmp_path, path="d", input_column=["id", "a"])


def test_a_column_that_numbers_the_rows_of_several_splits_is_warned_of_once(tmp_path):
    for name in ("train", "test"):
        a = np.random.default_rng(0).normal(size=30)
        save(tmp_path / "d" / name, {"id": list(range(30)), "a": a, "label": [0, 1] * 15})
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.warns(UserWarning, match="column 'id' numbers the rows") as told:
        saved_dataset(tmp_path, path="d", input_column=["id", "a"])
    assert ["numbers the rows" in str(each.message) for each in told].count(True) == 1
