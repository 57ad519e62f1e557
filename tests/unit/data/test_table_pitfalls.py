"""Tables that would silently give wrong numbers: row numbers as features, thousands separators, signed times."""

import warnings

import numpy as np
import pytest
import torch

from fedmpi import config
from fedmpi.comm.base import Solo
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.leaks import warn_of_leaks
from fedmpi.data.sources.tables.index import numbers_rows
from fedmpi.data.sources.tables.table import table
from fedmpi.runtime import build_data
from fedmpi.tasks.survival import Survival


def sheet(folder, columns, name="a.csv"):
    """Write columns (name -> cells) as CSV."""
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (folder / name).write_text("\n".join(lines) + "\n")


def noise(n=60, seed=0):
    return np.random.default_rng(seed).normal(size=n).round(3)


# ---- index columns ----
@pytest.mark.parametrize("name", ["", "Unnamed: 0", "Unnamed: 0.1", "__index_level_0__"])
def test_an_index_column_of_pandas_is_left_out_of_a_csv_and_said_once(tmp_path, name):
    sheet(tmp_path, {name: range(60), "a": noise(), "label": [0] * 30 + [1] * 30})
    with pytest.warns(UserWarning, match="is left out: pandas writes the numbers of the rows") as told:
        data = table(tmp_path, path="a.csv")
    assert data.meaning[:2] == ("a", "->")
    assert len(told) == 1


def test_an_index_column_is_learned_from_where_the_config_names_it(tmp_path):
    sheet(tmp_path, {"Unnamed: 0": noise(), "a": noise(seed=1), "label": [0, 1] * 30})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table(tmp_path, path="a.csv", features=["Unnamed: 0"]).meaning[:2] == ("Unnamed: 0", "->")
        assert table(tmp_path, path="a.csv", drop=["Unnamed: 0"]).meaning[:2] == ("a", "->")


def test_the_index_that_pandas_names_in_a_parquet_file_is_left_out(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    said = b'{"index_columns": ["patient"], "columns": [], "column_indexes": [], "pandas_version": "2.2.0"}'
    rows = arrow.table({"a": noise(), "label": [0] * 30 + [1] * 30, "patient": range(100, 220, 2)})
    parquet.write_table(rows.replace_schema_metadata({b"pandas": said}), tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match="column 'patient' is left out"):
        assert table(tmp_path, path="a.parquet").meaning[:2] == ("a", "->")
    rows = rows.rename_columns(["a", "label", "__index_level_0__"])  # as `datasets` writes it, without metadata
    parquet.write_table(rows.replace_schema_metadata(None), tmp_path / "b.parquet")
    with pytest.warns(UserWarning, match="column '__index_level_0__' is left out"):
        assert table(tmp_path, path="b.parquet").meaning[:2] == ("a", "->")


def test_a_column_without_a_name_elsewhere_is_refused(tmp_path):
    sheet(tmp_path, {"a": noise(), "": range(60), "label": [0, 1] * 30})
    with pytest.raises(UserError, match="column 2 has no name"):
        table(tmp_path, path="a.csv")


# ---- numbers of rows ----
RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("x", "numbers"),
    [
        (np.arange(40.0), True),
        (np.arange(40.0)[::-1] * 5 + 3, True),
        (np.arange(40.0) / 4, True),
        (RANDOM.permutation(40) + 1.0, True),
        (np.flatnonzero(RANDOM.random(100) < 0.5).astype(float), True),  # the rest of an index after filtering
        (np.sort(RANDOM.normal(size=40)), False),  # a file that is sorted by what was measured
        (np.sort(RANDOM.integers(0, 30, 40)).astype(float), False),
        (np.ones(40), False),
        (np.arange(10.0), False),  # too few rows
        (np.array([np.nan, *range(39)]), False),
    ],
)
def test_which_columns_number_rows(x, numbers):
    assert numbers_rows(x) is numbers


def test_a_feature_that_numbers_the_rows_is_warned_of(tmp_path):
    sheet(tmp_path, {"id": range(7, 67), "a": noise(), "label": [0, 1] * 30})
    with pytest.warns(UserWarning, match=r"a\.csv: column 'id' numbers the rows.*leave it out"):
        table(tmp_path, path="a.csv")
    sheet(tmp_path, {"id": [*range(30)] * 2, "who": ["n"] * 30 + ["s"] * 30, "a": noise(), "label": [0, 1] * 30})
    with pytest.warns(UserWarning, match="column 'id' numbers the rows"):
        table(tmp_path, path="a.csv", site_column="who")
    sheet(tmp_path, {"id": range(60), "a": noise(), "label": [0, 1] * 30}, "north.csv")
    with pytest.warns(UserWarning, match="column 'id' numbers the rows"):
        table(tmp_path, site="north", path="{site}.csv")


