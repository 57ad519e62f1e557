"""What went wrong on the way, and what it means for the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedmpi.analysis.pages.run import Run, number
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Section, Table, Text, Value

MOST = 200  # rows of a table


def told(runs: Runs) -> Section | None:
    """Lost ranks, uploads that were refused or clipped, training that came apart, runs that have not finished."""
    parts: list[Table | Text] = [Text(text, warning=True) for text in _words(runs)]
    lost = [[*_who(runs, run), row.get("round"), _ranks(row), _list(row.get("clients")), _list(row.get("gone")),
             str(row.get("why", ""))] for run in runs.all for row in run.faults]  # fmt: skip
    head = () if runs.alone else ("run",)
    if lost:
        parts.append(
            Table(
                (*head, "round", "ranks lost", "clients out of the round", "clients gone", "why"),
                lost[:MOST],
                "Lost ranks",
            )
        )
    refused = [[*_who(runs, run), *row] for run in runs.all for row in _uploads(run)]
    if refused:
        more = f"The first {MOST} of {len(refused):,}." if len(refused) > MOST else ""
        parts.append(
            Table(
                (*head, "round", "client", "what", "norm", "bound"),
                refused[:MOST],
                "Uploads that did not count as they were",
                more,
            )
        )
    return Section("faults", "Faults", parts) if parts else None


def _words(runs: Runs) -> Iterator[str]:
    for run in runs.all:
        who = "" if runs.alone else f"{runs.label(run)}: "
        since = run.summary.get("diverged")
        if since is not None:
            yield f"{who}training came apart: from round {since} on the loss is far above its best."
        if not run.complete:
            yield f"{who}{run.state}."
        yield from (f"{who}{note}" for note in run.notes)


def _who(runs: Runs, run: Run) -> list[Value]:
    return [] if runs.alone else [runs.label(run)]


def _ranks(row: dict[str, Any]) -> str:
    ranks = row.get("ranks") or {}
    return ", ".join(f"{rank} on {host}" if host else str(rank) for rank, host in ranks.items())


def _list(value: Any) -> str:
    return ", ".join(map(str, value)) if value else ""


def _uploads(run: Run) -> Iterator[list[Value]]:
    """round, client, what, norm, bound."""
    for row in run.rows:
        for key, what in (("refused", "refused"), ("clipped", "taken at the bound")):
            for each in row.get(key) or ():
                said = "the client came to an error" if each.get("error") else what
                yield [row["round"], each.get("client"), said, number(each.get("norm")), number(each.get("bound"))]
        for client in row.get("lost") or ():
            yield [row["round"], client, "lost with its rank", None, None]
