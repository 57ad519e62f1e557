"""Records of rank failures, and their effect on the results of a run.

Each failure is a row of faults.jsonl:

    {"round": 7, "ranks": {"2": "node5"}, "clients": [3], "gone": [], "back": [], "reverted": {"3": 6},
     "reported": true, "why": "..."}

    ranks      failed rank -> its host
    clients    clients that do not take part in round t, the round in which the failure happened
    gone       clients that do not take part in round t and later rounds, until a row lists them in `back`
    reverted   client -> round r: round t starts with the client's state of round r (-1: the initial state), because a
               newer state existed only in the memory of a failed rank
    reported   whether round t - 1 was evaluated before the failure, i.e. with the clients and states of that time
    why        the error messages

These rows determine the results of a run with failures: a run without failures that replays the rows (`fedmpi replay`)
produces bitwise identical results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
INITIAL_STATE = -1  # in place of a round number: the initial state of a client


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
    """Return a row of faults.jsonl for a failure in round t; the module's docstring describes its entries."""
    lists = {"clients": sorted(clients), "gone": sorted(gone), "back": sorted(back)}
    rounds = {str(k): r for k, r in sorted((reverted or {}).items())}
    hosts = {str(rank): host for rank, host in sorted(ranks.items())}
    return {"round": t, "ranks": hosts, **lists, "reverted": rounds, "reported": reported, "why": why}


def check_row(row: Row) -> None:
    """Raise KeyError, TypeError, ValueError or AttributeError if `row` is not a valid row of faults.jsonl."""
    numbers = (row["round"], *row["ranks"], *row["clients"], *row["gone"], *row["back"], *row["reverted"])
    for number in (*numbers, *row["reverted"].values()):
        int(number)


def followed_previous_evaluation(row: Row) -> bool:
    """Return whether the failure happened after the evaluation of the previous round."""
    return bool(row.get("reported", False))


@dataclass
class LostRanks:
    """The rank failures of one run, in chronological order."""

    rows: list[Row] = field(default_factory=list)

    def in_round(self, t: int) -> list[Row]:
        """Return the recorded failures in round t, as rows of faults.jsonl."""
        return [each for each in self.rows if each["round"] == t]

    def up_to_round(self, t: int) -> LostRanks:
        """Return the failures of rounds 0 to t."""
        return LostRanks([each for each in self.rows if each["round"] <= t])

    def before_evaluation(self, t: int) -> LostRanks:
        """Return the failures of rounds 0 to t, except those of round t that followed the evaluation of round t - 1.

        Round t - 1 is evaluated at the beginning of round t.
        """
        return LostRanks(
            [
                each
                for each in self.rows
                if each["round"] < t or (each["round"] == t and not followed_previous_evaluation(each))
            ]
        )

    def for_resume(self, t: int) -> LostRanks:
        """Return the failures as they apply to a run that is resumed at round t.

        The resumed run evaluates round t - 1 again. Failures of round t that happened after the first evaluation thus
        come before the new one.
        """
        return LostRanks([{**each, "reported": False} if each["round"] == t else each for each in self.rows])

    def replace_failures_since(self, t: int, rows: Sequence[Row]) -> None:
        """Replace the recorded failures of round t by `rows`, and delete the failures of later rounds."""
        self.rows = [each for each in self.rows if each["round"] < t] + list(rows)

    def unavailable_clients(self, t: int) -> set[int]:
        """Return the clients that are unavailable in round t because their site has failed."""
        missing: set[int] = set()
        for each in self.rows:
            if each["round"] <= t:
                missing = (missing | set(each["gone"])) - set(each["back"])
        return missing

    def participants(self, t: int, cohort: Sequence[int]) -> list[int]:
        """Return the clients of round t's cohort that take part in the round despite failures."""
        out = self.unavailable_clients(t).union(*(each["clients"] for each in self.in_round(t)))
        return [k for k in cohort if k not in out]

    def reverted_states(self, t: int) -> dict[int, int]:
        """For each client that is reverted at the start of round t, return the round whose state it gets."""
        return {int(k): r for each in self.in_round(t) for k, r in each["reverted"].items()}

    def needed_states(self) -> set[tuple[int, int]]:
        """Return (client, round) for each state to which a client is reverted; initial states are left out."""
        return {(int(k), r) for each in self.rows for k, r in each["reverted"].items() if r != INITIAL_STATE}
