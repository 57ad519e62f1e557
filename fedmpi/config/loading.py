"""YAML -> settings: defaults < base files < file < `key=value` overrides.

A config names the files that it starts from in `base: [data/digits.yaml, methods/fedld.yaml]`, relative to its own
place; later ones win. Mappings are merged key by key. Where a layer names another method (model, source, ...) than the
layer below, the options of the lower layer are dropped, as they belong to its method. One message reports all mistakes
of a config.

Loading does not import torch, so that every rank reports a mistake at once.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedmpi.common import redaction
from fedmpi.common.errors import UserError
from fedmpi.common.registry import is_file
from fedmpi.common.text import brief, control, show
from fedmpi.config.error_text import SWEEP, complaints
from fedmpi.config.schema import Settings, section
from fedmpi.config.sections import OpenSection, ShortSection
from fedmpi.config.yaml_source import MAX_DEPTH, Document, read, read_value

__all__ = ["Settings", "load"]

# keys under which a plug-in may be named; a server rule without options may be written as a bare name
PLUGINS = (
    "data.source",
    "data.partition.scheme",
    "model.name",
    "task.name",
    "method.name",
    "server.rule.name",
    "server.rule",
)
MAX_FILES = 100  # a config and all that it is based on
MAX_SHOWN = 20  # mistakes in one message


def load(path: str | Path, overrides: Sequence[str] = (), moved: Mapping[str, str] | None = None) -> Settings:
    """The settings of a run.

    Args:
        path: the YAML file.
        overrides: `train.epochs=3`: a dotted key and a value in YAML; the later of two wins.
        moved: plug-ins that are elsewhere now than the file says: name -> name.

    Raises:
        UserError: for each mistake the file and line (or the override), the key, the value and what is allowed.
    """
    path = Path(path)
    document = files(path, moved)
    if asked := next((key for key in SWEEP if key in document.data), ""):
        where = document.origins.get(asked, path)
        raise UserError(f"{where}: {asked}: {path} asks for many runs; `fedmpi sweep {path}` trains them")
    return settings([document, command_line(overrides)], path)


def settings(layers: Sequence[Document], path: Path) -> Settings:
    """The settings that layers make, the later one over the earlier. Raises UserError with all mistakes in them."""
    document = reduce(merge, layers)
    used = set(_texts(document.data)) if document.missing else set()
    document.problems += [problem for name, problem in document.missing.items() if name in used]
    document.data.setdefault("name", path.stem)
    try:
        made = Settings.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        document.problems += complaints(error, document, str(path))
    if document.problems:
        lines = list(dict.fromkeys(document.problems))  # a base that is named twice repeats its mistakes
        more = [f"... and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
        lines = lines if len(lines) == 1 else [f"{len(lines)} mistakes in the config", *lines[:MAX_SHOWN], *more]
        raise UserError("\n  ".join(lines))
    made._origins.update(document.origins)
    made._file = str(path)
    return made


def files(path: Path, moved: Mapping[str, str] | None = None) -> Document:
    """A file over its bases."""
    return _Files(moved or {}).merged(path, ())


@dataclass
class _Files:
    """The files of one config, each read once, however many others start from it."""

    moved: Mapping[str, str] = field(default_factory=dict)
    done: dict[str, Document] = field(default_factory=dict)

    def merged(self, path: Path, around: tuple[str, ...]) -> Document:
        """A file merged over its bases. `around`: the files whose base it is, the outermost first."""
        place = os.path.realpath(path)  # not resolve(): a link to itself is an error of its own there
        if place in around:
            raise UserError(f"base files form a circle: {' -> '.join([*around[around.index(place) :], place])}")
        if place not in self.done:
            if len(self.done) + len(around) >= MAX_FILES:
                raise UserError(f"more than {MAX_FILES} base files; a config starts from a few")
            self.done[place] = self.read(path, (*around, place))
        return self.done[place]

    def read(self, path: Path, around: tuple[str, ...]) -> Document:
        own = read(path)
        bases = own.data.pop("base", [])
        origin = own.origins.pop("base", "")
        own.data = _with(own.data, self.moved) if self.moved else own.data
        _anchor_plugins(own, path.parent)
        _anchor_axes(own, path.parent)
        below = Document()
        if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
            own.problems.append(f"{origin}: base: {show(bases)} is not allowed; must be a list of files")
            bases = []
        for base in bases:
            try:
                below = merge(below, self.merged(path.parent / base, around))
            except UserError as error:
                own.problems.append(f"{origin}: base: {error}")
        if "over" in own.data and "over" not in below.data:  # a run's name is not that of a sweep over it
            below = replace(below, data={key: value for key, value in below.data.items() if key != "name"})
        return merge(below, own)


def _with(tree: Any, names: Mapping[str, str]) -> Any:
    """A tree with other texts in place of some."""
    if isinstance(tree, dict):
        return {key: _with(value, names) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with(value, names) for value in tree]
    return names.get(tree, tree) if isinstance(tree, str) else tree


def _texts(tree: Any) -> Iterator[str]:
    """All texts in a tree, keys too."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (dict, list)):
        for item in tree:
            yield from _texts(item)
        yield from _texts(list(tree.values())) if isinstance(tree, dict) else ()


