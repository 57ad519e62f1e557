"""The sites of a run, what the audit file of each says, and the baseline run in which each site trained alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import CLIENT_NAMES
from fedmpi.reports.groups import is_run
from fedmpi.reports.run_data import Row, Run, number

PROTOCOLS = {  # how a site's model was evaluated
    "personal": "the model that the site would use, on its own test samples",
    "global": "the common model, on the site's own test samples",
    "personal_on_global": "the site's model, on the common test set",
}
METHOD = "local"  # in which each site trains alone
SAME = (  # settings that a fair baseline shares
    *("data.", "model.", "task.", "train.", "init.", "seed", "rounds"),
    *("cohort.fraction", "cohort.size", "cohort.draw"),
)
PLACES = ("data.root", "data.download", "data.audit", "data.stream", "data.share_ranks")  # which change no metric
CLEAR = 2.0  # standard errors beyond which a difference is called one
FEWEST = 20  # test samples that a verdict needs
NOTE = (
    "After the last evaluated round, not the best one. A difference of accuracies below two standard errors is too "
    "close to tell; of other figures the error is not known, and small differences may be chance. With fewer than "
    f"{FEWEST} test samples there is no verdict."
)


@dataclass(frozen=True)
class Evaluated:
    """A site's metrics by one protocol. curves: metric -> round -> value; end: the last round that was evaluated."""

    samples: int
    curves: Mapping[str, Mapping[int, float]]
    end: int

    def last(self, name: str) -> float | None:
        """Return the value in the last evaluated round; None if it was not a number."""
        return self.curves.get(name, {}).get(self.end)


@dataclass(frozen=True)
class Site:
    """One site's part in a run.

    Attributes:
        train: number of training samples.
        counts: training samples of each class; None if they are not classes, or not shared.
        took_part, refused: rounds; refused: its upload did not count.
        share: of the weight of all updates, mean over the rounds.
        evaluated: by protocol.
        own: of the model that the site would use, if that was evaluated; else of the common model; None without either.
        falls: whether less of a metric is better.
    """

    client: int
    name: str
    train: int
    counts: list[int] | None
    took_part: tuple[int, ...]
    refused: tuple[int, ...]
    share: float | None
    evaluated: Mapping[str, Evaluated]
    own: Evaluated | None
    falls: Callable[[str], bool]

    def last(self, name: str) -> float | None:
        return self.own.last(name) if self.own else None

    @property
    def samples(self) -> int | None:
        """Number of test samples."""
        return self.own.samples if self.own else None

    @property
    def metrics(self) -> list[str]:
        """Names of its metrics, the loss last."""
        names = dict.fromkeys(name for each in self.evaluated.values() for name in each.curves)
        return sorted(names, key=lambda name: (name == "loss", self.falls(name)))


def sites(run: Run) -> list[Site]:
    """Return all sites, in the order of the clients.

    Raises:
        UserError: the clients of the run are no sites.
    """
    sizes, counts = run.by_client
    if not run.client_names or not isinstance(sizes, (list, np.ndarray)):
        raise UserError(
            f"{run.path}: its clients have no names, so there are no sites to write pages for; sites are the entries "
            "of data.silos, or the owners of rows (data.partition.scheme: site), evaluated by evaluate.protocol: "
            "[global, personal]"
        )
    # Targets that are no classes have counts of zeros.
    known = isinstance(counts, (list, np.ndarray)) and len(counts) == len(sizes) and bool(np.any(counts))
    shares, result = _shares(run, sizes), list[Site]()
    for k, n in enumerate(sizes):
        evaluated = _evaluated(run, k)
        took_part = tuple(row["round"] for row in run.rows if k in (row.get("cohort") or ()))
        refused = tuple(row["round"] for row in run.rows if k in _clients(row, "refused"))
        own = evaluated.get("personal") or evaluated.get("global")
        by_class = [int(c) for c in counts[k]] if known else None
        part = (took_part, refused, shares.get(k))
        result.append(Site(k, run.client_names.get(k, str(k)), int(n), by_class, *part, evaluated, own, run.falls))
    return result


def _clients(row: Mapping[str, Any], key: str) -> set[int]:
    return {each["client"] for each in row.get(key) or () if isinstance(each, dict) and "client" in each}


def _shares(run: Run, sizes: Sequence[int] | np.ndarray) -> dict[int, float]:
    """Return the mean over rounds of each client's weight p_k; it is 0 in rounds where its upload did not count."""
    uniform, shares = run.config.get("cohort.weighting") == "uniform", list[np.ndarray]()
    for row in run.rows:
        members = [k for k in row.get("cohort") or () if k not in _clients(row, "refused") and k < len(sizes)]
        weight = np.zeros(len(sizes))
        weight[members] = 1.0 if uniform else np.asarray(sizes, float)[members]
        if weight.sum() > 0:
            shares.append(weight / weight.sum())
    return dict(enumerate(map(float, np.mean(shares, axis=0)))) if shares else {}


