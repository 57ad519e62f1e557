"""The text of a config file: of a regular file that exists, is UTF-8, and is not larger than configs are."""

import difflib
import os
import stat
from pathlib import Path

from fedmpi.common.errors import UserError

MAX_BYTES = 1_000_000


def text_of(path: Path) -> str:
    """The text in a file.

    Raises:
        UserError: no such file (with the nearest name), a directory or a device, unreadable, too large, not UTF-8.
    """
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise UserError(f"{path}: is a directory; name a YAML file in it")
        if not stat.S_ISREG(kind):  # opening a pipe would wait for its writer, and a device never ends
            raise UserError(f"{path}: is a device, pipe or socket; a config is a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path}: there is no such config file{_similar(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: is larger than {MAX_BYTES // 10**6} MB; a config is a short YAML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: cannot be read as text: {error}; save it as UTF-8") from error


def _similar(path: Path) -> str:
    """The config of the nearest name in the same directory, if there is one."""
    try:
        others = {other.stem: other for other in path.parent.iterdir() if other.suffix in (".yaml", ".yml")}
    except OSError:
        return ""
    close = difflib.get_close_matches(path.stem, others, n=1)
    return f"; did you mean {others[close[0]]}?" if close else ""
