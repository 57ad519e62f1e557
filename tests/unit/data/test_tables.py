"""The source `table`: columns become features and targets, each site by its own training rows."""

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from table_files import noise, write_table

from fedmpi.comm.base import SingleProcess
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.config import load
from fedmpi.data.preprocessing import PredictionRequest
from fedmpi.data.sources.tables.read_table import Table
from fedmpi.data.sources.tables.table_source import table
from fedmpi.runtime import build_data
from fedmpi.tasks.survival import Survival

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
AS_THEY_ARE = {"path": "a.csv", "test_fraction": 0, "standardise": "none"}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "a.csv").write_text(PATIENTS)
    return tmp_path


def test_each_site_is_standardised_by_its_own_training_rows(root):
    data = table(root, path="a.csv", **BY)
    north, south = np.array([50, 60, 55.0]), np.array([10, 20, 30.0])  # the gap is the median of 50 and 60
    age = np.concatenate([(ages - ages.mean()) / ages.std() for ages in (north, south)])
    bonn, ulm = [0, 1, 0, 1, 1, 1], [1, 0, 1, 0, 0, 0]  # south's third city is Bonn, its most frequent
    assert data.input_and_class_names == ("age", "city=Bonn", "city=Ulm", "->", "no", "yes")
    assert np.allclose(data.train_x, np.stack([age, bonn, ulm], axis=1), atol=1e-6)
    test = [[(80 - 55) / north.std(), 0, 1], [0, 0, 0]]  # the city is Ulm, the most frequent there;
    assert np.allclose(data.test_x, test, atol=1e-6)  # nobody trains on Rome
    assert (data.train_y.tolist(), data.test_y.tolist(), data.classes) == ([1, 0, 0, 1, 0, 1], [1, 0], 2)
    assert (data.site.tolist(), data.test_site.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])
    assert data.site_names == ("north", "south")
    assert data.global_test_x is None


def test_pooled_standardisation_uses_the_training_rows_of_all_sites(root):
    data = table(root, path="a.csv", **BY, standardise="pooled")
    ages = np.array([50, 60, 55, 10, 20, 30.0])
    assert np.allclose(data.train_x[:, 0], (ages - ages.mean()) / ages.std(), atol=1e-6)


def test_options_set_features_values_and_classes(root):
    data = table(root, path="a.csv", **(BY | {"missing": "drop"}), standardise="none")
    assert data.train_x.tolist() == [[50, 0, 1], [60, 1, 0], [10, 1, 0], [20, 1, 0]]
    assert len(data.test_x) == 0
    values, names = {"city": ["Ulm", "Rome", "Bonn"]}, ["yes", "no"]
    given = {"features": ["city", "age"], "categorical": values, "class_names": names, "standardise": "none"}
    data = table(root, path="a.csv", **(BY | given))
    assert data.train_x[0].tolist() == [1, 0, 0, 50]
    assert data.train_y.tolist() == [0, 1, 1, 0, 1, 0]
    dropped = table(root, path="a.csv", **(BY | {"categorical": None}), drop=["city"], standardise="none")
    assert dropped.input_and_class_names[:2] == ("age", "->")


