"""A log of all messages that a rank sends, so that a site can check what data leave it: one JSON line per message.

    {"time": ..., "round": 3, "what": ["_loss", ..., "dw"], "to": 0, "bytes": 220852, "sha256": ...}

`sha256` is the hash of the bytes that were handed to the network. `what` lists the names of the tensors (slots) that
the message contains. `to` is the receiving rank, or "all" if a short text was sent to all ranks.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path

from torch import Tensor, uint8

from fedmpi.common.errors import UserError


class AuditLog:
    """A log of all messages that this rank sends.

    Lines are held in memory until `open` is called, because the run directory is not known at the start.
    """

    def __init__(self) -> None:
        self.unwritten_lines: list[str] = []
        self.path: Path | None = None

    def open(self, path: Path) -> None:
        """Append all lines to a file: those recorded so far, and all later ones. Raises UserError if this fails."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                with path.open("rb+") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)  # remove an incomplete line, left by a full disk
        except OSError as error:
            raise self._make_write_error(path, error) from error
        self._write(path)

    def record_tensor(self, message_info: tuple[int | None, tuple[str, ...]], to: int, x: Tensor) -> None:
        """Record that tensor x is sent to rank `to`; message_info: the round and the slots of the message."""
        self.record_bytes(message_info, to, x.detach().cpu().contiguous().view(uint8).numpy().tobytes())

    def record_bytes(self, message_info: tuple[int | None, tuple[str, ...]], to: int | str, content: bytes) -> None:
        """Record that `content` is being sent.

        Args:
            message_info: the round and the slots of the message.
            to: the receiving rank, or "all".
        """
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "round": message_info[0],
            "what": list(message_info[1]),
            "to": to,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        self.unwritten_lines.append(json.dumps(line))
        if self.path is not None:
            self._write(self.path)

    def _write(self, path: Path) -> None:
        try:
            with open(path, "a", encoding="utf-8") as stream:
                stream.writelines(f"{line}\n" for line in self.unwritten_lines)
        except OSError as error:
            raise self._make_write_error(path, error) from error
        self.unwritten_lines.clear()

    def _make_write_error(self, path: Path, error: OSError) -> UserError:
        return UserError(
            f"data.audit: cannot write {path}: {error.strerror or error}; free disk space there, or make the folder "
            "writable"
        )
