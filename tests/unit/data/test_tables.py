"""The source `table`: columns become features and targets, each site by its own training rows."""

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.federated import split
from fedmpi.data.silos import describe, label_table
from fedmpi.data.sources.tables.files import Table
from fedmpi.data.sources.tables.table import table

PATIENTS = """\
hospital,age,city,part,sick
north,50,Ulm,train,yes
north,60,Bonn,train,no
north,,Ulm,train,no
north,80,,test,yes
south,10,Bonn,train,yes
south,20,Bonn,train,no
south,30,,val,yes
south,,Rome,test,no
"""
BY = {
    "label_column": "sick",
    "site_column": "hospital",
    "split_column": "part",
    "categorical": ["city"],
    "missing": "impute",
}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "a.csv").write_text(PATIENTS)
    return tmp_path


def test_each_site_by_its_own_training_rows(root):
    data = table(root, path="a.csv", **BY)
    north, south = np.array([50, 60, 55.0]), np.array([10, 20, 30.0])  # the gap is the median of 50 and 60
    age = np.concatenate([(ages - ages.mean()) / ages.std() for ages in (north, south)])
    bonn, ulm = [0, 1, 0, 1, 1, 1], [1, 0, 1, 0, 0, 0]  # south's third city is Bonn, its most frequent
    assert data.meaning == ("age", "city=Bonn", "city=Ulm", "->", "no", "yes")
    assert np.allclose(data.train_x, np.stack([age, bonn, ulm], axis=1), atol=1e-6)
    test = [[(80 - 55) / north.std(), 0, 1], [0, 0, 0]]  # the city is Ulm, the most frequent there;
    assert np.allclose(data.test_x, test, atol=1e-6)  # nobody trains on Rome
    assert (data.train_y.tolist(), data.test_y.tolist(), data.classes) == ([1, 0, 0, 1, 0, 1], [1, 0], 2)
    assert (data.site.tolist(), data.test_site.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])
    assert data.site_names == ("north", "south")
    assert data.global_x is None


def test_pooled(root):
    data = table(root, path="a.csv", **BY, standardise="pooled")
    ages = np.array([50, 60, 55, 10, 20, 30.0])
    assert np.allclose(data.train_x[:, 0], (ages - ages.mean()) / ages.std(), atol=1e-6)
    both = table(root, path="a.csv", **BY, global_test="pooled")
    assert torch.equal(both.train_x, table(root, path="a.csv", **BY).train_x)
    assert torch.equal(both.global_x, data.test_x)
    assert not torch.equal(both.global_x, both.test_x)
    federation = split(both, "site", None, seed=0)
    assert torch.equal(federation.global_test.x, data.test_x)
    assert torch.equal(federation.test[1].x[federation.test[1].index], both.test_x[1:])
    assert torch.equal(federation.to("cpu").global_test.x, data.test_x)


def test_options_name_features_values_and_classes(root):
    data = table(root, path="a.csv", **(BY | {"missing": "drop"}), standardise="none", small_sites="keep")
    assert data.train_x.tolist() == [[50, 0, 1], [60, 1, 0], [10, 1, 0], [20, 1, 0]]
    assert len(data.test_x) == 0
    given = {
        "features": ["city", "age"],
        "categorical": {"city": ["Ulm", "Rome", "Bonn"]},
        "class_names": ["yes", "no"],
    }
    data = table(root, path="a.csv", **(BY | given), standardise="none")
    assert data.train_x[0].tolist() == [1, 0, 0, 50]
    assert data.train_y.tolist() == [0, 1, 1, 0, 1, 0]
    dropped = table(root, path="a.csv", **(BY | {"categorical": None}), drop=["city"], standardise="none")
    assert dropped.meaning[:2] == ("age", "->")


@pytest.mark.parametrize(
    ("cells", "target", "dtype"),
    [
        (["1.5", "2", "3", "4"], "auto", torch.float32),
        (["1", "2", "3", "4"], "number", torch.float32),
        (["1", "2.0", "1.0", "02"], "auto", torch.int64),
        (["b", "a", "b", "a"], "auto", torch.int64),
    ],
)
def test_targets(root, cells, target, dtype):
    (root / "b.csv").write_text("x,y\n" + "".join(f"{k},{cell}\n" for k, cell in enumerate(cells)))
    data = table(root, path="b.csv", label_column="y", target=target, test_fraction=0)
    assert data.train_y.dtype == dtype
    assert data.classes == (1 if dtype == torch.float32 else 2)  # 1 and 1.0 are one class
    if dtype == torch.float32:
        assert data.train_y.tolist() == [float(cell) for cell in cells]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["3", "3.0", "03", " 3", "+3", "3."], ["3"] * 6),
        (["1234567890123456789", "1234567890123456790"], ["1234567890123456789", "1234567890123456790"]),
        (["0.50", ".5", "-0.5"], ["0.5", "0.5", "-0.5"]),
        (["none", "NA", "x"], ["", "", "x"]),
    ],
)
def test_identifiers_are_not_rounded(cells, words):
    """Two sites were one, where their numbers were one to a float."""
    table_ = Table(Path("a.csv"), {"site": np.array(cells, dtype=object)}, np.arange(len(cells)))
    assert table_.words("site", "site_column").tolist() == words
    named = replace(table_, named={"site": frozenset(word.strip() for word in cells)})
    assert "" not in named.words("site", "site_column").tolist()


