"""Tables that would silently give wrong numbers are refused, or warned of, with the row, the cell and the remedy."""

import re

import pytest
from table_files import noise, warnings_of, write_table

from fedmpi.common.errors import UserError
from fedmpi.data.sources.tables.table_source import table

EVENTS = {"label_column": ["event", "days"]}


def read_table(folder, columns, **options):
    """The table with these columns, a feature `a` and, unless the options name another one, a label."""
    n = len(next(iter(columns.values())))
    label = {} if "label_column" in options else {"label": [0, 1, 1, 0] * (n // 4) + [0, 1] * (n % 4 // 2)}
    write_table(folder, {**columns, "a": noise(n), **label})
    return table(folder, **{"path": "a.csv", **options})


NO_NUMBER = (
    r"which is not a number; correct it, or list the column in data\.categorical .*or in data\.drop; .* data\.decimal"
)


@pytest.mark.parametrize(
    ("cells", "options"),
    [
        (["27,822", "31,000,000"], {}),
        (["1.500,5", "2"], {"decimal": ","}),
        (["1.500", "1,5"], {"decimal": ","}),  # a point is no decimal mark there, nor ignored
        (["1_0", "2"], {}),
        (["05.03.2016"] * 4, {"decimal": ","}),
        (["red", "green"] * 20, {}),
    ],
)
def test_an_invalid_number_is_reported_with_the_options_that_help(tmp_path, cells, options):
    with pytest.raises(UserError, match=rf"a\.csv, line 2: column 'x' contains .*{re.escape(cells[0])}.*{NO_NUMBER}"):
        read_table(tmp_path, {"x": cells}, **options)


REFUSED = [  # columns, options, message
    (
        {"price": ["27,822", "31,500"]},
        {"label_column": "price"},
        r"column 'price' contains '27,822', which is not a number",
    ),
    # ---- columns
    ({"": [1, 2], "x": [1, 2]}, {}, r"column 1 has no name .*index=False"),
    (
        {"x": [1, 2]},
        {"features": ["x", "label"]},
        r"data\.features lists it twice, or it is also in .* data\.label_column",
    ),
    ({"sex": ["m", "w"]}, {"features": ["sexx"], "categorical": ["sex"]}, r"no column 'sexx' .*mean 'sex'"),
    ({"x": [1, -9]}, {"missing_values": [-9]}, r"line 3: the cell in column 'x' is empty"),
    ({"x": [1, 2]}, {"missing_values": {"xx": [-9]}}, r"no column 'xx' \(data\.missing_values\)"),
    # ---- events and times
    ({"event": ["alive", "ja"], "days": [1, 2]}, EVENTS, r"line 2: .*'alive', which is not a number"),
    (
        {"days": [k - 150 for k in range(300)]},
        {"label_column": "days"},
        r"for the task survival, set data\.label_column: \[EVENT, TIME\]",
    ),
]


@pytest.mark.parametrize(("columns", "options", "message"), REFUSED)
def test_an_invalid_table_is_refused(tmp_path, columns, options, message):
    with pytest.raises(UserError, match=message):
        read_table(tmp_path, columns, **options)


def test_missing_drop_warns_about_rows_and_refuses_to_drop_a_site(tmp_path):
    columns = {"age": ["" if i == 4 else i for i in range(30)], "sick": ["none", "ill"] * 15}
    options = {"label_column": "sick", "missing": "drop", "target": "class", "class_names": ["ill", "well"]}
    (message,) = warnings_of(read_table, tmp_path, columns, **options)
    assert re.search("removes 15 of 30 rows .*; columns with most missing values: 'sick' .15., 'age' .1.", message)
    columns = {"at": [*"aaaabbbbcccc"], "b": [1, 2, 3, 4, 6, 7, 8, 9, "", "", "", ""]}
    options = {"site_column": "at", "missing": "drop"}
    message = r"removes 4 of 12 rows .* including all rows of site 'c'; fill in its values, or remove the site"
    with pytest.warns(UserWarning, match="removes 4 of 12 rows"), pytest.raises(UserError, match=message):
        read_table(tmp_path, columns, **options)
