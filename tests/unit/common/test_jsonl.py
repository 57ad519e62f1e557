"""Files with one JSON object per line."""

import pytest

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import parse_jsonl, read_jsonl

CONTENT = b'{"round": 0}\n\n[1]\n{"a": 1}\n\xff{}\n{"round": "1"}\n{"round": 2}\n{"rou'


def test_rows_damaged_lines_and_a_truncated_end_are_told_apart():
    found = parse_jsonl(CONTENT)
    assert found.rows == [{"round": 0}, {"a": 1}, {"round": "1"}, {"round": 2}]
    assert (found.damaged_lines, found.is_truncated) == ([3, 5], True)
    found = parse_jsonl(CONTENT, need_round=True)
    assert (found.rows, found.damaged_lines) == ([{"round": 0}, {"round": 2}], [3, 4, 5, 6])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'{"round": 0}\n{"round": 1}', ([{"round": 0}], [], True)),  # the number in it may go on: 1 of 12
        (b"[" * 100_000 + b"\n", ([], [1], False)),  # deeper than Python parses
        (b"", ([], [], False)),
    ],
)
def test_unusual_files_are_parsed(content, found):
    lines = parse_jsonl(content)
    assert (lines.rows, lines.damaged_lines, lines.is_truncated) == found


def test_a_missing_file_has_no_rows(tmp_path):
    found = read_jsonl(tmp_path / "a.jsonl", strict=True)
    assert (found.rows, found.damaged_lines, found.is_truncated) == ([], [], False)


def test_errors_name_file_and_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(CONTENT)
    with pytest.raises(UserError, match=r"a\.jsonl:3: this line is not a valid row; the file was changed, or the disk"):
        read_jsonl(file, strict=True)
    with pytest.raises(UserError, match=rf"^cannot read {tmp_path}: Is a directory$"):
        read_jsonl(tmp_path)


def test_a_tail_starts_with_a_complete_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"round": {t}}}\n' for t in range(5)))
    assert [row["round"] for row in read_jsonl(file, tail_bytes=30).rows] == [3, 4]
    assert [row["round"] for row in read_jsonl(file, tail_bytes=10_000).rows] == [0, 1, 2, 3, 4]
    assert read_jsonl(file, tail_bytes=5).rows == []
