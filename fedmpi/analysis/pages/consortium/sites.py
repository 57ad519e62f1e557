"""Who took part in a run, as its directory tells: a `Site` for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.analysis.pages.run import Run, number
from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import CLIENT_NAMES

SAID = {  # how a site's model was judged
    "personal": "the model that the site would use, on its own test samples",
    "global": "the common model, on the site's own test samples",
    "personal_on_global": "the site's model, on the common test set",
}


@dataclass(frozen=True)
class Judged:
    """A site's figures by one protocol. curves: figure -> round -> value; end: the last round that was judged."""

    samples: int
    curves: Mapping[str, Mapping[int, float]]
    end: int

    def last(self, name: str) -> float | None:
        """None where it was no number: an earlier round's does not stand for it."""
        return self.curves.get(name, {}).get(self.end)


@dataclass(frozen=True)
class Site:
    """One site's part in a run."""

    client: int
    name: str
    train: int  # samples
    counts: list[int] | None  # of each class, where targets are classes and sites tell
    took_part: tuple[int, ...]  # rounds
    refused: tuple[int, ...]  # rounds in which its upload did not count
    clipped: tuple[int, ...]
    share: float | None  # of the weight of all updates, mean over the rounds
    judged: Mapping[str, Judged]  # by protocol
    falls: Callable[[str], bool]  # whether less of a figure is better

    @property
    def own(self) -> Judged | None:
        """What the site would use, where that was judged; else the common model."""
        return self.judged.get("personal") or self.judged.get("global")


def sites(run: Run) -> list[Site]:
    """All sites, in the order of the clients.

    Raises:
        UserError: the clients of the run are no sites.
    """
    names, (sizes, counts) = run.client_names, run.by_client
    if not names or not isinstance(sizes, (list, np.ndarray)):
        raise UserError(
            f"{run.path}: its clients have no names, so there are no sites to write pages for; sites are the entries "
            "of data.silos, or the owners of rows (data.partition.scheme: site), and they have names where they are "
            "evaluated: evaluate.protocol: [global, personal]"
        )
    # Targets that are no classes have counts of zeros.
    known = isinstance(counts, (list, np.ndarray)) and len(counts) == len(sizes) and bool(np.any(counts))
    weights = _shares(run, sizes)
    return [
        Site(
            k,
            run.client_name(k),
            int(n),
            [int(c) for c in counts[k]] if known else None,
            tuple(row["round"] for row in run.rows if k in (row.get("cohort") or ())),
            tuple(row["round"] for row in run.rows if k in _named(row, "refused")),
            tuple(row["round"] for row in run.rows if k in _named(row, "clipped")),
            weights.get(k),
            _judged(run, k),
            run.falls,
        )
        for k, n in enumerate(sizes)
    ]


def figures(site: Site) -> list[str]:
    """Its figures, the loss last."""
    named = dict.fromkeys(name for each in site.judged.values() for name in each.curves)
    return sorted(named, key=lambda name: (name == "loss", site.falls(name)))


def _named(row: Mapping[str, Any], key: str) -> set[int]:
    return {each["client"] for each in row.get(key) or () if isinstance(each, dict) and "client" in each}


def _shares(run: Run, sizes: Sequence[int] | np.ndarray) -> dict[int, float]:
    """p_k, by samples or alike among those whose uploads count; a round without a client gives it none."""
    alike, total, rounds = run.config.get("cohort.weighting") == "uniform", dict[int, float](), 0
    for row in run.rows:
        members = [k for k in row.get("cohort") or () if k not in _named(row, "refused") and k < len(sizes)]
        weight = {k: 1.0 if alike else float(sizes[k]) for k in members}
        if sum(weight.values()) > 0:
            rounds += 1
            for k, p in weight.items():
                total[k] = total.get(k, 0.0) + p / sum(weight.values())
    return {k: total.get(k, 0.0) / rounds for k in range(len(sizes))} if rounds else {}


def _judged(run: Run, client: int) -> dict[str, Judged]:
    found, ends = dict[str, tuple[int, dict[str, dict[int, float]]]](), dict[str, int]()
    for line in run.clients:
        if line.get("client") != client or not isinstance(line.get("round"), int):
            continue
        protocol = str(line.get("protocol"))
        ends[protocol] = max(line["round"], ends.get(protocol, -1))
        _, curves = found.setdefault(protocol, (int(line.get("samples") or 0), {}))
        for name in (n for n in line if n not in CLIENT_NAMES):
            if (value := number(line[name])) is not None:
                curves.setdefault(name, {})[line["round"]] = value
            elif line[name] is None:  # not defined there, such as the loss of a site without events
                curves.setdefault(name, {})
    return {protocol: Judged(samples, curves, ends[protocol]) for protocol, (samples, curves) in found.items()}
