"""The model card: data, method, metrics by site and limits, for people who judge the model without having trained it.

After Mitchell et al. Model Cards for Model Reporting. FAT* 2019. https://arxiv.org/abs/1810.03993
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from fedmpi.analysis.charts import stacked_bars
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import size_text
from fedmpi.common.text import count, metric_title
from fedmpi.config import yaml_source
from fedmpi.reports.page import Figure, Part, Section, Table, Text, Value, cell
from fedmpi.reports.run_data import Run
from fedmpi.reports.sites import FEWEST, NOTE, PROTOCOLS, Baseline, Site, baseline_command, read_audit, verdict
from fedmpi.runtime import introspection
from fedmpi.runtime.record.run_dir import MODEL

WRITTEN = 12  # classes that have a bar each
FEW = 100  # test samples below which metrics are called coarse
ASKED = {
    "Intended use": "for whom, for which decision, beside which other evidence",
    "Not for": "patients, places and decisions for which it was not made",
    "Approval and consent": "ethics votes and legal basis at each site",
    "Contact": "who answers questions, and whom to tell of harm",
}


def read_statements(path: Path) -> dict[str, str]:
    """Read {heading: text} from a YAML file: statements about a model that only people can make.

    Raises:
        UserError: no such file, no YAML, or something else than headings and texts.
    """
    if not path.is_file():
        raise UserError(f"--about: there is no file {path}; write one with lines `Intended use: text`")
    statements = yaml_source.read(path, "write lines `Intended use: text`").data
    for heading, text in statements.items():
        if not isinstance(text, (str, int, float)) or isinstance(text, bool) or not str(text).strip():
            raise UserError(f"--about: {path}: {heading}: {text!r} is no text; write `{heading}: some words`")
    return {str(heading): str(text).strip() for heading, text in statements.items()}


def sections(
    run: Run, sites: Sequence[Site], baseline: Baseline | None, statements: Mapping[str, str]
) -> list[Section]:
    limited = Table(("", ""), list(enumerate(limits(run, sites, baseline), 1)))
    return [
        Section("short", "In short", in_short(run, sites)),
        Section("use", "What it is for", intended_use(statements)),
        Section("data", "Data", data(run, sites)),
        Section("method", "How it was made", [Table(("", ""), method(run))]),
        Section("left", "What left the sites", traffic_of_sites(run, sites)),
        Section("good", "How good it is, site by site", metrics_by_site(run, sites, baseline)),
        Section("limits", "Limits", [limited]),
        Section("check", "How to check it", [Table(("", ""), check(run))]),
    ]


def in_short(run: Run, sites: Sequence[Site]) -> list[Part]:
    config = run.config
    try:  # the file's header (safetensors): its length in 8 bytes, then JSON
        with (run.path / MODEL).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = [each["shape"] for name, each in header.items() if name != "__metadata__"]
        size = f"{sum(map(prod, shapes)):,} weights"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        size = "its file cannot be read"
    rows: list[list[Value]] = [
        ["model", f"{config.get('model.name')}, {size}"],
        ["task", str(config.get("task.name"))],
        ["sites", f"{len(sites)}: {', '.join(site.name for site in sites)}"],
        ["training samples", f"{sum(site.train for site in sites):,} at all sites"],
        ["method", str(config.get("method.name"))],
        ["rounds", f"{len(run.rounds)} of {config.get('rounds')}{'' if run.state == 'finished' else f': {run.state}'}"],
        ["trained", str(run.environment.get("started", "not told")).replace("T", " ").replace("+00:00", " UTC")],
        ["software", f"fedmpi {(run.environment.get('packages') or {}).get('fedmpi', '?')}"],
    ]
    text = (
        f"One model that {count(len(sites), 'site')} trained together. Each site trained it on its own samples; what "
        "travelled was how the model changed, and the server put the changes together, round after round."
    )
    return [Text(text, main=True), Table(("", ""), rows)]


def intended_use(statements: Mapping[str, str]) -> list[Part]:
    """Show the given statements, and name those that are missing."""
    parts: list[Part] = [Table(("", ""), list(statements.items()))] if statements else []
    known = {heading.casefold() for heading in statements}
    if missing := [f"{heading} ({what})" for heading, what in ASKED.items() if heading.casefold() not in known]:
        text = f"Not stated, and not to be guessed from figures: {'; '.join(missing)}. --about FILE.yaml adds it."
        parts.append(Text(text, warning=True))
    return parts


def data(run: Run, sites: Sequence[Site]) -> list[Part]:
    classes = max((len(site.counts or ()) for site in sites), default=0)
    shown = any(site.counts for site in sites)
    each = range(classes) if shown and classes <= WRITTEN else range(0)
    head = ("site", "training samples", "test samples", *(f"class {c}" for c in each))
    rows: list[list[Value]] = [
        [site.name, site.train, site.samples, *(site.counts[c] if site.counts else None for c in each)]
        for site in sites
    ]
    text = (
        "Each site's samples stayed in its own files, which only its own rank opened."
        if run.config.get("data.silos") and len(run.environment.get("ranks") or ()) > 1
        else "One installation could read the samples of all sites: this run was a rehearsal, not a federation."
    )
    fraction = run.config.get("data.validation") or 0
    if isinstance(fraction, float) and fraction:
        text += f" Of the training samples {fraction:.0%} were held out to choose by."
    bars = {f"class {c}": [float((s.counts or [0] * classes)[c]) for s in sites] for c in each}
    bars = bars or {"samples": [float(s.train) for s in sites]}
    chart = stacked_bars([s.name for s in sites], bars, "training samples")
    note = "Class numbers are those of the data set." if each else ""
    parts: list[Part] = [
        Text(f"Source: {run.config.get('data.source')}. {text}", main=True),
        Table(head, rows),
        Figure("data", "who gave how much", chart, head, rows, note),
    ]
    if not shown and run.config.get("data.share_label_counts") is False:
        parts.append(Text("How many samples there are of which class the sites keep to themselves."))
    return parts


def method(run: Run) -> list[list[Value]]:
    c, name = run.config, str(run.config.get("method.name"))
    known = introspection.summaries("methods")
    options = [f"{key[7:]} {value}" for key, value in c.items() if key.startswith("method.") and key != "method.name"]
    size, steps, passes = c.get("cohort.size"), c.get("train.steps"), c.get("train.epochs", 1)
    share = count(size, "site") if size else f"of the sites {float(c.get('cohort.fraction') or 1.0):.0%}"
    work = f"{steps} steps" if steps else f"{passes:g} pass{'' if passes == 1 else 'es'} over its samples"
    local = f"batches of {c.get('train.batch_size')}, {c.get('train.optim')}, learning rate {c.get('train.lr')}"
    rule = c.get("server.rule.name", "auto")
    return [
        ["method", known.get(name, "code of the consortium's own, kept in plugins/ of the run directory")],
        ["its options", ", ".join(options) or "none but defaults"],
        ["rounds", f"{c.get('rounds')}, {share} in each"],
        ["at a site", f"{work} a round, {local}"],
        ["weights of sites", "alike" if c.get("cohort.weighting") == "uniform" else "by training samples"],
        ["the server's rule", "the method's own" if rule == "auto" else str(rule)],
        ["on the way", str(c.get("comm.wire.up.name") or "in the model's type")],
    ]


def traffic_of_sites(run: Run, sites: Sequence[Site]) -> list[Part]:
    """Show messages and bytes of each site whose audit file is here; contents are on the sites' own pages."""
    audits = {site.name: read_audit(run, site) for site in sites}
    analysis = ", and for `analysis` to all other sites, too, local models or their changes"
    text = (
        "Samples were not sent. What was: changes of the model, mean losses, figures of evaluation, numbers of "
        f"samples{analysis if run.config.get('analysis') else ''}. They tell something of the samples behind them: "
        "there is neither secure aggregation nor differential privacy, and fedmpi does not encrypt."
    )
    rows: list[list[Value]] = [
        [name, len(audit.lines), size_text(audit.bytes), audit.sha256[:16]] if audit else [name, None, None, "not here"]
        for name, audit in audits.items()
    ]
    head = ("site", "messages", "bytes in all", "SHA-256 of its record (begins)")
    return [Text(text, main=True), Table(head, rows)]


