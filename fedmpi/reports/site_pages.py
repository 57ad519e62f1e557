"""Write a page for each site of a consortium, and a model card (`fedmpi report RUN_DIR --sites`).

The page of a site shows its contribution, its benefit and the messages that it sent, but no metrics of other sites. The
model card describes the data, the method, the metrics of each site and the limitations, for people who assess the model
without having trained it (Mitchell et al. Model Cards for Model Reporting. FAT* 2019.
https://arxiv.org/abs/1810.03993). The HTML templates of these pages are in templates/.
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

from fedmpi.analysis.charts import make_stacked_bar_chart
from fedmpi.common.errors import UserError
from fedmpi.common.text import format_metric_title
from fedmpi.config import yaml_source
from fedmpi.reports.page import Figure, Table, Value, render_page
from fedmpi.reports.run_groups import Run, finite_number, plot_curves, read_runs
from fedmpi.reports.sites import (
    MIN_TEST_SAMPLES,
    BaselineRun,
    Site,
    compare_with_baseline,
    format_baseline_command,
    get_audit_path,
    list_sites,
    read_audit,
    read_baseline,
)
from fedmpi.runtime import introspection
from fedmpi.runtime.record import atomic_files
from fedmpi.runtime.record.run_dir import MODEL

SITES_FOLDER, MODEL_CARD = "sites", "model-card"
# What changes between two runs that differential privacy makes look alike, by how clients are drawn.
NEIGHBOURS = {
    "poisson": "added or removed",
    "without_replacement": "replaced by other data",
    "none": "replaced by an upload of zero",
}
NOT_COVERED = "not covered are durations, state/, the partition files and metrics on rows of the sites"
MAX_CLASSES_SHOWN = 12  # maximum number of classes that are shown separately
CONTENT_DESCRIPTIONS = {  # descriptions of the contents that audit files name
    "_loss": "its mean training loss",
    "_b": "batch statistics of the model",
    "dw": "the update of the model's weights",
    "n_train": "numbers of samples",
    "n_test": "numbers of samples",
    "label counts": "its number of samples per class",
    "form of samples, digest of names": "the shape and type of its samples, and a hash of its column names",
    "text": "host, versions, and hashes of settings and code",
    "client state": "the state that the method stores for the site",
    "local model": "its complete local model (for `analysis`)",
}
CONTENT_WITHOUT_DATA = ("_seconds", "_flag", "client")  # contents that contain no information about data


def write_site_pages(
    directory: Path, local_baseline: Path | None, statements: Path | None, print_line: Callable[[str], None]
) -> None:
    """Write a page for each site and the model card to DIRECTORY/sites/*.html.

    Args:
        directory: the run directory.
        local_baseline: directory of a run in which each site trained alone; None: no comparison.
        statements: YAML file with statements for the model card, such as its intended use; None: no statements.
        print_line: prints a line of output.

    Raises:
        UserError: if the directory does not contain exactly one run, its clients are not sites, the baseline or the
            statements are not valid, or the pages cannot be written.
    """
    runs = read_runs([directory])
    run = runs.single
    if run is None:
        names = ", ".join(run.path.name for run in runs.all[:5])
        raise UserError(
            f"--sites: {directory} contains {len(runs.all)} runs ({names}); give the directory of one of them"
        )
    all_sites = list_sites(run)
    baseline = read_baseline(run, local_baseline) if local_baseline is not None else None
    pages = {
        f"{MODEL_CARD}.html": render_model_card(
            all_sites, baseline, read_model_card_statements(statements) if statements is not None else {}
        )
    }
    for site in all_sites:  # unique file names that are valid on all systems
        plain = re.sub(r"[^a-z0-9_-]+", "-", site.name.lower()).strip("-")[:60] or f"site-{site.client}"
        plain = f"{plain}-{site.client}" if f"{plain}.html" in pages else plain
        pages[f"{plain}.html"] = render_site_page(site, all_sites, baseline)
    folder = run.path / SITES_FOLDER
    try:
        folder.mkdir(exist_ok=True)
        for name, content in pages.items():
            atomic_files.write_atomically(folder / name, content.encode())
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or folder}: {error.strerror}; the pages were not written"
        ) from error
    if baseline is None:
        print_line(f"no comparison with local training; to train a local baseline: {format_baseline_command(run)}")
    else:
        print_line(f"compared with the local baseline {baseline.run.path}")
    print_line(f"written: {folder}/{MODEL_CARD}.html, and a page for each of {len(all_sites)} sites")


def read_model_card_statements(path: Path) -> dict[str, str]:
    """Read the statements of a model card from a YAML file that maps headings to paragraphs.

    Raises:
        UserError: if the file does not exist or is not valid, or a value is neither a string nor a number.
    """
    if not path.is_file():
        raise UserError(f"--statements: file {path} not found; create it, with lines such as `Intended use: text`")
    statements = yaml_source.read_yaml_file(path, "write lines `Intended use: text`").data
    for heading, text in statements.items():
        if not isinstance(text, (str, int, float)) or isinstance(text, bool) or not str(text).strip():
            raise UserError(f"--statements: {path}: {heading}: {text!r} is not allowed; must be a string")
    return {str(heading): str(text).strip() for heading, text in statements.items()}


def _render_page(
    template: str, title: str, more: Sequence[str], run: Run, baseline: BaselineRun | None, **values: Any
) -> str:
    lead = [f"{run.name}: {run.config.get('method.name')} on {run.config.get('data.source')}", *more]
    values |= {"run": run, "config": run.config, "baseline": baseline, "baseline_command": format_baseline_command(run)}
    hides_updates = run.config.get("privacy.secagg.threshold") is not None
    values["privacy"] = describe_privacy(run.privacy, run.summary.get("epsilon"), len(run.rounds), hides_updates)
    return render_page(template, title, lead, fewest=MIN_TEST_SAMPLES, **values)


# ---- the page of a site ----
def render_site_page(site: Site, all_sites: Sequence[Site], baseline: BaselineRun | None) -> str:
    """Return the HTML page of one site."""
    audit = read_audit(site)
    uploads = {"_flag", "secagg headers"}  # one of these is in the messages of each upload
    sent = {line.get("round") for line in audit.rows if uploads & {*(line.get("what") or ())}} if audit else set()
    return _render_page(
        "site",
        f"{site.name} in {site.run.name}",
        ["This page is for this site; it names no other site."],
        site.run,
        baseline,
        site=site,
        total=sum(each.num_train for each in all_sites),
        gave=[each for each in (_plot_classes(site), plot_update_norms(site)) if each],
        compared=Table(("metric", "together", "alone", "verdict"), compare_with_baseline(site, baseline)),
        curves=[each for name in site.metric_names if baseline and (each := _plot_gain(site, baseline, name))],
        audit=audit,
        audit_path=get_audit_path(site),
        left=Table(("what", "messages", "bytes in all", "to"), summarize_messages(site, audit.rows) if audit else ()),
        missing=set(site.participated_rounds) - sent,
    )


def _plot_classes(site: Site) -> Figure | None:
    """Plot the number of training samples of a site by class."""
    if not site.label_counts:
        return None
    names = [f"class {c}" for c in range(len(site.label_counts))]
    chart = make_stacked_bar_chart(names, {"samples": [float(n) for n in site.label_counts]}, "training samples")
    return Figure("classes", "its samples by class", chart, ("class", "samples"), list(enumerate(site.label_counts)))


def plot_update_norms(site: Site) -> Figure | None:
    """Plot the norms of a site's updates, and the mean norm of the other sites' updates, over rounds."""
    own, others = dict[int, float](), dict[int, float]()
    for row in site.run.updates:
        pairs = zip(row.get("clients") or (), row.get("norms") or (), strict=False)
        norms = {k: v for k, value in pairs if (v := finite_number(value)) is not None}
        if site.client in norms:
            own[row["round"]] = norms.pop(site.client)
            if len(norms) > 1:  # with only one other site, the mean would disclose its norm
                others[row["round"]] = fmean(norms.values())
    note = "Norm of the difference between the site's local model after training and the global model."
    lines, head = {site.name: own, "mean of the others": others}, ("its own", "mean of the others")
    return plot_curves("lengths", "norm of its updates", "norm", lines, head, note, from_zero=True) if own else None


def _plot_gain(site: Site, baseline: BaselineRun, name: str) -> Figure | None:
    """Plot a metric of a site over rounds, in the joint run and in the local baseline."""
    title, both = format_metric_title(name), {"together": site, "alone": baseline.sites[site.client]}
    lines = {label: each.evaluation.curves.get(name, {}) if each.evaluation else {} for label, each in both.items()}
    return plot_curves(f"gained-{name}", f"{title} on its own test samples", title, lines)


def summarize_messages(site: Site, lines: Sequence[Mapping[str, Any]]) -> list[list[Value]]:
    """Return one row [content, number of messages, total bytes, receiver] for each kind of message of a site."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        names = [str(name) for name in line.get("what") or () if name not in CONTENT_WITHOUT_DATA]
        is_counted = site.label_counts is not None or "label counts" not in names
        words = (
            [CONTENT_DESCRIPTIONS.get(name, name) for name in names]
            if is_counted
            else ["zeros in place of label counts"]
        )
        to = {"0": "server", "all": "all ranks"}.get(str(line.get("to")), f"rank {line.get('to')}")
        what = "; ".join(dict.fromkeys(words)) or "times and numbers without data"
        kinds.setdefault((what, to), []).append(int(line.get("bytes") or 0))
    return [[what, len(sizes), sum(sizes), to] for (what, to), sizes in kinds.items()]


# ---- the model card ----
def render_model_card(all_sites: Sequence[Site], baseline: BaselineRun | None, statements: Mapping[str, str]) -> str:
    """Return the model card of a run as an HTML page.

    Args:
        all_sites: all sites of the run.
        baseline: the local baseline; None: no comparison.
        statements: paragraphs that the consortium wrote, by heading.
    """
    run = all_sites[0].run
    config, model = run.config, run.path / MODEL
    evaluated = [site for site in all_sites if site.evaluation is not None]
    name = evaluated[0].metric_names[0] if evaluated else ""
    measured = [site for site in evaluated if site.get_last_value(name) is not None]
    enough = [site for site in measured if (site.num_test or 0) >= MIN_TEST_SAMPLES]
    compared = [[site.name, site.num_test, *row] for site in evaluated for row in compare_with_baseline(site, baseline)]
    samples = build_samples_table(all_sites)
    return _render_page(
        "card",
        f"Model card: {run.name}",
        [],
        run,
        baseline,
        environment=run.environment,
        git=run.environment.get("git") or {},
        sites=all_sites,
        weights=_count_weights(model),
        statements=statements,
        samples=samples,
        who_gave=_plot_samples(all_sites, samples),
        method=introspection.list_summaries("methods").get(str(config.get("method.name"))),
        options=[f"{k[7:]} {v}" for k, v in config.items() if k.startswith("method.") and k != "method.name"],
        messages=Table(
            ("site", "messages", "bytes in all", "first digits of the SHA-256 of its audit file"),
            _build_audit_summary_rows(all_sites),
        ),
        evaluated=evaluated,
        metric=format_metric_title(name),
        compared=Table(("site", "test samples", "metric", "together", "alone", "verdict"), compared),
        worst=(max if run.is_lower_better(name) else min)(enough, key=lambda s: s.get_last_value(name) or 0.0)
        if len(enough) > 1
        else None,
        few=[f"{site.name} ({site.num_test})" for site in measured if site not in enough],
        by_site=_plot_metric_by_site(evaluated, baseline, name),
        digest_of_model=hashlib.sha256(model.read_bytes()).hexdigest() if model.is_file() else "",
    )


def describe_privacy(
    privacy: Mapping[str, Any], epsilon: float | None, rounds: int, secure_aggregation: bool
) -> tuple[str, str]:
    """Return a sentence about differential privacy, and a sentence about what the server receives.

    Args:
        privacy: the content of privacy.json; {} for a run without differential privacy.
        epsilon: epsilon after the last round; None if no round was released.
        rounds: the number of rounds.
    """
    hidden = (
        "Secure aggregation hides the updates of single sites from the server, which learns their sum."
        if secure_aggregation
        else "The server receives the update of each site; there is no secure aggregation."
    )
    if not privacy:
        return "The run has no differential privacy.", hidden
    if epsilon is None:
        return "The run has released nothing yet.", hidden
    who, change = "each site", NEIGHBOURS.get(str(privacy.get("sampling")), "")
    if privacy.get("unit") == "sample":
        who, change = "each training sample", "added or removed"
    return (
        f"All models of the run together have differential privacy for {who}: epsilon {epsilon:.4g} at delta "
        f"{privacy['delta']:g} after {rounds} rounds, where two data sets differ in the data of one "
        f"{'sample' if who.endswith('sample') else 'site'}, which are {change}; {NOT_COVERED}.",
        hidden,
    )


def _count_weights(model: Path) -> int | None:
    """Return the number of weights in a safetensors file, or None if the file cannot be read.

    Only the header is read: the file starts with 8 bytes, the length of the header, followed by the header as JSON.
    """
    try:
        with model.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return sum(prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return None


def build_samples_table(all_sites: Sequence[Site]) -> Table:
    """Return a table of the number of samples by site and, if it is known and there are few classes, by class."""
    classes = range(len(all_sites[0].label_counts or ()))
    shown = classes if len(classes) <= MAX_CLASSES_SHOWN else range(0)
    rows: list[list[Value]] = [
        [
            site.name,
            site.num_train,
            site.num_test,
            *(site.label_counts[c] if site.label_counts else None for c in shown),
        ]
        for site in all_sites
    ]
    return Table(("site", "training samples", "test samples", *(f"class {c}" for c in shown)), rows)


def _plot_samples(all_sites: Sequence[Site], samples: Table) -> Figure:
    """Plot the number of training samples by site and, if the table `samples` contains classes, by class."""
    columns = [list(column) for column in zip(*samples.rows, strict=True)]
    bars: Any = dict(zip(samples.head[3:], columns[3:], strict=True)) or {"samples": columns[1]}
    chart = make_stacked_bar_chart([site.name for site in all_sites], bars, "training samples")
    note = "Classes are numbered as in the data set." if columns[3:] else ""
    return Figure("data", "training samples by site", chart, samples.head, samples.rows, note)


def _build_audit_summary_rows(all_sites: Sequence[Site]) -> list[list[Value]]:
    """Return one table row per site: the number and size of its messages, and the SHA-256 of its audit file.

    The contents of the messages are shown only on the page of the site.
    """
    audits = {site.name: read_audit(site) for site in all_sites}
    return [
        [name, len(each.rows), each.size, each.sha256[:16]] if each else [name, None, None, "not here"]
        for name, each in audits.items()
    ]


def _plot_metric_by_site(evaluated: Sequence[Site], baseline: BaselineRun | None, name: str) -> Figure:
    """Plot a metric of each site as a bar; a second bar shows the metric in the local baseline, if there is one."""
    labels, together, alone, rows = list[str](), list[float](), list[float](), list[list[Value]]()
    for site in evaluated:
        before = baseline.sites[site.client].get_last_value(name) if baseline else None
        rows.append([site.name, site.get_last_value(name), before])
        labels += [site.name, f"{site.name}, alone"] if baseline else [site.name]
        together += [site.get_last_value(name) or 0.0, 0.0] if baseline else [site.get_last_value(name) or 0.0]
        alone += [0.0, before or 0.0] if baseline else [0.0]
    parts = {"together": together, "alone": alone} if baseline else {"together": together}
    chart = make_stacked_bar_chart(labels, parts, format_metric_title(name))
    return Figure(f"good-{name}", f"{format_metric_title(name)} by site", chart, ("site", "together", "alone"), rows)