# ---- features that separate the classes ----
def data_of(x, y, site=None, names=()):
    x, y = torch.tensor(np.asarray(x), dtype=torch.float32), torch.tensor(y)
    site = None if site is None else torch.tensor(site)
    return Dataset(x, y, x[:1], y[:1], int(y.max()) + 1, site=site, meaning=(*names, "->") if names else ())


def told(data):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_leaks(data)
    return [str(each.message) for each in said]


def test_a_feature_that_separates_the_classes_alone_is_named():
    y = [0] * 20 + [1] * 20 + [2] * 20
    x = np.stack([noise(), np.array([5.0, -1.0, 2.0])[y] + noise(seed=1) / 20], axis=1)
    assert "feature 'code' alone separates the classes" in told(data_of(x, y, names=("a", "code")))[0]
    assert "feature '1' alone" in told(data_of(x, y))[0]  # a source that names no feature
    assert told(data_of(x[:, :1], y)) == []
    x[0, 1] = x[25, 1]  # two classes with one value
    assert told(data_of(x, y)) == []


def test_a_feature_separates_the_classes_of_every_site_by_its_own_values():
    y, site = [0, 1] * 30, [0] * 30 + [1] * 30
    x = np.array(y) * np.where(np.array(site) == 0, 1.0, -1.0)  # up at one site, down at the other
    assert told(data_of(x[:, None], y)) == []
    assert "alone separates" in told(data_of(x[:, None], y, site))[0]
    x[0] = 1.0
    assert told(data_of(x[:, None], y, site)) == []