def metrics_by_site(run: Run, sites: Sequence[Site], baseline: Baseline | None) -> list[Part]:
    """Show the metrics on each site's test samples, the worst site, and which sites gain from taking part."""
    evaluated = [site for site in sites if site.own is not None]
    if not evaluated:
        why = "Nobody has measured it on the sites' own samples; evaluate.protocol: [global, personal] does."
        return [Text(why, warning=True)]
    of = PROTOCOLS["personal" if "personal" in evaluated[0].evaluated else "global"]
    rows: list[list[Value]] = []
    for site in evaluated:
        alone = baseline.evaluated.get(site.client) if baseline else None
        for name in site.metrics:
            alone_values = [alone.last(name), verdict(site, alone, name)] if alone else [None, None]
            rows.append([site.name, site.samples, metric_title(name), site.last(name), *alone_values])
    head = ("site", "test samples", "figure", "together", "alone", "verdict")
    parts: list[Part] = [
        Text(f"Of {of}. One figure for all would hide who is served badly."),
        Table(head, rows, note=NOTE),
    ]
    if baseline is None:
        text = "Whether taking part was worth it for each site is not known: no run in which they train alone is given."
        parts.append(Text(f"{text} To make one: {baseline_command(run)}.", warning=True))
    else:
        text = f"Alone: the run {baseline.run.path.name}, in which each site trains by itself."
        text += f" Not the same but for that: {', '.join(baseline.differs)} differ." if baseline.differs else ""
        parts.append(Text(text))
    name = evaluated[0].metrics[0]
    measured = {site.name: site for site in evaluated if site.last(name) is not None}
    enough = {k: site.last(name) or 0.0 for k, site in measured.items() if (site.samples or 0) >= FEWEST}
    if len(enough) > 1:
        worst = (max if run.falls(name) else min)(enough, key=lambda k: enough[k])
        parts.append(Text(f"It serves {worst} worst, with {metric_title(name)} {cell(enough[worst])}.", main=True))
    if few := [f"{k} ({site.samples})" for k, site in measured.items() if k not in enough]:
        text = f"Too few test samples, below {FEWEST}, to compare with other sites: {', '.join(few)}."
        parts.append(Text(text))
    return [*parts, _bars(evaluated, baseline, name)] if measured else parts


