"""The sections of a report on results: summary, learning curves, clients, classes, partition, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from fedmpi.analysis.charts import BarChart, HeatMap, LineChart, Series, make_stacked_bar_chart
from fedmpi.common.metrics_row import CLIENTS_NAMES
from fedmpi.common.text import format_metric, format_metric_title, pluralize
from fedmpi.reports.page import Figure, Paragraph, Part, Table, Value, format_cell
from fedmpi.reports.run_groups import (
    Row,
    Run,
    RunCollection,
    RunGroup,
    average_curves,
    extract_curve,
    finite_number,
    plot_by_group,
    plot_curves,
    strip_folders,
    subsample,
)
from fedmpi.runtime.inspection import compare
from fedmpi.runtime.record.data_files import MAX_CLIENTS_IN_JSON

BAND_NOTE = "A line with a band shows the mean ± one sample standard deviation of runs that differ only in their seeds."
MAX_METRIC_COLUMNS = 4  # maximum number of metrics in the table that compares runs
CLIENT_STATISTIC_SUFFIXES = ("_std", "_worst_decile")  # suffixes of metrics that only the section on clients shows
MAX_CLIENT_BARS = 40  # maximum number of clients shown as bars; more clients are shown as a curve
SPREAD_STATISTICS = ("worst", "10th percentile", "median", "90th percentile")
FAIRNESS_STATISTICS = ("mean", "std", "worst 10 %", "best 10 %", "Jain's index")
FAIRNESS_NOTE = (
    "Over clients: population standard deviation; means of the worst and the best tenth of the clients, at least one "
    "(q-FFL); and Jain's index, (sum x)² / (N sum x²), which is 1 if all clients have equal values, and 1/N if all but "
    "one have 0."
)
MAX_ROUNDS_DRAWN, MAX_CLASSES_DRAWN, MAX_CLIENTS_DRAWN = 120, 60, 150  # maximum sizes of heat maps
MAX_FAULT_ROWS = 200  # maximum number of rows in the table of faults


def build_summary_section(runs: RunCollection) -> list[Part | None]:
    """Show the final metrics of each group of runs as mean ± standard deviation, or all metrics of a single run."""
    names = [name for name in runs.metrics if not name.endswith(CLIENT_STATISTIC_SUFFIXES)]
    warnings = [Paragraph(text, warning=True) for text in _list_warnings(runs)]
    if runs.single is not None:
        return [*warnings, *_build_run_tables(runs.single, names)]
    rows: list[list[Value]] = []
    for group in runs.groups:
        finished = f"{sum(run.complete for run in group.runs)} of {len(group.runs)}"
        rows.append([group.name, finished, *(_format_last_values(group, name) for name in names[:MAX_METRIC_COLUMNS])])
    head = ("settings", "runs finished", *(name.replace("_", " ") for name in names[:MAX_METRIC_COLUMNS]))
    note = "Last evaluated round, mean ± sample standard deviation over the runs of these settings."
    return [*warnings, Table(head, rows, note=note)]


def _format_last_values(group: RunGroup, name: str) -> str:
    """Format the last values of a metric in a group of runs as mean ± standard deviation."""
    last = [value for run in group.runs if (value := run.last.get(name)) is not None]
    if not last:
        return "-"
    spread = f" ± {format_metric(name, stdev(last))}" if len(last) > 1 else ""
    some = f" ({pluralize(len(last), 'run')})" if len(last) < len(group.runs) else ""
    return f"{format_metric(name, fmean(last))}{spread}{some}"


def _list_warnings(runs: RunCollection) -> list[str]:
    """Return warnings about unfinished runs, groups whose runs have different data, and unreadable files."""
    warnings = list[str]()
    if unfinished := [run for run in runs.all if not run.complete]:
        several = f"{pluralize(len(unfinished), 'run')} of {len(runs.all)} not finished"
        who = f"This run has not finished ({runs.single.state})" if runs.single else several
        warnings.append(f"{who}; all numbers refer to the rounds so far.")
    different = dict[str, None]()
    for group in runs.groups:
        known = [compare.select_seed_independent_digests(run.identity) for run in group.runs]
        different |= {name[1:-1]: None for each in known for name in each if len({k.get(name) for k in known}) > 1}
    if different:
        warnings.append(f"Runs with the same settings differ in {', '.join(different)}.")
    if notes := sum(len(run.notes) for run in runs.all):
        warnings.append(f"Not all files could be read; see section Faults ({pluralize(notes, 'note')}).")
    return warnings


def _build_run_tables(run: Run, names: Sequence[str]) -> list[Part]:
    """Return a table that describes a run, and a table of its metrics with the given names."""
    seconds, up, down = (
        sum(finite_number(row.get(key)) or 0.0 for row in run.rows)
        for key in ("wall_s", "received_bytes", "sent_bytes")
    )
    facts = {
        **{key: strip_folders(run.config.get(f"{key}.name")) for key in ("method", "model")},
        "data": strip_folders(run.config.get("data.source")),
        "clients": run.partition.get("clients"),
        "partition": run.partition.get("scheme"),
        "rounds": f"{len(run.rounds)} of {run.config.get('rounds', '?')}",
        "ranks": len(run.environment.get("ranks") or ()) or None,
        "seed": run.seed,
        "ended": run.state,
        "seconds in rounds": f"{seconds:.1f}" if run.rounds else None,
        "megabytes of rank 0": f"{up / 1e6:,.4g} received, {down / 1e6:,.4g} sent" if up else None,
        "SHA-256 of the last model": run.last_hash,
    }
    rows = list[list[Value]]()
    for name in names:
        mean, best, best_round = (
            (run.summary.get(part) or {}).get(name) for part in ("mean_last_10", "best", "best_round")
        )
        values = [None if v is None else format_metric(name, v, 4) for v in (run.last.get(name), mean, best)]
        rows.append([name.replace("_", " "), *values, best_round])
    table = Table(("what", "value"), [[key, str(value)] for key, value in facts.items() if value not in (None, "")])
    head = ("metric", "last", "mean of the last ten", "best", "in round")
    biased = "The best round is chosen on the test set itself, so the values of that column are optimistic."
    return [table, *([Table(head, rows, note=biased)] if rows else [])]


def build_learning_section(runs: RunCollection) -> list[Part | None]:
    """Plot each training and evaluation metric over rounds: the curve of one run, or the mean of each group."""
    names = [name for name in runs.metrics if not name.endswith(CLIENT_STATISTIC_SUFFIXES)]
    parts = [_plot_metric(runs, "learning", name, format_metric_title(name)) for name in names if "@" not in name]
    of_sites = [name.split("@", 1) for name in names if "@" in name and runs.single]
    for what in dict.fromkeys(name for name, _ in of_sites):
        sites = {site: extract_curve(runs.all[0].rows, f"{what}@{site}") for name, site in of_sites if name == what}
        title, note = f"{what.replace('_', ' ')} by site", "Global model, evaluated on the test rows of each site."
        parts.append(plot_curves(f"learning-{what}-by-site", title, format_metric_title(what), sites, note=note))
    if parts and any(len(group.runs) > 1 for group in runs.groups):
        return [Paragraph(BAND_NOTE), *parts]
    reason = "No round has a finite metric: nothing has been evaluated yet, or training diverged in the first round."
    return list(parts) or [Paragraph(reason, warning=True)]


def build_method_metrics_section(runs: RunCollection) -> list[Part | None]:
    """Plot, over rounds, the metrics that methods record with `server.log_metrics`."""
    names = dict.fromkeys(name for run in runs.all for name in run.method_metrics)
    return [_plot_metric(runs, "method", name, name) for name in names]


def _plot_metric(runs: RunCollection, section: str, name: str, label: str) -> Figure | None:
    """Plot a metric from metrics.jsonl over rounds, with one line for each group of runs."""
    curves = {run.path: extract_curve(run.rows, name) for run in runs.all}
    return plot_by_group(runs, f"{section}-{name}", name.replace("_", " "), label, curves, name)


def build_clients_section(runs: RunCollection) -> list[Part | None]:
    """Show how each metric in clients.jsonl varies across clients, by round and after the last round."""
    kinds = dict[tuple[str, str], None]()
    for run in runs.all:
        for line in run.clients:
            names = [name for name in line if name not in CLIENTS_NAMES]
            kinds |= {(str(line.get("protocol")), name): None for name in names if name != "loss" or len(names) == 1}
    return [part for protocol, name in kinds for part in _show_client_metric(runs, protocol, name)]


def _show_client_metric(runs: RunCollection, protocol: str, name: str) -> list[Part | None]:
    """Show how one metric varies across clients under one evaluation protocol.

    One group of runs: percentiles over clients by round and, for a single run, the final value of each client. Several
    groups: the value of the worst client by round. A table shows SPREAD_STATISTICS and FAIRNESS_STATISTICS after the
    last round.
    """
    title, slug, label = f"{protocol} {name}".replace("_", " "), f"clients-{protocol}-{name}", format_metric_title(name)
    values: dict[Path, dict[int, dict[str, float]]] = {run.path: {} for run in runs.all}  # by run, round and client
    for run, line in [(each, line) for each in runs.all for line in each.clients]:
        if str(line.get("protocol")) == protocol and (value := finite_number(line.get(name))) is not None:
            client = run.client_names.get(line.get("client", -1), str(line.get("client")))
            values[run.path].setdefault(line["round"], {})[client] = value
    spread: dict[Path, list[Row]] = {
        run.path: [
            {"round": t, **compute_client_statistics([*values_by_client.values()], run.is_lower_better(name))}
            for t, values_by_client in values[run.path].items()
        ]
        for run in runs.all
    }
    parts = list[Part | None]()
    if len(runs.groups) == 1:
        lines = {
            part: average_curves(extract_curve(rows, part) for rows in spread.values()) for part in SPREAD_STATISTICS
        }
        many = f" Means over {len(runs.all)} runs." if len(runs.all) > 1 else ""
        note = f"Statistics over all evaluated clients.{many}"
        parts.append(plot_curves(slug, f"{title} over clients", label, lines, note=note))
    else:
        worst = {path: extract_curve(rows, "worst") for path, rows in spread.items()}
        parts.append(plot_by_group(runs, f"{slug}-worst", f"{title}: worst client", label, worst, "worst"))
    if runs.single is not None and (own := values[runs.single.path]):
        order = sorted(own[max(own)].items(), key=lambda pair: pair[1])
        chart = _chart_by_client(dict(order), name, label, "clients, in ascending order")
        parts.append(Figure(f"{slug}-last", f"{title}, last round", chart, ("client", name), order))
    rows: list[list[Value]] = []
    for group in runs.groups:
        last = [max(each, key=lambda row: row["round"]) for run in group.runs if (each := spread[run.path])]
        known = [
            [v for row in last if (v := row[part]) is not None] for part in (*SPREAD_STATISTICS, *FAIRNESS_STATISTICS)
        ]
        if last:
            rows.append([group.name, *(fmean(values) if values else None for values in known)])
    head, title = ("settings", *SPREAD_STATISTICS, *FAIRNESS_STATISTICS), f"{title}: spread and fairness, last round"
    return [*parts, Table(head, rows, title, FAIRNESS_NOTE) if rows else None]


def _chart_by_client(values: dict[str, float], part: str, label: str, order: str) -> BarChart | LineChart:
    """Return a bar chart with one bar per client, or a line chart if there are many clients or negative values.

    Args:
        values: the value of each client, by name.
        part: the name of the values in the legend.
        label: the label of the y axis.
        order: the label of the x axis, used only in a line chart.
    """
    if len(values) <= MAX_CLIENT_BARS and min(values.values(), default=0.0) >= 0:
        return make_stacked_bar_chart(list(values), {part: list(values.values())}, label)
    return LineChart([Series(part, range(1, len(values) + 1), list(values.values()))], order, label)


def compute_client_statistics(values: Sequence[float], lower_is_better: bool) -> dict[str, float | None]:
    """Compute SPREAD_STATISTICS (worst client, percentiles) and FAIRNESS_STATISTICS over clients, by name.

    Args:
        values: one value for each client.
        lower_is_better: whether lower values are better.

    >>> list(compute_client_statistics([90.0, 70.0, 80.0], lower_is_better=False).values())[:4]
    [70.0, 72.0, 80.0, 88.0]
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    tenth = max(len(x) // 10, 1)
    low, high = float(x[:tenth].mean()), float(x[-tenth:].mean())
    worst, best = (high, low) if lower_is_better else (low, high)
    index = None
    if x.min() >= 0 and x.max() > 0:
        scaled = x / x.max()  # prevents overflow of squares of large losses
        index = float(scaled.sum() ** 2 / (len(x) * (scaled**2).sum()))
    numbers = (x[-1] if lower_is_better else x[0], *np.quantile(x, (0.1, 0.5, 0.9)), x.mean(), x.std(), worst, best)
    return dict(zip((*SPREAD_STATISTICS, *FAIRNESS_STATISTICS), [*map(float, numbers), index], strict=True))


def build_classes_section(runs: RunCollection) -> list[Part | None]:
    """Plot the accuracy of each class of the global test set: by round or, for several groups, after the last round."""
    columns = dict[str, list[float | None]]()  # label of a round or a group -> accuracy by class
    many = len(runs.groups) > 1
    for group in runs.groups:
        rows = [row for run in group.runs for row in run.rows if isinstance(row.get("class_accuracy"), list)]
        names = range(max((len(row["class_accuracy"]) for row in rows), default=0))
        curves = [average_curves(extract_curve([row], "class_accuracy", str(c)) for row in rows) for c in names]
        rounds = sorted({row["round"] for row in rows})
        for t in rounds[-1:] if many else rounds:
            columns[group.name if many else str(t)] = [each.get(t) for each in curves]
    if not columns:
        return []
    note = "Percentage of the global test samples of a class that the model classifies correctly."
    what, title = ("settings", "last round") if many else ("round", "by round")
    shown = subsample(list(columns), MAX_ROUNDS_DRAWN)
    names = range(max(map(len, columns.values())))
    values = [[dict(enumerate(columns[each])).get(c) for each in shown] for c in names]
    chart = HeatMap([str(c) for c in names], shown, values, "class", what, "%", show_numbers=len(shown) < 10)
    data: list[list[Value]] = [[each, c, v] for each, row in columns.items() for c, v in enumerate(row)]
    return [Figure("classes", f"accuracy by class, {title}", chart, (what, "class", "accuracy"), data, note)]


def build_partition_section(runs: RunCollection) -> list[Part | None]:
    """Plot the number of training samples per client, in total and by class, for the first run that recorded it."""
    run = next(
        (run for run in runs.all if run.samples_by_client[0] is not None and len(run.samples_by_client[0])), None
    )
    if run is None:
        return []
    sizes, counts = run.samples_by_client
    drawn = subsample(range(len(sizes)), MAX_CLIENTS_DRAWN)
    listed = range(len(sizes)) if len(sizes) <= MAX_CLIENTS_IN_JSON else drawn  # clients in the CSV data of the figures
    names, parts = [run.client_names.get(k, str(k)) for k in range(len(sizes))], list[Part | None]()
    if any(each.partition != run.partition for each in runs.all):
        parts.append(
            Paragraph(f"Runs have other partitions, by seed or setting; that of {runs.run_names[run.path]} is shown.")
        )
    if counts is not None and any(map(any, counts)):
        columns = [str(c) for c in range(min(len(counts[0]), MAX_CLASSES_DRAWN))]
        values = [[float(v) for v in counts[k][:MAX_CLASSES_DRAWN]] for k in drawn]
        grid = HeatMap(
            [names[k] for k in drawn], columns, values, "client", "class", "samples", show_numbers=len(counts) <= 24
        )
        data: list[list[Value]] = [[names[k], c, int(n)] for k in listed for c, n in enumerate(counts[k]) if n]
        note = f"Scheme {run.partition.get('scheme')}, seed {run.partition.get('seed')}."
        if len(drawn) < len(sizes) or len(columns) < len(counts[0]):
            note += f" {len(drawn)} of {len(sizes)} clients and {len(columns)} of {len(counts[0])} classes are drawn."
        note += " partition.npz has all." if len(listed) < len(sizes) else ""
        head = ("client", "class", "samples")
        parts.append(Figure("partition", "training samples by client and class", grid, head, data, note))
    else:
        reason = "sites do not share label counts, or the targets are not classes"
        parts.append(Paragraph(f"The number of samples by client and class was not recorded: {reason}."))
    order = range(len(sizes)) if len(sizes) <= MAX_CLIENT_BARS else sorted(range(len(sizes)), key=lambda k: -sizes[k])
    samples = {f"{names[k]}": float(sizes[k]) for k in order}
    chart = _chart_by_client(samples, "samples", "training samples", "clients, in descending order")
    data = [[names[k], int(sizes[k])] for k in listed]
    return [*parts, Figure("samples", "training samples by client", chart, ("client", "samples"), data)]


def build_faults_section(runs: RunCollection) -> list[Part | None]:
    """Show rank failures, refused uploads, divergence, unfinished runs and damaged files."""
    parts, rows = list[Part | None](), list[list[Value]]()
    for run in runs.all:
        name = runs.run_names[run.path]
        since = run.summary.get("diverged")
        notes = (
            [] if since is None else [f"training diverged: from round {since} on, the loss is far above its minimum."]
        )
        notes += [] if run.complete else [f"{run.state}."]
        parts += [Paragraph(f"{name}: {text}", warning=True) for text in (*notes, *run.notes)]
        for row in run.faults:
            ranks = [f"rank {rank} on {host}" for rank, host in (row.get("ranks") or {}).items()]
            out = ", ".join(map(str, row.get("clients") or ())) or "none"
            text = f"{row.get('why', '')}; clients missing from the round: {out}"
            rows.append([name, row.get("round"), f"lost: {', '.join(ranks)}", text])
        for row in run.rows:
            for each in row.get("refused") or ():
                norm, bound = (
                    format_cell(finite_number(each.get("norm"))),
                    format_cell(finite_number(each.get("bound"))),
                )
                text = "an error during its training" if each.get("error") else f"norm {norm}, bound {bound}"
                rows.append([name, row["round"], f"client {each.get('client')}: upload refused", text])
    if rows:
        note = f"The first {MAX_FAULT_ROWS} of {len(rows):,}." if len(rows) > MAX_FAULT_ROWS else ""
        parts.append(Table(("run", "round", "what", "details"), rows[:MAX_FAULT_ROWS], "Lost ranks and uploads", note))
    return parts