def test_small_sites(root):
    before = table(root, path="a.csv", **BY)
    rows = PATIENTS + "west,50,Ulm,train,yes\nwest,60,Ulm,train,yes\nwest,60,Ulm,test,no\n"
    (root / "a.csv").write_text(rows)
    with pytest.raises(UserError, match=r"line 10: site 'west', .* 2 training rows of one class, 'yes'"):
        table(root, path="a.csv", **BY)
    assert table(root, path="a.csv", **BY, small_sites="keep").site_names == ("north", "south", "west")
    (root / "a.csv").write_text(rows.replace("west", "a"))  # the site that goes is the first
    data = table(root, path="a.csv", **BY, small_sites="drop")
    assert (data.site_names, data.site.tolist()) == (("north", "south"), [0, 0, 0, 1, 1, 1])
    assert torch.allclose(data.train_x, before.train_x)


# ---- silos


def write_silos(root):
    head, *rows = PATIENTS.splitlines(keepends=True)
    for site in ("north", "south"):
        (root / f"of_{site}.csv").write_text(head + "".join(row for row in rows if row.startswith(site)))
    return {k: v for k, v in BY.items() if k != "site_column"} | {"drop": ["hospital"]}


def test_silos_whose_columns_have_other_meanings_are_refused(root):
    by, names = write_silos(root) | {"small_sites": "keep"}, ["of_north.csv", "of_south.csv"]
    (root / names[1]).write_text((root / names[1]).read_text().replace("Bonn", "Graz"))
    (root / names[0]).write_text((root / names[0]).read_text().replace("Rome", "Ulm"))
    values = {"city": ["Bonn", "Ulm"]}, {"city": ["Graz", "Rome"]}
    opened = {k: table(root, site=names[k], **(by | {"categorical": values[k]})) for k in (0, 1)}
    with pytest.raises(UserError, match=r"of_north\.csv and of_south\.csv have as many columns .*data\.categorical"):
        label_table(opened, describe(opened), names)


# ---- Parquet


def test_parquet_reads_as_csv_does(root):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "hospital": arrow.array(["north"] * 4 + ["south"] * 4).dictionary_encode(),
        "age": arrow.array([50, 60, None, 80, 10, 20, 30, None]),
        "city": ["Ulm", "Bonn", "Ulm", None, "Bonn", "Bonn", None, "Rome"],
        "part": ["train"] * 3 + ["test"] + ["train"] * 3 + ["test"],
        "sick": [True, False, False, True, True, False, True, False],
    }

    def read(more=None, **given):
        parquet.write_table(arrow.table(columns | (more or {})), root / "a.parquet")
        return table(root, path="a.parquet", **(BY | given))

    data, same = read(), table(root, path="a.csv", **BY)
    for name in ("train_x", "train_y", "test_x", "test_y", "site"):
        assert torch.equal(getattr(data, name), getattr(same, name))
    assert data.meaning[-2:] == ("0", "1")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: column 'age' is empty"):
        read(missing="refuse")
    more = {"day": [date(2024, 1, 1)] * 8, "dose": [Decimal("0.50")] * 4 + [Decimal("1.25")] * 4}
    with pytest.raises(UserError, match=r"column 'day' holds '2024-01-01'.*data\.drop"):
        read(more)
    assert read(more, drop=["day"]).train_x.shape[1] == same.train_x.shape[1] + 1  # dose is a feature


def test_a_column_without_a_value_at_a_site_is_warned_of(tmp_path):
    (tmp_path / "a.csv").write_text(PATIENTS.replace("north,50", "north,").replace("north,60", "north,"))
    said = r"a\.csv: column 'age' has no value in any training row of north; it is 0 there"
    with pytest.warns(UserWarning, match=said):
        table(tmp_path, path="a.csv", **BY)


def test_the_label_is_no_feature(tmp_path):
    (tmp_path / "a.csv").write_text("a,y\n" + "".join(f"{k / 3},{k % 2}\n" for k in range(20)))
    with pytest.raises(UserError, match=r"data\.features: y is the data\.label_column"):
        table(tmp_path, path="a.csv", features=["a", "y"], label_column="y")


STAGES = "stage,age,sick\n" + "".join(
    f"{('none', 'mild', 'severe')[i % 3]},{'' if i == 4 else i},{('none', 'ill')[i % 2]}\n" for i in range(30)
)


def test_missing_drop_warns_of_the_rows_and_refuses_to_lose_a_site(tmp_path):
    (tmp_path / "a.csv").write_text(STAGES)
    given = {"path": "a.csv", "label_column": "sick", "test_fraction": 0, "missing": "drop", "drop": ["stage"]}
    with pytest.warns(UserWarning, match=r"15 cells of column 'sick' .*class_names") as told:
        data = table(tmp_path, **given, target="class", class_names=["ill", "well"])
    assert "leaves out 15 of 30 rows" in str(told[1].message)
    assert "most gaps: 'sick' 15, 'age' 1" in str(told[1].message)
    assert len(data.train_y) == 15
    lines = [f"{site},{i},{'' if site == 'c' else i},{i % 2}" for site in "abc" for i in range(6)]
    (tmp_path / "a.csv").write_text("\n".join(["at,a,b,sick", *lines]))
    given = {"path": "a.csv", "label_column": "sick", "site_column": "at", "missing": "drop"}
    said = r"leaves no row of site 'c', most gaps are in column 'b'; .* or say data\.small_sites: drop"
    with pytest.warns(UserWarning, match="leaves out 6 of 18 rows"), pytest.raises(UserError, match=said):
        table(tmp_path, **given)
    with pytest.warns(UserWarning, match="leaves out 6 of 18 rows"):
        assert table(tmp_path, **given, small_sites="drop").site_names == ("a", "b")
