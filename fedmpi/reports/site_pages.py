"""`fedmpi report RUN_DIR --sites`: a page for each site, and the model card.

The page of a site shows its contribution, its benefit, and which messages left it, without metrics of other sites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from fedmpi.analysis.charts import stacked_bars
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import size_text
from fedmpi.common.text import count, metric_title
from fedmpi.reports import card, groups
from fedmpi.reports.groups import by_name
from fedmpi.reports.page import Figure, Part, Section, Table, Text, Value, cell, render
from fedmpi.reports.run_data import Run, number
from fedmpi.reports.sites import (
    NOTE,
    PROTOCOLS,
    Baseline,
    Evaluated,
    Site,
    audit_path,
    baseline_command,
    read_audit,
    read_baseline,
    sites,
    verdict,
)
from fedmpi.runtime.record import durable

FOLDER, CARD = "sites", "model-card"
MEANING = {  # of names in an audit file
    "_loss": "its mean training loss",
    "_b": "batch statistics of the model",
    "dw": "the change of the model's weights",
    "n_train": "numbers of samples",
    "n_test": "numbers of samples",
    "label counts": "how many samples it has of each class",
    "form of samples, digest of names": "the form of its samples, and a hash of its columns' names",
    "text": "host, versions, and hashes of settings and code",
    "client state": "what the method keeps for the site",
    "local model": "all of its local model (analysis)",
}
INTERNAL = ("_seconds", "_flag", "client")  # which say nothing of its data
NO_BASELINE = (
    "There is no run in which the sites train alone, so what this one gained cannot be told. To make one: {how}."
)


def analyse(directory: Path, alone: Path | None, about: Path | None, say: Callable[[str], None]) -> None:
    """Write DIRECTORY/sites/*.html.

    Raises:
        UserError: no run, several runs, no sites; a baseline or statements that are none; no place to write to.
    """
    runs = groups.read([directory])
    run = runs.alone
    if run is None:
        names = ", ".join(run.path.name for run in runs.all[:5])
        raise UserError(f"--sites tells of one run, and there are {len(runs.all)} ({names}); name one of them")
    everybody = sites(run)
    baseline = read_baseline(run, alone) if alone is not None else None
    statements = card.read_statements(about) if about is not None else {}
    folder = run.path / FOLDER
    of = f"{run.name}: {run.config.get('method.name')} on {run.config.get('data.source')}"
    card_sections = card.sections(run, everybody, baseline, statements)
    pages = {f"{CARD}.html": render(f"Model card: {run.name}", [of], card_sections)}
    for site in everybody:  # names of files that any system can have, no two alike
        plain = re.sub(r"[^a-z0-9_-]+", "-", site.name.lower()).strip("-")[:60] or f"site-{site.client}"
        plain = f"{plain}-{site.client}" if f"{plain}.html" in pages else plain
        lead = [of, "For this site; it names no other."]
        pages[f"{plain}.html"] = render(f"{site.name} in {run.name}", lead, sections(run, site, everybody, baseline))
    try:
        folder.mkdir(exist_ok=True)
        for name, content in pages.items():
            durable.write(folder / name, content.encode())
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; the pages were not written") from error
    if baseline is None:
        say(f"not compared with sites that train alone. To make such a run: {baseline_command(run)}")
    else:
        say(f"compared with sites that train alone: {baseline.run.path}")
    say(f"written: {folder}/{CARD}.html, and a page for each of {len(everybody)} sites")


def sections(run: Run, site: Site, everybody: Sequence[Site], baseline: Baseline | None) -> list[Section]:
    total = sum(each.train for each in everybody)
    return [
        Section("short", "In short", in_short(site, total, baseline)),
        Section("gave", "What the site gave", contribution(run, site, total)),
        Section("gained", "What the site gained", benefit(run, site, baseline)),
        Section("left", "What left the site", traffic(run, site)),
    ]


def in_short(site: Site, total: int, baseline: Baseline | None) -> list[Part]:
    """Summarise each of the other sections in a sentence. total: training samples of all sites."""
    share = "" if site.share is None else f", with {site.share:.1%} of the weight in the common model"
    lines = [
        f"{site.name} gave {site.train:,} of {total:,} training samples ({site.train / max(total, 1):.1%}) and took "
        f"part in {count(len(site.took_part), 'round')}{share}."
    ]
    if baseline is None:
        lines.append("What it gained against training alone is not known: nobody has trained alone for comparison.")
    elif (alone := baseline.evaluated.get(site.client)) is not None and site.metrics:
        name = site.metrics[0]
        both = (site.last(name), alone.last(name))
        if None not in both:
            text = f"{metric_title(name).capitalize()}: {cell(both[0])} together, {cell(both[1])} alone"
            lines.append(f"{text}: {verdict(site, alone, name)}.")
    return [Text(line, main=True) for line in lines]


def contribution(run: Run, site: Site, total: int) -> list[Part]:
    """Samples, rounds, weight; how long its updates were, beside the others' mean."""
    rows: list[list[Value]] = [
        ["training samples", f"{site.train:,} of {total:,} ({site.train / max(total, 1):.1%})"],
        ["test samples", "not told" if site.samples is None else f"{site.samples:,}"],
        ["rounds in which it took part", f"{len(site.took_part)} of {len(run.rounds)}"],
        ["uploads that did not count", f"{len(site.refused)}"],
        ["share of weight, mean over rounds", "-" if site.share is None else f"{site.share:.1%}"],
    ]
    rule = run.config.get("server.rule.name", "auto")
    weights = "alike for all" if run.config.get("cohort.weighting") == "uniform" else "by training samples"
    who = f"the server's rule ({rule})" if rule != "auto" else f"the method ({run.config.get('method.name')})"
    parts: list[Part] = [Table(("", ""), rows, note=f"Weights are {weights}; what {who} makes of them may differ.")]
    if site.counts is not None and any(site.counts):
        names = [f"class {c}" for c in range(len(site.counts))]
        chart = stacked_bars(names, {"samples": [float(n) for n in site.counts]}, "training samples")
        data: list[list[Value]] = [list(pair) for pair in enumerate(site.counts)]
        parts.append(Figure("classes", "its samples by class", chart, ("class", "samples"), data))
    own, others = dict[int, float](), dict[int, float]()
    for row in run.updates:
        pairs = zip(row.get("clients") or (), row.get("norms") or (), strict=False)
        norms = {k: v for k, value in pairs if (v := number(value)) is not None}
        if site.client in norms:
            own[row["round"]] = norms.pop(site.client)
            if len(norms) > 1:  # the mean of one other site's would be its own
                others[row["round"]] = fmean(norms.values())
    note = "How far training on its samples moved the model away from the common one (norm)."
    lines, head = {site.name: own, "mean of the others": others}, ("its own", "mean of the others")
    lengths = by_name("lengths", "length of its updates", "norm", lines, head, note, from_zero=True) if own else None
    return [*parts, *([lengths] if lengths else [])]


def benefit(run: Run, site: Site, baseline: Baseline | None) -> list[Part]:
    """Compare the joint model on the site's test samples with the model that the site trained alone."""
    if site.own is None:
        why = "Nobody has measured the model on this site's own samples; evaluate.protocol: [global, personal] does."
        return [Text(why, warning=True)]
    alone = baseline.evaluated.get(site.client) if baseline else None
    parts = list[Part]()
    if baseline is None or alone is None:
        parts.append(Text(NO_BASELINE.format(how=baseline_command(run)), warning=True))
    else:
        parts.append(Text(f"Alone: the run {baseline.run.path.name}, in which each site trains by itself."))
        if baseline.differs:
            parts.append(Text(f"It is not the same but for that: {', '.join(baseline.differs)} differ.", warning=True))
    parts.append(_comparison(site, site.own, alone))
    for name in site.metrics if alone else ():
        curves = {"together": site.own.curves.get(name, {}), "alone": alone.curves.get(name, {}) if alone else {}}
        title = f"{metric_title(name)} on its own test samples"
        lines = {label: dict(curve) for label, curve in curves.items()}
        if figure := by_name(f"gained-{name}", title, metric_title(name), lines):
            parts.append(figure)
    return parts


def _comparison(site: Site, own: Evaluated, alone: Evaluated | None) -> Table:
    """Return a table of metrics after the last evaluated round, with the verdict against training alone."""
    rows: list[list[Value]] = [
        [metric_title(name), own.last(name), *([alone.last(name), verdict(site, alone, name)] if alone else [None, ""])]
        for name in site.metrics
    ]
    of = PROTOCOLS["personal" if own is site.evaluated.get("personal") else "global"]
    return Table(("figure", "together", "alone", "verdict"), rows, note=f"Of {of}, {own.samples:,} of them. {NOTE}")


def traffic(run: Run, site: Site) -> list[Part]:
    """Show what left the site by content, bytes and receiver, from its audit file."""
    audit = read_audit(run, site)
    if audit is None:
        path = audit_path(run, site)
        where = f"{path} in its copy of this run directory on the site's own host; put it there beside the others"
        why = f"It is {where}, and make this page once more" if path else "The run kept none (data.silos, data.audit)"
        return [Text(f"The record of what left the site is not here. {why}.", warning=True)]
    kinds: dict[tuple[str, str], list[int]] = {}
    for line in audit.lines:
        names = [str(name) for name in line.get("what") or () if name not in INTERNAL]
        counted = site.counts is not None or "label counts" not in names
        words = [MEANING.get(name, name) for name in names] if counted else ["zeros in place of label counts"]
        to = {"0": "server", "all": "all ranks"}.get(str(line.get("to")), f"rank {line.get('to')}")
        what = "; ".join(dict.fromkeys(words)) or "times and numbers without data"
        kinds.setdefault((what, to), []).append(int(line.get("bytes") or 0))
    rows: list[list[Value]] = [[what, len(sizes), sum(sizes), to] for (what, to), sizes in kinds.items()]
    parts: list[Part] = [
        Text(
            f"{len(audit.lines)} messages left the rank that opens the site's files, {size_text(audit.bytes)} in all. "
            f"{audit.path} on the site's own host has a line with a hash for each; its SHA-256 is {audit.sha256}. "
            "fedmpi sends no samples. Changes of the model are not encrypted, and tell something of the samples behind "
            "them: there is neither secure aggregation nor differential privacy.",
            main=True,
        ),
        Table(("what", "messages", "bytes in all", "to"), rows),
    ]
    sent = {line.get("round") for line in audit.lines if "_flag" in (line.get("what") or ())}
    if missing := set(site.took_part) - sent:
        text = f"The record lacks {len(missing)} of the {len(site.took_part)} rounds in which the site took part"
        parts.append(Text(f"{text}, round {min(missing)} first.", warning=True))
    return parts
