"""The sections of a report on traffic, time, settings, environment and hashes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from pydantic_core import PydanticUndefined

from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import SECONDS
from fedmpi.common.redaction import redacted
from fedmpi.common.text import metric_title
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.schema import Settings, section
from fedmpi.reports.charts import Lines, Series
from fedmpi.reports.groups import UNLIKE, Runs, by_group, by_name, means
from fedmpi.reports.page import Figure, Part, Table, Text, Value
from fedmpi.reports.run_data import Curve, Run, curve
from fedmpi.reports.timeline import figures
from fedmpi.runtime.introspection import description, registry
from fedmpi.runtime.record import timeline

SECONDS_OF = ("round", "busiest rank trains", "rank 0 waits", "server step", "evaluation")
ROUNDS, SPANS = 3, 2000  # of the timeline that are drawn, at most
SELECTORS = {  # what settings name, of which kind
    **{"data.source": "datasets", "data.partition.scheme": "partitions", "model.name": "models"},
    **{"task.name": "tasks", "method.name": "methods"},
}
PLACES = ("name", "output", "data.root")  # which say nothing of the experiment
FACTS = (
    *("started", "command", "directory", "launcher", "backend", "threads"),
    *("slurm_job_id", "python", "platform", "cuda", "mpi"),
)


# ---- traffic and time ----


def traffic(runs: Runs) -> list[Part | None]:
    """Draw the bytes sent and received by round, and the main evaluation metric against the parameters transmitted."""
    if not any(curve(run.rows, "sent_bytes") for run in runs.all):
        return []
    note = "Sums up to a round, of all that rank 0 has sent to and received from all ranks, itself among them."
    megabytes = {run.path: _sums(run, 1e-6, "received_bytes", "sent_bytes") for run in runs.all}
    both = by_group(runs, "bytes", "bytes", "megabytes, both ways", megabytes, "megabytes", note)
    if len(runs.groups) == 1:
        curves = {
            name: {t: m for t, (m, _, _) in means(_sums(run, 1e-6, key) for run in runs.groups[0].runs).items()}
            for name, key in (("received", "received_bytes"), ("sent", "sent_bytes"))
        }
        both = by_name("bytes", "bytes", "megabytes", curves, ("received_mb", "sent_mb"), note, from_zero=True)
    name = next((each for each in runs.metrics if not each.startswith("train_")), None)
    series, data = list[Series](), list[list[Value]]()
    for group in runs.groups if name else ():
        x = means(_sums(run, 1.0, "up_parameters", "down_parameters") for run in group.runs)
        y = means(curve(run.rows, str(name)) for run in group.runs)
        rounds = [t for t in y if t in x]
        series.append(Series(group.name, [x[t][0] for t in rounds], [y[t][0] for t in rounds]))
        data += [[group.name, t, x[t][0], y[t][0]] for t in rounds]
    if name is None or not any(len(each.x) > 1 for each in series):
        return [both]
    chart = Lines(series, "parameters sent and received, all clients", metric_title(name), whole_x=False)
    title = f"{name.replace('_', ' ')} by what travelled"
    return [both, Figure("cost", title, chart, ("settings", "round", "parameters", name), data)]


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
        label: {t: m for t, (m, _, _) in means(curve(run.rows, key) for run in runs.groups[0].runs).items()}
        for label, key in zip(SECONDS_OF, SECONDS, strict=True)
    }
    parts: list[Part | None] = [by_name("seconds", "seconds a round", "seconds", curves, SECONDS, note, from_zero=True)]
    if runs.alone is None:
        return parts
    try:
        recorded = timeline.read(runs.alone.path)  # the jobs, the oldest first
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        runs.alone.notes.append(f"{timeline.FOLDER} cannot be read ({error!r})")
        recorded = []
    jobs = [job for job in recorded if any(each["rounds"] for each in job["ranks"].values())]
    if not jobs:
        return [*parts, Text("What each rank did when is not recorded (timeline: false), or not yet.")]
    return [*parts, *figures(jobs[-1], ROUNDS, SPANS)]


# ---- settings ----


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
    changed = [
        [key, _shown(first, key), describe_value(defaults[key]) if key in defaults else "-"]
        for key in own
        if key not in PLACES
        and (key not in defaults or describe_value(first.config[key]) != describe_value(defaults[key]))
    ]
    title = "What is not as by default" if runs.alone else "What all runs share and is not as by default"
    parts.append(Table(("key", "value", "default"), changed, title))
    rest: list[list[Value]] = [[key, _shown(first, key)] for key in own]
    return [*parts, Table(("key", "value"), rest, folded=f"All {len(rest)} settings")]


def _shown(run: Run, key: str) -> str:
    return describe_value(redacted({key: run.config[key]})[key]) if key in run.config else run.digests.get(key, "-")


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


# ---- environment and hashes ----


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


def hashes(runs: Runs) -> list[Part | None]:
    """Show the SHA-256 of the global model after the last round, and of code, data and plug-ins."""
    rows = list[list[Value]]()
    for run in runs.all:
        last = next((str(row["sha256"]) for row in reversed(run.rows) if row.get("sha256")), "")
        rows.append([runs.labels[run.path], run.seed, len(run.rounds), last])
    if not any(row[-1] for row in rows):
        return []
    head = ("run", "seed", "rounds", "model after the last round")
    parts: list[Part | None] = [
        Table(head, rows, note="SHA-256. `fedmpi replay RUN_DIR` trains again and compares every round's.")
    ]
    run = runs.all[0]
    digests = {
        name: value for name, value in run.identity.items()
        if name not in run.config and isinstance(value, str) and len(value) >= 32 and not value.startswith(("'", "["))
    }  # fmt: skip
    plugins = [(str(each.get("file")), str(each.get("sha256"))) for each in run.environment.get("plugins") or ()]
    if own := [*digests.items(), *plugins]:
        of = "" if runs.alone else f" of {runs.labels[run.path]}"
        parts.append(Table(("what", "SHA-256"), own, folded=f"{len(own)} digests of code and data{of}"))
    return parts
