"""Describe types and values as a config has them: Annotated[float, Field(ge=0, lt=1)] is `number >= 0, < 1`."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_PLAIN = {int: "whole number", float: "number", bool: "true, false", str: "text", Path: "path", NoneType: "null"}
_PLAIN |= {Any: "any", dict: "mapping", list: "list", tuple: "list"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe_type(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe a type and its bounds.

    Args:
        metadata: the other arguments of Annotated, where pydantic has separated them from the type.

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
    else:
        description = _PLAIN.get(origin or hint) or str(getattr(hint, "__name__", hint))
    bounds = []
    # A pydantic Field holds what it is made of (Ge(0), MinLen(1)) as its own metadata.
    for part in (part for each in metadata for part in getattr(each, "metadata", [each])):
        bounds += [
            f"{sign} {getattr(part, key):,}" for key, sign in _SIGNS.items() if getattr(part, key, None) is not None
        ]
        lengths = {"at least": getattr(part, "min_length", None), "at most": getattr(part, "max_length", None)}
        bounds += [f"({word} {length} long)" for word, length in lengths.items() if length is not None]
    if description == "text":  # nearly every text is not to be empty
        bounds = [text for text in bounds if text != "(at least 1 long)"]
    return description + (" " if bounds else "") + ", ".join(bounds)


def describe_value(value: Any) -> str:
    """Return a value as a config has it, on one line.

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
