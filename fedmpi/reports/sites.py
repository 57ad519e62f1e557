"""Read the results of each site of a run, its audit file, and a baseline run in which each site trained alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import format_bytes
from fedmpi.common.metrics_row import CLIENTS_NAMES
from fedmpi.common.text import format_metric_title
from fedmpi.reports.page import Value
from fedmpi.reports.run_groups import Curve, Row, Run, extract_curve, is_run_directory

PROTOCOLS = {  # evaluation protocols for the results of a site; the first one that was evaluated is used
    "personal": "the model that the site would use, on its own test samples",
    "global": "the common model, on the site's own test samples",
}
BASELINE_METHOD = "local"  # the method with which each site trains alone
BASELINE_KEYS = (  # prefixes of settings that must be equal in a fair baseline
    *("data.", "model.", "task.", "train.", "init.", "seed", "rounds"),
    *("cohort.fraction", "cohort.size", "cohort.sampling"),
)
# Settings among them that do not influence metrics.
NEUTRAL_KEYS = ("data.root", "data.download", "data.audit", "data.stream", "data.share_ranks")
MIN_STANDARD_ERRORS = 2.0  # smallest difference, in standard errors, that decides a verdict
MIN_TEST_SAMPLES = 20  # number of test samples that a verdict requires


class SiteMetrics(NamedTuple):
    """Metrics of a site in one evaluation protocol. curves: metric -> round -> value; end: the last evaluated round."""

    samples: int
    curves: Mapping[str, Curve]
    end: int


class Site:
    """Participation and results of one site in a run.

    Attributes:
        train, samples: numbers of training and of test samples.
        counts: training samples of each class; None if targets are not classes or counts are not shared.
        took_part: rounds in which the site was in the cohort.
        refused: rounds in which its upload was refused.
        share: mean over rounds of its weight p_k in the aggregate.
        own: its metrics in the protocol `personal`; if that was not evaluated, in `global`; else None.
        what: description of the model that was evaluated.
        metrics: names of its metrics; those for which higher is better come first, the loss is last.
    """

    def __init__(self, run: Run, client: int, train: int, counts: list[int] | None, share: float | None) -> None:
        self.run, self.client, self.name = run, client, run.client_names.get(client, str(client))
        self.num_train, self.label_counts, self.mean_weight = train, counts, share
        self.participated_rounds = [row["round"] for row in run.rows if client in (row.get("cohort") or ())]
        self.refused_rounds = [row["round"] for row in run.rows if client in _refused_clients(row)]
        evaluated = {protocol: _read_site_metrics(run, client, protocol) for protocol in PROTOCOLS}
        protocol = next((each for each in PROTOCOLS if evaluated[each]), "")
        self.evaluation, self.personal_evaluation = evaluated.get(protocol), evaluated["personal"]
        self.model_description, self.num_test = (
            PROTOCOLS.get(protocol, ""),
            self.evaluation.samples if self.evaluation else None,
        )
        names = self.evaluation.curves if self.evaluation else ()
        self.metric_names = sorted(names, key=lambda name: (name == "loss", run.is_lower_better(name)))

    def last_value(self, name: str) -> float | None:
        """Return the value of a metric in the last evaluated round; None if it is missing or not a finite number."""
        return self.evaluation.curves.get(name, {}).get(self.evaluation.end) if self.evaluation else None


def list_sites(run: Run) -> list[Site]:
    """Return all sites of a run in the order of its clients. Raises UserError if the clients are not sites."""
    sizes, counts = run.samples_by_client
    if not run.client_names or not isinstance(sizes, (list, np.ndarray)):
        raise UserError(
            f"{run.path}: its clients have no names, so there are no sites to write pages for; sites are the entries "
            "of data.silos, or the owners of rows (data.partition.scheme: site), evaluated by evaluate.protocol: "
            "[global, personal]"
        )
    # If targets are not classes, all counts are 0.
    known = isinstance(counts, (list, np.ndarray)) and len(counts) == len(sizes) and bool(np.any(counts))
    shares = _mean_weights(run, np.asarray(sizes, dtype=float))
    return [
        Site(run, k, int(n), [int(c) for c in counts[k]] if known else None, None if shares is None else shares[k])
        for k, n in enumerate(sizes)
    ]


def _refused_clients(row: Row) -> set[int]:
    return {each["client"] for each in row.get("refused") or () if isinstance(each, dict) and "client" in each}


def _mean_weights(run: Run, sizes: np.ndarray) -> list[float] | None:
    """Return the mean over rounds of each client's weight p_k; it is 0 in rounds where its upload did not count."""
    weights = np.ones_like(sizes) if run.config.get("cohort.weighting") == "uniform" else sizes
    shares = list[np.ndarray]()
    for row in run.rows:
        members = [k for k in row.get("cohort") or () if k not in _refused_clients(row) and k < len(sizes)]
        weight = np.zeros_like(sizes)
        weight[members] = weights[members]
        if weight.sum() > 0:
            shares.append(weight / weight.sum())
    return [float(share) for share in np.mean(shares, axis=0)] if shares else None


def _read_site_metrics(run: Run, client: int, protocol: str) -> SiteMetrics | None:
    lines = [line for line in run.clients if line.get("client") == client and line.get("protocol") == protocol]
    if not lines:
        return None
    names = dict.fromkeys(name for line in lines for name in line if name not in CLIENTS_NAMES)
    curves = {name: extract_curve(lines, name) for name in names}
    return SiteMetrics(int(lines[0].get("samples") or 0), curves, max(line["round"] for line in lines))


