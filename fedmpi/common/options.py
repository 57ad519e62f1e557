"""Options of methods, models, data sources, partitions: declared where they are used, checked where they are given.

A dataclass declares an option as a field, with its meaning, unit and bounds; a function as a parameter, its bounds
written `Annotated[float, Field(gt=0)]` (pydantic). `check` compares what a config gives with what is declared.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedmpi.common.errors import UserError
from fedmpi.common.redaction import MARK, looks_secret
from fedmpi.common.text import suggest_key
from fedmpi.common.type_descriptions import not_allowed

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
    """Declare a hyperparameter: a dataclass field with its meaning and unit, and its bounds or choices.

    Numbers are finite.

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


def check(
    target: Callable[..., Any],
    given: Mapping[str, Any],
    where: str,
    supplied: Sequence[str] = (),
    origins: Mapping[str, str] | None = None,
    named: str = "",
    reserved_keys: Collection[str] = (),
) -> dict[str, Any]:
    """Check options against their declaration and return them with the declared types (int to float, list to tuple).

    Args:
        target: a function or (data)class; of a dataclass only its fields are options.
        given: the options in the config; absent ones keep the defaults of `target`.
        where: the section in the config ("method"); messages name `where.key`.
        supplied: parameters that the engine passes itself, in their order; a user's function may name them differently.
        origins: key -> where it was written ("run.yaml:7"); see `Settings.origins`.
        named: the target in messages ("method fedavg").
        reserved_keys: the other keys of the section.

    Raises:
        UserError: one line for each key that is unknown, missing, of a wrong type or out of bounds.
    """
    declared, required, open_ended = declared_options(target, given, supplied)
    origins = origins or {}
    checked: dict[str, Any] = {}
    problems = []
    named = named or getattr(target, "__name__", str(target))
    keys = [*declared, *reserved_keys]
    moved = getattr(target, "MOVED", {})  # option of earlier versions -> what it is now

    def complain(key: str, text: str) -> None:
        prefix = f"{origins[key]}: " if key in origins else ""
        problems.append(f"{prefix}{where}.{key}: {text}")

    for key, value in given.items():
        if MARK in repr(value):
            complain(key, f"was left out of the run directory, for it may be a secret; give it: {where}.{key}=VALUE")
        elif key in declared:
            try:
                # Through JSON: a list may become a tuple and text a path, but "1" is no number.
                adapter: TypeAdapter[Any] = TypeAdapter(declared[key], config=_STRICT)
                checked[key] = adapter.validate_json(json.dumps(value))
            except ValidationError:
                shown = MARK if looks_secret(key, value) else value
                default = ", or left out for its default" if value is None and key not in required else ""
                complain(key, not_allowed(shown, declared[key]) + default)
        elif open_ended:
            checked[key] = value
        elif key in moved:
            complain(key, moved[key])
        else:
            none = "" if declared else f"{named} has no options; "
            complain(key, f"unknown key; {none}{suggest_key(key, keys)}")
    for key in required - set(given):
        complain(key, f"missing; it must be given for {named}")
    if problems:
        raise UserError("\n".join(problems))
    return checked


def declared_options(
    target: Callable[..., Any], given: Mapping[str, Any], supplied: Sequence[str]
) -> tuple[dict[str, Any], set[str], bool]:
    """Return the options of `target` (name -> annotation), the required ones, and whether it takes others."""
    is_dataclass = dataclasses.is_dataclass(target)
    try:
        plain_class = inspect.isclass(target) and not is_dataclass
        hints = get_type_hints(target.__init__ if plain_class else target, include_extras=True)
    except NameError:  # annotations that exist for a type checker only: the values go unchecked, the names do not
        hints = {}
    declared, required = dict[str, Any](), set[str]()
    if is_dataclass:
        for field in dataclasses.fields(target):  # type: ignore[arg-type]
            if not field.init or field.name in supplied:
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
        if parameter.name in supplied or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is parameter.empty
        if needed and position < len(supplied) and supplied[position] not in names and parameter.name not in given:
            continue  # the engine's argument, which the user's function names differently
        declared[parameter.name] = hints.get(parameter.name, Any)
        if needed:
            required.add(parameter.name)
    return declared, required, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
