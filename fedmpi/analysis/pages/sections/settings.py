"""What was asked for: settings that differ from their defaults, and between the runs."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticUndefined

from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import UNLIKE, Runs
from fedmpi.analysis.pages.section import Section, Table
from fedmpi.common.redaction import flow, redacted
from fedmpi.common.typewords import value_words
from fedmpi.config.schema import Settings, section
from fedmpi.runtime.introspection import description, registry

NONE = "-"
SELECTORS = (
    ("data", "source", "datasets"),
    ("data.partition", "scheme", "partitions"),
    ("model", "name", "models"),
    ("task", "name", "tasks"),
    ("method", "name", "methods"),
)  # a section that names something, by which key, of which kind
PLACES = ("name", "output", "data.root")  # where things lie, which says nothing of the experiment


def asked(runs: Runs) -> Section | None:
    """A table of what differs between groups; of what all share and is no default; all of it, folded."""
    configs = [redacted(run.config) for run in runs.all if run.config]
    if not configs:
        return None
    parts = list[Table]()
    if len(runs.groups) > 1:
        head = ("settings", "seeds", *runs.differing)
        rows = [
            [g.name(), ", ".join(r.seed for r in g.runs), *(shown(g.runs[0], k) for k in runs.differing)]
            for g in runs.groups
        ]
        parts.append(Table(head, rows, "What differs between the runs"))
    known = defaults()
    first = next(run for run in runs.all if run.config)
    own = [key for key in first.config if key not in runs.differing and (key not in UNLIKE or runs.alone)]
    of_options = option_defaults(first)
    changed = [
        [key, shown(first, key), of_options.get(key) or (flow(known[key]) if key in known else NONE)]
        for key in own
        if key not in PLACES
        and value_words(first.config[key]) != of_options.get(key)
        and (key not in known or first.config[key] != known[key])
    ]
    title = "What is not as by default" if len(runs.all) == 1 else "What all runs share and is not as by default"
    parts.append(Table(("key", "value", "default"), changed, title))
    rest = [[key, shown(first, key)] for key in own]
    parts.append(Table(("key", "value"), rest, folded=f"All {len(rest)} settings"))
    return Section("settings", "Settings", parts)


def shown(run: Run, key: str) -> str:
    return flow(redacted({key: run.config[key]})[key]) if key in run.config else run.digests.get(key, NONE)


def defaults(path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Dotted key -> its default; options of methods, models and the like have theirs in the code that they name."""
    found: dict[str, Any] = {}
    holder: Any = section(path) or Settings
    for name, declared in holder.model_fields.items():
        here = (*path, declared.alias or name)
        if section((*path, name)) is not None:
            found |= defaults((*path, name))
        elif declared.default is not PydanticUndefined:
            value = declared.default
            found[".".join(here)] = list(value) if isinstance(value, tuple) else value
    return found


def option_defaults(run: Run) -> dict[str, str]:
    """Dotted key -> default, in words, of the options of what is fedmpi's own; read from its sources, nothing runs."""
    found: dict[str, str] = {}
    for where, selector, kind in SELECTORS:
        name = run.config.get(f"{where}.{selector}")
        if isinstance(name, str) and name in registry(kind):
            found |= {f"{where}.{each.name}": each.default for each in description(kind, name).options}
    return found
