"""How well the models do, round by round."""

from __future__ import annotations

from functools import partial

from fedmpi.analysis.pages.grouping import BAND, figure, rounds_in, spoken, title
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Section, Text

OF_SPREAD = ("_std", "_worst_decile")  # told by the section of the clients


def curves(runs: Runs) -> Section | None:
    """Every figure of training and evaluation: a run's own line, or the mean of a group's with its band."""
    names = [name for name in runs.figures() if not name.endswith(OF_SPREAD)]
    made = [
        figure(runs, f"learning-{name}", title(name), spoken(name), partial(rounds_in, name=name), name)
        for name in names
    ]
    found = [each for each in made if each is not None]
    several = [Text(BAND)] if found and any(len(group.runs) > 1 for group in runs.groups) else []
    why = "No figure of any round is a number: nothing was evaluated yet, or training came apart at once."
    return (
        Section("learning", "Learning", [*several, *found] or [Text(why, warning=True)])
        if any(r.rows for r in runs.all)
        else None
    )


def own(runs: Runs) -> Section | None:
    """What the methods have reported of their steps."""
    names = dict.fromkeys(name for run in runs.all for name in run.own_figures)
    made = [figure(runs, f"method-{name}", title(name), name, partial(rounds_in, name=name), name) for name in names]
    found = [each for each in made if each is not None]
    return Section("method", "The methods' own figures", found) if found else None