def shown(text: str) -> str:
    """A `key=value` of a command line as it may be shown and written down: without secrets.

    >>> shown("data.token=abc"), shown("data={source: web, token: abc}"), shown("rounds=3")
    ('data.token=<redacted>', 'data={source: web, token: <redacted>}', 'rounds=3')
    """
    key, equals, value = text.partition("=")
    if not equals:
        return text
    try:
        tree = read_value(value, "", key, Document())
    except UserError:  # not YAML: all of it is left out if any of it smells
        return f"{key}={redaction.MARK}" if redaction.smells(text) else text
    clean = redaction.MARK if redaction.smells(key, tree) else redaction.redacted(tree)
    return text if clean == tree else f"{key}={redaction.flow(clean)}"


def command_line(overrides: Sequence[str]) -> Document:
    """The overrides as one layer."""
    document = Document()
    for text in overrides:
        origin = f"command line: {brief(repr(shown(text)) if control(text) else shown(text), 200)}"
        key, equals, value = text.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            document.problems.append(f"{origin}: must be KEY=VALUE, such as train.lr=0.1")
            continue
        if parts[0] == "base":
            document.problems.append(
                f"{origin}: base can stand in a file only; write one that names its bases, and run it"
            )
            continue
        if len(parts) > MAX_DEPTH:
            document.problems.append(f"{origin}: nested deeper than {MAX_DEPTH} levels")
            continue
        one = Document(origins={".".join(parts[: depth + 1]): origin for depth in range(len(parts))})
        try:
            # YAML has a meaning of its own for most marks, but as a whole value one is a text, such as a delimiter.
            is_mark = len(value) == 1 and value in ",;:|-#&*!%@`?>'\"\t"
            tree: Any = value if is_mark else read_value(value, origin, key, one)
        except UserError as error:
            quoted = f"; a text can be put in quotes: '{key}={json.dumps(value)}'" if value[:1] not in "[{" else ""
            document.problems.append(f"{error}{quoted}")
            continue
        for part in reversed(parts):
            tree = {part: tree}
        one.data = tree
        document = merge(document, one)
    _anchor_plugins(document, Path())
    return document


def merge(low: Document, high: Document) -> Document:
    problems = list(dict.fromkeys([*low.problems, *high.problems]))  # files that share a base bring its mistakes twice
    new = {_file_name(text): text for text in _texts(high.data) if is_file(text)} if low.missing else {}
    moved = {name: new[_file_name(name)] for name in low.missing if _file_name(name) in new}  # it keeps its options
    tree = _merge_trees(_with(low.data, moved) if moved else low.data, high.data, ())
    return Document(tree, low.origins | high.origins, problems, low.missing | high.missing)


def _file_name(name: str) -> str:
    """
    >>> _file_name("/home/me/own.py:net")
    'own.py:net'
    """
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).name}:{attribute}"