def test_no_warning_where_chance_alone_would_separate_the_classes():
    """Of n = 12 rows one in 2 / C(12, 6) = 1/462 features separates six from six; of 20, one in 92,378."""
    for n, says in ((12, 0), (20, 1)):
        assert len(told(data_of(np.arange(n)[:, None] * 1.0, [0] * (n // 2) + [1] * (n // 2)))) == says


def test_a_run_warns_of_a_feature_that_separates_the_classes(tmp_path):
    cells = [0.1 * (k % 7) + 5 * (k % 2) for k in range(60)]
    sheet(tmp_path, {"a": noise(), "code": cells, "label": ["no", "yes"] * 30})
    (tmp_path / "run.yaml").write_text(
        f"data: {{source: table, root: {tmp_path}, path: a.csv, partition: {{scheme: iid, clients: 2}}}}\n"
        "rounds: 1\nmodel: {name: logistic}\nmethod: {name: fedavg}\n"
    )
    with pytest.warns(UserWarning, match="data: feature 'code' alone separates the classes"):
        build_data.partitioned(config.load(tmp_path / "run.yaml"))


# ---- numbers as spreadsheets write them ----
def priced(folder, cells, **options):
    sheet(folder, {"x": [f'"{cell}"' for cell in cells], "label": ["a", "b"] * (len(cells) // 2)})
    return table(folder, path="a.csv", test_fraction=0, standardise="none", **options).train_x[:, 0].tolist()


@pytest.mark.parametrize(
    ("cells", "options", "values"),
    [
        (["27,822", "1,234,567.5", "12", "-1,000"], {"thousands": ","}, [27822, 1234567.5, 12, -1000]),
        (["1.500", "1.234.567,25", "2,5", "7"], {"decimal": ",", "thousands": "."}, [1500, 1234567.25, 2.5, 7]),
        (["1'500", "2\u2019500.5"], {"thousands": "'"}, [1500, 2500.5]),
        (["1 500", "2\u00a0500,5"], {"thousands": " ", "decimal": ","}, [1500, 2500.5]),
        (["1,500", "2,25"], {"decimal": ","}, [1.5, 2.25]),
    ],
)
def test_numbers_with_marks_between_thousands(tmp_path, cells, options, values):
    assert priced(tmp_path, cells, **options) == values


@pytest.mark.parametrize(
    ("cells", "options", "says", "not_said"),
    [
        (
            ["27,822", "31,000,000"],
            {},
            r'line 2: .*"?27,822.* three digits follow every comma.*data\.thousands: ","',
            "decimal",
        ),
        (["27,822", "1,500"], {}, r'data\.thousands: "," .*; say data\.decimal: "," only if commas are decimal', None),
        (["27,822", "1,5"], {}, r'data\.decimal: ","', "thousands"),
        (["1.500,5", "2.000,5"], {}, r'data\.decimal: "," and data\.thousands: "\."', None),
        (["1.500", "1,5"], {"decimal": ","}, r"'1\.500' has a point.*data\.thousands: \"\.\"", None),
        (["1.500,5", "2"], {"decimal": ","}, r'three digits follow every point: say data\.thousands: "\."', None),
        (["1'500", "2"], {}, r'three digits follow every apostrophe: say data\.thousands: "\'"', None),
        (["1,5", "2,000"], {"thousands": ","}, r"'1,5', .*groups of three digits; correct the cell", None),
        (["1", "2"], {"thousands": "."}, r"data\.thousands and data\.decimal are both '\.'", None),
    ],
)
def test_advice_on_commas_and_points_does_not_spoil_numbers(tmp_path, cells, options, says, not_said):
    with pytest.raises(UserError, match=says) as told:
        priced(tmp_path, cells, **options)
    assert not_said is None or not_said not in str(told.value)


def test_a_label_with_commas_gets_the_same_advice(tmp_path):
    sheet(tmp_path, {"x": noise(4), "price": ['"27,822"', '"31,500"', '"1,200,000"', '"9,000"']})
    with pytest.raises(UserError, match=r'data\.thousands: ","'):
        table(tmp_path, path="a.csv", label_column="price")
    data = table(tmp_path, path="a.csv", label_column="price", thousands=",", target="number", test_fraction=0)
    assert data.train_y.tolist() == [27822, 31500, 1200000, 9000]


# ---- survival ----
def survival(folder, events, days, label=("event", "days")):
    sheet(folder, {"x": noise(len(days)), "event": events, "days": days})
    return table(folder, path="a.csv", label_column=list(label), test_fraction=0)


@pytest.mark.parametrize("events", [["True", "False"], ["TRUE", "false"], ["yes", "no"], ["1.0", "0"]])
def test_events_may_be_truth_values(tmp_path, events):
    assert survival(tmp_path, events * 2, [5, 6, 7, 8]).train_y.tolist() == [[1, 5], [0, 6], [1, 7], [0, 8]]


def test_labels_for_multi_label_may_be_truth_values(tmp_path):
    sheet(tmp_path, {"x": noise(4), "a": ["True", "False"] * 2, "b": ["y", "y", "n", "n"], "c": [0, 1, 1, 0]})
    data = table(tmp_path, path="a.csv", label_column=["a", "b", "c"], target="number", test_fraction=0)
    assert data.train_y.tolist() == [[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("events", "days", "says"),
    [
        ([1, 1, 1, 1], [5, 6, -7, 8], r"a\.csv, line 4: column 'days' holds the time -7; .*below 0; if the sign marks"),
        ([5, 6, 7, 8], [1, 0, 1, 1], r"line 2: column 'event' holds the event 5.*data\.label_column: \[days, event\]"),
        (["alive", "dead", "dead", "dead"], [1, 2, 3, 4], r"line 2: column 'event' holds 'alive', .*; correct it"),
    ],
)
def test_impossible_events_and_times_are_refused_with_their_row(tmp_path, events, days, says):
    with pytest.raises(UserError, match=says) as told:
        survival(tmp_path, events, days)
    assert "categorical" not in str(told.value)  # which a label cannot be


def test_the_task_refuses_negative_times_of_any_source():
    y = torch.tensor([[1.0, 3.0], [1.0, 0.0], [0.0, -2.0]])
    assert "row 2 has the time -2" in Survival(1).check(y, (1,))
    assert Survival(1).check(y[:2], (1,)) == ""


def test_a_silos_warnings_are_shown_by_the_rank_that_has_opened_it(tmp_path):
    """Other warnings are shown by rank 0 alone, which has opened none."""
    for name in ("north", "south"):
        sheet(tmp_path, {"id": range(60), "a": noise(), "label": [0] * 30 + [1] * 30}, f"{name}.csv")
    (tmp_path / "run.yaml").write_text(
        f"data: {{source: table, root: {tmp_path}, silos: [north, south], path: '{{site}}.csv'}}\n"
        "rounds: 1\nmodel: {name: logistic}\nmethod: {name: fedavg}\ntrain: {lr: 0.1}\n"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_data.siloed(config.load(tmp_path / "run.yaml"), Solo(torch.device("cpu")))
    assert {each.category for each in caught} == {RankWarning}
    said = [str(each.message) for each in caught]
    for name in ("north", "south"):
        assert [f"{name}.csv: column 'id' numbers the rows" in each for each in said].count(True) == 1
        assert [f"data of {name}: feature 'id' alone separates" in each for each in said].count(True) == 1


# ---- cells that are no numbers ----
def test_events_in_other_words_are_answered_with_the_words_that_are_known(tmp_path):
    sheet(tmp_path, {"a": noise(4), "event": ["ja", "nein", "ja", "nein"], "time": [1, 2, 3, 4]})
    known = r"column 'event' holds 'ja', which is no number; .* an event is 1, yes or true \(seen\), or 0, no or false"
    with pytest.raises(UserError, match=known) as refused:
        table(tmp_path, path="a.csv", label_column=["event", "time"])
    assert "categorical" not in str(refused.value)


@pytest.mark.parametrize("date", ["05.03.2016", "2016-03-05", "2016-03-05T10:00:00", "3/5/16"])
@pytest.mark.parametrize("decimal", [".", ","])
def test_a_column_of_dates_is_to_be_left_out_or_made_a_number(tmp_path, date, decimal):
    sheet(tmp_path, {"seen": [date] * 4, "label": ["a", "b"] * 2})
    with pytest.raises(UserError, match=r"if it is a date, leave the column out \(data\.drop\)") as refused:
        table(tmp_path, path="a.csv", decimal=decimal, thousands="." if decimal == "," else ",")
    assert "categorical" not in str(refused.value)


def test_a_version_number_is_no_date(tmp_path):
    sheet(tmp_path, {"version": ["1.5.2", "1.5.3"] * 2, "label": ["a", "b"] * 2})
    with pytest.raises(UserError, match=r"'1\.5\.2', which is no number; list it in data\.categorical"):
        table(tmp_path, path="a.csv")


@pytest.mark.parametrize("cells", [[f"p{k}" for k in range(40)], [f"{k}a" for k in range(38)] + ["x", "x"]])
def test_a_column_of_ids_is_to_be_left_out_and_not_made_columns_of_its_words(tmp_path, cells):
    sheet(tmp_path, {"who": cells, "a": noise(40), "label": ["a", "b"] * 20})
    many = len(set(cells))
    with pytest.raises(UserError, match=rf"{many} values in 40 rows are names .*: list it in data\.drop") as refused:
        table(tmp_path, path="a.csv")
    assert "categorical" not in str(refused.value)
    with pytest.warns(UserWarning, match=r"'who' \(data\.categorical\) has \d+ values in 32 training rows: it names"):
        table(tmp_path, path="a.csv", categorical=["who"])


def test_a_column_of_one_word_is_to_be_left_out(tmp_path):
    sheet(tmp_path, {"unit": ["mg/dl"] * 40, "a": noise(40), "label": ["a", "b"] * 20})
    with pytest.raises(UserError, match=r"the same in all rows, .*: list it in data\.drop") as refused:
        table(tmp_path, path="a.csv")
    assert "categorical" not in str(refused.value)


def test_words_that_many_rows_share_or_of_a_few_rows_become_columns(tmp_path):
    for words in (["red", "green"] * 20, [f"w{k}" for k in range(12)]):
        sheet(tmp_path, {"w": words, "label": ["a", "b"] * (len(words) // 2)})
        with pytest.raises(UserError, match=r"list it in data\.categorical"):
            table(tmp_path, path="a.csv")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table(tmp_path, path="a.csv", categorical=["w"])
        assert not any("names the rows" in str(each.message) for each in caught)


def test_a_time_whose_sign_marks_who_is_censored_is_answered_with_two_columns(tmp_path):
    sheet(tmp_path, {"a": noise(4), "event": [1, 1, 0, 1], "time": [1, -2, 3, 4]})
    two = (
        r"line 3: column 'time' holds the time -2; .* write 0 into column 'event' there, and the time without its sign"
    )
    with pytest.raises(UserError, match=two):
        table(tmp_path, path="a.csv", label_column=["event", "time"])
    sheet(tmp_path, {"a": noise(300), "days": [k - 150 for k in range(300)]})
    with pytest.raises(UserError, match=r"for the task survival name two columns, data\.label_column: \[EVENT, TIME\]"):
        table(tmp_path, path="a.csv", label_column="days")


def test_numbers_of_rows_that_restart_at_each_site_are_found_where_sites_alternate(tmp_path):
    sheet(tmp_path, {"id": np.arange(60) // 2, "who": ["n", "s"] * 30, "a": noise(), "label": [0, 1, 1, 0] * 15})
    with pytest.warns(UserWarning, match="column 'id' numbers the rows"):
        table(tmp_path, path="a.csv", site_column="who")


def test_advice_on_commas_looks_at_the_whole_column(tmp_path):
    """The first 1,000 rows, at which a look is taken for numbers of rows, have thousands separators alone."""
    with pytest.raises(UserError, match=r'holds \'1,000\', .*data\.decimal: ","') as told:
        priced(tmp_path, ["1,000"] * 1200 + ["1,5", "2,5"])
    assert "thousands" not in str(told.value)
