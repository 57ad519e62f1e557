"""One order of classes and sites in all sources: numbers by value, also inside words."""

import numpy as np
import pytest
from PIL import Image

from fedmpi.common.text import natural_order
from fedmpi.data.sources.pictures.class_pictures import csv_images, image_folder
from fedmpi.data.sources.tables.table import table
from fedmpi.data.sources.text import text


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (map(str, range(12, 0, -1)), [str(k) for k in range(1, 13)]),
        (["grade 10", "grade 9", "Grade 10"], ["Grade 10", "grade 9", "grade 10"]),
        (["none", "10", "2"], ["2", "10", "none"]),  # one more class moves no other one
        (["a2b10", "a2b9", "a10"], ["a2b9", "a2b10", "a10"]),
        (["x" + "9" * 5000, "x1"], ["x1", "x" + "9" * 5000]),  # more digits than int() reads
        (["b", "a", "b", ""], ["", "a", "b"]),
    ],
)
def test_natural_order(names, expected):
    assert natural_order(names) == expected


NAMES = [str(k) for k in range(1, 11)]  # as text 1, 10, 2, ...


@pytest.fixture
def folder(tmp_path):
    """Two pictures of each class, whose grey is ten times the number of the class: 10, ..., 100."""
    rows = []
    for name in NAMES:
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(2):
            Image.new("L", (4, 4), 10 * int(name)).save(tmp_path / "images" / name / f"{k}.png")
            rows.append(f"images/{name}/{k}.png,{name},{10 * int(name)}")
    (tmp_path / "a.csv").write_text("path,label,grey\n" + "\n".join(rows))
    return tmp_path


def labels_by_grey(x, y):
    greys = (x.flatten(1)[:, 0] * 127.5 + 127.5).round().int().tolist()
    return dict(zip(greys, y.tolist(), strict=True))


def test_sources_number_the_classes_alike(folder):
    expected = {10 * (k + 1): k for k in range(10)}
    for data in (
        image_folder(folder, path="images", test_fraction=0),
        csv_images(folder, path="a.csv", test_fraction=0),
    ):
        assert labels_by_grey(data.train_x.floats(), data.train_y) == expected
    rows = table(folder, path="a.csv", label_column="label", features=["grey"], standardise="none", test_fraction=0)
    assert dict(zip(rows.train_x[:, 0].int().tolist(), rows.train_y.tolist(), strict=True)) == expected


def test_sites_are_in_the_same_order(folder):
    expected = ("1", "2", "9", "10")
    (folder / "b.csv").write_text(
        "path,label,site\n" + "\n".join(f"images/{name}/{k}.png,c{k},{name}" for name in expected for k in range(2))
    )
    found = csv_images(folder, path="b.csv", site_column="site", test_fraction=0)
    assert found.site_names == expected
    for name in expected:
        for kind in "ab":
            (folder / "sites" / name / kind).mkdir(parents=True)
            Image.new("L", (4, 4), 9).save(folder / "sites" / name / kind / "0.png")
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{name}.txt").write_text("abcd" * 9)
    assert image_folder(folder, path="sites", sites=True, test_fraction=0).site_names == expected
    assert text(folder, path="texts", context=4).site_names == expected
    assert np.array_equal(np.unique(text(folder, path="texts", context=4).site), range(4))
