"""The sections of a report on traffic, time, settings and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from fedmpi.analysis.charts import Lines, Series
from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import SECONDS
from fedmpi.common.redaction import redacted
from fedmpi.common.text import metric_title
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.field_types import flat
from fedmpi.config.schema import Settings
from fedmpi.reports.page import Figure, Part, Table, Text, Value
from fedmpi.reports.runs import UNLIKE, Curve, Run, Runs, by_group, by_name, curve, mean_curve
from fedmpi.reports.timeline import figures, last_job

SECONDS_OF = ("round", "busiest rank trains", "rank 0 waits", "server step", "evaluation")
LEAST = {  # what each config gives, here by names that none does, so that all other settings have their defaults
    "data": {"source": "-", "partition": {"scheme": "-", "clients": 1}},
    "model": {"name": "-"},
    "method": {"name": "-"},
}
ROUNDS = 3  # of the timeline that are drawn


def traffic(runs: Runs) -> list[Part | None]:
    """Draw the main evaluation metric against the parameters transmitted."""
    name = next((each for each in runs.metrics if not each.startswith("train_")), "")
    series, data = list[Series](), list[list[Value]]()
    for group in runs.groups:
        x, y = mean_curve(map(_parameters, group.runs)), mean_curve(curve(run.rows, name) for run in group.runs)
        rounds = [t for t in y if t in x]
        series.append(Series(group.name, [x[t] for t in rounds], [y[t] for t in rounds]))
        data += [[group.name, t, x[t], y[t]] for t in rounds]
    if not any(len(each.x) > 1 for each in series):
        return []
    chart = Lines(series, "parameters sent and received, all clients", metric_title(name), integer_x=False)
    title = f"{name.replace('_', ' ')} by what was transmitted"
    return [Figure("cost", title, chart, ("settings", "round", "parameters", name), data)]


def _parameters(run: Run) -> Curve:
    """Return the parameters sent and received up to each round."""
    up, down = curve(run.rows, "up_parameters"), curve(run.rows, "down_parameters")
    return dict(zip(up, accumulate(up[t] + down.get(t, 0.0) for t in up), strict=True))


def time(runs: Runs) -> list[Part | None]:
    """Draw the parts of a round for one group, or the whole round for several; for one run also each rank's spans."""
    measures = any(run.config.get("analysis") for run in runs.all)
    note = "Rounds in which `analysis` measures train their clients twice, which counts." if measures else ""
    if len(runs.groups) > 1:
        wall_s = {run.path: curve(run.rows, "wall_s") for run in runs.all}
        return [by_group(runs, "seconds", "seconds a round", "seconds", wall_s, "wall_s", note)]
    curves = {
        label: mean_curve(curve(run.rows, key) for run in runs.all)
        for label, key in zip(SECONDS_OF, SECONDS, strict=True)
    }
    parts: list[Part | None] = [by_name("seconds", "seconds a round", "seconds", curves, SECONDS, note, from_zero=True)]
    if runs.alone is not None:
        try:
            parts += figures(last_job(runs.alone.path), ROUNDS)
        except UserError as error:
            parts.append(Text(f"What each rank did when is not known: {error}"))
    return parts


def settings(runs: Runs) -> list[Part | None]:
    """Show the settings that differ, those that are shared and no defaults, and all that are shared, folded."""
    by_group = dict[str, dict[str, str]]()
    for group in runs.groups:
        config = redacted(group.runs[0].config)
        left_out = () if runs.alone else UNLIKE
        facts = {key: describe_value(value) for key, value in config.items() if key not in left_out}
        by_group[group.name] = facts | ({} if runs.alone else {"seeds": ", ".join(run.seed for run in group.runs)})
    shared, differing = _compared("settings", by_group)
    defaults = flat(Settings.model_validate(LEAST).model_dump(mode="json", by_alias=True), "")
    changed = [row for row in shared if row[0] not in defaults or row[1] != describe_value(defaults[str(row[0])])]
    return [
        replace(differing, title="What differs between the runs") if differing else None,
        Table(("key", "value"), changed, "What is not as by default; options of plug-ins"),
        Table(("key", "value"), shared, folded=f"All {len(shared)} settings"),
    ]


def environment(runs: Runs) -> list[Part | None]:
    """Show environment.json: what is the same in all runs, and what differs."""
    by_run = dict[str, dict[str, str]]()
    for run in (run for run in runs.all if run.environment):
        facts = {key: value for key, value in run.environment.items() if key != "ranks"}
        facts = {key.removeprefix("packages."): str(value) for key, value in flat(facts, "").items() if value}
        for each in run.environment.get("ranks") or ():
            where = f"{each.get('device')} on {each.get('host')}"
            facts[where] = ", ".join(filter(None, (facts.get(where), f"rank {each.get('rank')}")))
        by_run[runs.labels[run.path]] = facts
    shared, differing = _compared("run", by_run)
    folded = f"What differs: {', '.join(differing.head[1:])}" if differing else ""
    return [Table(("what", "value"), shared), replace(differing, folded=folded) if differing else None]


def _compared(what: str, by_name: Mapping[str, Mapping[str, str]]) -> tuple[list[list[Value]], Table | None]:
    """Return the facts that are the same for all names, and a table of the others, a row for each name."""
    keys = dict.fromkeys(key for facts in by_name.values() for key in facts)
    other = [key for key in keys if len({facts.get(key) for facts in by_name.values()}) > 1]
    first = next(iter(by_name.values()))
    shared: list[list[Value]] = [[key, first[key]] for key in keys if key not in other]
    rows: list[list[Value]] = [[name, *(facts.get(key, "-") for key in other)] for name, facts in by_name.items()]
    return shared, Table((what, *other), rows) if other else None
