"""Pictures that stay on disk: rows are read when a batch asks for them, those of the next ones by a thread meanwhile.

data.stream says which sets do: `auto` those of more than LIMIT bytes, `true` all, `false` none. A data source asks
`wanted`, and where it is true gives a Stream in place of an array.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LIMIT = 1 << 31  # bytes of pictures, of training and test part together, that a rank keeps in memory

_limit = ContextVar("limit", default=LIMIT)


@contextmanager
def choosing(stream: bool | str) -> Iterator[None]:
    """While this lasts, sources are told what `data.stream` says."""
    token = _limit.set(LIMIT if stream == "auto" else 0 if stream else 1 << 62)
    try:
        yield
    finally:
        _limit.reset(token)


def wanted(size: int) -> bool:
    """Whether pictures of so many bytes stay on disk."""
    return size > _limit.get()