def _merge_trees(low: dict[str, Any], high: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    kind = section(path)
    if kind is not None and issubclass(kind, OpenSection):
        old, new = low.get(kind.selector), high.get(kind.selector)
        if old is not None and new is not None and old != new:
            low = {key: value for key, value in low.items() if key in kind.model_fields}
    elif path[:1] == ("method",) and len({low.get("name"), high.get("name")} - {None}) > 1:
        low = {}  # a method within a method is another one now
    merged = dict(low)
    for key, value in high.items():
        below = _named(low.get(key), (*path, key))
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge_trees(below, value, (*path, key)) if both else value
    return merged


def _named(value: Any, path: tuple[str, ...]) -> Any:
    """`server.rule: krum` as {name: krum}, to which `server.rule.select=2` adds; `comm.wire: int8` as {up: int8}."""
    kind = section(path)
    if isinstance(value, str) and kind is not None and issubclass(kind, OpenSection | ShortSection):
        return {kind.selector if issubclass(kind, OpenSection) else kind.short: value}
    return value


def _anchor_plugins(document: Document, directory: Path) -> None:
    """Make relative `file.py:Name` absolute: beside the config that names it, else in the working directory."""
    for dotted in PLUGINS:
        *parts, last = dotted.split(".")
        tree: Any = document.data
        for part in parts:
            tree = tree.get(part) if isinstance(tree, dict) else None
        name = tree.get(last) if isinstance(tree, dict) else None
        if not isinstance(name, str) or not is_file(name):
            continue
        tree[last] = _anchored(document, directory, dotted, name)
    if isinstance(method := document.data.get("method"), dict):
        _anchor_within(document, directory, "method", method)
    heard = document.data.get("callbacks")
    heard = heard if isinstance(heard, list) else []
    for i, item in enumerate(heard):
        if not isinstance(item, (dict, str)):
            continue  # a mistake, which the schema names
        names = item if isinstance(item, dict) else {item: None}
        made = {
            _anchored(document, directory, "callbacks", name)
            if isinstance(name, str) and is_file(name)
            else name: options
            for name, options in names.items()
        }
        heard[i] = made if isinstance(item, dict) else next(iter(made))


def _anchor_within(document: Document, directory: Path, dotted: str, tree: dict[str, Any]) -> None:
    """Of a method's options: a method that it is made of may be a plug-in, too."""
    for key, value in tree.items():
        if isinstance(value, dict):
            _anchor_within(document, directory, f"{dotted}.{key}", value)
        elif isinstance(value, str) and is_file(value) and not Path(value).is_absolute():
            tree[key] = _anchored(document, directory, f"{dotted}.{key}", value)


def _anchored(document: Document, directory: Path, dotted: str, name: str) -> str:
    place, _, attribute = name.rpartition(":")
    tried = [(directory / place).absolute(), Path(place).absolute()]
    found = next((path for path in tried if os.path.isfile(path)), None)
    if found is not None:
        return f"{found}:{attribute}"
    where = " nor ".join(dict.fromkeys(map(str, tried)))
    document.missing[name] = f"{document.origins.get(dotted, directory)}: {dotted}: there is no file {where}"
    return name


def is_config(value: Any) -> bool:
    """Whether a value of an axis is a file of settings."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def nested(dotted: str, value: Any, origin: str) -> Document:
    """One value under a dotted key."""
    parts = dotted.split(".")
    tree = value
    for part in reversed(parts):
        tree = {part: tree}
    return Document(tree, {".".join(parts[: depth + 1]): origin for depth in range(len(parts))})


def _anchor_axes(document: Document, directory: Path) -> None:
    """Make the files that a sweep's axes name absolute: settings as `base` has them, plug-ins as elsewhere."""
    _anchor_each(document, directory, "over", document.data.get("over"))
    if isinstance(best := document.data.get("best"), dict):
        _anchor_each(document, directory, "best.over", best.get("over"))


def _anchor_each(document: Document, directory: Path, below: str, over: Any) -> None:
    for name, axis in over.items() if isinstance(over, dict) else ():
        if isinstance(axis, list):
            over[name] = [os.path.abspath(directory / item) if is_config(item) else item for item in axis]
        for label, tree in axis.items() if isinstance(axis, dict) else ():
            if isinstance(tree, dict):
                start = f"{below}.{name}.{label}."
                named = {k.removeprefix(start): v for k, v in document.origins.items() if k.startswith(start)}
                part = Document(tree, named)
                _anchor_plugins(part, directory)
                document.missing |= part.missing
