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
from fedmpi.common.redaction import MARK, is_marked, smells
from fedmpi.common.synonyms import advice
from fedmpi.common.text import allowed, show

_BOUNDS = ("ge", "gt", "le", "lt")


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
    """A hyperparameter: a dataclass field with its meaning and unit, its bounds, or the values it may take.

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
    beside: Collection[str] = (),
) -> dict[str, Any]:
    """`given`, converted to the declared types (a whole number for a float becomes a float, a list a tuple).

    Args:
        target: a function or (data)class; of a dataclass only its fields are options.
        given: what the config says; keys that are absent keep the target's own defaults.
        where: the section in the config ("method"); messages name `where.key`.
        supplied: parameters that the engine passes itself, in their order; a user's function may name them differently.
        origins: key -> where it was written ("run.yaml:7"); see `Settings.origins`.
        named: what the target is to the user ("method fedavg"), for messages.
        beside: the keys that the section has besides.

    Raises:
        UserError: one line for each key that is unknown, missing, of a wrong type or out of bounds.
    """
    declared, required, open_ended = declared_options(target, given, supplied)
    origins = origins or {}
    checked: dict[str, Any] = {}
    problems = []
    named = named or getattr(target, "__name__", str(target))
    keys, moved = [*declared, *beside], getattr(target, "MOVED", {})  # option of earlier versions -> what it is now

    def complain(key: str, text: str) -> None:
        prefix = f"{origins[key]}: " if key in origins else ""
        problems.append(f"{prefix}{where}.{key}: {text}")

    for key, value in given.items():
        if is_marked(value):
            complain(key, f"was left out of the run directory, for it may be a secret; give it: {where}.{key}=VALUE")
        elif key in declared:
            try:
                checked[key] = _convert(declared[key], value)
            except ValidationError as error:
                said = MARK if smells(key, value) else show(value)
                default = ", or left out for its default" if value is None and key not in required else ""
                complain(key, f"{said} is not allowed; must be {allowed(error.errors())}{default}")
        elif open_ended:
            checked[key] = value
        elif key in moved:
            complain(key, moved[key])
        else:
            complain(key, f"unknown key; {_untyped(target, key)}{_none(named, declared)}{advice(key, where, keys)}")
    for key in required - set(given):
        complain(key, f"missing; it must be given for {named}")
    if problems:
        raise UserError("\n".join(problems))
    return checked


def _none(named: str, declared: Collection[str]) -> str:
    return "" if declared else f"{named} has no options; "


def _untyped(target: Callable[..., Any], key: str) -> str:
    """`mu = 0.1` in a dataclass is no field: the mistake of its author, not of who gives `mu`."""
    if dataclasses.is_dataclass(target) and not key.startswith("_") and key in vars(target):
        return f"{getattr(target, '__name__', target)}.{key} is no option without a type: write {key}: float = ...; "
    return ""


def declared_options(
    target: Callable[..., Any], given: Mapping[str, Any], supplied: Sequence[str]
) -> tuple[dict[str, Any], set[str], bool]:
    """The options of `target`: name -> annotation with bounds; which are required; whether other keys are accepted."""
    hints = _hints(target)
    if dataclasses.is_dataclass(target):
        fields = [field for field in dataclasses.fields(target) if field.init and field.name not in supplied]
        missing = dataclasses.MISSING
        required = {f.name for f in fields if f.default is missing and f.default_factory is missing}
        return {f.name: _bounded(hints.get(f.name, Any), f.metadata) for f in fields}, required, False
    parameters = list(inspect.signature(target).parameters.values())
    names = {parameter.name for parameter in parameters}
    declared, required = {}, set()
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


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    plain_class = inspect.isclass(target) and not dataclasses.is_dataclass(target)
    try:
        return get_type_hints(target.__init__ if plain_class else target, include_extras=True)
    except NameError:  # annotations that exist for a type checker only: the values go unchecked, the names do not
        return {}


def _bounded(hint: Any, metadata: Mapping[str, Any]) -> Any:
    if metadata.get("choices") is not None:
        return Literal[tuple(metadata["choices"])]
    bounds = {name: metadata[name] for name in _BOUNDS if metadata.get(name) is not None}
    return Annotated[hint, Field(**bounds)] if bounds else hint


def _convert(hint: Any, value: Any) -> Any:
    """`value` as a `hint`, strictly, through JSON: a list may become a tuple and text a path, but "1" is no number."""
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=config)
    return adapter.validate_json(json.dumps(value), strict=True)
