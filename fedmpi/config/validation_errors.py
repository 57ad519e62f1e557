"""pydantic's errors about a config -> one line for each mistake: where, key, value, what is allowed."""

import itertools
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
        (_key(document.data, each), each) for each in errors if each["type"] != "too_short" or each["loc"] not in wrong
    ]
    for key, group in itertools.groupby(located, key=lambda pair: pair[0]):
        where = _origin(document, key, source)
        text = _describe(key, [each for _, each in group], document.data)
        lines.append((order.get(where, -1), f"{where}: {'.'.join(shorten(str(part)) for part in key)}{text}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _describe(key: Key, errors: list[Any], data: dict[str, Any]) -> str:
    first = errors[0]
    if first["type"] == "missing":
        return ": missing; it must be given"
    if first["type"] == "extra_forbidden":
        return f": unknown key; {_advice(key)}"
    if first["type"] == "value_error":  # from our own validators
        text = str(first["ctx"]["error"])
        begins, _, rest = text.partition(": ")
        named = {".".join(map(str, key[depth:])) for depth in range(len(key))}
        if begins in named:
            return f": {rest}"
        below = f"{'.'.join(map(str, key))}." if key else ""  # evaluate.best.metric, where evaluate.best is a bare text
        return text.removeprefix(below[:-1]) if begins.startswith(below) else f": {text}"
    value = _value(data, key)
    name = next((name for name in ("name", "source", "scheme") if name in _keys(*key)), None)  # method=fedprox
    meant = f"; did you mean {'.'.join(map(str, key))}.{name}={value}?" if name and isinstance(value, str) else ""
    if isinstance(value, list) and len(value) > 1 and all(isinstance(each, (int, float, str)) for each in value):
        text = f"{'.'.join(map(str, key))}: {show(value)}"
        text = f"{'.'.join(map(str, key))}.{name}: {show(value)}" if name else text  # method: [fedavg, ditto]
        each = name is not None or _takes_one(errors)
        meant = f"; for a run with each of them write over: {{{text}}}, for fedmpi sweep" if each else ""
    return f": {show(value)} is not allowed; must be {allowed(errors)}{meant}"


def _takes_one(errors: list[Any]) -> bool:
    """Whether the key takes one number, text or truth value, and no list."""
    return all(each["type"] in ("int_type", "float_type", "string_type", "bool_type") for each in errors)


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


def _key(data: Any, error: Any) -> Key:
    """The error's place as far as it exists in the data: pydantic appends the names of the alternatives it tried."""
    loc: Key = error["loc"]
    if error["type"] == "missing":
        return loc
    for depth, part in enumerate(loc):
        inside = isinstance(data, list) if isinstance(part, int) else isinstance(data, dict) and part in data
        if not inside:
            return loc[:depth]
        data = data[part]
    return (*loc, *_named(error, data))


def _named(error: Any, data: Any) -> Key:
    """Return the keys that an error of our own names at its start, `train.lr: ...` as ("train", "lr").

    Keys that are not in the data are left out.
    """
    text = str(error["ctx"]["error"]) if error["type"] == "value_error" else ""
    named = tuple(text.partition(":")[0].split("."))
    if text.partition(": ")[2].startswith("missing"):
        return named
    for depth, part in enumerate(named):
        if not isinstance(data, dict) or part not in data:
            return named[:depth]
        data = data[part]
    return named


def _value(data: Any, key: Key) -> Any:
    for part in key:
        data = data[part]
    return data


def _origin(document: Document, key: Key, source: str) -> str:
    """Where the key, or else the nearest section around it, was written."""
    for depth in range(len(key), 0, -1):
        dotted = ".".join(map(str, key[:depth]))
        if dotted in document.origins:
            return document.origins[dotted]
    return source
