"""Lines in the ranks' store that all ranks read in one order, and to which each may add one.

The order is what makes ranks act alike: whether a rank failed before it was taken for lost, or after, is the same for
all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import final

from torch.distributed import Store

DAY = timedelta(days=1)


@final
class EventLog:
    """What a rank has read of the lines, through a connection of its own. Raises DistError once the store is gone."""

    def __init__(self, store: Store, at: int = 0) -> None:
        self.store = store
        self.at = at  # number of the next line

    def next(self) -> str:
        """The next line; waits for it."""
        self.store.wait([f"events/{self.at}"], DAY)
        line = self.store.get(f"events/{self.at}").decode()
        self.at += 1
        return line

    def add(self, line: str, decisive: Callable[[str], bool] = lambda line: False) -> str | None:
        """Add a line and pass all before it; or stop at the first one (this one, too) that is decisive: that one."""
        while True:
            there: str = self.store.compare_set(f"events/{self.at}", "", line).decode()
            if decisive(there):
                return there
            self.at += 1
            if there == line:
                return None