@pytest.mark.parametrize(
    ("columns", "options", "targets"),
    [
        ({"y": ["1.5", "2", "3", "4"]}, {}, [1.5, 2.0, 3.0, 4.0]),
        ({"y": ["1", "2", "3", "4"]}, {"target": "number"}, [1.0, 2.0, 3.0, 4.0]),
        ({"y": ["1", "2.0", "1.0", "02"]}, {}, [0, 1, 0, 1]),  # 1 and 1.0 are one class
        ({"y": ["b", "a", "b", "a"]}, {}, [1, 0, 1, 0]),
        ({"event": ["True", "False"], "days": [5, 6]}, {}, [[1.0, 5.0], [0.0, 6.0]]),
        ({"event": ["yes", "no"], "days": [5, 6]}, {}, [[1.0, 5.0], [0.0, 6.0]]),
        (
            {"a": ["True", "False"], "b": ["y", "n"], "c": [0, 1]},
            {"target": "number"},
            [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        ),
    ],
)
def test_targets(tmp_path, columns, options, targets):
    write_table(tmp_path, {"x": noise(len(targets)), **columns})
    data = table(tmp_path, **AS_THEY_ARE, label_column=list(columns), **options)
    assert data.train_y.tolist() == targets
    is_class = isinstance(targets[0], int)
    assert data.train_y.dtype == (torch.int64 if is_class else torch.float32)
    assert data.classes == (2 if is_class else len(columns) if "target" in options else 1)
    assert (
        data.preparation.read_requested_rows(PredictionRequest(str(tmp_path / "a.csv"))).y.tolist() == targets
    )  # new rows are read alike


def test_the_survival_task_refuses_negative_times():
    y = torch.tensor([[1.0, 3.0], [1.0, 0.0], [0.0, -2.0]])
    assert "the time in row 2 is -2" in Survival(1).check(y, (1,))
    assert Survival(1).check(y[:2], (1,)) == ""


@pytest.mark.parametrize("rows", [[{"x": "1,5"}, {"x": "-2,25"}], {"x": [1.5, -2.25]}])
def test_numbers_with_a_decimal_comma(tmp_path, rows):
    """In the file of the training, and in new rows in memory."""
    write_table(tmp_path, {"x": ["1,5", "-2,25", "3"], "label": ["a", "b", "a"]})
    data = table(tmp_path, **AS_THEY_ARE, decimal=",")
    assert data.train_x[:, 0].tolist() == [1.5, -2.25, 3]
    assert data.preparation.read_requested_rows(PredictionRequest(rows)).x[:, 0].tolist() == [1.5, -2.25]


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
    rows = Table(Path("a.csv"), {"site": np.array(cells, dtype=object)}, np.arange(len(cells)))
    assert rows.parse_words("site", "site_column").tolist() == words
    named = replace(rows, valid_words={"site": frozenset(word.strip() for word in cells)})
    assert "" not in named.parse_words("site", "site_column").tolist()


@pytest.mark.parametrize(
    ("given", "remaining"),
    [
        ([-9], [60, 70, 99, 50, 40, 61]),
        (["-9", 99], [60, 70, 50, 40, 61]),
        ({"days": [80]}, [60, -9, 70, -9, 99, 50, 40]),
    ],
)
def test_missing_values_apply_to_all_columns_or_to_the_named_ones(tmp_path, given, remaining):
    write_table(tmp_path, {"age": [60, -9, 70, "-9.0", 99, 50, 40, 61], "days": range(10, 90, 10), "label": [0, 1] * 4})
    data = table(tmp_path, **AS_THEY_ARE, missing="drop", missing_values=given)
    assert data.train_x[:, 0].tolist() == remaining
    new = data.preparation.read_requested_rows(PredictionRequest(str(tmp_path / "a.csv")))
    assert (99 in new.x[:, 0].tolist()) == (99 in remaining)  # new rows are read alike


def test_a_site_of_one_class_is_a_site_and_one_without_training_rows_is_refused(root):
    (root / "a.csv").write_text(PATIENTS + "west,50,Ulm,train,yes\nwest,60,Ulm,train,yes\n")
    assert table(root, path="a.csv", **BY).site_names == ("north", "south", "west")
    (root / "a.csv").write_text(PATIENTS + "west,50,Ulm,test,yes\n")
    with pytest.raises(UserError, match=r"line 10: site 'west', which begins here, has no training rows"):
        table(root, path="a.csv", **BY)


def test_warnings_about_a_silo_are_shown_by_its_own_rank(tmp_path):
    """Other warnings are shown by rank 0 alone, which has opened none."""
    for name in ("north", "south"):
        write_table(tmp_path, {"id": range(60), "a": noise(), "label": [0] * 30 + [1] * 30}, f"{name}.csv")
    (tmp_path / "run.yaml").write_text(
        f"data: {{source: table, root: {tmp_path}, silos: [north, south], path: '{{site}}.csv'}}\n"
        "rounds: 1\nmodel: {name: logistic}\nmethod: {name: fedavg}\ntrain: {lr: 0.1}\n"
    )
    with pytest.warns(RankWarning) as caught:
        build_data.build_silo_data(load(tmp_path / "run.yaml"), SingleProcess(torch.device("cpu")))
    assert {each.category for each in caught} == {RankWarning}
    messages = [str(each.message) for each in caught]
    for name in ("north", "south"):
        assert sum(f"data of {name}: feature 'id' alone separates" in message for message in messages) == 1


# ---- Parquet ----
def test_parquet_and_csv_give_the_same_data(root):
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
    assert data.input_and_class_names[-2:] == ("0", "1")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: the cell in column 'age' is empty"):
        read(missing="refuse")
    more = {"day": [date(2024, 1, 1)] * 8, "dose": [Decimal("0.50")] * 4 + [Decimal("1.25")] * 4}
    with pytest.raises(UserError, match=r"column 'day' contains '2024-01-01'.*data\.drop"):
        read(more)
    assert read(more, drop=["day"]).train_x.shape[1] == same.train_x.shape[1] + 1  # dose is a feature
