"""pydantic's errors about a config -> one line for each mistake: where, key, value, what is allowed."""

import itertools
import re
from typing import Any

from pydantic import ValidationError

from fedmpi.common.key_suggestions import suggest_key
from fedmpi.common.text import allowed, shorten, show
from fedmpi.config.schema import Settings, section
from fedmpi.config.yaml_source import Document

Key = tuple[str | int, ...]

SWEEP = ("over", "only", "leave_out", "published", "best")  # keys of a file that asks for many runs (sweeps/expand.py)


def complaints(error: ValidationError, document: Document, source: str) -> list[str]:
    """One line for each key, in the order in which the keys were written; `source` is the place of missing keys."""
    order = {where: position for position, where in enumerate(document.origins.values())}
    lines = []
    errors = error.errors(include_url=False)
    wrong = {each["loc"][:-1] for each in errors}  # a list that is too short only because its items are wrong is not
    located = [
        (_locate(document.data, each), each)
        for each in errors
        if each["type"] != "too_short" or each["loc"] not in wrong
    ]
    for key, group in itertools.groupby(located, key=lambda pair: pair[0]):
        dotted = ".".join(shorten(str(part)) for part in key)
        nearest = next((name for name in _sections_around(key) if name in document.origins), "")
        where = document.origins.get(nearest, source)
        text = _describe(key, [each for _, each in group], document.data)
        lines.append((order.get(where, -1), f"{where}: {dotted}: {text}" if dotted else f"{where}: {text}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _sections_around(key: Key) -> list[str]:
    """Return the dotted names of a key and of the sections that contain it: `a.b.c`, `a.b`, `a`."""
    return [".".join(map(str, key[:depth])) for depth in range(len(key), 0, -1)]


def _describe(key: Key, errors: list[Any], data: dict[str, Any]) -> str:
    first = errors[0]
    if first["type"] == "missing":
        return "missing; it must be given"
    if first["type"] == "extra_forbidden":
        return f"unknown key; {_advice(key)}"
    if first["type"] == "value_error":  # from our own validators, which may name the key themselves
        text = str(first["ctx"]["error"])
        names = {".".join(map(str, key[depth:])) for depth in range(len(key))}
        begins, _, rest = text.partition(": ")
        return rest if begins in names else text
    value: Any = data
    for part in key:
        value = value[part]
    name = next((name for name in ("name", "source", "scheme") if name in _keys(*key)), None)  # method=fedprox
    meant = f"; did you mean {'.'.join(map(str, key))}.{name}={value}?" if name and isinstance(value, str) else ""
    if isinstance(value, list) and first["type"] in ("int_type", "float_type", "string_type"):
        meant = (
            f"; for a run with each of them write over: {{{'.'.join(map(str, key))}: {show(value)}}}, for fedmpi sweep"
        )
    return f"{show(value)} is not allowed; must be {allowed(errors)}{meant}"


def _advice(key: Key) -> str:
    """The nearest allowed key; for a key that belongs into another section, that section."""
    known = section(key[:-1])
    assert known is not None  # only a declared section forbids keys
    keys = [*known.model_fields, *(["base", *SWEEP] if len(key) == 1 else [])]
    where, last = ".".join(map(str, key[:-1])), str(key[-1])
    inside = [f"{where}.{name}.{last}" for name in known.model_fields if where and last in _keys(*key[:-1], name)]
    homes = [f"{name}.{last}" for name in Settings.model_fields if name != where and last in _keys(name)]
    return suggest_key(last, where, keys, inside or homes)


def _keys(*path: str | int) -> tuple[str | int, ...]:
    known = section(path)
    return tuple(known.model_fields) if known is not None else ()


def _locate(data: Any, error: Any) -> Key:
    """The error's place as far as it exists in the data, as pydantic appends the names of the alternatives it tried;
    then the keys that an error of our own names at its start: `train.lr: ...`."""
    loc: Key = error["loc"]
    if error["type"] == "missing":
        return loc
    text = str(error["ctx"]["error"]) if error["type"] == "value_error" else ""
    named = re.match(r"([\w.]+): (missing)?", text)
    steps: Key = (*loc, *(named[1].split(".") if named else ()))
    if named and named[2]:
        return steps
    for depth, part in enumerate(steps):
        inside = isinstance(data, list) if isinstance(part, int) else isinstance(data, dict) and part in data
        if not inside:
            in_short_form = named is not None and isinstance(data, str)  # evaluate.best: accuracy is its metric
            return steps if in_short_form else steps[:depth]
        data = data[part]
    return steps
