"""The model card: data, method, figures by site, limits; for who has to judge the model and has not trained it.

After Mitchell et al. Model Cards for Model Reporting. FAT* 2019. https://arxiv.org/abs/1810.03993
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fedmpi.analysis.pages.consortium import left
from fedmpi.analysis.pages.consortium.about import ASKED
from fedmpi.analysis.pages.consortium.alone import FEWEST, NOTE, Alone, how_to, verdict
from fedmpi.analysis.pages.consortium.limits import limits
from fedmpi.analysis.pages.consortium.sites import SAID, Site, figures
from fedmpi.analysis.pages.grouping import spoken
from fedmpi.analysis.pages.html import cell
from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.section import Bars, Figure, Section, Table, Text, Value
from fedmpi.common.host_memory import size_text
from fedmpi.common.text import count
from fedmpi.runtime import introspection
from fedmpi.runtime.record.run_dir import MODEL

WRITTEN = 12  # classes that have a bar each


def sections(run: Run, sites: Sequence[Site], alone: Alone | None, about: Mapping[str, str]) -> list[Section]:
    return [
        in_short(run, sites),
        use(about),
        data(run, sites),
        method(run),
        left_sites(run, sites),
        how_good(run, sites, alone),
        Section("limits", "Limits", (Table(("", ""), list(enumerate(limits(run, sites, alone), 1))),)),
        check(run),
    ]


def in_short(run: Run, sites: Sequence[Site]) -> Section:
    config, total = run.config, sum(site.train for site in sites)
    done = sum(row["round"] >= 0 for row in run.rows)
    rows: list[list[Value]] = [
        ["model", f"{config.get('model.name')}, {_parameters(run)}"],
        ["task", str(config.get("task.name"))],
        ["sites", f"{len(sites)}: {', '.join(site.name for site in sites)}"],
        ["training samples", f"{total:,} at all sites"],
        ["method", str(config.get("method.name"))],
        ["rounds", f"{done} of {config.get('rounds')}" + ("" if run.state == "finished" else f": {run.state}")],
        ["trained", str(run.environment.get("started", "not told")).replace("T", " ").replace("+00:00", " UTC")],
        ["software", f"fedmpi {(run.environment.get('packages') or {}).get('fedmpi', '?')}"],
    ]
    said = (
        f"One model that {count(len(sites), 'site')} trained together. Each site trained it on its own samples; what "
        "travelled was how the model changed, and the server put the changes together, round after round."
    )
    return Section("short", "In short", (Text(said, main=True), Table(("", ""), rows)))


def use(about: Mapping[str, str]) -> Section:
    """What people have said; what nobody has is named."""
    rows: list[list[Value]] = [[heading, text] for heading, text in about.items()]
    parts: list[Text | Table] = [Table(("", ""), rows)] if rows else []
    known = {heading.casefold() for heading in about}
    missing = [f"{heading} ({what})" for heading, what in ASKED.items() if heading.casefold() not in known]
    if missing:
        said = f"Not stated, and not to be guessed from figures: {'; '.join(missing)}. --about FILE.yaml adds it."
        parts.append(Text(said, warning=True))
    return Section("use", "What it is for", parts)


def data(run: Run, sites: Sequence[Site]) -> Section:
    classes = max((len(site.counts or ()) for site in sites), default=0)
    shown = [site for site in sites if site.counts]
    each = range(classes) if shown and classes <= WRITTEN else ()
    head = ("site", "training samples", "test samples", *(f"class {c}" for c in each))
    rows: list[list[Value]] = [
        [site.name, site.train, site.own.samples if site.own else None, *(site.counts[c] if site.counts else None
         for c in each)] for site in sites
    ]  # fmt: skip
    held = (
        "Each site's samples stayed in its own files, which only its own rank opened."
        if run.config.get("data.silos") and len(run.environment.get("ranks") or ()) > 1
        else "One installation could read the samples of all sites: this run was a rehearsal, not a federation."
    )
    fraction = run.config.get("data.validation") or 0
    kept = (
        f" Of the training samples {fraction:.0%} were held out to choose by."
        if isinstance(fraction, float) and fraction
        else ""
    )
    parts: list[Text | Table | Figure] = [
        Text(f"Source: {run.config.get('data.source')}. {held}{kept}", main=True),
        Table(head, rows),
    ]
    names = [site.name for site in sites]
    if each:
        chart = Bars(names, {f"class {c}": [float((s.counts or [0] * classes)[c]) for s in sites] for c in each},
                     "training samples")  # fmt: skip
        note = "Class numbers are those of the data set."
    else:
        chart = Bars(names, {"samples": [float(s.train) for s in sites]}, "training samples")
        note = ""
    parts.append(Figure("data", "who gave how much", chart, head, rows, note))
    if not shown and run.config.get("data.share_label_counts") is False:
        parts.append(Text("How many samples there are of which class is not known: sites keep it to themselves, or the "
                          "targets are no classes."))  # fmt: skip
    return Section("data", "Data", parts)


def method(run: Run) -> Section:
    c, name = run.config, str(run.config.get("method.name"))
    known = {entry.name: entry.summary for entry in introspection.entries("methods")}
    options = [f"{key[7:]} {value}" for key, value in c.items() if key.startswith("method.") and key != "method.name"]
    wire = left.FORMATS.get(str(c.get("comm.wire.up.name")), "in the model's type")
    rows: list[list[Value]] = [
        ["method", known.get(name, "code of the consortium's own, kept in plugins/ of the run directory")],
        ["its options", ", ".join(options) or "none but defaults"],
        ["rounds", f"{c.get('rounds')}, {_share(c)} in each"],
        ["at a site", f"{_work(c)}, batches of {c.get('train.batch_size')}, {c.get('train.optim')}, learning rate "
                      f"{c.get('train.lr')}"],
        ["weights of sites", "alike" if c.get("cohort.weighting") == "uniform" else "by training samples"],
        ["the server's rule", "the method's own" if c.get("server.rule.name", "auto") == "auto" else
         str(c.get("server.rule.name"))],
        ["on the way", wire],
    ]  # fmt: skip
    return Section("method", "How it was made", (Table(("", ""), rows),))


def _share(c: Mapping[str, Any]) -> str:
    size = c.get("cohort.size")
    return count(size, "site") if size else f"of the sites {float(c.get('cohort.fraction') or 1.0):.0%}"


def _work(c: Mapping[str, object]) -> str:
    steps = c.get("train.steps")
    passes = c.get("train.epochs", 1)
    return (
        f"{steps} steps a round" if steps else f"{passes:g} pass{'' if passes == 1 else 'es'} over its samples a round"
    )


def left_sites(run: Run, sites: Sequence[Site]) -> Section:
    """Messages and bytes of each site, where its record is here; contents are on the sites' own pages."""
    rows, none = list[list[Value]](), list[str]()
    for site in sites:
        found = left.audit(run, site, sites)
        if found is None:
            none.append(site.name)
            continue
        rows.append([site.name, len(found.lines), len(found.uploads), size_text(found.total), found.sha256[:16]])
    more = (
        ", and for `analysis` to all other sites, too, local models or their changes"
        if run.config.get("analysis")
        else ""
    )
    parts: list[Text | Table] = [
        Text("Samples were not sent. What was: changes of the model, mean losses, figures of evaluation, numbers of "
             f"samples{more}. They tell something of the samples behind them: there is neither secure aggregation nor "
             "differential privacy, and fedmpi does not encrypt.", main=True)
    ]  # fmt: skip
    if rows:
        head = ("site", "messages", "of these for training", "bytes in all", "SHA-256 of its record (begins)")
        parts.append(Table(head, rows))
    if none:
        parts.append(
            Text(f"No record of what left them is here: {', '.join(none)}. Their pages say why.", warning=True)
        )
    return Section("left", "What left the sites", parts)


