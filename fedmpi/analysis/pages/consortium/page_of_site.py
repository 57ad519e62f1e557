"""One site's page: what it gave, what it gained, what left it. It names no other site's figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedmpi.analysis.pages.consortium import left
from fedmpi.analysis.pages.consortium.alone import NOTE, Alone, how_to, verdict
from fedmpi.analysis.pages.consortium.sites import SAID, Judged, Site, figures
from fedmpi.analysis.pages.grouping import spoken
from fedmpi.analysis.pages.html import cell
from fedmpi.analysis.pages.run import Run, number
from fedmpi.analysis.pages.section import Bars, Figure, Lines, Section, Series, Table, Text, Value
from fedmpi.common.text import count


def sections(run: Run, site: Site, everybody: Sequence[Site], alone: Alone | None) -> list[Section]:
    return [
        in_short(site, everybody, alone),
        gave(run, site, everybody),
        gained(run, site, alone),
        left.section(run, site, left.audit(run, site, everybody)),
    ]


def in_short(site: Site, everybody: Sequence[Site], alone: Alone | None) -> Section:
    """A sentence for each of the other sections."""
    all_ = sum(each.train for each in everybody)
    share = "" if site.share is None else f", with {site.share:.1%} of the weight in the common model"
    lines = [
        f"{site.name} gave {site.train:,} of {all_:,} training samples ({site.train / max(all_, 1):.1%}) and took part "
        f"in {count(len(site.took_part), 'round')}{share}."
    ]
    if alone is None:
        lines.append("What it gained against training alone is not known: nobody has trained alone for comparison.")
    elif (theirs := alone.judged.get(site.client)) is not None:
        lines += [_sentence(site, theirs, name) for name in figures(site)[:1]]
    return Section("short", "In short", [Text(line, main=True) for line in lines if line])


def _sentence(site: Site, alone: Judged, name: str) -> str:
    joint, before = site.own.last(name) if site.own else None, alone.last(name)
    if joint is None or before is None:
        return ""
    return f"{spoken(name).capitalize()}: {cell(joint)} together, {cell(before)} alone: {verdict(site, alone, name)}."


def gave(run: Run, site: Site, everybody: Sequence[Site]) -> Section:
    """Samples, rounds, weight; how long its updates were, beside the others' mean."""
    all_ = sum(each.train for each in everybody)
    rows: list[list[Value]] = [
        ["training samples", f"{site.train:,} of {all_:,} ({site.train / max(all_, 1):.1%})"],
        ["test samples", f"{site.own.samples:,}" if site.own else "not told"],
        ["rounds in which it took part", f"{len(site.took_part)} of {sum(row['round'] >= 0 for row in run.rows)}"],
        ["uploads that did not count", f"{len(site.refused)}"],
        ["uploads taken at the bound", f"{len(site.clipped)}"],
        ["share of weight, mean over rounds", "-" if site.share is None else f"{site.share:.1%}"],
    ]
    rule = run.config.get("server.rule.name", "auto")
    how = "alike for all" if run.config.get("cohort.weighting") == "uniform" else "by training samples"
    rule_said = f"the server's rule ({rule})" if rule != "auto" else f"the method ({run.config.get('method.name')})"
    note = f"Weights are {how}; what {rule_said} makes of them may differ."
    parts: list[Table | Figure | Text] = [Table(("", ""), rows, note=note)]
    if site.counts is not None and any(site.counts):
        names = [f"class {c}" for c in range(len(site.counts))]
        chart = Bars(names, {"samples": [float(n) for n in site.counts]}, "training samples")
        data: list[list[Value]] = [[c, n] for c, n in enumerate(site.counts)]
        parts.append(Figure("classes", "its samples by class", chart, ("class", "samples"), data))
    parts += _lengths(run, site)
    return Section("gave", "What the site gave", parts)


def _lengths(run: Run, site: Site) -> list[Figure]:
    """updates.jsonl: the norm of its updates, and the mean of the others'."""
    own, others = dict[int, float](), dict[int, float]()
    for row in run.updates:
        pairs = zip(row.get("clients") or (), row.get("norms") or (), strict=False)
        norms = {k: v for k, value in pairs if (v := number(value)) is not None}
        if site.client in norms and isinstance(row.get("round"), int):
            own[row["round"]] = norms.pop(site.client)
            if len(norms) > 1:  # one other site's would be its own figure
                others[row["round"]] = fmean(norms.values())
    if not own:
        return []
    series = [Series(site.name, list(own), list(own.values()))]
    series += [Series("mean of the others", list(others), list(others.values()))] if others else []
    data: list[list[Value]] = [[t, value, others.get(t)] for t, value in own.items()]
    note = "How far training on its samples moved the model away from the common one (norm)."
    chart = Lines(series, "round", "norm", from_zero=True)
    return [Figure("lengths", "length of its updates", chart, ("round", "its own", "mean of the others"), data, note)]


def gained(run: Run, site: Site, alone: Alone | None) -> Section:
    """The joint model on the site's own test samples, beside what the site reaches by itself."""
    name = "What the site gained"
    if site.own is None:
        why = "Nobody has measured the model on this site's own samples; evaluate.protocol: [global, personal] does."
        return Section("gained", name, (Text(why, warning=True),))
    theirs = alone.judged.get(site.client) if alone else None
    parts: list[Table | Figure | Text] = []
    if alone is None or theirs is None:
        parts.append(Text(NO_BASELINE.format(how=how_to(run)), warning=True))
    else:
        parts.append(Text(f"Alone: the run {alone.run.path.name}, in which each site trains by itself."))
        if alone.differs:
            parts.append(Text(f"It is not the same but for that: {', '.join(alone.differs)} differ.", warning=True))
    parts.append(_table(site, theirs))
    if theirs is not None:
        parts += [_curves(site, theirs, each) for each in figures(site) if theirs.curves.get(each)]
    return Section("gained", name, parts)


NO_BASELINE = (
    "There is no run in which the sites train alone, so what this one gained cannot be told. To make one: {how}. It is "
    "found where it lies beside this run, or named by --alone RUN_DIR."
)


def _table(site: Site, alone: Judged | None) -> Table:
    """After the last evaluated round, by each protocol; of what the site would use, against alone."""
    rows, own = list[list[Value]](), site.own
    kept = {
        p: judged for p, judged in site.judged.items() if judged is own or own is None or judged.curves != own.curves
    }
    for name in figures(site):
        for protocol, judged in kept.items():
            row: list[Value] = [spoken(name), SAID.get(protocol, protocol), judged.last(name)]
            beside = judged is own and alone is not None
            rows.append([*row, alone.last(name), verdict(site, alone, name)] if beside and alone else [*row, None, ""])
    head, samples = ["figure", "of", "together", "alone", "verdict"], own.samples if own else 0
    note = f"Of {samples:,} test samples. "
    if len(kept) == 1:
        note = f"Of {rows[0][1]}, {samples:,} of them. " if rows else ""
        head, rows = [head[0], *head[2:]], [[row[0], *row[2:]] for row in rows]
    return Table(head, rows, note=note + NOTE)


def _curves(site: Site, alone: Judged, name: str) -> Figure:
    assert site.own is not None
    lines = {"together": site.own.curves.get(name, {}), "alone": alone.curves.get(name, {})}
    series = [Series(label, list(curve), list(curve.values())) for label, curve in lines.items()]
    data: list[list[Value]] = [[label, t, value] for label, curve in lines.items() for t, value in curve.items()]
    chart = Lines(series, "round", spoken(name))
    return Figure(f"gained-{name}", f"{spoken(name)} on its own test samples", chart, ("run", "round", name), data)
