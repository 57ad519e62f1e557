"""Load settings from YAML files and `key=value` overrides.

Overrides take precedence over the file, the file over its base files, and base files over defaults. A config lists its
base files in `base: [data/digits.yaml, methods/fedld.yaml]`, relative to its own directory; later files override
earlier ones. Mappings are merged key by key. If a file or override replaces the method (model, source, ...) of a base
file, the options of the replaced method are dropped. One message reports all mistakes of a config.

Loading does not import torch, so that ranks report a mistake without delay.
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
from fedmpi.common.registry import is_file_reference
from fedmpi.common.text import find_control_character, locate_key, shorten, suggest_key
from fedmpi.common.type_descriptions import describe_value, format_not_allowed, shorten_value
from fedmpi.config import renamed
from fedmpi.config.field_types import SECTION, OpenSection, ShortFormSection
from fedmpi.config.schema import Settings, section_class
from fedmpi.config.yaml_source import ConfigLayer, parse_value, read_yaml_file

__all__ = ["Settings", "load"]

# Keys whose values may name a plug-in. A server rule without options may be written as a plain name.
PLUGIN_KEYS = (
    "data.source",
    "data.partition.scheme",
    "model.name",
    "task.name",
    "method.name",
    "server.rule.name",
    "server.rule",
)
SWEEP_KEYS = ("grid", "include", "exclude", "published", "tune")  # keys of sweep files (sweeps/expand.py)
KeyPath = tuple[str | int, ...]


def load(path: str | Path, overrides: Sequence[str] = (), renamed_plugins: Mapping[str, str] | None = None) -> Settings:
    """Load the settings of a run from a YAML file.

    Args:
        path: The config file.
        overrides: Strings such as `train.epochs=3`: a dotted key and a value in YAML. Later ones take precedence.
        renamed_plugins: {old name: new name} of plug-ins whose files have moved.

    Raises:
        UserError: The config contains mistakes. For each mistake the message contains the file and line (or the
            override), the key, the value and the allowed values.
    """
    path = Path(path)
    document, override = read_with_bases(path, renamed_plugins), parse_overrides(overrides)
    raise_if_any_problems([*document.old_names, *override.old_names])
    if sweep_key := next((key for key in SWEEP_KEYS if key in document.data), ""):
        raise_if_any_problems(document.problems)
        where = document.origins.get(sweep_key, path)
        raise UserError(
            f"{where}: {sweep_key}: {path} is a sweep of several runs; train them with `fedmpi sweep {path}`"
        )
    return merge_settings([document, override], path)


def merge_settings(layers: Sequence[ConfigLayer], path: Path) -> Settings:
    """Merge layers and validate the result; values of later layers replace those of earlier ones.

    Args:
        layers: The contents of the files and the overrides, in ascending precedence.
        path: The config file, named in messages about missing keys. Its stem is the default of the key `name`.

    Raises:
        UserError: There are mistakes; the message lists all of them.
    """
    document = reduce(merge_layers, layers)
    raise_if_any_problems(document.old_names)
    document.data.setdefault("name", path.stem)
    try:
        result = Settings.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        document.problems += validation_messages(error, document, str(path))
    raise_if_any_problems(document.problems)
    result._origins.update(document.origins)
    return result


def raise_if_any_problems(problems: Sequence[str]) -> None:
    """Raise UserError if the list of problems is not empty; its message contains all of them."""
    lines = list(dict.fromkeys(problems))  # a base file that is named twice would repeat its mistakes
    if lines:
        raise UserError("\n  ".join([f"{len(lines)} mistakes in the config", *lines] if len(lines) > 1 else lines))


def read_with_bases(
    path: Path, renamed_plugins: Mapping[str, str] | None = None, including_files: tuple[str, ...] = ()
) -> ConfigLayer:
    """Read a config file and merge it over its base files.

    Args:
        renamed_plugins: {old name: new name} of plug-ins whose files have moved.
        including_files: The files that include this file as a base file, the outermost file first.
    """
    absolute_path = os.path.abspath(path)
    if absolute_path in including_files:
        circle = [*including_files[including_files.index(absolute_path) :], absolute_path]
        if len(circle) == 2:
            raise UserError(f"{absolute_path} includes itself; remove this base entry")
        raise UserError(f"circular include: {' -> '.join(circle)}; remove one of these base entries")
    own = read_yaml_file(path, included_by=including_files[-1] if including_files else "")
    own.old_names = renamed.find_old_names(own.data, own.origins)
    bases, origin = own.data.pop("base", []), own.origins.pop("base", "")
    own.data = _transform_texts(own.data, lambda text: renamed_plugins.get(text, text)) if renamed_plugins else own.data
    _make_paths_absolute(own, path.parent)
    base_layers = ConfigLayer()
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        own.problems.append(
            f"{origin}: base: {shorten_value(bases)} is not allowed; must be a list of file names, such as [a.yaml]"
        )
        bases = []
    for base in bases:
        try:
            base_layers = merge_layers(
                base_layers, read_with_bases(path.parent / base, renamed_plugins, (*including_files, absolute_path))
            )
        except UserError as error:
            own.problems.append(f"{origin}: base: {error}")
    if (
        "grid" in own.data and "grid" not in base_layers.data
    ):  # a sweep does not inherit the name of a run that it uses as a base file
        base_layers.data.pop("name", None)
    return merge_layers(base_layers, own)


def _transform_texts(tree: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of nested settings with the function `change` applied to each string, including keys."""
    if isinstance(tree, dict):
        return {change(key): _transform_texts(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_transform_texts(value, change) for value in tree]
    return change(tree) if isinstance(tree, str) else tree


def redact_override(text: str) -> str:
    """Return a `key=value` override with secrets replaced by "<redacted>", for messages and logs.

    >>> redact_override("data.token=abc"), redact_override("data={source: web, token: abc}")
    ('data.token=<redacted>', 'data={source: web, token: <redacted>}')
    >>> redact_override("rounds=3")
    'rounds=3'
    """
    key, equals, value = text.partition("=")
    if not equals or not redaction.looks_secret(text):  # no word in the text suggests a secret
        return text
    try:
        tree = parse_value(value, "", key, ConfigLayer())
    except UserError:  # not valid YAML: the whole value is replaced
        return f"{key}={redaction.MARK}"
    clean = redaction.MARK if redaction.looks_secret(key, tree) else redaction.redact(tree)
    return text if clean == tree else f"{key}={describe_value(clean)}"


def parse_overrides(overrides: Sequence[str]) -> ConfigLayer:
    """Parse the `key=value` overrides of a command line, and return them as one layer of settings."""
    document = ConfigLayer()
    for text in overrides:
        clean = redact_override(text)
        origin = f"command line: {shorten(repr(clean) if find_control_character(text) else clean, 200)}"
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            document.problems.append(f"{origin} is not allowed; must be KEY=VALUE, such as train.lr=0.1")
        elif key.partition(".")[0] == "base":
            document.problems.append(
                f"{origin}: base is not allowed on the command line; list base files in a config file"
            )
        else:
            document = merge_layers(document, _parse_override(key, value, origin))
    _make_paths_absolute(document, Path())
    return document


def _parse_override(key: str, value: str, origin: str) -> ConfigLayer:
    """Parse one `key=value` override, and return it as a layer of settings.

    origin: how messages refer to the override, for example `command line: seed=3`.
    """
    value_layer = ConfigLayer()
    try:
        # A single punctuation mark has a meaning in YAML, but here it is a text, such as a delimiter.
        is_mark = len(value) == 1 and value in ",;:|-#&*!%@`?>'\"\t"
        tree = value if is_mark else parse_value(value, origin, key, value_layer)
    except UserError as error:
        can_be_quoted = "YAML" in str(error) and value[:1] not in "[{"
        quoted = f"; to use this value as plain text, write '{key}={json.dumps(value)}'" if can_be_quoted else ""
        return ConfigLayer(problems=[f"{error}{quoted}"])
    override_at_key = nest_value(key, tree, origin)
    override = replace(value_layer, data=override_at_key.data, origins=override_at_key.origins | value_layer.origins)
    override.old_names = renamed.find_old_names(override.data, override.origins)
    return override


def merge_layers(low: ConfigLayer, high: ConfigLayer) -> ConfigLayer:
    """Merge two layers of settings; values of `high` replace those of `low`."""
    return ConfigLayer(
        _merge_trees(low.data, high.data, ()),
        low.origins | high.origins,
        [*low.problems, *high.problems],
        [*low.old_names, *high.old_names],
    )


def _merge_trees(low: dict[str, Any], high: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Merge the settings below the key `path`; if `high` selects a different component, drop the options in `low`."""
    kind = section_class(path)
    if kind is not None and issubclass(kind, OpenSection):
        if _selects_another(low.get(kind.selector), high.get(kind.selector)):
            low = {key: value for key, value in low.items() if key in kind.model_fields}
    elif path[:1] == ("method",) and _selects_another(low.get("name"), high.get("name")):
        low = {}  # the options belong to another method within a method
    merged = dict(low)
    for key, value in high.items():
        low_value: Any = low.get(key)
        if isinstance(value, dict) and isinstance(low_value, str):
            # `server.rule: krum` stands for {name: krum}, which `server.rule.select=2` extends.
            kind = section_class((*path, key))
            if kind is not None and issubclass(kind, ShortFormSection):
                low_value = {kind.short_key: low_value}
        are_mappings = isinstance(low_value, dict) and isinstance(value, dict)
        merged[key] = _merge_trees(low_value, value, (*path, key)) if are_mappings else value
    return merged


def _selects_another(low: Any, high: Any) -> bool:
    """Return whether two layers select different components, given the names of the components.

    Plug-ins in different folders count as the same component if their file names and their class or function names are
    equal.
    """
    return low is not None and high is not None and Path(str(low)).name != Path(str(high)).name


def _make_paths_absolute(document: ConfigLayer, directory: Path) -> None:
    """Make relative paths absolute, in place: those of plug-ins, and of config files on the axes of a sweep.

    Plug-ins are searched for in `directory`, the directory of the config, and then in the working directory.
    """

    def make_plugin_path_absolute(text: str) -> str:
        if not is_file_reference(text):
            return text
        file, _, attribute = text.rpartition(":")
        in_directory, in_cwd = (directory / file).absolute(), Path(file).absolute()
        return f"{in_cwd if in_cwd.is_file() and not in_directory.is_file() else in_directory}:{attribute}"

    for key, value in document.data.items():
        if key not in SWEEP_KEYS:
            document.data[key] = _transform_texts(value, make_plugin_path_absolute)
    tune = document.data.get("tune")
    grids: list[Any] = [document.data.get("grid"), tune.get("grid") if isinstance(tune, dict) else None]
    for grid in grids:
        for name, axis in grid.items() if isinstance(grid, dict) else ():
            if isinstance(axis, list):
                grid[name] = [os.path.abspath(directory / item) if is_config_file(item) else item for item in axis]
            elif isinstance(axis, dict):
                grid[name] = {label: _transform_texts(tree, make_plugin_path_absolute) for label, tree in axis.items()}


def is_config_file(value: Any) -> bool:
    """Return whether a value on an axis of a sweep is the name of a config file."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml"))


