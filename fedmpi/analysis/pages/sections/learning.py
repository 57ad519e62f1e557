"""How well the models do, round by round."""

from __future__ import annotations

from functools import partial

from fedmpi.analysis.pages.grouping import BAND, figure, rounds_in, spoken, title
from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Figure, Lines, Section, Series, Text, Value

MOST_SITES = 12  # with figures of their own where several runs are compared
OF_SPREAD = ("_std", "_worst_decile")  # told by the section of the clients


def curves(runs: Runs) -> Section | None:
    """Every figure of training and evaluation: a run's own line, or the mean of a group's with its band."""
    names = [name for name in runs.figures() if not name.endswith(OF_SPREAD)]
    of_sites = [name for name in names if "@" in name]
    if runs.alone is not None or len({name.partition("@")[2] for name in of_sites}) > MOST_SITES:
        names = [name for name in names if name not in of_sites]
    made = [
        figure(runs, f"learning-{name}", title(name), spoken(name), partial(rounds_in, name=name), name)
        for name in names
    ]
    if runs.alone is not None:
        made += [_by_site(runs.alone, what, of_sites) for what in dict.fromkeys(n.partition("@")[0] for n in of_sites)]
    found = [each for each in made if each is not None]
    several = [Text(BAND)] if found and any(len(group.runs) > 1 for group in runs.groups) else []
    why = "No figure of any round is a number: nothing was evaluated yet, or training came apart at once."
    return (
        Section("learning", "Learning", [*several, *found] or [Text(why, warning=True)])
        if any(r.rows for r in runs.all)
        else None
    )


def _by_site(run: Run, what: str, of_sites: list[str]) -> Figure:
    """One figure of the global model, a line a site (evaluate.protocol: sites)."""
    sites = {name.partition("@")[2]: rounds_in(run, name) for name in of_sites if name.partition("@")[0] == what}
    t = sorted({at for curve in sites.values() for at in curve})
    data: list[list[Value]] = [[at, *(curve.get(at) for curve in sites.values())] for at in t]
    lines = [Series(site, t, [curve.get(at) for at in t]) for site, curve in sites.items()]
    chart, note = Lines(lines, "round", spoken(what)), "The global model on the test rows of each site."
    return Figure(f"learning-{what}-by-site", f"{title(what)} by site", chart, ("round", *sites), data, note)


def own(runs: Runs) -> Section | None:
    """What the methods have reported of their steps."""
    names = dict.fromkeys(name for run in runs.all for name in run.own_figures)
    made = [figure(runs, f"method-{name}", title(name), name, partial(rounds_in, name=name), name) for name in names]
    found = [each for each in made if each is not None]
    return Section("method", "The methods' own figures", found) if found else None
