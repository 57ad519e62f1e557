"""The sections of a report on traffic, time, settings and environment."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from pydantic_core import PydanticUndefined

from fedmpi.analysis.charts import Lines, Series
from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import SECONDS
from fedmpi.common.redaction import redacted
from fedmpi.common.text import metric_title
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.schema import Settings, section
from fedmpi.reports.groups import UNLIKE, Runs, by_group, by_name, mean_curve
from fedmpi.reports.page import Figure, Part, Table, Text, Value
from fedmpi.reports.run_data import Curve, Run, curve
from fedmpi.reports.timeline import figures, last_job
from fedmpi.runtime.introspection import description, registry

SECONDS_OF = ("round", "busiest rank trains", "rank 0 waits", "server step", "evaluation")
ROUNDS = 3  # of the timeline that are drawn
SELECTORS = {  # settings that name a choice with options of its own -> its kind
    "data.source": "datasets",
    "data.partition.scheme": "partitions",
    "model.name": "models",
    "task.name": "tasks",
    "method.name": "methods",
}
PLACES = ("name", "output", "data.root")  # which say nothing of the experiment
FACTS = (
    *("started", "command", "directory", "launcher", "backend", "threads"),
    *("slurm_job_id", "python", "platform", "cuda", "mpi"),
)


def traffic(runs: Runs) -> list[Part | None]:
    """Draw the bytes sent and received by round, and the main evaluation metric against the parameters transmitted."""
    if not any(curve(run.rows, "sent_bytes") for run in runs.all):
        return []
    note = "Sums up to a round, of all that rank 0 has sent to and received from all ranks, itself among them."
    megabytes = {run.path: _sums(run, 1e-6, "received_bytes", "sent_bytes") for run in runs.all}
    parts = [by_group(runs, "bytes", "bytes", "megabytes, both ways", megabytes, "megabytes", note)]
    name = next((each for each in runs.metrics if not each.startswith("train_")), "")
    series, data = list[Series](), list[list[Value]]()
    for group in runs.groups:
        x = mean_curve(_sums(run, 1.0, "up_parameters", "down_parameters") for run in group.runs)
        y = mean_curve(curve(run.rows, name) for run in group.runs)
        rounds = [t for t in y if t in x]
        series.append(Series(group.name, [x[t] for t in rounds], [y[t] for t in rounds]))
        data += [[group.name, t, x[t], y[t]] for t in rounds]
    if any(len(each.x) > 1 for each in series):
        chart = Lines(series, "parameters sent and received, all clients", metric_title(name), integer_x=False)
        title = f"{name.replace('_', ' ')} by what was transmitted"
        parts.append(Figure("cost", title, chart, ("settings", "round", "parameters", name), data))
    return list(parts)


def _sums(run: Run, unit: float, *keys: str) -> Curve:
    """Return the sum of all these numbers up to each round, times `unit`."""
    curves = [curve(run.rows, key) for key in keys]
    rounds = [t for t in curves[0] if all(t in each for each in curves)]
    return dict(zip(rounds, accumulate(unit * sum(each[t] for each in curves) for t in rounds), strict=True))


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
    """Show what differs between groups, shared settings that are no defaults, and all settings, folded."""
    first = next((run for run in runs.all if run.config), None)
    if first is None:
        return []
    parts = list[Part | None]()
    if len(runs.groups) > 1:
        rows: list[list[Value]] = [
            [g.name, ", ".join(run.seed for run in g.runs), *(_shown(g.runs[0], key) for key in runs.differing)]
            for g in runs.groups
        ]
        parts.append(Table(("settings", "seeds", *runs.differing), rows, "What differs between the runs"))
    defaults = _defaults()
    for selector, kind in SELECTORS.items():  # options have theirs in the source that the setting names
        name, where = first.config.get(selector), selector.rpartition(".")[0]
        if isinstance(name, str) and name in registry(kind):
            defaults |= {f"{where}.{each.name}": each.default for each in description(kind, name).options}
    own = [key for key in first.config if key not in runs.differing and (key not in UNLIKE or runs.alone)]
    changed: list[list[Value]] = []
    for key in own:
        default = describe_value(defaults[key]) if key in defaults else "-"
        if key not in PLACES and default != describe_value(first.config[key]):
            changed.append([key, _shown(first, key), default])
    title = "What is not as by default" if runs.alone else "What all runs share and is not as by default"
    parts.append(Table(("key", "value", "default"), changed, title))
    rest: list[list[Value]] = [[key, _shown(first, key)] for key in own]
    return [*parts, Table(("key", "value"), rest, folded=f"All {len(rest)} settings")]


def _shown(run: Run, key: str) -> str:
    return describe_value(redacted({key: run.config[key]})[key]) if key in run.config else "-"


def _defaults(path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return {dotted key: default} of all settings."""
    defaults: dict[str, Any] = {}
    holder: Any = section(path) or Settings
    for name, declared in holder.model_fields.items():
        if section((*path, name)) is not None:
            defaults |= _defaults((*path, name))
        elif declared.default is not PydanticUndefined:
            defaults[".".join((*path, declared.alias or name))] = declared.default
    return defaults


def environment(runs: Runs) -> list[Part | None]:
    """Show environment.json: what is the same in all runs, and what differs."""
    by_run = list[tuple[Run, dict[str, str]]]()
    for run in (run for run in runs.all if run.environment):
        of = run.environment
        facts = {key.replace("_", " "): str(of[key]) for key in FACTS if of.get(key) is not None}
        if git := of.get("git") or {}:
            facts["code"] = f"{git.get('commit')}{', modified' if git.get('modified') else ''}"
        for each in of.get("ranks") or ():
            where = f"{each.get('device')} on {each.get('host')}"
            facts[where] = ", ".join(filter(None, (facts.get(where), f"rank {each.get('rank')}")))
        versions = (of.get("packages") or {}).items()
        by_run.append((run, facts | {name: str(version) for name, version in versions if version}))
    keys = dict.fromkeys(key for _, facts in by_run for key in facts)
    other = [key for key in keys if len({facts.get(key) for _, facts in by_run}) > 1]
    parts: list[Part | None] = [Table(("what", "value"), [[k, by_run[0][1][k]] for k in keys if k not in other])]
    if other:
        rows: list[list[Value]] = [
            [runs.labels[run.path], *(facts.get(key, "-") for key in other)] for run, facts in by_run
        ]
        parts.append(Table(("run", *other), rows, folded=f"What differs: {', '.join(other)}"))
    return parts
