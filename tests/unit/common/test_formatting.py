"""How numbers, durations and tables are written."""

import doctest

from fedmpi.common import formatting


def test_examples_in_docstrings_hold():
    found = doctest.testmod(formatting)
    assert found.attempted > 2
    assert found.failed == 0


def test_columns_are_as_wide_as_need_be():
    rows = [("round", "ratio"), ("10", 0.5)]
    assert formatting.table(rows) == ["round  ratio", "10       0.5"]
    assert formatting.table(rows, "left") == ["round  ratio", "10     0.5"]
