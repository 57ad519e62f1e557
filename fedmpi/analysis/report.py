"""The files that an analysis writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable


def folder(to: Path, option: str = "--to") -> Path:
    """Create the directory to write to, before the work begins. Raises UserError if that is not possible."""
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: cannot create {to}: {error.strerror}; choose another directory") from error
    if not os.access(to, os.W_OK):
        raise UserError(f"{option}: {to} cannot be written to; choose another directory")
    return to


def write(path: Path, facts: Mapping[str, Any]) -> Path:
    """The facts as JSON; numbers that are not finite are null."""
    path.write_text(json.dumps(to_jsonable(facts), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path
