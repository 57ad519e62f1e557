"""Who holds what: a map of classes by clients, and samples a client."""

from __future__ import annotations

import json
from collections.abc import Callable

from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Bars, Figure, Grid, Lines, Section, Series, Text, Value
from fedmpi.runtime.record.data_files import MANY

NAMED, CLASSES, SHOWN = 40, 60, 150  # clients with a bar each; classes and clients of a map
MAPS = 3  # of several partitions


def held(runs: Runs) -> Section | None:
    """A map for each partition; runs of one seed share theirs mostly."""
    found: dict[str, list[Run]] = {}
    for run in runs.all:
        sizes, _ = run.by_client
        if sizes is not None and len(sizes):
            found.setdefault(json.dumps(run.partition, sort_keys=True), []).append(run)
    if not found:
        return None
    parts, seeds = list[Figure | Text](), {members[0].seed for members in found.values()}
    for i, members in enumerate(list(found.values())[:MAPS]):
        parts += _figures(members, runs, "" if len(found) == 1 else f"-{i + 1}", len(seeds) == len(found))
    if len(found) > MAPS:
        parts.append(Text(f"The runs have {len(found)} partitions; the first {MAPS} are shown."))
    return Section("partition", "Partition", parts)


def _figures(members: list[Run], runs: Runs, ending: str, by_seed: bool) -> list[Figure | Text]:
    facts, (sizes, counts) = members[0].partition, members[0].by_client
    name, every = _names(members[0], len(sizes)), -(-len(sizes) // SHOWN)
    drawn = range(0, len(sizes), every)
    listed = range(len(sizes)) if len(sizes) <= MANY else drawn  # what a reader of the page can save as a table
    whose = "" if not ending else f", seed {members[0].seed}" if by_seed else f", {runs.label(members[0])}"
    parts = list[Figure | Text]()
    if counts is not None and any(map(any, counts)):
        wide = len(counts[0])
        values = [[float(v) for v in counts[k][:CLASSES]] for k in drawn]
        chart = Grid([name(k) for k in drawn], [str(c) for c in range(min(wide, CLASSES))], values, "client", "class",
                     "samples", written=len(counts) <= 24)  # fmt: skip
        data: list[list[Value]] = [[name(k), c, int(n)] for k in listed for c, n in enumerate(counts[k]) if n]
        note = f"Scheme {facts.get('scheme')}, seed {facts.get('seed')}."
        note += f" One client in {every} is drawn." if every > 1 else ""
        note += f" The first {CLASSES} of {wide} classes are drawn." if wide > CLASSES else ""
        note += " partition.npz has all." if len(listed) < len(sizes) else ""
        parts.append(Figure(f"partition{ending}", f"training samples by client and class{whose}", chart,
                            ("client", "class", "samples"), data, note))  # fmt: skip
    else:
        parts.append(Text("Which client holds how many samples of which class is not recorded: sites keep it to "
                          "themselves, or targets are no classes."))  # fmt: skip
    data = [[name(k), int(sizes[k])] for k in listed]
    if len(sizes) <= NAMED:
        shape: Bars | Lines = Bars([name(k) for k in listed], {"samples": sizes}, "training samples")
    else:
        y = sorted(map(float, sizes), reverse=True)
        shape = Lines(
            [Series("samples", [place + 1 for place in listed], [y[place] for place in listed])],
            "clients, the largest first",
            "training samples",
            from_zero=True,
        )
    parts.append(Figure(f"samples{ending}", f"training samples by client{whose}", shape, ("client", "samples"), data))
    return parts


def _names(run: Run, clients: int) -> Callable[[int], str]:
    """What a client is called: of silos by the site's name."""
    silos = run.config.get("data.silos")
    if isinstance(silos, list) and len(silos) == clients:
        return lambda client: str(silos[client])
    return str
