"""The reader of CSV files returns the cells unchanged, whatever the size of blocks, and names the line of errors."""

import csv

import numpy as np
import pytest
import torch
from table_files import write_table

from fedmpi.common.errors import UserError
from fedmpi.data import csv_file
from fedmpi.data.csv_file import decode_cells, iter_csv_rows, read_csv_columns
from fedmpi.data.partitions.site_and_file import partition_from_file
from fedmpi.data.sources.labelled_files import read_csv_rows
from fedmpi.data.sources.tables.read_table import read_table
from fedmpi.data.sources.tables.table_preprocessing import compute_column_moments, standardise_columns
from fedmpi.data.sources.tables.table_source import table

LONG = "x" * 200_000  # Python's default limit is 131,072 characters per cell


def read_columns(path):
    return read_csv_columns(path, ",", lambda header: None)


@pytest.mark.parametrize("block", [1, 7, 200_000])
def test_columns_contain_the_cells_unchanged(tmp_path, monkeypatch, block):
    monkeypatch.setattr(csv_file, "CELLS_PER_BLOCK", block)
    cells = [["1", "né", ""], [" 2.50 ", "Ω", "a\nb"], ["-3e7", 'q"', "z" * 500], ["", "né", "1"]] * 5
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([["a", "b", "c"], *cells])
    columns, lines = read_columns(tmp_path / "a.csv")
    assert [decode_cells(columns[name]).tolist() for name in "abc"] == [
        list(column) for column in zip(*cells, strict=True)
    ]
    # A row ends one line after the previous row, or two lines if a cell contains a line feed.
    assert lines.tolist() == [2 + k + (k + 3) // 4 for k in range(20)]


def test_long_cells_and_the_byte_order_mark_are_read_by_all_sources(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"\ufeffauthor,text\nann,{LONG}\n", encoding="utf-8")
    assert decode_cells(read_table(path, ",").columns["text"])[0] == LONG
    assert next(read_csv_rows(path, {"text_column": "text"}))[1]["text_column"] == LONG
    assert [len(row[1]) for _, row in iter_csv_rows(path)] == [4, len(LONG)]
    (tmp_path / "p.csv").write_text("\ufeffclient,note\n1,a\n0,b\n", encoding="utf-8")
    parts = partition_from_file(np.zeros(2, np.int64), None, np.random.default_rng(0), path=tmp_path / "p.csv")
    assert [part.tolist() for part in parts] == [[1], [0]]


EXCEL = "\n".join(["a,b", *["1,2"] * 9000, "K\xf6ln,3"])  # the invalid byte is not in the first block that is decoded


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{}", r"a\.jsonl is not a CSV file; export it as CSV"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "cannot be read as CSV in UTF-8: .*0xff"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16-be"), r"cannot be read as CSV in UTF-8.*(x00|NUL).*save it as CSV"),
        ("a.csv", EXCEL.encode("cp1252"), r"UTF-8, after line \d{4}: .*0xf6.*save it as CSV"),
        ("a.csv", b"a,b\n1,2\n3\n", r"line 3: the row '3' has 1 cell, but the header has 2"),
        ("none.csv", None, r"none\.csv cannot be read .*No such file"),
    ],
    ids=["other suffix", "UTF-16", "UTF-16-BE", "cp1252", "missing cell", "missing file"],
)
def test_errors_of_unreadable_files_name_the_file_or_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for reader in (lambda path: read_table(path, ","), lambda path: list(read_csv_rows(path, {"a": "a"}))):
        with pytest.raises(UserError, match=message):
            reader(tmp_path / name)


@pytest.mark.parametrize("columns", [1, 2, 8, 9, 17])
def test_moments_are_bitwise_equal_to_those_of_all_columns_at_once(tmp_path, columns):
    """Columns are processed a few at a time; sums over a single one of several would differ in their last bits."""
    x = np.random.default_rng(1).lognormal(size=(1000, columns)) * 1e3
    cells = {f"c{k}": [*map(repr, x[:, k].tolist()), "0.5"] for k in range(columns)}
    write_table(tmp_path, {**cells, "y": ["a", "b"] * 500 + ["a"], "part": ["train"] * 1000 + ["test"]})
    data = table(tmp_path, path="a.csv", label_column="y", split_column="part")
    mean, deviation = compute_column_moments(x)
    assert torch.equal(data.train_x, torch.from_numpy(standardise_columns(x, mean, deviation)).float())
