"""Settings with nothing left unsaid: the options of what they name, with the defaults that its code has today.

A default may be another one in a later version, and in a file of one's own after the next edit; what config.yaml says
stays. Left out are defaults that YAML cannot hold, or that the option's own type refuses, and what smells of a secret.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from fedmpi import methods, models, tasks
from fedmpi.aggregation import rules
from fedmpi.common import options, registry
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import smells
from fedmpi.config import Settings
from fedmpi.data import augment, partitions, sources

NOTHING = object()


def written(settings: Settings) -> Settings:
    """Return the settings as they are written down, with all defaults.

    `checkpoint.resume: must` and `checkpoint.changes: accept` are said of a start, not of the run, whose config may be
    run again.
    """
    kept = settings.checkpoint
    once = {"changes": "refuse"} | ({"resume": "never"} if kept.resume == "must" else {})
    return of(settings).model_copy(update={"checkpoint": kept.model_copy(update=once)})


def of(settings: Settings) -> Settings:
    """The same settings, in which every option of method, model, task, data source, partition, augmentation and server
    rule has its value. They have been used already, so that all that they name is there."""
    data, server, cut = settings.data, settings.server, settings.data.partition
    parts: dict[str, Any] = {"augment": tuple(_operation(item) for item in data.augment)}
    if cut is not None:
        parts["partition"] = _open(cut, partitions.KIND)
    new: dict[str, Any] = {
        "method": settings.method.model_copy(update=_method(settings.method.chosen, settings.method.options)),
        "model": _open(settings.model, models.KIND),
        "task": _open(settings.task, tasks.KIND),
        "data": _open(data, sources.KIND).model_copy(update=parts),
    }
    if server.rule.name != "auto":
        new["server"] = server.model_copy(update={"rule": _open(server.rule, rules.KIND)})
    return settings.model_copy(update=new)


def _open(section: Any, kind: registry.Kind) -> BaseModel:
    """A section that names something of a kind, with that thing's options."""
    found = registry.load(section.chosen, kind.registry, kind.label)
    copy: BaseModel = section.model_copy(update=defaults(found, section.options, kind.supplied, section.beside))
    return copy


def _method(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method; those that are methods themselves with theirs."""
    found = registry.load(name, methods.registry, methods.KIND.label)
    inner = (
        [f for f in dataclasses.fields(found) if f.metadata.get("method")] if dataclasses.is_dataclass(found) else []
    )
    names = [f.name for f in inner]
    plain = {key: value for key, value in given.items() if key not in names}
    out = {**given, **defaults(found, plain, ("name", *names))}
    for f in inner:
        said = given.get(f.name, f.default if f.default is None else NOTHING)
        if said is None:
            out[f.name] = None
        elif said is not NOTHING:
            chosen = dict(said) if isinstance(said, Mapping) else {"name": said}
            if chosen.get("name") is not None:
                own = {key: value for key, value in chosen.items() if key != "name"}
                out[f.name] = {"name": chosen["name"], **_method(str(chosen["name"]), own)}
    return out


def _operation(item: Any) -> Any:
    """An augmentation with its options: {crop: {size: 32}}; as it was where it has none."""
    name, given = (item, None) if isinstance(item, str) else next(iter(item.items()))
    found = registry.load(name, augment.registry, "augmentation")
    given = {} if given is None else given if isinstance(given, Mapping) else {found.short: given}
    full = {**given, **defaults(found, given)}
    return {name: full} if full else item


def defaults(
    found: Any, given: Mapping[str, Any], supplied: Sequence[str] = (), beside: Collection[str] = ()
) -> dict[str, Any]:
    """Option -> default, of those that are not given."""
    out: dict[str, Any] = {}
    typed = options.declared_options(found, given, supplied)[0]
    for name, default in _declared(found):
        if name in given or name in supplied or name in beside or smells(name, default):
            continue
        value = _plain(default)
        try:
            if value is not NOTHING:
                taken = options.check(found, {**given, name: value}, "", supplied)[name]
                # (3, 3) comes back as a list where no type says otherwise: a user's own code may mind.
                if taken == default or (typed.get(name, Any) is not Any and _plain(taken) == value):
                    out[name] = value
        except (UserError, ValueError, TypeError):  # None that stands for "not given", arrays
            continue
    return out


def _declared(found: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(found):
        for f in dataclasses.fields(found):
            if f.init and f.default is not dataclasses.MISSING:
                yield f.name, f.default
            elif f.init and f.default_factory is not dataclasses.MISSING:
                yield f.name, f.default_factory()
        return
    for parameter in inspect.signature(found).parameters.values():
        if parameter.default is not parameter.empty:
            yield parameter.name, parameter.default


def _plain(value: Any) -> Any:
    """What YAML can hold; NOTHING for all else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        pairs = {str(key): _plain(each) for key, each in value.items()}
        return NOTHING if any(each is NOTHING for each in pairs.values()) else pairs
    if isinstance(value, list | tuple):
        items = [_plain(each) for each in value]
        return NOTHING if any(each is NOTHING for each in items) else items
    return NOTHING
