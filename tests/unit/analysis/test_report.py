"""The files that an analysis writes."""

import json

import pytest

from fedmpi.analysis import report
from fedmpi.common.errors import UserError


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = report.write(tmp_path / "a.json", {"ratio": float("nan"), "rounds": 2})
    assert json.loads(path.read_text()) == {"ratio": None, "rounds": 2}


def test_a_folder_is_made_or_it_is_said_why_not(tmp_path):
    assert report.folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--to: cannot create .*file: File exists; choose another directory"):
        report.folder(tmp_path / "file")
