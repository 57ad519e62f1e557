"""Read the results and the audit file of each site of a run, and a baseline run in which each site trained alone."""

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
    "personal": "the model that the site would use, evaluated on its own test samples",
    "global": "the global model, evaluated on the site's own test samples",
}
BASELINE_METHOD = "local"  # the method with which each site trains alone
BASELINE_KEYS = (  # prefixes of settings that must be equal in a fair baseline
    *("data.", "model.", "task.", "train.", "init.", "seed", "rounds"),
    *("cohort.fraction", "cohort.size", "cohort.sampling"),
)
# Settings with these prefixes that do not influence metrics.
NEUTRAL_KEYS = ("data.root", "data.download", "data.audit", "data.stream", "data.share_ranks")
MIN_STANDARD_ERRORS = 2.0  # smallest difference between accuracies that decides a verdict, in standard errors
MIN_TEST_SAMPLES = 20  # smallest number of test samples for a verdict


class SiteMetrics(NamedTuple):
    """The metrics of a site under one evaluation protocol.

    Attributes:
        samples: the number of test samples.
        curves: dict from the name of each metric to its values by round.
        end: the last evaluated round.
    """

    samples: int
    curves: Mapping[str, Curve]
    end: int


class Site:
    """The participation and the results of one site in a run.

    Attributes:
        client: the number of the site's client.
        num_train, num_test: the numbers of training and test samples; num_test is None if the site was not evaluated.
        label_counts: the number of training samples per class; None if targets are not classes or counts are not
            shared.
        participated_rounds: the rounds in which the site was in the cohort.
        refused_rounds: the rounds in which its upload was refused.
        mean_weight: its weight p_k in the aggregate, averaged over rounds.
        evaluation: its metrics under the protocol `personal` or, if that was not evaluated, `global`; None if neither
            was evaluated.
        personal_evaluation: its metrics under the protocol `personal`; None if that was not evaluated.
        model_description: a description of the evaluated model and samples.
        metric_names: the names of its metrics; metrics for which higher is better come first, and the loss comes last.
    """

    def __init__(self, run: Run, client: int, train: int, counts: list[int] | None, share: float | None) -> None:
        self.run, self.client, self.name = run, client, run.client_names.get(client, str(client))
        self.num_train, self.label_counts, self.mean_weight = train, counts, share
        self.participated_rounds = [row["round"] for row in run.rows if client in (row.get("cohort") or ())]
        self.refused_rounds = [row["round"] for row in run.rows if client in _find_clients_with_refused_uploads(row)]
        evaluated = {protocol: _read_site_metrics(run, client, protocol) for protocol in PROTOCOLS}
        protocol = next((each for each in PROTOCOLS if evaluated[each]), "")
        self.evaluation, self.personal_evaluation = evaluated.get(protocol), evaluated["personal"]
        self.model_description, self.num_test = (
            PROTOCOLS.get(protocol, ""),
            self.evaluation.samples if self.evaluation else None,
        )
        names = self.evaluation.curves if self.evaluation else ()
        self.metric_names = sorted(names, key=lambda name: (name == "loss", run.is_lower_better(name)))

    def get_last_value(self, name: str) -> float | None:
        """Return a metric in the last evaluated round; None if it is missing or not a finite number."""
        return self.evaluation.curves.get(name, {}).get(self.evaluation.end) if self.evaluation else None


def list_sites(run: Run) -> list[Site]:
    """Return the sites of a run, in the order of its clients.

    Raises:
        UserError: if the clients of the run are not sites.
    """
    sizes, counts = run.samples_by_client
    if not run.client_names or not isinstance(sizes, (list, np.ndarray)):
        raise UserError(
            f"{run.path}: the clients of this run have no names, so they are not sites; give each site an entry in "
            "data.silos, or set data.partition.scheme: site, and set evaluate.protocol: [global, personal]"
        )
    # All counts are 0 if targets are not classes.
    known = isinstance(counts, (list, np.ndarray)) and len(counts) == len(sizes) and bool(np.any(counts))
    shares = _compute_mean_weights(run, np.asarray(sizes, dtype=float))
    return [
        Site(run, k, int(n), [int(c) for c in counts[k]] if known else None, None if shares is None else shares[k])
        for k, n in enumerate(sizes)
    ]


def _find_clients_with_refused_uploads(row: Row) -> set[int]:
    """Return the clients whose uploads were refused in a round, given the round's row of metrics.jsonl."""
    return {each["client"] for each in row.get("refused") or () if isinstance(each, dict) and "client" in each}


def _compute_mean_weights(run: Run, sizes: np.ndarray) -> list[float] | None:
    """Return each client's weight p_k in the aggregate, averaged over rounds; refused uploads have weight 0."""
    weights = np.ones_like(sizes) if run.config.get("cohort.weighting") == "uniform" else sizes
    shares = list[np.ndarray]()
    for row in run.rows:
        members = [
            k for k in row.get("cohort") or () if k not in _find_clients_with_refused_uploads(row) and k < len(sizes)
        ]
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
    """The audit file (comm/audit.py) of the rank that opened a site's files.

    Attributes:
        path: its path, relative to the run directory.
        rows: its rows, one per message.
        size: the total size of all messages, as text with a unit.
        sha256: SHA-256 of the file.
    """

    path: Path
    rows: list[Row]
    size: str
    sha256: str


