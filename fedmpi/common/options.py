"""Declare and check the options of methods, models, data sources and partitions.

A dataclass declares an option as a field, with its meaning, unit and bounds; a function declares an option as a
parameter, with bounds written as `Annotated[float, Field(gt=0)]` (pydantic). `check_options` compares the options in
a config with their declarations.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedmpi.common.errors import UserError
from fedmpi.common.redaction import MARK, looks_secret
from fedmpi.common.text import locate_key, suggest_key
from fedmpi.common.type_descriptions import format_not_allowed

_BOUNDS = ("ge", "gt", "le", "lt")
_STRICT = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)


def option(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Collection[Any] | None = None,
) -> Any:
    """Declare a hyperparameter as a dataclass field; non-finite values in a config are rejected.

    Args:
        doc: meaning and unit, as shown in the documentation.
        ge: lowest allowed value.
        gt: exclusive lower bound.
        le: highest allowed value.
        lt: exclusive upper bound.
        choices: the allowed values, instead of bounds.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Prox:
    ...     mu: float = option(0.01, "weight of the proximal term", ge=0)
    >>> Prox().mu
    0.01
    """
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "lt": lt, "choices": choices}
    if isinstance(default, (list, dict, set)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_options(
    target: Callable[..., Any],
    values: Mapping[str, Any],
    section: str,
    engine_arguments: Sequence[str] = (),
    origins: Mapping[str, str] | None = None,
    label: str = "",
    reserved_keys: Collection[str] = (),
    optional_arguments: Collection[str] = (),
) -> dict[str, Any]:
    """Check options against their declaration; return them converted to the declared types (int to float, ...).

    Args:
        target: a function or class that takes the options; the options of a dataclass are its fields.
        values: the options in the config; omitted options keep their defaults.
        section: the section in the config ("method"); messages name `section.key`.
        engine_arguments: parameters that the engine passes by position, in this order; a user's function may give them
            other names.
        origins: option -> where it was written ("run.yaml:7"); see `Settings.origins`.
        label: description of the target for messages ("method fedavg").
        reserved_keys: the other keys of the section; they, too, are suggested for misspelled keys.
        optional_arguments: parameters that the engine passes by name.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or is out of bounds. The message has one
            line for each such key.
    """
    declared, required, open_ended = read_declared_options(target, values, engine_arguments, optional_arguments)
    origins = origins or {}
    converted: dict[str, Any] = {}
    problems = []
    label = label or getattr(target, "__name__", str(target))
    keys = [*declared, *reserved_keys]
    moved = getattr(target, "REPLACED_OPTIONS", {})  # option of earlier versions -> message that names its replacement

    def add_problem(key: str, text: str) -> None:
        problems.append(f"{locate_key(origins.get(key, ''), f'{section}.{key}')}: {text}")

    for key, value in values.items():
        if MARK in repr(value):
            add_problem(
                key, f"this value is not stored in the run directory, as it may be a secret; set {section}.{key}=VALUE"
            )
        elif key in declared:
            try:
                # Validation from JSON converts a list to a tuple and a text to a path, but not "1" to a number.
                adapter: TypeAdapter[Any] = TypeAdapter(declared[key], config=_STRICT)
                converted[key] = adapter.validate_json(json.dumps(value))
            except ValidationError:
                shown = MARK if looks_secret(key, value) else value
                default = ", or omitted for the default" if value is None and key not in required else ""
                add_problem(key, format_not_allowed(shown, declared[key]) + default)
        elif open_ended:
            converted[key] = value
        elif key in moved:
            add_problem(key, f"this option {moved[key]}")
        else:
            none = "" if declared else f"{label} has no options of its own; "
            add_problem(key, f"unknown key; {none}{suggest_key(key, keys)}")
    for key in required - set(values):
        add_problem(key, f"missing; {label} requires it")
    if problems:
        raise UserError("\n".join(problems))
    return converted


def read_declared_options(
    target: Callable[..., Any],
    values: Mapping[str, Any],
    engine_arguments: Sequence[str],
    optional_arguments: Collection[str] = (),
) -> tuple[dict[str, Any], set[str], bool]:
    """Return {option: annotation} of `target`, the names of required options, and whether it accepts other options."""
    is_dataclass = dataclasses.is_dataclass(target)
    try:
        plain_class = inspect.isclass(target) and not is_dataclass
        hints = get_type_hints(target.__init__ if plain_class else target, include_extras=True)
    except NameError:  # some annotations exist only for a type checker: names are checked, but values are not
        hints = {}
    declared, required = dict[str, Any](), set[str]()
    if is_dataclass:
        for field in dataclasses.fields(target):  # type: ignore[arg-type]
            if not field.init or field.name in engine_arguments:
                continue
            hint, metadata = hints.get(field.name, Any), field.metadata
            if metadata.get("choices") is not None:
                hint = Literal[tuple(metadata["choices"])]
            elif bounds := {name: metadata[name] for name in _BOUNDS if metadata.get(name) is not None}:
                hint = Annotated[hint, Field(**bounds)]
            declared[field.name] = hint
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                required.add(field.name)
        return declared, required, False
    parameters = list(inspect.signature(target).parameters.values())
    names = {parameter.name for parameter in parameters}
    for position, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in engine_arguments or parameter.name in optional_arguments:
            continue
        needed = parameter.default is parameter.empty
        renamed = position < len(engine_arguments) and engine_arguments[position] not in names
        if needed and renamed and parameter.name not in values:
            continue  # an argument that the engine passes by position; the user's function names it differently
        declared[parameter.name] = hints.get(parameter.name, Any)
        if needed:
            required.add(parameter.name)
    return declared, required, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
