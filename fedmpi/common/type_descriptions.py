"""Describe types and values as in a config: Annotated[float, Field(ge=0, lt=1)] is `number >= 0, < 1`."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from fedmpi.common.text import pluralize, shorten_repr

_PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path", NoneType: "null"}
_PLAIN |= {Any: "any", dict: "mapping", list: "list", tuple: "list"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def format_not_allowed(value: Any, hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Format the error message for a value that does not have the declared type.

    >>> format_not_allowed("x", int | None), format_not_allowed(float("inf"), float)
    ("'x' is not allowed; must be: whole number; null", 'inf is not allowed; must be: number, finite')
    """
    finite = ", finite" if isinstance(value, float) and not math.isfinite(value) else ""
    return f"{shorten_repr(value)} is not allowed; must be: {describe_type(hint, metadata)}{finite}"


def describe_type(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe a type and its bounds for messages and for the reference of config keys.

    Args:
        metadata: the other arguments of Annotated, if pydantic has separated them from the type.

    >>> from pydantic import Field
    >>> describe_type(Annotated[float, Field(gt=0)] | Literal["auto"] | None)
    'number > 0; auto; null'
    >>> describe_type(tuple[Annotated[int, Field(ge=1)], ...]), describe_type(Literal["a", "b"])
    ('list of: whole number >= 1', 'a, b')
    """
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe_type(inside[0], (*inside[1:], *metadata))
    if origin in (Union, UnionType):
        return "; ".join(describe_type(each, () if each is NoneType else metadata) for each in inside)
    elif origin is Literal:
        description = ", ".join(describe_value(each) for each in inside)
    elif inspect.isclass(origin) and issubclass(origin, Sequence):
        items = dict.fromkeys(describe_type(each) for each in inside if each is not ...)
        description = (
            f"list of: {', '.join(items)}" if len(items) == 1 or ... in inside else f"list: {', '.join(items)}"
        )
    elif inspect.isclass(hint) and issubclass(hint, BaseModel):
        description = "mapping (`key: value` lines)"
    else:
        description = _PLAIN.get(origin or hint) or str(getattr(hint, "__name__", hint))
    bounds = []
    least = most = None
    # A pydantic Field has its bounds, such as Ge(0) and MinLen(1), in its own metadata.
    for part in (part for each in metadata for part in getattr(each, "metadata", [each])):
        limits = {sign: getattr(part, key, None) for key, sign in _SIGNS.items()}
        bounds += [f"{sign} {limit:,}" for sign, limit in limits.items() if limit is not None]
        least, most = getattr(part, "min_length", None) or least, getattr(part, "max_length", None) or most
    if description == "text" and least == 1:  # nearly all texts must not be empty
        least = None
    thing = "character" if description == "text" else "item"
    if least is not None and least == most:
        bounds += [f"(exactly {pluralize(least, thing)})"]
    else:
        bounds += [f"(at least {pluralize(least, thing)})"] if least is not None else []
        bounds += [f"(at most {pluralize(most, thing)})"] if most is not None else []
    return description + (" " if bounds else "") + ", ".join(bounds)


def describe_value(value: Any) -> str:
    """Format a value as in a config (YAML), on one line.

    >>> describe_value(None), describe_value((1, 2)), describe_value({"source": "web", "size": 0.5})
    ('null', '[1, 2]', '{source: web, size: 0.5}')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (str, Path)):
        return str(value) or '""'
    if isinstance(value, Sequence):
        return f"[{', '.join(describe_value(each) for each in value)}]"
    return json.dumps(value, default=str)