def _evaluated(run: Run, client: int) -> dict[str, Evaluated]:
    lines: dict[str, list[Row]] = {}
    for line in run.clients:
        if line.get("client") == client:
            lines.setdefault(str(line.get("protocol")), []).append(line)
    by_protocol = dict[str, Evaluated]()
    for protocol, own in lines.items():
        curves: dict[str, dict[int, float]] = {name: {} for line in own for name in line if name not in CLIENT_NAMES}
        for name, curve in curves.items():
            curve |= {line["round"]: v for line in own if (v := number(line.get(name))) is not None}
        by_protocol[protocol] = Evaluated(int(own[0].get("samples") or 0), curves, max(line["round"] for line in own))
    return by_protocol


@dataclass(frozen=True)
class Audit:
    """The audit file (comm/audit.py) of the rank that opened a site's files."""

    path: Path
    lines: list[Row]
    sha256: str

    @property
    def bytes(self) -> int:
        return sum(int(line.get("bytes") or 0) for line in self.lines)


def read_audit(run: Run, site: Site) -> Audit | None:
    """Read the audit file of a site; None if it is not in the run directory."""
    path = audit_path(run, site)
    if path is None or not (run.path / path).is_file():
        return None
    return Audit(path, run.lines(str(path), rounds=False), hashlib.sha256((run.path / path).read_bytes()).hexdigest())


def audit_path(run: Run, site: Site) -> Path | None:
    """Return the path of the audit file of a site in its host's run directory; None where there is none.

    Sites are assigned to the training ranks in turn; what rank 0 sends to itself leaves no host.
    """
    size = len(run.environment.get("ranks") or ())
    first = 0 if size == 1 or run.config.get("server.trains") else 1
    rank = first + site.client % (size - first) if size > first else 0
    silos = run.config.get("data.silos") and run.config.get("data.audit") is not False
    return Path("audit") / f"rank-{rank}.jsonl" if silos and rank else None


@dataclass(frozen=True)
class Baseline:
    """A run in which every site trained alone.

    Attributes:
        evaluated: by client.
        differs: settings that are not those of the joint run.
    """

    run: Run
    evaluated: Mapping[int, Evaluated]
    differs: tuple[str, ...]


def read_baseline(run: Run, path: Path) -> Baseline:
    """Read the run in `path` as the baseline of `run`. Raises UserError if it cannot be that."""
    if not (path.is_dir() and is_run(path)):
        raise UserError(f"--alone: {path} is no run directory; name one that `fedmpi run` has written")
    other = Run(path)
    method = other.config.get("method.name")
    if method != METHOD or run.client_names != other.client_names:
        raise UserError(
            f"--alone: {path} is a run of method {method} at {', '.join(other.client_names.values()) or 'no sites'}; "
            f"method.name=local at the sites of {run.path} is needed: {', '.join(run.client_names.values())}"
        )
    personal = {site.client: site.evaluated["personal"] for site in sites(other) if "personal" in site.evaluated}
    if not personal:
        raise UserError(
            f"--alone: {path} does not say how good each site's model is; run it with evaluate.protocol=[personal]"
        )
    keys = [key for key in dict.fromkeys([*run.config, *other.config]) if key.startswith(SAME) and key not in PLACES]
    differs = [key for key in keys if run.config.get(key) != other.config.get(key)]
    differs += [f"how they ended ({run.state}; {other.state})"] if run.state != other.state else []
    return Baseline(other, personal, tuple(differs))


def baseline_command(run: Run) -> str:
    """Return a command that trains a baseline; settings without effect in it are reset to their defaults."""
    words = [quote(f"name={run.name}_alone"), "'method={name: local}'", "evaluate.protocol=[personal]"]
    words += ["server.rule=auto"] if run.config.get("server.rule.name", "auto") != "auto" else []
    words += ["record.updates=norms"] if run.config.get("record.updates") == "gram" else []
    command = f"fedmpi run {quote(str(run.path))}/config.yaml {' '.join(words)}"
    return f"{command} (started as the joint run was), and name it by --alone"


def verdict(site: Site, alone: Evaluated, name: str) -> str:
    """Whether a metric is "better together" or "better alone", or that this cannot be told.

    The standard error of a difference of two shares a, b of n samples is sqrt(a (1 - a) / n + b (1 - b) / n), too much
    where both models err on the same samples; of other metrics than accuracy none is known.
    """
    joint, before = site.last(name), alone.last(name)
    if joint is None or before is None:
        return "-"
    n = min(site.samples or 0, alone.samples)
    if 0 < n < FEWEST:
        return f"too few test samples ({n}) for a verdict"
    if joint == before:
        return "the same"
    if name == "accuracy" and n:
        error = sqrt(sum(a * (100 - a) / n for a in (joint, before)))
        if abs(joint - before) < CLEAR * error:
            return "too close to tell"
    return "better together" if (joint < before) == site.falls(name) else "better alone"
