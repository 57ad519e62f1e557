"""Pictures that a CSV file names: classes, sites, parts, silos, spreadsheets."""

import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.data.federated import split
from fedmpi.data.sources.images import read_images
from fedmpi.data.sources.images.class_images import csv_images

GREY = {"channels": 1, "mean": (0.0,), "std": (1 / 255,)}  # a pixel is its grey again


def write(folder, header="path,label,site", rows=None, name="a.csv", encoding="utf-8"):
    """Twenty pictures of grey 0..19; classes by turns; sites of 5, 15."""
    rows = rows or [f"{i}.png,{('cat', 'dog')[i % 2]},{'uk' if i < 5 else 'at'}" for i in range(20)]
    folder.mkdir(exist_ok=True)
    for i in range(20):
        Image.new("L", (4, 4), i).save(folder / f"{i}.png")
    (folder / name).write_bytes("\r\n".join([header, *rows, ""]).encode(encoding))


def greys(x):
    return x[:, 0, 0, 0].round().int().tolist()


def test_classes_and_sites_are_in_natural_order(tmp_path, monkeypatch):
    monkeypatch.setattr(read_images, "IMAGES_PER_TASK", 3)  # several threads
    write(tmp_path)
    data = csv_images(tmp_path, path="a.csv", site_column="site", **GREY)
    assert data.site_names == ("at", "uk")
    assert (torch.bincount(data.site) + torch.bincount(data.test_site)).tolist() == [15, 5]
    assert data.train_y.tolist() == [grey % 2 for grey in greys(data.train_x)]  # cat, dog
    assert sorted(greys(data.train_x) + greys(data.test_x)) == list(range(20))
    assert all((grey < 5) == (site == 1) for grey, site in zip(greys(data.train_x), data.site.tolist(), strict=True))
    assert len(data.test_y) == 3 + 0 + 1  # of 8, 7, 3 and 2: 20 % each, rounded
    fed = split(data, "site", None, seed=0)
    assert (fed.clients, fed.site_names) == (2, ("at", "uk"))
    without = csv_images(tmp_path, path="a.csv", **GREY)
    assert (without.site, len(without.test_y)) == (None, 4)


def test_a_csv_file_exported_from_a_spreadsheet(tmp_path):
    """Semicolons, quotations, blanks, columns of other names, numbers for classes, a name from Windows."""
    rows = [f'"{i}.png"; {(i % 4) * 5 + 5} ;"Wien; 9. Bezirk"' for i in range(20)]
    rows[9] = rows[9].replace('"9.png"', r'".\9.png"')
    write(tmp_path / "pictures", "Datei;Befund;Haus", [*rows, ""], encoding="utf-8-sig")
    (tmp_path / "pictures/a.csv").rename(tmp_path / "b.csv")
    columns = {"image_column": "Datei", "label_column": "Befund", "site_column": "Haus"}
    data = csv_images(tmp_path, path="b.csv", folder="pictures", delimiter=";", **columns, **GREY)
    assert data.site_names == ("Wien; 9. Bezirk",)
    assert data.classes == 4
    assert data.train_y.tolist() == [grey % 4 for grey in greys(data.train_x)]  # 5, 10, 15, 20: by size, not as text


def test_words_for_missing_values_are_not_classes(tmp_path):
    rows = [f"{i}.png,{('cat', 'dog', 'NA')[i % 3]},a" for i in range(20)]
    write(tmp_path, rows=rows)
    with pytest.raises(
        UserError, match=r"a\.csv, line 4: column 'label' contains 'NA', which usually means a missing value"
    ):
        csv_images(tmp_path, path="a.csv", **GREY)
    assert csv_images(tmp_path, path="a.csv", class_names=["cat", "dog", "NA"], **GREY).classes == 3