def read_audit(site: Site) -> AuditFile | None:
    """Read the audit file of a site; return None if this copy of the run directory does not contain it."""
    path = get_audit_path(site)
    if path is None or not (site.run.path / path).is_file():
        return None
    lines = site.run.read_rows(str(path), rounds=False)
    size = format_bytes(sum(int(line.get("bytes") or 0) for line in lines))
    return AuditFile(path, lines, size, hashlib.sha256((site.run.path / path).read_bytes()).hexdigest())


def get_audit_path(site: Site) -> Path | None:
    """Return the path of a site's audit file, relative to the run directory on the host of the site.

    Sites are assigned to training ranks round-robin. Sites of rank 0 have no audit file, since their data never leave
    the host of the server.

    Returns:
        The path, or None if the site has no audit file.
    """
    config, size = site.run.config, len(site.run.environment.get("ranks") or ())
    first = 0 if size == 1 or config.get("server.trains_clients") else 1
    rank = first + site.client % (size - first) if size > first else 0
    has_audit = config.get("data.silos") and config.get("data.audit") is not False
    return Path("audit") / f"rank-{rank}.jsonl" if has_audit and rank else None


# ---- local baseline ----
class BaselineRun(NamedTuple):
    """A run in which each site trained alone.

    Attributes:
        run: the records of the run.
        sites: its sites, in the same order as in the joint run.
        differing_settings: settings that should be equal in both runs, but differ.
    """

    run: Run
    sites: Sequence[Site]
    differing_settings: Sequence[str]


def read_baseline(run: Run, path: Path) -> BaselineRun:
    """Read the run in `path` as the local baseline of `run`.

    Raises:
        UserError: if `path` is not a run of method `local` at the sites of `run`, or did not evaluate personal models.
    """
    if not is_run_directory(path):
        raise UserError(f"--local-baseline: {path} is not a run directory; give a directory that `fedmpi run` wrote")
    other = Run(path)
    method = other.config.get("method.name")
    if method != BASELINE_METHOD or run.client_names != other.client_names:
        raise UserError(
            f"--local-baseline: {path} is a run of method {method} at "
            f"{', '.join(other.client_names.values()) or 'no sites'}; it must be a run of method {BASELINE_METHOD} at "
            f"the sites of {run.path}: {', '.join(run.client_names.values())}"
        )
    alone = list_sites(other)
    if not any(site.personal_evaluation for site in alone):
        raise UserError(
            f"--local-baseline: {path} has no evaluation of each site's own model; train it with "
            "evaluate.protocol=[personal]"
        )
    keys = [
        key
        for key in dict.fromkeys([*run.config, *other.config])
        if key.startswith(BASELINE_KEYS) and key not in NEUTRAL_KEYS
    ]
    differing = [key for key in keys if run.config.get(key) != other.config.get(key)]
    differing += [f"the way they ended ({run.state}; {other.state})"] if run.state != other.state else []
    return BaselineRun(other, alone, differing)


def format_baseline_command(run: Run) -> str:
    """Return the command that trains a local baseline of `run`, and a note on how to start and use it.

    The command resets server.rule and record.updates: gram, which need model updates; here no site sends any.
    """
    words = [quote(f"name={run.name}_alone"), "'method={name: local}'", "evaluate.protocol=[personal]"]
    words += ["server.rule=auto"] if run.config.get("server.rule.name", "auto") != "auto" else []
    words += ["record.updates=norms"] if run.config.get("record.updates") == "gram" else []
    command = f"fedmpi run {quote(str(run.path))}/config.yaml {' '.join(words)}"
    return f"{command} (start it like the joint run), and give its directory with --local-baseline"


def compare_with_baseline(site: Site, baseline: BaselineRun | None) -> list[list[Any]]:
    """Compare each metric of a site in the joint run with the local baseline.

    Returns:
        One row per metric: title, value in the joint run, value in the baseline, and verdict. The last two are None
        without a baseline.
    """
    alone = baseline.sites[site.client] if baseline else None
    rows = list[list[Value]]()
    for name in site.metric_names:
        before = alone.get_last_value(name) if alone else None
        rows.append(
            [
                format_metric_title(name),
                site.get_last_value(name),
                before,
                compare_metric(site, alone, name) if alone else None,
            ]
        )
    return rows


def compare_metric(site: Site, alone: Site, name: str) -> str:
    """Compare a site's metric after joint training with its metric after training alone.

    Accuracies that differ by less than MIN_STANDARD_ERRORS standard errors are too close to tell. The standard error of
    the difference between two accuracies a and b on n samples is sqrt(a (1 - a) / n + b (1 - b) / n); this is an
    overestimate if both models err on the same samples. For all other metrics the standard error is unknown, and any
    difference counts.

    Args:
        site: the site in the joint run.
        alone: the site in the local baseline.
        name: the metric.

    Returns:
        The verdict: "better together", "better alone", "the same", "too close to tell", "too few test samples (n) for a
        verdict", or "-" if a value is missing.
    """
    joint, before = site.get_last_value(name), alone.get_last_value(name)
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
