"""The audit file contains complete lines, and an error is raised if it cannot be written."""

import errno
import json
import os

import pytest
import torch

from fedmpi.comm import audit
from fedmpi.common.errors import UserError


def test_an_incomplete_line_is_removed_before_the_next(tmp_path):
    path = tmp_path / "audit" / "rank-1.jsonl"
    path.parent.mkdir()
    path.write_text('{"round": 0}\n{"round": 1, "wh')
    it = audit.AuditLog()
    it.record_tensor((2, ("dw",)), 0, torch.ones(3))  # before the run directory is known
    it.open(path)
    it.record_bytes((3, ("text",)), "all", b"abc")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 2, 3]
    assert [row.get("bytes") for row in rows] == [None, 12, 3]


def test_a_full_disk_is_one_error(tmp_path, monkeypatch):
    it = audit.AuditLog()
    it.open(tmp_path / "audit" / "rank-1.jsonl")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(audit, "open", full, raising=False)
    with pytest.raises(UserError, match=r"data\.audit: cannot write .*rank-1\.jsonl: No space left on device"):
        it.record_tensor((0, ("dw",)), 0, torch.ones(1))


def test_an_impossible_path_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.audit: cannot write .*(Not a directory|File)"):
        audit.AuditLog().open(tmp_path / "file" / "rank-1.jsonl")