def nest_value(dotted: str, value: Any, origin: str) -> ConfigLayer:
    """Return a layer of settings that contains one value.

    Args:
        dotted: The dotted key of the value.
        origin: Where the key was written, for messages.
    """
    parts = dotted.split(".")
    tree = reduce(lambda subtree, part: {part: subtree}, reversed(parts), value)
    return ConfigLayer(tree, {".".join(parts[: depth + 1]): origin for depth in range(len(parts))})


def validation_messages(
    error: ValidationError, document: ConfigLayer, source: str, root: type[BaseModel] = Settings
) -> list[str]:
    """Return one message for each invalid key, in the order in which the keys were written.

    Args:
        error: The error of pydantic.
        document: The layer of settings that was validated.
        source: The file that is named in messages about missing keys.
        root: The section class that defines the allowed keys.
    """
    order = {where: position for position, where in enumerate(document.origins.values())}
    errors = error.errors(include_url=False)
    wrong = {each["loc"][:-1] for each in errors}  # a list is not too short if only its invalid items are missing
    errors = [each for each in errors if each["type"] != "too_short" or each["loc"] not in wrong]
    lines = []
    for key, group in itertools.groupby(errors, key=lambda each: _find_key_of_error(document.data, each)):
        candidates = [".".join(map(str, key[:depth])) for depth in range(len(key), 0, -1)]  # a.b.c, a.b, a
        where = next((document.origins[name] for name in candidates if name in document.origins), source)
        dotted = ".".join(shorten(str(part)) for part in key)
        text = _describe_error(key, list(group), document.data, root)
        lines.append((order.get(where, -1), f"{locate_key(where, dotted)}: {text}" if dotted else f"{where}: {text}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _describe_error(key: KeyPath, errors: list[Any], data: dict[str, Any], root: type[BaseModel]) -> str:
    """Return the message about one invalid key: what is wrong, what is allowed, and how to correct it."""
    first = errors[0]
    if first["type"] == "missing":
        return "missing, but required"
    if first["type"] == "extra_forbidden":
        return f"unknown key; {_suggest(key, root)}"
    if first["type"] == "value_error":  # raised by a validator of fedmpi; its message may begin with the key
        path = "".join(f"{part}." for part in first["loc"])
        text = str(first["ctx"]["error"]).replace(SECTION, path)
        begins, _, rest = text.partition(": ")
        return rest if begins in [".".join(map(str, key[depth:])) for depth in range(len(key))] else text
    value: Any = data
    for part in key:
        value = value[part]
    dotted, meant, declared = ".".join(map(str, key)), "", _find_field(first["loc"], root)
    text = format_not_allowed(value, declared.annotation, declared.metadata)
    name = next(
        (name for name in ("name", "source", "scheme") if name in _section_keys(root, *key)), None
    )  # method=fedprox
    if name and isinstance(value, str):
        meant = f"; did you mean {dotted}.{name}={value}?"
    elif (kind := section_class(key, root)) is not None and issubclass(kind, ShortFormSection):
        text += f", or a string, which sets {dotted}.{kind.short_key}"
    elif isinstance(value, list) and "list" not in text:
        meant = (
            f"; to train a run with each of them, write grid: {{{dotted}: {shorten_value(value)}}} and use fedmpi sweep"
        )
    return text + meant


def _find_field(loc: KeyPath, root: type[BaseModel]) -> FieldInfo:
    """Return the field to which an error refers. Pydantic's path `loc` may end with names of type alternatives."""
    depth = next(d for d in range(len(loc), 0, -1) if loc[d - 1] in _section_keys(root, *loc[: d - 1]))
    holder = section_class(loc[: depth - 1], root)
    assert holder is not None
    return holder.model_fields[str(loc[depth - 1])]


def _suggest(key: KeyPath, root: type[BaseModel]) -> str:
    """Return a suggestion for an unknown key: a section that contains this key, or the most similar allowed key."""
    parent, last = key[:-1], str(key[-1])
    section_path, names = ".".join(map(str, parent)), _section_keys(root, *parent)
    in_subsections = [
        f"{section_path}.{name}.{last}" for name in names if section_path and last in _section_keys(root, *parent, name)
    ]
    in_other_sections = [
        f"{name}.{last}" for name in root.model_fields if name != section_path and last in _section_keys(root, name)
    ]
    return suggest_key(
        last, [*names, *(["base", *SWEEP_KEYS] if not parent else [])], in_subsections or in_other_sections
    )


def _section_keys(root: type[BaseModel], *path: str | int) -> tuple[str, ...]:
    """Return the declared keys of the section at `path`; () if there is no such section."""
    known = section_class(path, root)
    return tuple(known.model_fields) if known is not None else ()


def _find_key_of_error(data: Any, error: Any) -> KeyPath:
    """Return the key to which an error refers.

    Pydantic appends the names of type alternatives to the path, so the part that is not in the data is removed. If the
    message comes from a validator of fedmpi and begins with a key (`train.lr: ...`), this key is appended.
    """
    loc: KeyPath = error["loc"]
    if error["type"] == "missing":
        return loc
    text = str(error["ctx"]["error"]) if error["type"] == "value_error" else ""
    named_key = re.match(r"([\w.]+): (not set)?", text)
    steps: KeyPath = (*loc, *(named_key[1].split(".") if named_key else ()))
    if named_key and named_key[2]:
        return steps
    for depth, part in enumerate(steps):
        exists = isinstance(data, list) if isinstance(part, int) else isinstance(data, dict) and part in data
        if not exists:
            in_short_form = named_key is not None and isinstance(data, str)  # evaluate.best: accuracy is its metric
            return steps if in_short_form else steps[:depth]
        data = data[part]
    return steps