def how_good(run: Run, sites: Sequence[Site], alone: Alone | None) -> Section:
    """The model on each site's own test samples; its worst site; and who gains from taking part."""
    judged = [site for site in sites if site.own is not None]
    if not judged:
        why = "Nobody has measured it on the sites' own samples; evaluate.protocol: [global, personal] does."
        return Section("good", "How good it is, site by site", (Text(why, warning=True),))
    protocol = "personal" if "personal" in judged[0].judged else "global"
    parts: list[Text | Table | Figure] = [
        Text(f"Of {SAID[protocol]}, after the last evaluated round. One figure for all would hide who is served badly.")
    ]
    names = list(dict.fromkeys(name for site in judged for name in figures(site)))
    rows: list[list[Value]] = [
        [site.name, site.own.samples if site.own else None, *(site.own.last(n) if site.own else None for n in names)]
        for site in sites
    ]
    parts.append(Table(("site", "test samples", *map(spoken, names)), rows))
    for name in names[:1]:
        own = [(site.name, site.own.samples, site.own.last(name)) for site in judged if site.own]
        values = {site: value for site, n, value in own if value is not None and not 0 < n < FEWEST}
        worst = (max if run.falls(name) else min)(values, key=lambda k: values[k], default="")
        if len(values) > 1:
            parts.append(Text(f"It serves {worst} worst, with {spoken(name)} {cell(values[worst])}.", main=True))
        few = [f"{site} ({n})" for site, n, value in own if value is not None and 0 < n < FEWEST]
        if few:
            said = f"Too few test samples, below {FEWEST}, to compare with other sites: {', '.join(few)}."
            parts.append(Text(said))
        if any(value is not None for _, _, value in own):
            parts.append(_bars(judged, alone, name))
    parts += _gains(run, judged, alone, names)
    return Section("good", "How good it is, site by site", parts)


