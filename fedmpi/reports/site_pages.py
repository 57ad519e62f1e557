"""Write a page for each site of a consortium, and a model card (`fedmpi report RUN_DIR --sites`).

The page of a site shows its contribution, its benefit and the messages that it sent, without metrics of other sites.
The model card shows data, method, metrics by site and limitations, for people who assess the model without having
trained it, after Mitchell et al. Model Cards for Model Reporting. FAT* 2019. https://arxiv.org/abs/1810.03993
The texts of both are in templates/.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmpi.analysis.charts import stacked_bars
from fedmpi.common.errors import UserError
from fedmpi.common.text import metric_title
from fedmpi.config import yaml_source
from fedmpi.reports.page import Figure, Table, Value, render
from fedmpi.reports.run_groups import Run, by_name, number, read
from fedmpi.reports.sites import (
    FEWEST,
    Baseline,
    Site,
    audit_path,
    baseline_command,
    compare,
    read_audit,
    read_baseline,
    sites,
)
from fedmpi.runtime import introspection
from fedmpi.runtime.record import atomic_files
from fedmpi.runtime.record.run_dir import MODEL

FOLDER, CARD = "sites", "model-card"
WRITTEN = 12  # classes that are shown separately, at most
MEANING = {  # descriptions of the contents that audit files name
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
INTERNAL = ("_seconds", "_flag", "client")  # contents without information about data


def analyse(directory: Path, alone: Path | None, about: Path | None, say: Callable[[str], None]) -> None:
    """Write DIRECTORY/sites/*.html: a page for each site and the model card.

    Args:
        alone: directory of a run in which each site trained alone; None: no comparison.
        about: YAML file with statements for the model card, such as its intended use; None: no statements.

    Raises:
        UserError: the directory does not contain exactly one run, its clients are not sites, the baseline or the
            statements are not valid, or the pages cannot be written.
    """
    runs = read([directory])
    run = runs.alone
    if run is None:
        names = ", ".join(run.path.name for run in runs.all[:5])
        raise UserError(f"--sites tells of one run, and there are {len(runs.all)} ({names}); name one of them")
    everybody = sites(run)
    baseline = read_baseline(run, alone) if alone is not None else None
    pages = {f"{CARD}.html": card(everybody, baseline, read_statements(about) if about is not None else {})}
    for site in everybody:  # unique file names that are valid on all systems
        plain = re.sub(r"[^a-z0-9_-]+", "-", site.name.lower()).strip("-")[:60] or f"site-{site.client}"
        plain = f"{plain}-{site.client}" if f"{plain}.html" in pages else plain
        pages[f"{plain}.html"] = page(site, everybody, baseline)
    folder = run.path / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        for name, content in pages.items():
            atomic_files.write_atomically(folder / name, content.encode())
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; the pages were not written") from error
    if baseline is None:
        say(f"not compared with sites that train alone. To make such a run: {baseline_command(run)}")
    else:
        say(f"compared with sites that train alone: {baseline.run.path}")
    say(f"written: {folder}/{CARD}.html, and a page for each of {len(everybody)} sites")


def read_statements(path: Path) -> dict[str, str]:
    """Read the statements, heading -> text, from a YAML file. Raises UserError if a value is not text or a number."""
    if not path.is_file():
        raise UserError(f"--about: there is no file {path}; write one with lines `Intended use: text`")
    statements = yaml_source.read_yaml_file(path, "write lines `Intended use: text`").data
    for heading, text in statements.items():
        if not isinstance(text, (str, int, float)) or isinstance(text, bool) or not str(text).strip():
            raise UserError(f"--about: {path}: {heading}: {text!r} is no text; write `{heading}: some words`")
    return {str(heading): str(text).strip() for heading, text in statements.items()}


def _render(template: str, title: str, more: Sequence[str], run: Run, baseline: Baseline | None, **values: Any) -> str:
    lead = [f"{run.name}: {run.config.get('method.name')} on {run.config.get('data.source')}", *more]
    values |= {"run": run, "config": run.config, "baseline": baseline, "baseline_command": baseline_command(run)}
    return render(template, title, lead, fewest=FEWEST, **values)


# ---- the page of a site ----
def page(site: Site, everybody: Sequence[Site], baseline: Baseline | None) -> str:
    """Return the HTML page of one site."""
    audit = read_audit(site)
    sent = {line.get("round") for line in audit.lines if "_flag" in (line.get("what") or ())} if audit else set()
    return _render(
        "site",
        f"{site.name} in {site.run.name}",
        ["For this site; it names no other."],
        site.run,
        baseline,
        site=site,
        total=sum(each.train for each in everybody),
        gave=[each for each in (_class_bars(site), update_lengths(site)) if each],
        compared=Table(("metric", "together", "alone", "verdict"), compare(site, baseline)),
        curves=[each for name in site.metrics if baseline and (each := _gain(site, baseline, name))],
        audit=audit,
        audit_path=audit_path(site),
        left=Table(("what", "messages", "bytes in all", "to"), messages(site, audit.lines) if audit else ()),
        missing=set(site.took_part) - sent,
    )


def _class_bars(site: Site) -> Figure | None:
    if not site.counts:
        return None
    names = [f"class {c}" for c in range(len(site.counts))]
    chart = stacked_bars(names, {"samples": [float(n) for n in site.counts]}, "training samples")
    return Figure("classes", "its samples by class", chart, ("class", "samples"), list(enumerate(site.counts)))


def update_lengths(site: Site) -> Figure | None:
    """Draw the norms of a site's updates, and the mean norm of the other sites' updates."""
    own, others = dict[int, float](), dict[int, float]()
    for row in site.run.updates:
        pairs = zip(row.get("clients") or (), row.get("norms") or (), strict=False)
        norms = {k: v for k, value in pairs if (v := number(value)) is not None}
        if site.client in norms:
            own[row["round"]] = norms.pop(site.client)
            if len(norms) > 1:  # with only one other site, the mean would disclose its norm
                others[row["round"]] = fmean(norms.values())
    note = "How far training on its samples moved the model away from the common one (norm)."
    lines, head = {site.name: own, "mean of the others": others}, ("its own", "mean of the others")
    return by_name("lengths", "length of its updates", "norm", lines, head, note, from_zero=True) if own else None


def _gain(site: Site, baseline: Baseline, name: str) -> Figure | None:
    title, both = metric_title(name), {"together": site, "alone": baseline.sites[site.client]}
    lines = {label: each.own.curves.get(name, {}) if each.own else {} for label, each in both.items()}
    return by_name(f"gained-{name}", f"{title} on its own test samples", title, lines)


def messages(site: Site, lines: Sequence[Mapping[str, Any]]) -> list[list[Value]]:
    """Return a row for each kind of message that a site sent: content, number of messages, bytes, receiver."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        names = [str(name) for name in line.get("what") or () if name not in INTERNAL]
        is_counted = site.counts is not None or "label counts" not in names
        words = [MEANING.get(name, name) for name in names] if is_counted else ["zeros in place of label counts"]
        to = {"0": "server", "all": "all ranks"}.get(str(line.get("to")), f"rank {line.get('to')}")
        what = "; ".join(dict.fromkeys(words)) or "times and numbers without data"
        kinds.setdefault((what, to), []).append(int(line.get("bytes") or 0))
    return [[what, len(sizes), sum(sizes), to] for (what, to), sizes in kinds.items()]


# ---- the model card ----
def card(everybody: Sequence[Site], baseline: Baseline | None, statements: Mapping[str, str]) -> str:
    """Return the model card as an HTML page. statements: heading -> text, written by people."""
    run = everybody[0].run
    config, model = run.config, run.path / MODEL
    evaluated = [site for site in everybody if site.own is not None]
    name = evaluated[0].metrics[0] if evaluated else ""
    measured = [site for site in evaluated if site.last(name) is not None]
    enough = [site for site in measured if (site.samples or 0) >= FEWEST]
    compared = [[site.name, site.samples, *row] for site in evaluated for row in compare(site, baseline)]
    samples = samples_by_site(everybody)
    return _render(
        "card",
        f"Model card: {run.name}",
        [],
        run,
        baseline,
        environment=run.environment,
        git=run.environment.get("git") or {},
        sites=everybody,
        weights=_weights(model),
        statements=statements,
        samples=samples,
        who_gave=_sample_bars(everybody, samples),
        method=introspection.list_summaries("methods").get(str(config.get("method.name"))),
        options=[f"{k[7:]} {v}" for k, v in config.items() if k.startswith("method.") and k != "method.name"],
        messages=Table(("site", "messages", "bytes in all", "SHA-256 of its record (begins)"), _records(everybody)),
        evaluated=evaluated,
        metric=metric_title(name),
        compared=Table(("site", "test samples", "metric", "together", "alone", "verdict"), compared),
        worst=(max if run.falls(name) else min)(enough, key=lambda s: s.last(name) or 0.0) if len(enough) > 1 else None,
        few=[f"{site.name} ({site.samples})" for site in measured if site not in enough],
        by_site=_metric_bars(evaluated, baseline, name),
        digest_of_model=hashlib.sha256(model.read_bytes()).hexdigest() if model.is_file() else "",
    )


def _weights(model: Path) -> int | None:
    """Return the number of weights in a safetensors file, from its header; None if it cannot be read.

    The file starts with the length of the header in 8 bytes, followed by the header as JSON.
    """
    try:
        with model.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return sum(prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return None


def samples_by_site(everybody: Sequence[Site]) -> Table:
    """Return a table of the samples by site, and by class if counts are known and classes are few."""
    classes = range(len(everybody[0].counts or ()))
    shown = classes if len(classes) <= WRITTEN else range(0)
    rows: list[list[Value]] = [
        [site.name, site.train, site.samples, *(site.counts[c] if site.counts else None for c in shown)]
        for site in everybody
    ]
    return Table(("site", "training samples", "test samples", *(f"class {c}" for c in shown)), rows)


def _sample_bars(everybody: Sequence[Site], samples: Table) -> Figure:
    columns = [list(column) for column in zip(*samples.rows, strict=True)]
    bars: Any = dict(zip(samples.head[3:], columns[3:], strict=True)) or {"samples": columns[1]}
    chart = stacked_bars([site.name for site in everybody], bars, "training samples")
    note = "Class numbers are those of the data set." if columns[3:] else ""
    return Figure("data", "who gave how much", chart, samples.head, samples.rows, note)


def _records(everybody: Sequence[Site]) -> list[list[Value]]:
    """Return a row for each site: numbers of messages and bytes in its audit file, and the file's SHA-256.

    The contents of messages are shown on the page of the site only.
    """
    audits = {site.name: read_audit(site) for site in everybody}
    return [
        [name, len(each.lines), each.size, each.sha256[:16]] if each else [name, None, None, "not here"]
        for name, each in audits.items()
    ]


def _metric_bars(evaluated: Sequence[Site], baseline: Baseline | None, name: str) -> Figure:
    """Draw a metric of each site as a bar; with a baseline, a second bar shows the site that trained alone."""
    labels, together, alone, rows = list[str](), list[float](), list[float](), list[list[Value]]()
    for site in evaluated:
        before = baseline.sites[site.client].last(name) if baseline else None
        rows.append([site.name, site.last(name), before])
        labels += [site.name, f"{site.name}, alone"] if baseline else [site.name]
        together += [site.last(name) or 0.0, 0.0] if baseline else [site.last(name) or 0.0]
        alone += [0.0, before or 0.0] if baseline else [0.0]
    parts = {"together": together, "alone": alone} if baseline else {"together": together}
    chart = stacked_bars(labels, parts, metric_title(name))
    return Figure(f"good-{name}", f"{metric_title(name)} by site", chart, ("site", "together", "alone"), rows)
