"""Output directory and JSON files of an analysis."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable


def create_output_folder(to: Path, option: str = "--to") -> Path:
    """Create the output directory of a command before its work begins, and return its path.

    Raises UserError, which names `option`, if the directory cannot be created or written to.
    """
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: cannot create {to}: {error.strerror}; choose another directory") from error
    if not os.access(to, os.W_OK):
        raise UserError(f"{option}: {to} cannot be written to; choose another directory")
    return to


def write_json(path: Path, facts: Mapping[str, Any]) -> Path:
    """Write facts to a JSON file and return its path. Numbers that are not finite become null."""
    path.write_text(json.dumps(to_jsonable(facts), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path
