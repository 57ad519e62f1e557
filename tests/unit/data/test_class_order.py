"""One order of classes and sites in all sources: numbers by value, also inside words."""

import numpy as np
import pytest
from PIL import Image

from fedmpi.common.text import sort_naturally
from fedmpi.data.sources.images.class_images import csv_images, image_folder
from fedmpi.data.sources.tables.table_source import table
from fedmpi.data.sources.texts import text


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
    assert sort_naturally(names) == expected


def test_all_sources_number_classes_and_sites_in_the_same_order(tmp_path):
    """Two pictures of each class, whose grey is ten times the number of the class; as text the order is 1, 10, 2."""
    names, rows = [str(k) for k in range(1, 11)], []
    (tmp_path / "texts").mkdir()
    for name in names:
        (tmp_path / "texts" / f"{name}.txt").write_text("abcd" * 9)
        for k in range(2):
            for place in (f"images/{name}", f"sites/{name}/c{k}"):
                (tmp_path / place).mkdir(parents=True, exist_ok=True)
                Image.new("L", (4, 4), 10 * int(name)).save(tmp_path / place / f"{k}.png")
            rows.append(f"images/{name}/{k}.png,{name},{10 * int(name)}")
    (tmp_path / "a.csv").write_text("path,label,grey\n" + "\n".join(rows))
    (tmp_path / "b.csv").write_text(
        "path,site,grey,label\n" + "\n".join(f"{row},c{k % 2}" for k, row in enumerate(rows))
    )
    dataset = {"test_fraction": 0}
    folder, listed = image_folder(tmp_path, path="images", **dataset), csv_images(tmp_path, path="a.csv", **dataset)
    rows = table(tmp_path, path="a.csv", label_column="label", features=["grey"], standardise="none", **dataset)
    for data, greys in (
        *((data, (data.train_x.all_inputs()[:, 0, 0, 0] * 127.5 + 127.5).round()) for data in (folder, listed)),
        (rows, rows.train_x[:, 0]),
    ):
        by_grey = dict(zip(greys.int().tolist(), data.train_y.tolist(), strict=True))
        assert by_grey == {10 * (k + 1): k for k in range(10)}
    texts = text(tmp_path, path="texts", context=4)
    assert np.array_equal(np.unique(texts.site), range(10))
    sites = (image_folder(tmp_path, path="sites", sites=True, **dataset), texts)
    for data in (*sites, csv_images(tmp_path, path="b.csv", site_column="site", **dataset)):
        assert data.site_names == tuple(names)
