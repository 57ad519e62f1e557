"""What has left this rank: one line a message, for the site whose data lie here.

    {"time": ..., "round": 3, "what": ["_loss", ..., "dw"], "to": 0, "bytes": 220852, "sha256": ...}

sha256 is that of the message's bytes as they were handed to the network. `what` are the slots of its packing, by the
engine's names. `to` is a rank; "all" where a few bytes of text went to everybody.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path

from torch import Tensor, uint8

from fedmpi.common.errors import UserError


class Audit:
    """Lines wait in memory until `open` says where to write them: the run directory is not known at the start."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.path: Path | None = None

    def open(self, path: Path) -> None:
        """Write all lines to this file from here on. Raises UserError where it cannot be written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                with path.open("rb+") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)  # of half a line, which a full disk has left
        except OSError as error:
            raise self._cannot_write(path, error) from error
        self._write(path)

    def sent(self, about: tuple[int | None, tuple[str, ...]], to: int, x: Tensor) -> None:
        """Note that tensor x was sent to rank `to`."""
        self.said(about, to, x.detach().cpu().contiguous().view(uint8).numpy().tobytes())

    def said(self, about: tuple[int | None, tuple[str, ...]], to: int | str, content: bytes) -> None:
        """Note some bytes to a rank, or to "all"."""
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "round": about[0],
            "what": list(about[1]),
            "to": to,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        self.waiting.append(json.dumps(line))
        if self.path is not None:
            self._write(self.path)

    def _write(self, path: Path) -> None:
        try:
            with open(path, "a", encoding="utf-8") as stream:
                stream.writelines(f"{line}\n" for line in self.waiting)
        except OSError as error:
            raise self._cannot_write(path, error) from error
        self.waiting.clear()

    def _cannot_write(self, path: Path, error: OSError) -> UserError:
        return UserError(f"data.audit: cannot write {path}: {error.strerror or error}; free some space there")
