"""Tables that would silently give wrong numbers are refused, or warned of, with the row, the cell and the remedy."""

import re

import numpy as np
import pytest
from table_files import noise, warnings_of, write_table

from fedmpi.common.errors import UserError
from fedmpi.data.sources.tables.table import table

EVENTS = {"label_column": ["event", "days"]}
DATE = r"if it is a date, leave the column out \(data\.drop\)"
COMMA = {"decimal": ",", "thousands": "."}


def read_table(folder, columns, **options):
    """The table with these columns, a feature `a` and, unless the options name another one, a label."""
    n = len(next(iter(columns.values())))
    label = {} if "label_column" in options else {"label": [0, 1, 1, 0] * (n // 4) + [0, 1] * (n % 4 // 2)}
    write_table(folder, {**columns, "a": noise(n), **label})
    return table(folder, **{"path": "a.csv", **options})


REFUSED = [  # columns, options, message, what the message must not advise
    # ---- numbers as spreadsheets write them
    (
        {"x": ["27,822", "31,000,000"]},
        {},
        r'line 2: .* three digits follow every comma.*data\.thousands: ","',
        "decimal",
    ),
    ({"x": ["27,822", "1,500"]}, {}, r'thousands: "," .*; say data\.decimal: "," only if commas are decimal', "drop"),
    ({"x": ["27,822", "1,5"]}, {}, r'data\.decimal: ","', "thousands"),
    # Whether a column numbers the rows is seen in its first rows; the advice needs all of them.
    ({"x": ["1,000"] * 1200 + ["1,5", "2,5"]}, {}, r'holds \'1,000\', .*data\.decimal: ","', "thousands"),
    ({"x": ["1.500,5", "2.000,5"]}, {}, r'data\.decimal: "," and data\.thousands: "\."', "drop"),
    ({"x": ["1.500", "1,5"]}, {"decimal": ","}, r"'1\.500' has a point.*data\.thousands: \"\.\"", "drop"),
    ({"x": ["1.500,5", "2"]}, {"decimal": ","}, r'three digits follow every point: say data\.thousands: "\."', "drop"),
    ({"x": ["1'500", "2"]}, {}, r'three digits follow every apostrophe: say data\.thousands: "\'"', "drop"),
    ({"x": ["1,5", "2,000"]}, {"thousands": ","}, r"'1,5', .*groups of three digits; correct the cell", "drop"),
    ({"x": ["1", "2"]}, {"thousands": "."}, r"data\.thousands and data\.decimal are both '\.'", "drop"),
    ({"price": ["27,822", "31,500"]}, {"label_column": "price"}, r'data\.thousands: ","', "categorical"),
    # ---- words, dates, identifiers
    ({"seen": ["05.03.2016"] * 4}, {}, DATE, "categorical"),
    ({"seen": ["2016-03-05"] * 4}, {"thousands": ","}, DATE, "categorical"),
    ({"seen": ["2016-03-05T10:00:00"] * 4}, COMMA, DATE, "categorical"),
    ({"seen": ["3/5/16"] * 4}, {}, DATE, "categorical"),
    ({"seen": ["05.03.2016"] * 4}, COMMA, DATE, "categorical"),
    ({"version": ["1.5.2", "1.5.3"] * 2}, {}, r"'1\.5\.2', which is no number; list it in data\.categorical", "date"),
    ({"w": ["red", "green"] * 20}, {}, r"list it in data\.categorical", "names of the rows"),
    ({"w": [f"w{k}" for k in range(12)]}, {}, r"list it in data\.categorical", "names of the rows"),
    (
        {"p": [f"p{k}" for k in range(40)]},
        {},
        r"40 values in 40 rows are names .*: list it in data\.drop",
        "categorical",
    ),
    (
        {"p": [*map("{}a".format, range(38)), "x", "x"]},
        {},
        r"39 values in 40 rows are .*: list it in data\.drop",
        "cate",
    ),
    ({"unit": ["mg/dl"] * 40}, {}, r"the same in all rows, .*: list it in data\.drop", "categorical"),
    # ---- columns
    ({"x": [1, 2], "": [1, 2]}, {}, "column 2 has no name", "drop"),
    ({"x": [1, 2]}, {"features": ["x", "label"]}, r"data\.features: label is the data\.label_column", "drop"),
    ({"sex": ["m", "w"]}, {"features": ["sexx"], "categorical": ["sex"]}, r"no column 'sexx' .*mean 'sex'", "drop"),
    ({"x": [1, -9]}, {"missing_values": [-9]}, r"line 3: column 'x' is empty \(or holds one of data\.missing_", "cate"),
    ({"x": [1, 2]}, {"missing_values": {"xx": [-9]}}, r"no column 'xx' \(data\.missing_values\)", "drop"),
    # ---- events and times
    (
        {"event": [1, 1, 0, 1], "days": [5, 6, -7, 8]},
        EVENTS,
        r"a\.csv, line 4: column 'days' holds the time -7; .*below 0; if the sign marks .* write 0 into column 'event' "
        "there, and the time without its sign",
        "categorical",
    ),
    ({"event": [5, 6], "days": [1, 0]}, EVENTS, r"line 2: .* holds the event 5.*label_column: \[days, event\]", "cate"),
    (
        {"event": ["alive", "ja"], "days": [1, 2]},
        EVENTS,
        r"line 2: column 'event' holds 'alive', which is no number; correct it: .* an event is 1, yes or true "
        r"\(seen\), or 0, no or false .*data\.event_words: \{WORD: 1, WORD: 0\}",
        "categorical",
    ),
    (
        {"event": ["ja", "nein", "Ja", "?"], "days": range(4)},
        {**EVENTS, "event_words": {"ja": 1, "nein": 0}, "missing": "drop"},
        r"line 4: column 'event' holds the event 'Ja'.*data\.event_words: ja, nein",
        "categorical",
    ),
    ({"event": [0, 1], "days": [1, 2]}, {**EVENTS, "event_words": {"ja": 1}}, "needs a word with 1", "categorical"),
    ({"days": [1, 2]}, {"label_column": "days", "event_words": {1: 1, 2: 0}}, "two label columns", "categorical"),
    (
        {"days": [k - 150 for k in range(300)]},
        {"label_column": "days"},
        r"for the task survival name two columns, data\.label_column: \[EVENT, TIME\]",
        "categorical",
    ),
]


@pytest.mark.parametrize(("columns", "options", "message", "not_advised"), REFUSED)
def test_refused(tmp_path, columns, options, message, not_advised):
    with pytest.raises(UserError, match=message) as refused:
        read_table(tmp_path, columns, **options)
    assert not_advised not in str(refused.value)


NUMBERS = r"a\.csv: column 'id' numbers the rows.*leave it out"


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"id": range(7, 67)}, {}),
        ({"id": [*range(40)] * 2, "who": ["n"] * 40 + ["s"] * 40}, {"site_column": "who"}),
        ({"id": np.arange(60) // 2, "who": ["n", "s"] * 30}, {"site_column": "who"}),
        ({"id": range(60)}, {"site": "a", "path": "{site}.csv"}),
    ],
)
def test_a_column_that_numbers_the_rows_is_warned_of(tmp_path, columns, options):
    (message,) = warnings_of(read_table, tmp_path, columns, **options)
    assert re.search(NUMBERS, message)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "Unnamed: 0.1", "__index_level_0__"])