def _bars(judged: Sequence[Site], alone: Alone | None, name: str) -> Figure:
    """A bar for each site, and one below it for the site alone."""
    labels, parts, data = list[str](), {"together": list[float](), "alone": list[float]()}, list[list[Value]]()
    for site in judged:
        together = site.own.last(name) if site.own else None
        theirs = alone.judged.get(site.client) if alone else None
        before = theirs.last(name) if theirs else None
        data.append([site.name, together, before])
        for label, pair in ((site.name, (together, None)), (f"{site.name}, alone", (None, before))):
            if any(value is not None for value in pair):
                labels.append(label)
                for part, value in zip(parts, pair, strict=True):
                    parts[part].append(value or 0.0)
    chart = Bars(labels, {part: values for part, values in parts.items() if any(values)}, spoken(name))
    return Figure(f"good-{name}", f"{spoken(name)} by site", chart, ("site", "together", "alone"), data)


def _gains(run: Run, judged: Sequence[Site], alone: Alone | None, names: Sequence[str]) -> list[Text | Table]:
    if alone is None:
        said = "Whether taking part was worth it for each site is not known: no run in which they train alone is given."
        return [Text(f"{said} To make one: {how_to(run)}.", warning=True)]
    rows: list[list[Value]] = []
    for site in judged:
        theirs = alone.judged.get(site.client)
        for name in names if theirs and site.own else ():
            together, before = site.own.last(name), theirs.last(name)  # type: ignore[union-attr]
            rows.append([site.name, spoken(name), together, before, verdict(site, theirs, name)])  # type: ignore[arg-type]
    note = f"Against the run {alone.run.path.name}, in which each site trains by itself. {NOTE}"
    note += f" Not the same but for that: {', '.join(alone.differs)} differ." if alone.differs else ""
    return [Table(("site", "figure", "together", "alone", "verdict"), rows, "Who gains from taking part", note)]


def check(run: Run) -> Section:
    """By what somebody else can tell that this is the model, and that the figures are its own."""
    last = next((row.get("sha256") for row in reversed(run.rows) if row.get("sha256")), None)
    path = run.path / MODEL
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "there is none"
    git = run.environment.get("git") or {}
    rows: list[list[Value]] = [
        [f"SHA-256 of {MODEL}", digest],
        ["SHA-256 of the weights after the last round", str(last or "not told")],
        ["commit of the code", str(git.get("commit") or "not told") + (", changed" if git.get("modified") else "")],
        ["seed", run.seed],
        ["to train once more and compare", f"fedmpi replay {run.path.name}"],
    ]
    return Section("check", "How to check it", (Table(("", ""), rows),))


def _parameters(run: Run) -> str:
    """Of the file's header (safetensors: its length in 8 bytes, then JSON)."""
    try:
        with (run.path / MODEL).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = [each["shape"] for name, each in header.items() if name != "__metadata__"]
        return f"{sum(map(prod, shapes)):,} weights"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return "its file cannot be read"
