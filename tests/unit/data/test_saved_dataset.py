"""The source `saved_dataset`: folders as `save_to_disk` of Hugging Face's datasets writes them."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.data.sources.tables.saved_dataset import saved_dataset

arrow = pytest.importorskip("pyarrow")


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
    assert torch.equal(data.train_x, torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(255)))
    rows = [picture(p) for p in (pixels[0], pixels[1][:4])]
    save(tmp_path / "d", {"image": rows, "label": [0, 1]})
    with pytest.raises(UserError, match=r"row 1: the picture in column 'image' has \(4, 6\) pixels, those of row 0"):
        saved_dataset(tmp_path, path="d", input_column="image")
    save(tmp_path / "d", {"image": [picture(pixels[0]), {"bytes": b"x", "path": None}], "label": [0, 1]})
    with pytest.raises(UserError, match="row 1: column 'image' holds no readable picture"):
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


def test_a_column_that_numbers_the_rows_is_warned_of(tmp_path):
    a = np.random.default_rng(0).normal(size=30)
    save(tmp_path / "d", {"id": list(range(30)), "a": a, "label": [0, 1] * 15})
    with pytest.warns(UserWarning, match="column 'id' numbers the rows"):
        saved_dataset(tmp_path, path="d", input_column=["id", "a"])