def _bars(evaluated: Sequence[Site], baseline: Baseline | None, name: str) -> Figure:
    """Draw a bar for each site, and one below it for the site alone."""
    labels, together, alone, rows = list[str](), list[float](), list[float](), list[list[Value]]()
    for site in evaluated:
        theirs = baseline.evaluated.get(site.client) if baseline else None
        rows.append([site.name, site.last(name), theirs.last(name) if theirs else None])
        labels += [site.name, f"{site.name}, alone"] if theirs else [site.name]
        together += [site.last(name) or 0.0, 0.0] if theirs else [site.last(name) or 0.0]
        alone += [0.0, theirs.last(name) or 0.0] if theirs else [0.0]
    parts = {"together": together, "alone": alone} if any(alone) else {"together": together}
    chart = stacked_bars(labels, parts, metric_title(name))
    return Figure(f"good-{name}", f"{metric_title(name)} by site", chart, ("site", "together", "alone"), rows)


def check(run: Run) -> list[list[Value]]:
    """Return hashes and commands by which others can check the model and its metrics."""
    last = next((row.get("sha256") for row in reversed(run.rows) if row.get("sha256")), None)
    path, git = run.path / MODEL, run.environment.get("git") or {}
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "there is none"
    return [
        [f"SHA-256 of {MODEL}", digest],
        ["SHA-256 of the weights after the last round", str(last or "not told")],
        ["commit of the code", str(git.get("commit") or "not told") + (", changed" if git.get("modified") else "")],
        ["seed", run.seed],
        ["to train once more and compare", f"fedmpi replay {run.path.name}"],
    ]


def limits(run: Run, sites: Sequence[Site], baseline: Baseline | None) -> list[str]:
    """Return the limitations of the model, one sentence each; general ones first."""
    summary: Mapping[str, Any] = run.summary
    sentences = [
        "It was tested on samples of the sites that trained it. How it does elsewhere is not known; a site that took "
        "no part should test it first.",
        "It is one run with one seed: another one would have somewhat other figures.",
        "Whether its settings were chosen by looking at these very test samples the record cannot tell; if so, the "
        "figures are too good.",
    ]
    few = [f"{s.name} ({s.samples}, one is {100 / s.samples:.1f} %)" for s in sites if s.samples and s.samples < FEW]
    single = [s.name for s in sites if s.counts and sum(n > 0 for n in s.counts) == 1]
    largest = max(sites, key=lambda s: s.share or 0.0)
    refused = [f"{s.name} ({len(s.refused)})" for s in sites if s.refused]
    absent = [s.name for s in sites if not s.took_part]
    best, modified = summary.get("best_model") or {}, (run.environment.get("git") or {}).get("modified")
    conditions: tuple[tuple[Any, str], ...] = (  # whether it holds, and the sentence
        (few, f"Few test samples, so that figures are coarse: {', '.join(few)}."),
        (single, f"Training samples of one class alone: {', '.join(single)}."),
        (len(sites) > 2 and (largest.share or 0) > 0.5, f"More than half of the weight was {largest.name}'s."),
        (absent, f"Never took part in a round: {', '.join(absent)}."),
        (not run.complete, f"The run did not end as planned: {run.state}."),
        (summary.get("diverged") is not None, f"Training diverged from round {summary.get('diverged')} on."),
        (refused, f"Uploads that did not count, as they could not be meant: {', '.join(refused)}."),
        (run.faults, f"Ranks were lost {count(len(run.faults), 'time')}; faults.jsonl says which rounds lack whom."),
        (best, f"{best.get('file')} is another model; the figures here are those of the last round's."),
        (modified, "The code had changes that no commit holds."),
        (baseline is None, "No run in which sites train alone shows who is better off by taking part."),
    )
    groups = (
        "Figures are means over a site's samples. Whether it serves all groups of people alike within a site (sex, "
        "age, device) was not looked at."
    )
    return [*sentences, *(sentence for holds, sentence in conditions if holds), groups]