def test_an_index_column_of_pandas_is_left_out_with_one_warning_unless_the_config_names_it(tmp_path, name):
    columns = {name: noise(seed=1)}
    (message,) = warnings_of(read_table, tmp_path, columns)
    assert "is left out: pandas writes the numbers of the rows" in message
    for options in ({"features": [name]}, {"drop": [name]}):
        assert warnings_of(read_table, tmp_path, columns, **options) == []
        assert read_table(tmp_path, columns, **options).meaning[:2] == ("a" if "drop" in options else name, "->")


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("patient", {b"pandas": b'{"index_columns": ["patient"]}'}),
        ("__index_level_0__", None),  # as `datasets` writes it
    ],
)
def test_the_index_of_pandas_in_a_parquet_file_is_left_out(tmp_path, name, metadata):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = arrow.table({"a": noise(), "label": [0] * 30 + [1] * 30, name: range(100, 220, 2)})
    parquet.write_table(rows.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match=f"column '{name}' is left out"):
        assert table(tmp_path, path="a.parquet").meaning[:2] == ("a", "->")


def test_missing_drop_warns_of_the_rows_and_refuses_to_lose_a_site(tmp_path):
    columns = {"age": ["" if i == 4 else i for i in range(30)], "sick": ["none", "ill"] * 15}
    options = {"label_column": "sick", "missing": "drop", "target": "class", "class_names": ["ill", "well"]}
    messages = warnings_of(read_table, tmp_path, columns, **options)
    assert re.search("15 cells of column 'sick' .*class_names", messages[0])
    assert re.search("leaves out 15 of 30 rows .*; most gaps: 'sick' 15, 'age' 1", messages[1])
    columns = {"at": [*"aaaabbbbcccc"], "b": [1, 2, 3, 4, 6, 7, 8, 9, "", "", "", ""]}
    options = {"site_column": "at", "missing": "drop"}
    message = r"leaves no row of site 'c', most gaps are in column 'b'; .* or say data\.small_sites: drop"
    with pytest.warns(UserWarning, match="leaves out 4 of 12 rows"), pytest.raises(UserError, match=message):
        read_table(tmp_path, columns, **options)
    with pytest.warns(UserWarning, match="leaves out 4 of 12 rows"):
        assert read_table(tmp_path, columns, **options, small_sites="drop").site_names == ("a", "b")
