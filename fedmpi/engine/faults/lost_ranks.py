"""Records of rank failures, and what they mean for a run's numbers.

    S_t   is the cohort as drawn, without the clients that were lost in round t and without those gone since
    c_k   the state of a client in `reverted` of round t is at the start of that round the one that round r made,
          -1: the one of the start; what lay in a dead rank's memory alone is lost
    reported: round t - 1 had been evaluated by then, with all clients and the states that they had before the loss
These rows, which faults.jsonl holds, define the bits of a run with faults: a run without any that is given them
(`fedmpi replay`) has the same ones.

    {"round": 7, "ranks": {"2": "node5"}, "clients": [3], "gone": [], "back": [], "reverted": {"3": 6},
     "reported": true, "why": "..."}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
START = -1  # in place of a round: the state before any


def row(
    t: int,
    ranks: Mapping[int, str],
    *,
    clients: Iterable[int] = (),
    gone: Iterable[int] = (),
    back: Iterable[int] = (),
    reverted: Mapping[int, int] | None = None,
    reported: bool = False,
    why: str = "",
) -> Row:
    """Return a row of faults.jsonl. ranks: number -> host."""
    lists = {"clients": sorted(clients), "gone": sorted(gone), "back": sorted(back)}
    rounds = {str(k): r for k, r in sorted((reverted or {}).items())}
    hosts = {str(rank): host for rank, host in sorted(ranks.items())}
    return {"round": t, "ranks": hosts, **lists, "reverted": rounds, "reported": reported, "why": why}


def check(row: Row) -> None:
    """Raise KeyError, TypeError, ValueError or AttributeError if this is not such a row."""
    numbers = (row["round"], *row["ranks"], *row["clients"], *row["gone"], *row["back"], *row["reverted"])
    for number in (*numbers, *row["reverted"].values()):
        int(number)


def late(row: Row) -> bool:
    """Return whether the round before had been evaluated."""
    return bool(row.get("reported", False))


@dataclass
class LostRanks:
    """The rank failures of one run, in their order."""

    rows: list[Row] = field(default_factory=list)

    def of(self, t: int) -> list[Row]:
        return [each for each in self.rows if each["round"] == t]

    def until(self, t: int) -> LostRanks:
        """Return those of rounds 0..t."""
        return LostRanks([each for each in self.rows if each["round"] <= t])

    def before(self, t: int) -> LostRanks:
        """Return those that happened before the evaluation of round t - 1."""
        return LostRanks([each for each in self.rows if each["round"] < t or (each["round"] == t and not late(each))])

    def known(self, t: int) -> LostRanks:
        """Return all, as a run sees them that is resumed at round t and evaluates round t - 1 again."""
        return LostRanks([{**each, "reported": False} if each["round"] == t else each for each in self.rows])

    def replace(self, t: int, rows: Sequence[Row]) -> None:
        """Replace the rows of round t by these, and delete those of later rounds."""
        self.rows = [each for each in self.rows if each["round"] < t] + list(rows)

    def gone(self, t: int) -> set[int]:
        """Return the clients that are unavailable in round t."""
        missing: set[int] = set()
        for each in self.rows:
            if each["round"] <= t:
                missing = (missing | set(each["gone"])) - set(each["back"])
        return missing

    def present(self, t: int, cohort: Sequence[int]) -> list[int]:
        """Return those of round t's cohort that take part."""
        out = self.gone(t).union(*(each["clients"] for each in self.of(t)))
        return [k for k in cohort if k not in out]

    def reverted(self, t: int) -> dict[int, int]:
        """Return client -> the round whose state it starts round t with, of the clients that revert."""
        return {int(k): r for each in self.of(t) for k, r in each["reverted"].items()}

    def needed(self) -> set[tuple[int, int]]:
        """Return (client, round) of each earlier client state that is used again after a rank failure."""
        return {(int(k), r) for each in self.rows for k, r in each["reverted"].items() if r != START}