# ---- audit of the data that a site sent ----
class AuditFile(NamedTuple):
    """The audit file (comm/audit.py) of the rank that opened a site's files. size: bytes of all messages, as text."""

    path: Path
    rows: list[Row]
    size: str
    sha256: str


def read_audit(site: Site) -> AuditFile | None:
    """Read the audit file of a site. Returns None if it is not in this copy of the run directory."""
    path = audit_path(site)
    if path is None or not (site.run.path / path).is_file():
        return None
    lines = site.run.read_rows(str(path), rounds=False)
    size = format_bytes(sum(int(line.get("bytes") or 0) for line in lines))
    return AuditFile(path, lines, size, hashlib.sha256((site.run.path / path).read_bytes()).hexdigest())


def audit_path(site: Site) -> Path | None:
    """Return the path of a site's audit file, relative to the run directory on its host; None if there is none.

    Sites are assigned to the training ranks in turn. Rank 0 has no audit file, since its own clients' data stay on its
    host.
    """
    config, size = site.run.config, len(site.run.environment.get("ranks") or ())
    first = 0 if size == 1 or config.get("server.trains_clients") else 1
    rank = first + site.client % (size - first) if size > first else 0
    has_audit = config.get("data.silos") and config.get("data.audit") is not False
    return Path("audit") / f"rank-{rank}.jsonl" if has_audit and rank else None


# ---- training alone ----
class BaselineRun(NamedTuple):
    """A run in which each site trained alone. differs: settings that should be as in the joint run, and are not."""

    run: Run
    sites: Sequence[Site]
    differing_settings: Sequence[str]


def read_baseline(run: Run, path: Path) -> BaselineRun:
    """Read the run in `path` as the baseline of `run`. Raises UserError if it is not a suitable baseline."""
    if not is_run_directory(path):
        raise UserError(f"--local-baseline: {path} is no run directory; name one that `fedmpi run` has written")
    other = Run(path)
    method = other.config.get("method.name")
    if method != BASELINE_METHOD or run.client_names != other.client_names:
        raise UserError(
            f"--local-baseline: {path} is a run of method {method} at "
            f"{', '.join(other.client_names.values()) or 'no sites'}; "
            f"method.name=local at the sites of {run.path} is needed: {', '.join(run.client_names.values())}"
        )
    alone = list_sites(other)
    if not any(site.personal_evaluation for site in alone):
        raise UserError(
            f"--local-baseline: {path} does not say how good each site's model is; run it with "
            "evaluate.protocol=[personal]"
        )
    keys = [
        key
        for key in dict.fromkeys([*run.config, *other.config])
        if key.startswith(BASELINE_KEYS) and key not in NEUTRAL_KEYS
    ]
    differs = [key for key in keys if run.config.get(key) != other.config.get(key)]
    differs += [f"how they ended ({run.state}; {other.state})"] if run.state != other.state else []
    return BaselineRun(other, alone, differs)


def baseline_command(run: Run) -> str:
    """Return a command that trains a baseline. Settings without effect in it are reset to their defaults."""
    words = [quote(f"name={run.name}_alone"), "'method={name: local}'", "evaluate.protocol=[personal]"]
    words += ["server.rule=auto"] if run.config.get("server.rule.name", "auto") != "auto" else []
    words += ["record.updates=norms"] if run.config.get("record.updates") == "gram" else []
    command = f"fedmpi run {quote(str(run.path))}/config.yaml {' '.join(words)}"
    return f"{command} (started as the joint run was), and name it by --local-baseline"


def compare_with_baseline(site: Site, baseline: BaselineRun | None) -> list[list[Any]]:
    """Return a row for each metric of a site: title, value in the joint run, value in the baseline, and verdict."""
    alone = baseline.sites[site.client] if baseline else None
    rows = list[list[Value]]()
    for name in site.metric_names:
        before = alone.last_value(name) if alone else None
        rows.append(
            [
                format_metric_title(name),
                site.last_value(name),
                before,
                compare_metric(site, alone, name) if alone else None,
            ]
        )
    return rows


def compare_metric(site: Site, alone: Site, name: str) -> str:
    """Return the verdict on a metric of a site: "better together", "better alone", or why neither is certain.

    Accuracies that differ by less than CLEAR standard errors are too close to tell. The standard error of the
    difference of two shares a, b of n samples is sqrt(a (1 - a) / n + b (1 - b) / n), an overestimate if both models
    fail on the same samples. For metrics other than accuracy the standard error is unknown, and any difference counts.
    """
    joint, before = site.last_value(name), alone.last_value(name)
    if joint is None or before is None:
        return "-"
    n = min(site.num_test or 0, alone.num_test or 0)
    if 0 < n < MIN_TEST_SAMPLES:
        return f"too few test samples ({n}) for a verdict"
    if joint == before:
        return "the same"
    if name == "accuracy" and n:
        error = sqrt(sum(a * (100 - a) / n for a in (joint, before)))
        if abs(joint - before) < MIN_STANDARD_ERRORS * error:
            return "too close to tell"
    return "better together" if (joint < before) == site.run.is_lower_better(name) else "better alone"
