"""Who holds what: partition.json as a map of classes by clients, and samples a client."""

from __future__ import annotations

import json

from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Bars, Figure, Grid, Lines, Section, Series, Text, Value

NAMED, CLASSES, SHOWN = 40, 60, 150  # clients with a bar each; classes and clients of a map
MAPS = 3  # of several partitions


def held(runs: Runs) -> Section | None:
    """A map for each partition; runs of one seed share theirs mostly."""
    found: dict[str, list[Run]] = {}
    for run in runs.all:
        if run.partition.get("sizes"):
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
    facts = members[0].partition
    sizes, counts = facts["sizes"], facts.get("label_counts")
    names = _names(members[0], len(sizes))
    whose = "" if not ending else f", seed {members[0].seed}" if by_seed else f", {runs.label(members[0])}"
    parts = list[Figure | Text]()
    if counts and any(map(any, counts)):
        every, wide = -(-len(counts) // SHOWN), len(counts[0])
        kept = range(0, len(counts), every)
        values = [[float(v) for v in counts[k][:CLASSES]] for k in kept]
        chart = Grid([names[k] for k in kept], [str(c) for c in range(min(wide, CLASSES))], values, "client", "class",
                     "samples", written=len(counts) <= 24)  # fmt: skip
        data: list[list[Value]] = [[names[k], c, n] for k, row in enumerate(counts) for c, n in enumerate(row) if n]
        note = f"Scheme {facts.get('scheme')}, seed {facts.get('seed')}."
        note += f" One client in {every} is drawn." if every > 1 else ""
        note += f" The first {CLASSES} of {wide} classes are drawn." if wide > CLASSES else ""
        parts.append(Figure(f"partition{ending}", f"training samples by client and class{whose}", chart,
                            ("client", "class", "samples"), data, note))  # fmt: skip
    else:
        parts.append(Text("Which client holds how many samples of which class is not recorded: sites keep it to "
                          "themselves, or targets are no classes."))  # fmt: skip
    order = sorted(range(len(sizes)), key=lambda k: -sizes[k])
    data = [[names[k], sizes[k]] for k in range(len(sizes))]
    if len(sizes) <= NAMED:
        shape: Bars | Lines = Bars(names, {"samples": sizes}, "training samples")
    else:
        y = [float(sizes[k]) for k in order]
        shape = Lines(
            [Series("samples", list(range(1, len(y) + 1)), y)],
            "clients, the largest first",
            "training samples",
            from_zero=True,
        )
    parts.append(Figure(f"samples{ending}", f"training samples by client{whose}", shape, ("client", "samples"), data))
    return parts


def _names(run: Run, clients: int) -> list[str]:
    """Of silos the sites' names."""
    silos = run.config.get("data.silos")
    named = isinstance(silos, list) and len(silos) == clients
    return [str(name) for name in silos] if named else [str(k) for k in range(clients)]  # type: ignore[union-attr]
