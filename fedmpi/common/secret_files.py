"""Files with secrets that only their owner can read."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def read_or_create_secret(path: Path) -> bytes:
    """Return the secret in a file that only the user can read; if the file is missing, create it.

    If several ranks create the file at the same time, all get the same secret.

    Raises:
        OSError: other users can read the file.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        mine = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with open(os.open(mine, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another rank was faster; creating a link is atomic, even on NFS
            os.link(mine, path)
        mine.unlink()
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise OSError(
                "other users may read this secret; run chmod 600 on it, or delete it so that a new one is created"
            )
        return file.read(4096).strip()
