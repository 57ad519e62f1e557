"""Records of rank failures, and their effect on the results of a run.

    S_t        is the cohort as drawn, without the clients that were lost in round t (`clients`) and those that are
               unavailable from a round on (`gone`, until they are `back`)
    reverted   client -> r: its state at the start of round t is the one that round r produced; r = -1 is the initial
               state. A state that existed only in the memory of a failed rank is lost.
    reported   round t - 1 was evaluated before the failure, with all clients and their states before it

These rows, which faults.jsonl contains, determine the results of a run with faults: a run that is given them (`fedmpi
replay`) and has no failures produces the same bits.

    {"round": 7, "ranks": {"2": "node5"}, "clients": [3], "gone": [], "back": [], "reverted": {"3": 6},
     "reported": true, "why": "..."}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
INITIAL_STATE = -1  # in place of a round: the initial state


def make_row(
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
    """Return a row of faults.jsonl; `ranks` maps failed ranks to their hosts."""
    lists = {"clients": sorted(clients), "gone": sorted(gone), "back": sorted(back)}
    rounds = {str(k): r for k, r in sorted((reverted or {}).items())}
    hosts = {str(rank): host for rank, host in sorted(ranks.items())}
    return {"round": t, "ranks": hosts, **lists, "reverted": rounds, "reported": reported, "why": why}


def check_row(row: Row) -> None:
    """Raise KeyError, TypeError, ValueError or AttributeError if this is not a row of faults.jsonl."""
    numbers = (row["round"], *row["ranks"], *row["clients"], *row["gone"], *row["back"], *row["reverted"])
    for number in (*numbers, *row["reverted"].values()):
        int(number)


def was_reported(row: Row) -> bool:
    """Return whether the failure happened after the round before had been evaluated."""
    return bool(row.get("reported", False))


@dataclass
class LostRanks:
    """The rank failures of one run, in chronological order."""

    rows: list[Row] = field(default_factory=list)

    def in_round(self, t: int) -> list[Row]:
        return [each for each in self.rows if each["round"] == t]

    def up_to_round(self, t: int) -> LostRanks:
        """Return the failures of rounds 0..t."""
        return LostRanks([each for each in self.rows if each["round"] <= t])

    def before_evaluation(self, t: int) -> LostRanks:
        """Return the failures that happened before the evaluation of round t - 1."""
        return LostRanks(
            [each for each in self.rows if each["round"] < t or (each["round"] == t and not was_reported(each))]
        )

    def for_resume(self, t: int) -> LostRanks:
        """Return all failures for a run that is resumed at round t and evaluates round t - 1 once more."""
        return LostRanks([{**each, "reported": False} if each["round"] == t else each for each in self.rows])

    def replace_rows(self, t: int, rows: Sequence[Row]) -> None:
        """Replace the rows of round t by the given ones, and delete those of later rounds."""
        self.rows = [each for each in self.rows if each["round"] < t] + list(rows)

    def unavailable_clients(self, t: int) -> set[int]:
        """Return the clients that are unavailable in round t."""
        missing: set[int] = set()
        for each in self.rows:
            if each["round"] <= t:
                missing = (missing | set(each["gone"])) - set(each["back"])
        return missing

    def participants(self, t: int, cohort: Sequence[int]) -> list[int]:
        """Return the clients of round t's cohort that take part."""
        out = self.unavailable_clients(t).union(*(each["clients"] for each in self.in_round(t)))
        return [k for k in cohort if k not in out]

    def reverted_states(self, t: int) -> dict[int, int]:
        """Return client -> the round of its state at the start of round t, for clients that are reverted."""
        return {int(k): r for each in self.in_round(t) for k, r in each["reverted"].items()}

    def needed_states(self) -> set[tuple[int, int]]:
        """Return (client, round) of all earlier client states that are used again after a rank failure."""
        return {(int(k), r) for each in self.rows for k, r in each["reverted"].items() if r != INITIAL_STATE}
