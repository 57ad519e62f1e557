"""The sections of a report on traffic, time, settings and environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from fedmpi.analysis import charts, output
from fedmpi.analysis.charts import LineChart, Series
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import DURATION_NAMES
from fedmpi.common.redaction import redact
from fedmpi.common.text import format_metric, format_metric_title, suggest_name
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.field_types import flatten
from fedmpi.config.schema import Settings
from fedmpi.reports.page import Figure, Paragraph, Part, Table, Value
from fedmpi.reports.run_groups import (
    KEYS_IGNORED_IN_GROUPS,
    Run,
    RunCollection,
    average_curves,
    extract_curve,
    plot_by_group,
    plot_curves,
    read_runs,
)
from fedmpi.reports.timeline import plot_timeline, read_last_job

DIRECTIONS = ("up", "down", "both")
TIME_LABELS = ("round", "busiest rank trains", "rank 0 waits", "server step", "evaluation")
REQUIRED_SETTINGS = {  # placeholders for the required keys of a config; all other settings have their defaults
    "data": {"source": "-", "partition": {"scheme": "-", "clients": 1}},
    "model": {"name": "-"},
    "method": {"name": "-"},
}
TIMELINE_ROUNDS = 3  # number of rounds in the figure of the timeline


def build_metric_vs_traffic_section(runs: RunCollection) -> list[Part | None]:
    """Plot the main evaluation metric against the number of transmitted parameters."""
    name = next((each for each in runs.metrics if not each.startswith("train_")), "")
    return [_plot_by_parameters({group.name: group.runs for group in runs.groups}, name)]


def _plot_by_parameters(lines: Mapping[str, Sequence[Run]], metric: str) -> Figure | None:
    """Plot a metric against the number of parameters that all clients together have sent and received so far.

    The counts are `up_parameters` and `down_parameters` in metrics.jsonl, which are sums over the cohort of a round.
    The x coordinate of the value after round t is the sum of these counts over rounds 0 to t.

    Args:
        lines: a dict from the label of each line to its runs; the line shows the mean over these runs.
        metric: the name of the metric.
    """
    series, data = list[Series](), list[list[Value]]()
    for label, runs in lines.items():
        counts = [
            average_curves(extract_curve(run.rows, f"{way}_parameters") for run in runs) for way in ("up", "down")
        ]
        up, down = (dict(zip(each, accumulate(each.values()), strict=True)) for each in counts)
        y = {
            t: value for t, value in average_curves(extract_curve(run.rows, metric) for run in runs).items() if t in up
        }
        series.append(Series(label, [up[t] + down[t] for t in y], list(y.values())))
        data += [[label, t, up[t], down[t], value] for t, value in y.items()]
    if not any(len(each.x) > 1 for each in series):
        return None
    chart = LineChart(
        series, "parameters sent and received by all clients", format_metric_title(metric), integer_x=False
    )
    head, title = (
        ("settings", "round", "up", "down", metric),
        f"{format_metric_title(metric)} by transmitted parameters",
    )
    return Figure("cost", title, chart, head, data)


def compare_communication(paths: Sequence[Path], metric: str, to: Path, print_line: Callable[[str], None]) -> None:
    """Compare the number of parameters that runs transmit (`fedmpi analyse communication`).

    The function prints averages per round and their ratios to those of the first run, and writes communication.json and
    communication.png, a chart of a metric against transmitted parameters.

    Args:
        paths: run directories.
        metric: the metric of the chart.
        to: the output directory.
        print_line: prints a line of output.

    Raises:
        UserError: if a path is not a run directory, or a run recorded the metric in fewer than two rounds.
    """
    to, rows = output.create_output_folder(to), list[list[object]]()
    runs = {str(path): read_runs([path]).single for path in paths}
    averages = list[list[float]]()
    for path, run in runs.items():
        if run is None or not run.rows:
            raise UserError(f"{path} is not a run directory: it contains no metrics.jsonl with a complete round")
        if metric not in run.metrics:
            raise UserError(f"--metric: {path} has no '{metric}'; {suggest_name(metric, run.metrics)}")
        values = list(extract_curve(run.rows, metric).values())
        if len(values) < 2:
            raise UserError(
                f"{path}: {metric} was measured in fewer than 2 rounds, too few for a curve; train more rounds"
            )
        up, down = (
            sum(extract_curve(run.rows, f"{way}_parameters").values()) / len(run.rows) for way in ("up", "down")
        )
        averages.append([up, down, up + down])
        ratios = [f"{a / b:.3f}" if b else "-" for a, b in zip(averages[-1], averages[0], strict=True)]
        rows.append([path, len(run.rows), *map(round, averages[-1]), *ratios, format_metric(metric, values[-1], 4)])
    print_line("parameters transmitted per round by all its clients, on average, and ratios to the first run")
    for line in formatting.format_table(
        [["run", "rounds", *DIRECTIONS, *(f"ratio {way}" for way in DIRECTIONS), metric], *rows]
    ):
        print_line(line)
    figure = _plot_by_parameters({path: [run] for path, run in runs.items() if run}, metric)
    if figure is None:
        raise UserError(f"{paths[0]}: metrics.jsonl has no counts of parameters (up_parameters, down_parameters)")
    facts = [dict(zip(figure.head, point, strict=True)) for point in figure.data]
    print_line(f"written: {output.write_json(to / 'communication.json', {'metric': metric, 'points': facts})}")
    print_line(f"written: {charts.write_chart(figure.chart, to / 'communication.png', figure.title)}")


def build_time_section(runs: RunCollection) -> list[Part | None]:
    """Plot the duration of each round: split into its parts for one group of runs, in total for several groups.

    For a single run, also plot the timeline of each rank.
    """
    has_analysis = any(run.config.get("analysis") for run in runs.all)
    note = "In rounds with `analysis`, clients train twice; the second time is included." if has_analysis else ""
    if len(runs.groups) > 1:
        wall_s = {run.path: extract_curve(run.rows, "wall_s") for run in runs.all}
        return [plot_by_group(runs, "seconds", "seconds a round", "seconds", wall_s, "wall_s", note)]
    curves = {
        label: average_curves(extract_curve(run.rows, key) for run in runs.all)
        for label, key in zip(TIME_LABELS, DURATION_NAMES, strict=True)
    }
    parts: list[Part | None] = [
        plot_curves("seconds", "seconds a round", "seconds", curves, DURATION_NAMES, note, from_zero=True)
    ]
    if runs.single is not None:
        try:
            parts += plot_timeline(read_last_job(runs.single.path), TIMELINE_ROUNDS)
        except UserError as error:
            parts.append(Paragraph(f"The timeline of the ranks is not available: {error}"))
    return parts


def build_settings_section(runs: RunCollection) -> list[Part | None]:
    """Show the settings that differ between runs, shared settings other than the defaults, and all shared settings."""
    by_group = dict[str, dict[str, str]]()
    for group in runs.groups:
        config = redact(group.runs[0].config)
        left_out = () if runs.single else KEYS_IGNORED_IN_GROUPS
        facts = {key: describe_value(value) for key, value in config.items() if key not in left_out}
        by_group[group.name] = facts | ({} if runs.single else {"seeds": ", ".join(run.seed for run in group.runs)})
    shared, differing = _split_shared_and_differing("settings", by_group)
    defaults = flatten(Settings.model_validate(REQUIRED_SETTINGS).model_dump(mode="json", by_alias=True), "")
    changed = [row for row in shared if row[0] not in defaults or row[1] != describe_value(defaults[str(row[0])])]
    return [
        replace(differing, title="Settings that differ between the runs") if differing else None,
        Table(("key", "value"), changed, "Settings other than defaults, and options of plug-ins"),
        Table(("key", "value"), shared, collapsed_title=f"All {len(shared)} settings"),
    ]


def build_environment_section(runs: RunCollection) -> list[Part | None]:
    """Show the content of environment.json: values that are equal in all runs, and values that differ."""
    by_run = dict[str, dict[str, str]]()
    for run in (run for run in runs.all if run.environment):
        facts = {key: value for key, value in run.environment.items() if key != "ranks"}
        facts = {key.removeprefix("packages."): str(value) for key, value in flatten(facts, "").items() if value}
        for each in run.environment.get("ranks") or ():
            where = f"{each.get('device')} on {each.get('host')}"
            facts[where] = ", ".join(filter(None, (facts.get(where), f"rank {each.get('rank')}")))
        by_run[runs.run_names[run.path]] = facts
    shared, differing = _split_shared_and_differing("run", by_run)
    folded = f"Differences between the runs: {', '.join(differing.head[1:])}" if differing else ""
    return [Table(("what", "value"), shared), replace(differing, collapsed_title=folded) if differing else None]


def _split_shared_and_differing(
    what: str, by_name: Mapping[str, Mapping[str, str]]
) -> tuple[list[list[Value]], Table | None]:
    """Split settings or properties into those that are equal in all runs or groups, and those that differ.

    Args:
        what: the heading of the column with the names of the runs or groups.
        by_name: dict from the name of each run or group to its values by key.

    Returns:
        The shared values as rows (key, value), and a table of the other values with one row per run or group. The table
        is None if all values are shared.
    """
    keys = dict.fromkeys(key for facts in by_name.values() for key in facts)
    other = [key for key in keys if len({facts.get(key) for facts in by_name.values()}) > 1]
    first = next(iter(by_name.values()))
    shared: list[list[Value]] = [[key, first[key]] for key in keys if key not in other]
    rows: list[list[Value]] = [[name, *(facts.get(key, "-") for key in other)] for name, facts in by_name.items()]
    return shared, Table((what, *other), rows) if other else None
