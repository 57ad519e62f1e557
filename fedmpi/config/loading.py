"""Load settings from YAML, with the precedence defaults < base files < file < `key=value` overrides.

A config names its base files in `base: [data/digits.yaml, methods/fedld.yaml]`, relative to its own directory; later
files override earlier ones. Mappings are merged key by key. If a layer names another method (model, source, ...) than
the layer below, the options of the lower layer are dropped, because they belong to the other method. One message
reports all mistakes of a config.

Loading does not import torch, so that every rank reports a mistake at once.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedmpi.common import redaction
from fedmpi.common.errors import UserError
from fedmpi.common.registry import is_file
from fedmpi.common.text import control_character, shorten, show, suggest_key
from fedmpi.common.type_descriptions import describe_value, not_allowed
from fedmpi.config import renamed
from fedmpi.config.field_types import OpenSection, ShortSection
from fedmpi.config.schema import Settings, section
from fedmpi.config.yaml_source import Document, read, read_value

__all__ = ["Settings", "load"]

# Keys whose values may name a plug-in. A server rule without options may be written as a plain name.
PLUGINS = (
    "data.source",
    "data.partition.scheme",
    "model.name",
    "task.name",
    "method.name",
    "server.rule.name",
    "server.rule",
)
SWEEP = ("over", "only", "leave_out", "published", "best")  # keys of sweep files (sweeps/expand.py)
Key = tuple[str | int, ...]


def load(path: str | Path, overrides: Sequence[str] = (), moved: Mapping[str, str] | None = None) -> Settings:
    """Load the settings of a run from a YAML file.

    Args:
        overrides: texts such as `train.epochs=3`, with a dotted key and a value in YAML; later ones replace earlier
            ones.
        moved: {old name: new name} of plug-ins whose files have moved.

    Raises:
        UserError: if the config contains mistakes. The message has, for each mistake, the file and line (or the
            override), the key, the value and the allowed values.
    """
    path = Path(path)
    document = files(path, moved)
    if asked := next((key for key in SWEEP if key in document.data), ""):
        where = document.origins.get(asked, path)
        raise UserError(f"{where}: {asked}: {path} asks for many runs; `fedmpi sweep {path}` trains them")
    return settings([document, command_line(overrides)], path)


def settings(layers: Sequence[Document], path: Path) -> Settings:
    """Merge layers into settings; values of later layers replace those of earlier ones.

    Args:
        layers: the files and overrides.
        path: the file that messages name for missing keys; its stem is the default of `name`.

    Raises:
        UserError: if there are mistakes; the message lists all of them.
    """
    document = reduce(merge, layers)
    document.data.setdefault("name", path.stem)
    try:
        result = Settings.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        document.problems += complaints(error, document, str(path))
    check_problems(document)
    result._origins.update(document.origins)
    return result


def check_problems(document: Document) -> None:
    """Raise UserError with all problems of a document, if there are any."""
    lines = list(dict.fromkeys(document.problems))  # a base file that is named twice would repeat its mistakes
    if lines:
        raise UserError("\n  ".join([f"{len(lines)} mistakes in the config", *lines] if len(lines) > 1 else lines))


def files(path: Path, moved: Mapping[str, str] | None = None, around: tuple[str, ...] = ()) -> Document:
    """Read a config file and merge it over its base files.

    Args:
        moved: as in `load`.
        around: the files that include this file as a base, the outermost first.
    """
    place = os.path.abspath(path)
    if place in around:
        raise UserError(f"base files form a circle: {' -> '.join([*around[around.index(place) :], place])}")
    own = read(path)
    renamed.use_new_names(own)
    bases, origin = own.data.pop("base", []), own.origins.pop("base", "")
    own.data = _map_texts(own.data, lambda text: moved.get(text, text)) if moved else own.data
    _anchor_document(own, path.parent)
    below = Document()
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        own.problems.append(f"{origin}: base: {show(bases)} is not allowed; must be a list of files")
        bases = []
    for base in bases:
        try:
            below = merge(below, files(path.parent / base, moved, (*around, place)))
        except UserError as error:
            own.problems.append(f"{origin}: base: {error}")
    if "over" in own.data and "over" not in below.data:  # a sweep does not inherit the name of a run that is its base
        below.data.pop("name", None)
    return merge(below, own)


def _map_texts(tree: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of nested settings in which a function was applied to each text, keys included."""
    if isinstance(tree, dict):
        return {change(key): _map_texts(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_map_texts(value, change) for value in tree]
    return change(tree) if isinstance(tree, str) else tree


def shown(text: str) -> str:
    """Return a `key=value` override with its secrets replaced by a mark, so that it may be shown.

    >>> shown("data.token=abc"), shown("data={source: web, token: abc}"), shown("rounds=3")
    ('data.token=<redacted>', 'data={source: web, token: <redacted>}', 'rounds=3')
    """
    key, equals, value = text.partition("=")
    if not equals or not redaction.looks_secret(text):  # the text contains no word that names a secret
        return text
    try:
        tree = read_value(value, "", key, Document())
    except UserError:  # not valid YAML: the whole value is replaced
        return f"{key}={redaction.MARK}"
    clean = redaction.MARK if redaction.looks_secret(key, tree) else redaction.redacted(tree)
    return text if clean == tree else f"{key}={describe_value(clean)}"


def command_line(overrides: Sequence[str]) -> Document:
    """Return the overrides of a command line as one layer of settings."""
    document = Document()
    for text in overrides:
        origin = f"command line: {shorten(repr(shown(text)) if control_character(text) else shown(text), 200)}"
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            document.problems.append(f"{origin}: must be KEY=VALUE, such as train.lr=0.1")
        elif key.partition(".")[0] == "base":
            document.problems.append(f"{origin}: base can stand in a file only; write one that names its bases")
        else:
            document = merge(document, _override(key, value, origin))
    _anchor_document(document, Path())
    return document


def _override(key: str, value: str, origin: str) -> Document:
    """Return one `key=value` override as a layer of settings."""
    one = Document()
    try:
        # YAML gives most punctuation marks a meaning, but a value of a single mark is a text, such as a delimiter.
        is_mark = len(value) == 1 and value in ",;:|-#&*!%@`?>'\"\t"
        tree = value if is_mark else read_value(value, origin, key, one)
    except UserError as error:
        quoted = f"; a text can be put in quotes: '{key}={json.dumps(value)}'" if value[:1] not in "[{" else ""
        return Document(problems=[f"{error}{quoted}"])
    above = nested(key, tree, origin)
    override = replace(one, data=above.data, origins=above.origins | one.origins)
    renamed.use_new_names(override)
    return override


def merge(low: Document, high: Document) -> Document:
    """Merge two layers; values of `high` replace those of `low`."""
    return Document(_merge_trees(low.data, high.data, ()), low.origins | high.origins, [*low.problems, *high.problems])


def _merge_trees(low: dict[str, Any], high: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    kind = section(path)
    if kind is not None and issubclass(kind, OpenSection):
        if _names_another(low.get(kind.selector), high.get(kind.selector)):
            low = {key: value for key, value in low.items() if key in kind.model_fields}
    elif path[:1] == ("method",) and _names_another(low.get("name"), high.get("name")):
        low = {}  # the options belong to another method within a method
    merged = dict(low)
    for key, value in high.items():
        below: Any = low.get(key)
        if isinstance(value, dict) and isinstance(below, str):
            # `server.rule: krum` stands for {name: krum}, which `server.rule.select=2` extends.
            kind = section((*path, key))
            if kind is not None and issubclass(kind, ShortSection):
                below = {kind.short: below}
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge_trees(below, value, (*path, key)) if both else value
    return merged


def _names_another(low: Any, high: Any) -> bool:
    """Return whether two layers select different components.

    Paths with the same file name and attribute are the same component, whose file has moved.
    """
    return low is not None and high is not None and Path(str(low)).name != Path(str(high)).name


def _anchor_document(document: Document, directory: Path) -> None:
    """Make relative paths absolute: those of plug-ins, and those of config files that the axes of a sweep name.

    Plug-ins are searched in the directory of the config that names them, then in the working directory.
    """

    def anchor(text: str) -> str:
        if not is_file(text):
            return text
        place, _, attribute = text.rpartition(":")
        beside, here = (directory / place).absolute(), Path(place).absolute()
        return f"{here if here.is_file() and not beside.is_file() else beside}:{attribute}"

    for key, value in document.data.items():
        if key not in SWEEP:
            document.data[key] = _map_texts(value, anchor)
    best = document.data.get("best")
    overs: list[Any] = [document.data.get("over"), best.get("over") if isinstance(best, dict) else None]
    for over in overs:
        for name, axis in over.items() if isinstance(over, dict) else ():
            if isinstance(axis, list):
                over[name] = [os.path.abspath(directory / item) if is_config(item) else item for item in axis]
            elif isinstance(axis, dict):
                over[name] = {label: _map_texts(tree, anchor) for label, tree in axis.items()}


def is_config(value: Any) -> bool:
    """Return whether a value of an axis names a config file."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def nested(dotted: str, value: Any, origin: str) -> Document:
    """Return a layer of settings with one value.

    Args:
        dotted: the dotted key of the value.
        origin: where the key was written, for messages.
    """
    parts = dotted.split(".")
    tree = reduce(lambda below, part: {part: below}, reversed(parts), value)
    return Document(tree, {".".join(parts[: depth + 1]): origin for depth in range(len(parts))})


def complaints(error: ValidationError, document: Document, source: str, root: type[BaseModel] = Settings) -> list[str]:
    """Return one line for each wrong key, in the order in which the keys were written.

    Args:
        error: the error of pydantic.
        source: the file that is named for missing keys.
        root: the class against which the document was checked.
    """
    order = {where: position for position, where in enumerate(document.origins.values())}
    errors = error.errors(include_url=False)
    wrong = {each["loc"][:-1] for each in errors}  # a list is not too short if it only lacks its wrong items
    errors = [each for each in errors if each["type"] != "too_short" or each["loc"] not in wrong]
    lines = []
    for key, group in itertools.groupby(errors, key=lambda each: _locate(document.data, each)):
        around = [".".join(map(str, key[:depth])) for depth in range(len(key), 0, -1)]  # a.b.c, a.b, a
        where = next((document.origins[name] for name in around if name in document.origins), source)
        dotted = ".".join(shorten(str(part)) for part in key)
        text = _describe(key, list(group), document.data, root)
        lines.append((order.get(where, -1), f"{where}: {dotted}: {text}" if dotted else f"{where}: {text}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _describe(key: Key, errors: list[Any], data: dict[str, Any], root: type[BaseModel]) -> str:
    first = errors[0]
    if first["type"] == "missing":
        return "missing; it must be given"
    if first["type"] == "extra_forbidden":
        return f"unknown key; {_advice(key, root)}"
    if first["type"] == "value_error":  # raised by validators of fedmpi, whose message may begin with the key
        text = str(first["ctx"]["error"])
        begins, _, rest = text.partition(": ")
        return rest if begins in [".".join(map(str, key[depth:])) for depth in range(len(key))] else text
    value: Any = data
    for part in key:
        value = value[part]
    dotted, meant, declared = ".".join(map(str, key)), "", _declared(first["loc"], root)
    text = not_allowed(value, declared.annotation, declared.metadata)
    name = next((name for name in ("name", "source", "scheme") if name in _keys(root, *key)), None)  # method=fedprox
    if name and isinstance(value, str):
        meant = f"; did you mean {dotted}.{name}={value}?"
    elif isinstance(value, list) and "list" not in text:
        meant = f"; for a run with each of them write over: {{{dotted}: {show(value)}}}, for fedmpi sweep"
    return text + meant


def _declared(loc: Key, root: type[BaseModel]) -> FieldInfo:
    """Return the field that an error is about. Pydantic's `loc` may continue with the alternatives that it tried."""
    depth = next(d for d in range(len(loc), 0, -1) if loc[d - 1] in _keys(root, *loc[: d - 1]))
    holder = section(loc[: depth - 1], root)
    assert holder is not None
    return holder.model_fields[str(loc[depth - 1])]


def _advice(key: Key, root: type[BaseModel]) -> str:
    """Return advice on an unknown key: the section to which it belongs, or the most similar allowed key."""
    above, last = key[:-1], str(key[-1])
    where, names = ".".join(map(str, above)), _keys(root, *above)
    inside = [f"{where}.{name}.{last}" for name in names if where and last in _keys(root, *above, name)]
    homes = [f"{name}.{last}" for name in root.model_fields if name != where and last in _keys(root, name)]
    return suggest_key(last, [*names, *(["base", *SWEEP] if not above else [])], inside or homes)


def _keys(root: type[BaseModel], *path: str | int) -> tuple[str, ...]:
    known = section(path, root)
    return tuple(known.model_fields) if known is not None else ()


def _locate(data: Any, error: Any) -> Key:
    """Return the key that an error is about.

    Pydantic appends the names of the alternatives that it tried, so the place is cut where the data end. If the message
    of one of fedmpi's validators begins with a key (`train.lr: ...`), this key is appended.
    """
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
