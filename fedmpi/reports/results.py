"""The sections of a report on results: summary, learning curves, clients, classes, partition, and faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from fedmpi.common.metrics_row import CLIENT_NAMES
from fedmpi.common.text import count, format_metric, metric_title
from fedmpi.reports.charts import Bars, Grid, Lines, Series
from fedmpi.reports.groups import BAND, Runs, by_group, by_name, means
from fedmpi.reports.page import Figure, Part, Table, Text, Value
from fedmpi.reports.run_data import Curve, Run, base_name, curve, number
from fedmpi.runtime.reading.digests import CODE
from fedmpi.runtime.record.data_files import MANY

COLUMNS = 4  # metrics of a comparison's table
OF_CLIENTS = ("_std", "_worst_decile")  # metrics that the section on clients shows
MOST_SITES = 12  # with metrics of their own where several runs are compared
NAMED = 40  # clients with a bar each; more are a curve
SPREAD = ("worst", "10th percentile", "median", "90th percentile")
FAIRNESS = ("mean", "std", "worst 10 %", "best 10 %", "Jain's index")
FAIRNESS_NOTE = (
    "Over clients: population standard deviation, means of the worst and the best tenth, at least one client (q-FFL), "
    "and Jain's index, (sum x)² / (N sum x²): 1 where all clients have the same, 1/N where one has everything."
)
COMPARED = (  # over clients: statistic, ending of the figure's name, words for it
    ("worst", "worst", "worst client"),
    ("10th percentile", "10th", "10th percentile"),
    ("Jain's index", "jain", "Jain's index over clients"),
)
ROUNDS = 120  # of the map of classes, evenly chosen
CLASSES, CLIENTS, PARTITIONS = 60, 150, 3  # of maps of samples
ROWS = 200  # of a table of faults

# ---- summary ----


def summary(runs: Runs) -> list[Part | None]:
    """Show the last metrics of each group, mean and standard deviation over its runs; or all metrics of one run."""
    names = [name for name in runs.metrics if not name.endswith(OF_CLIENTS)]
    warnings = [Text(text, warning=True) for text in _warnings(runs)]
    if runs.alone is not None:
        return [*warnings, *_facts(runs.alone, names)]
    table = list[list[Value]]()
    for group in runs.groups:
        row: list[Value] = [group.name, f"{sum(run.complete for run in group.runs)} of {len(group.runs)}"]
        for name in names[:COLUMNS]:
            last = [value for run in group.runs if (value := run.last.get(name)) is not None]
            spread = f" ± {format_metric(name, stdev(last))}" if len(last) > 1 else ""
            some = f" ({len(last)} runs)" if len(last) < len(group.runs) else ""
            row.append(f"{format_metric(name, fmean(last))}{spread}{some}" if last else "-")
        table.append(row)
    head = ("settings", "runs finished", *(name.replace("_", " ") for name in names[:COLUMNS]))
    note = "Last evaluated round, mean ± sample standard deviation over the runs of these settings."
    return [*warnings, Table(head, table, note=note)]


def _warnings(runs: Runs) -> list[str]:
    warnings, unfinished = list[str](), [run for run in runs.all if not run.complete]
    if unfinished:
        who = f"This run has not finished ({runs.alone.state})" if runs.alone else (
            f"{count(len(unfinished), 'run')} of {len(runs.all)} not finished"
        )  # fmt: skip
        warnings.append(f"{who}: figures are of the rounds so far.")
    if hidden := [key[1:-1] for key in runs.differing if key.startswith("(")]:
        warnings.append(f"Runs differ in {', '.join(hidden)}, though the settings say the same; no mean is over both.")
    if again := [runs.labels[run.path] for group in runs.groups for run in group.duplicates]:
        warnings.append(f"Not in any mean, for another run has the same settings, data and seed: {', '.join(again)}.")
    if len({run.identity[CODE] for run in runs.all if CODE in run.identity}) > 1:
        warnings.append(f"Not all runs were made with one {CODE[1:-1]}; see Environment.")
    if odd := [run.name for run in runs.all if run.rounds != list(range(len(run.rounds)))]:
        warnings.append(f"Rounds are missing from metrics.jsonl, or stand there twice: {', '.join(odd)}.")
    if notes := sum(len(run.notes) for run in runs.all):
        warnings.append(f"Not all files could be read; see Faults ({count(notes, 'note')}).")
    return warnings


def _facts(run: Run, names: Sequence[str]) -> list[Part]:
    wall = sum(number(row.get("wall_s")) or 0.0 for row in run.rows)
    facts = {
        **{key: base_name(run.config.get(f"{key}.name")) for key in ("method", "model")},
        "data": base_name(run.config.get("data.source")),
        "clients": run.partition.get("clients"),
        "partition": run.partition.get("scheme"),
        "rounds": f"{len(run.rounds)} of {run.config.get('rounds', '?')}",
        "ranks": len(run.environment.get("ranks") or ()) or None,
        "seed": run.seed,
        "ended": run.state,
        "seconds in rounds": f"{wall:.1f}" if run.rounds else None,
    }
    rows = list[list[Value]]()
    for name in names:
        mean, best, at = ((run.summary.get(part) or {}).get(name) for part in ("mean_last_10", "best", "best_round"))
        values = [None if v is None else format_metric(name, v, 4) for v in (run.last.get(name), mean, best)]
        rows.append([name.replace("_", " "), *values, at])
    head = ("figure", "last", "mean of the last ten", "best", "in round")
    biased = "The best round is chosen by the test set itself, so it flatters."
    table = Table(("what", "value"), [[key, str(value)] for key, value in facts.items() if value not in (None, "")])
    return [table, *([Table(head, rows, note=biased)] if rows else [])]


# ---- learning ----


def learning(runs: Runs) -> list[Part | None]:
    """Draw every metric of training and evaluation: the curve of a run, or the mean of each group with a band."""
    names = [name for name in runs.metrics if not name.endswith(OF_CLIENTS)]
    of_sites = [name for name in names if "@" in name]
    if runs.alone is not None or len({name.partition("@")[2] for name in of_sites}) > MOST_SITES:
        names = [name for name in names if name not in of_sites]
    parts = list[Part | None]()
    for name in names:
        curves = {run.path: curve(run.rows, name) for run in runs.all}
        parts.append(by_group(runs, f"learning-{name}", name.replace("_", " "), metric_title(name), curves, name))
    for what in dict.fromkeys(name.partition("@")[0] for name in of_sites) if runs.alone else ():
        own = [name for name in of_sites if name.startswith(f"{what}@")]
        sites = {name.partition("@")[2]: curve(runs.all[0].rows, name) for name in own}
        title, note = f"{what.replace('_', ' ')} by site", "The global model on the test rows of each site."
        parts.append(by_name(f"learning-{what}-by-site", title, metric_title(what), sites, note=note))
    if parts and any(len(group.runs) > 1 for group in runs.groups):
        parts.insert(0, Text(BAND))
    if not parts:
        why = "No figure of any round is a number: nothing was evaluated yet, or training diverged at once."
        parts.append(Text(why, warning=True))
    return parts


def own_metrics(runs: Runs) -> list[Part | None]:
    """Draw the metrics that methods report about their steps."""
    parts = list[Part | None]()
    for name in dict.fromkeys(name for run in runs.all for name in run.own_metrics):
        curves = {run.path: curve(run.rows, name) for run in runs.all}
        parts.append(by_group(runs, f"method-{name}", name.replace("_", " "), name, curves, name))
    return parts


# ---- clients ----


def clients(runs: Runs) -> list[Part | None]:
    """Show the spread over clients of each metric of clients.jsonl, over the rounds and after the last one."""
    parts = list[Part | None]()
    kinds = list[tuple[str, str]]()
    for run in runs.all:
        for protocol in dict.fromkeys(str(line.get("protocol")) for line in run.clients):
            own = [line for line in run.clients if str(line.get("protocol")) == protocol]
            names = dict.fromkeys(name for line in own for name in line if name not in CLIENT_NAMES)
            kinds += [(protocol, name) for name in names if name != "loss" or len(names) == 1]
    for protocol, name in dict.fromkeys(kinds):
        ends, statistics = dict[Path, dict[str, float]](), dict[Path, dict[str, Curve]]()
        for run in runs.all:
            ends[run.path], statistics[run.path] = _client_metrics(run, protocol, name)
        title, slug = f"{protocol} {name}".replace("_", " "), f"clients-{protocol}-{name}"
        if len(runs.groups) == 1:
            same = {part: means(statistics[run.path][part] for run in runs.groups[0].runs) for part in SPREAD}
            lines = {part: {t: mean for t, (mean, _, _) in each.items()} for part, each in same.items()}
            many, note = len(runs.groups[0].runs), "Over all clients that were evaluated."
            note += f" Means over {many} runs." if many > 1 else ""
            parts.append(by_name(slug, f"{title} over clients", metric_title(name), lines, note=note))
        for part, ending, whose in COMPARED if len(runs.groups) > 1 else ():
            label = part if ending == "jain" else metric_title(name)
            curves = {path: each[part] for path, each in statistics.items()}
            parts.append(by_group(runs, f"{slug}-{ending}", f"{title}: {whose}", label, curves, ending))
        if runs.alone is not None:
            parts += _each_client(ends[runs.alone.path], slug, title, name)
        rows = list[list[Value]]()
        for group in runs.groups:
            last = [over_clients(list(ends[r.path].values()), r.falls(name)) for r in group.runs if ends[r.path]]
            known = [[v for each in last if (v := each[part]) is not None] for part in (*SPREAD, *FAIRNESS)]
            if last:
                rows.append([group.name, *(fmean(values) if values else None for values in known)])
        if rows:
            head = ("settings", *SPREAD, *FAIRNESS)
            parts.append(Table(head, rows, f"{title}: spread and fairness, last round", FAIRNESS_NOTE))
    return parts


def _client_metrics(run: Run, protocol: str, name: str) -> tuple[dict[str, float], dict[str, Curve]]:
    """Return ({client's name: value in the last evaluated round}, {statistic over clients: curve})."""
    by_round: dict[int, dict[str, float]] = {}
    for line in run.clients:
        if str(line.get("protocol")) == protocol:
            at = by_round.setdefault(line["round"], {})
            if (value := number(line.get(name))) is not None:
                client = line.get("client", -1)
                at[run.client_names.get(client, str(client))] = value
    rounds = {t: over_clients(list(at.values()), run.falls(name)) for t, at in by_round.items() if at}
    parts = (*SPREAD, *FAIRNESS)
    curves = {part: {t: v for t, each in rounds.items() if (v := each[part]) is not None} for part in parts}
    return by_round[max(by_round)] if by_round else {}, curves


def _each_client(values_by_name: dict[str, float], slug: str, title: str, name: str) -> list[Figure]:
    """Draw the value of each client after the last evaluated round, the lowest first."""
    order = sorted(values_by_name.items(), key=lambda pair: pair[1])
    if not order:
        return []
    names, values = [client for client, _ in order], [value for _, value in order]
    chart: Bars | Lines = Bars(names, {name: values}, metric_title(name))
    if len(order) > NAMED or values[0] < 0:
        places = list(range(1, len(order) + 1))
        chart = Lines([Series(name, places, values)], "clients, the lowest first", metric_title(name))
    return [Figure(f"{slug}-last", f"{title}, last round", chart, ("client", name), order)]


def over_clients(values: Sequence[float], falling: bool) -> dict[str, float | None]:
    """Return the statistics of SPREAD and FAIRNESS. falling: less is better.

    >>> list(over_clients([90.0, 70.0, 80.0], falling=False).values())[:4]
    [70.0, 72.0, 80.0, 88.0]
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    tenth = max(len(x) // 10, 1)
    low, high = float(x[:tenth].mean()), float(x[-tenth:].mean())
    worst, best = (high, low) if falling else (low, high)
    index = None
    if x.min() >= 0 and x.max() > 0:
        scaled = x / x.max()  # squares of large losses stay numbers
        index = float(scaled.sum() ** 2 / (len(x) * (scaled**2).sum()))
    numbers = (x[-1] if falling else x[0], *np.quantile(x, (0.1, 0.5, 0.9)), x.mean(), x.std(), worst, best)
    return dict(zip((*SPREAD, *FAIRNESS), [*map(float, numbers), index], strict=True))


# ---- classes and data ----


def classes(runs: Runs) -> list[Part | None]:
    """Draw the accuracy of each class of the global test set: by round, or after the last one of several groups."""
    accuracies = dict[str, dict[int, list[float | None]]]()
    for group in runs.groups:
        rows = [row for run in group.runs for row in run.rows if isinstance(row.get("class_accuracy"), list)]
        width = max((len(row["class_accuracy"]) for row in rows), default=0)
        curves = [means(curve([row], "class_accuracy", str(c)) for row in rows) for c in range(width)]
        if rows:
            rounds = sorted({row["round"] for row in rows})
            accuracies[group.name] = {t: [each[t][0] if t in each else None for each in curves] for t in rounds}
    if not accuracies:
        return []
    note = "Percent of the samples of a class in the global test set that are recognised as of it."
    if len(accuracies) > 1:
        last = {name: rows[max(rows)] for name, rows in accuracies.items()}
        names = [str(c) for c in range(max(map(len, last.values())))]
        values = [[*row, *[None] * (len(names) - len(row))] for row in last.values()]
        chart = Grid(list(last), names, values, "settings", "class", "%", written=True)
        data: list[list[Value]] = [[name, c, v] for name, row in last.items() for c, v in enumerate(row)]
        head = ("settings", "class", "accuracy")
        return [Figure("classes", "accuracy by class, last round", chart, head, data, note)]
    (by_round,) = accuracies.values()
    every = -(-len(by_round) // ROUNDS)
    shown = list(by_round)[::every]
    columns = [list(each) for each in zip(*(by_round[t] for t in shown), strict=True)]
    names, rounds = [str(c) for c in range(len(columns))], [str(t) for t in shown]
    chart = Grid(names, rounds, columns, "class", "round", "%", written=len(shown) < 10)
    note += f" Every {every}th evaluated round is drawn." if every > 1 else ""
    data = [[t, c, v] for t, row in by_round.items() for c, v in enumerate(row)]
    return [Figure("classes", "accuracy by class and round", chart, ("round", "class", "accuracy"), data, note)]


def partition(runs: Runs) -> list[Part | None]:
    """Draw the samples by client and class, and by client, for each partition."""
    by_partition: dict[str, list[Run]] = {}
    for run in runs.all:
        sizes, _ = run.by_client
        if sizes is not None and len(sizes):
            by_partition.setdefault(json.dumps(run.partition, sort_keys=True), []).append(run)
    parts, seeds = list[Part | None](), {members[0].seed for members in by_partition.values()}
    for i, (run, *_) in enumerate(list(by_partition.values())[:PARTITIONS], 1):
        whose = f"seed {run.seed}" if len(seeds) == len(by_partition) else runs.labels[run.path]
        parts += _samples(run, *(("", "") if len(by_partition) == 1 else (f"-{i}", f", {whose}")))
    if len(by_partition) > PARTITIONS:
        parts.append(Text(f"The runs have {len(by_partition)} partitions; the first {PARTITIONS} are shown."))
    return parts


def _samples(run: Run, ending: str, whose: str) -> list[Part]:
    """Draw one partition. ending: of the figures' names; whose: the end of their titles."""
    facts, (sizes, counts) = run.partition, run.by_client
    every = -(-len(sizes) // CLIENTS)
    drawn = range(0, len(sizes), every)
    listed = range(len(sizes)) if len(sizes) <= MANY else drawn  # what a reader of the page can save as a table
    names, parts = [run.client_names.get(k, str(k)) for k in range(len(sizes))], list[Part]()
    if counts is not None and any(map(any, counts)):
        wide = len(counts[0])
        values = [[float(v) for v in counts[k][:CLASSES]] for k in drawn]
        columns = [str(c) for c in range(min(wide, CLASSES))]
        grid = Grid([names[k] for k in drawn], columns, values, "client", "class", "samples", written=len(counts) <= 24)
        data: list[list[Value]] = [[names[k], c, int(n)] for k in listed for c, n in enumerate(counts[k]) if n]
        note = f"Scheme {facts.get('scheme')}, seed {facts.get('seed')}."
        note += f" One client in {every} is drawn." if every > 1 else ""
        note += f" The first {CLASSES} of {wide} classes are drawn." if wide > CLASSES else ""
        note += " partition.npz has all." if len(listed) < len(sizes) else ""
        title = f"training samples by client and class{whose}"
        parts.append(Figure(f"partition{ending}", title, grid, ("client", "class", "samples"), data, note))
    else:
        why = "sites keep it to themselves, or targets are no classes"
        parts.append(Text(f"Which client holds how many samples of which class is not recorded: {why}."))
    chart: Bars | Lines = Bars(names, {"samples": sizes}, "training samples")
    if len(sizes) > NAMED:
        y = sorted(map(float, sizes), reverse=True)
        line = Series("samples", [place + 1 for place in listed], [y[place] for place in listed])
        chart = Lines([line], "clients, the largest first", "training samples", from_zero=True)
    data = [[names[k], int(sizes[k])] for k in listed]
    title = f"training samples by client{whose}"
    return [*parts, Figure(f"samples{ending}", title, chart, ("client", "samples"), data)]


# ---- faults ----


def faults(runs: Runs) -> list[Part | None]:
    """Rank failures, uploads that were refused or clipped, divergence, runs that have not finished, damaged files."""
    parts, lost, uploads = list[Part | None](), list[list[Value]](), list[list[Value]]()
    for run in runs.all:
        whose = "" if runs.alone else f"{runs.labels[run.path]}: "
        since = run.summary.get("diverged")
        notes = [] if since is None else [f"training came apart: from round {since} on the loss is far above its best."]
        notes += [] if run.complete else [f"{run.state}."]
        parts += [Text(f"{whose}{text}", warning=True) for text in (*notes, *run.notes)]
        first: list[Value] = [] if runs.alone else [runs.labels[run.path]]
        for row in run.faults:
            ranks = [f"{rank} on {host}" if host else str(rank) for rank, host in (row.get("ranks") or {}).items()]
            out, gone = (", ".join(map(str, row.get(key) or ())) for key in ("clients", "gone"))
            lost.append([*first, row.get("round"), ", ".join(ranks), out, gone, str(row.get("why", ""))])
        for row in run.rows:
            for key, what in (("refused", "refused"), ("clipped", "taken at the bound")):
                for each in row.get(key) or ():
                    text = "the client came to an error" if each.get("error") else what
                    norms = [number(each.get("norm")), number(each.get("bound"))]
                    uploads.append([*first, row["round"], each.get("client"), text, *norms])
            uploads += [[*first, row["round"], k, "lost with its rank", None, None] for k in row.get("lost") or ()]
    head = () if runs.alone else ("run",)
    if lost:
        names = (*head, "round", "ranks lost", "clients out of the round", "clients gone", "why")
        parts.append(Table(names, lost[:ROWS], "Lost ranks"))
    if uploads:
        note = f"The first {ROWS} of {len(uploads):,}." if len(uploads) > ROWS else ""
        names = (*head, "round", "client", "what", "norm", "bound")
        parts.append(Table(names, uploads[:ROWS], "Uploads that did not count as they were", note))
    return parts
