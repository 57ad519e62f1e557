"""Create the output directory of an analysis, and write its JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable


def create_output_folder(to: Path, option: str = "--to") -> Path:
    """Create the output directory of a command and return its path.

    Args:
        to: the directory.
        option: the command-line option that sets the directory, for messages.

    Raises:
        UserError: if the directory cannot be created or is not writable.
    """
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: cannot create {to}: {error.strerror}; choose another directory") from error
    if not os.access(to, os.W_OK):
        raise UserError(f"{option}: {to} is not writable; choose another directory")
    return to


def write_json(path: Path, facts: Mapping[str, Any]) -> Path:
    """Write a mapping to a JSON file and return the path; numbers that are not finite become null."""
    path.write_text(json.dumps(to_jsonable(facts), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path
