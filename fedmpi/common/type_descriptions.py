"""Describe types and values for configs, their documentation and messages.

For example, Annotated[float, Field(ge=0, lt=1)] is described as `number >= 0 and < 1`.
"""

import ast
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from fedmpi.common.text import pluralize, shorten, shorten_repr

_PLAIN = {int: "whole number", float: "number", str: "string", Path: "path", NoneType: "null"}
_PLAIN |= {Any: "any", dict: "mapping", list: "list", tuple: "list"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LENGTHS = ("min_length", "max_length")


def format_not_allowed(value: Any, hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Format the error message for a value that does not have the declared type.

    >>> format_not_allowed("x", int | None), format_not_allowed(float("inf"), float)
    ("'x' is not allowed; must be a whole number or null", 'inf is not allowed; must be a finite number')
    """
    alternatives = _list_alternatives(hint, metadata)
    if isinstance(value, float) and not math.isfinite(value):
        alternatives = [f"finite {each}" if each.startswith("number") else each for each in alternatives]
    if value == "":
        alternatives = ["non-empty string" if each == "string" else each for each in alternatives]
    nouns = (
        "whole number",
        "number",
        "finite number",
        "string",
        "non-empty string",
        "list",
        "non-empty list",
        "path",
        "mapping",
    )
    allowed = [f"a {each}" if each.startswith(nouns) else each for each in alternatives]
    return f"{shorten_value(value)} is not allowed; must be {join_alternatives(allowed)}"


def describe_type(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe a type and its bounds for the config reference.

    Args:
        metadata: the other arguments of Annotated, if pydantic has separated them from the type.

    >>> from pydantic import Field
    >>> describe_type(Annotated[float, Field(gt=0)] | Literal["auto"] | None)
    'number > 0, auto or null'
    >>> describe_type(Annotated[list[Annotated[int, Field(ge=1, le=9)]], Field(min_length=1)]), describe_type(bool)
    ('non-empty list of whole numbers from 1 to 9', 'true or false')
    """
    return join_alternatives(_list_alternatives(hint, metadata))


def join_alternatives(alternatives: Sequence[str]) -> str:
    """Join alternatives with commas, and the last one with "or"."""
    if len(alternatives) == 1:
        return alternatives[0]
    comma = "," if any(word in each for each in alternatives for word in (" and ", " or ", " from ")) else ""
    return f"{', '.join(alternatives[:-1])}{comma} or {alternatives[-1]}"


def _list_alternatives(hint: Any, metadata: Sequence[Any] = ()) -> list[str]:
    """Return a description of each value or kind of value that a type allows."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if description := next((each for each in inside[1:] if isinstance(each, str)), ""):
            return [description]
        return _list_alternatives(inside[0], (*inside[1:], *metadata))
    if origin in (Union, UnionType):
        return [text for each in inside for text in _list_alternatives(each, () if each is NoneType else metadata)]
    if origin is Literal:
        return [describe_value(each) for each in inside]
    if hint is bool:
        return ["true", "false"]
    # A pydantic Field has its bounds, such as Ge(0) and MinLen(1), in its own metadata.
    parts = [part for each in metadata for part in getattr(each, "metadata", [each])]
    limits = {key: getattr(part, key) for part in parts for key in _SIGNS if getattr(part, key, None) is not None}
    least, most = (next((getattr(part, key) for part in parts if getattr(part, key, None)), None) for key in _LENGTHS)
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return [_describe_list([each for each in inside if each is not ...], ... in inside, least, most)]
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        return ["mapping (`key: value` lines)"]
    description = _PLAIN.get(origin or hint) or str(getattr(hint, "__name__", hint))
    if description == "string":  # nearly all strings must not be empty, so this bound is not mentioned
        return [description + (f" of at most {pluralize(most, 'character')}" if most else "")]
    if limits.keys() == {"ge", "le"}:
        return [f"{description} from {limits['ge']:,} to {limits['le']:,}"]
    return [" ".join([description, " and ".join(f"{_SIGNS[key]} {limit:,}" for key, limit in limits.items())]).strip()]


def _describe_list(items: Sequence[Any], repeated: bool, least: int | None, most: int | None) -> str:
    """Describe a list or tuple by its items and its length.

    Args:
        items: the types of the items.
        repeated: whether this is a tuple of any number of items of one type, tuple[X, ...].
        least: the minimum length, or None.
        most: the maximum length, or None.
    """
    kinds = list(dict.fromkeys(join_alternatives(_list_alternatives(each)) for each in items))
    if len(kinds) != 1 and not repeated:
        return f"list ({', '.join(kinds)})"
    single = kinds[0] if kinds else "any"
    plural = re.sub("^(whole number|number|string|path|mapping)", r"\1s", single)
    if least is not None and least == most:
        return f"list of exactly {least} {plural}"
    size = f" (at most {pluralize(most, 'item')})" if most else ""
    return f"{'non-empty list' if least == 1 else 'list'} of {plural}{size}"


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


def shorten_value(value: Any) -> str:
    """Format a value of a config for a message: strings in quotes, other values as in YAML; at most 60 characters.

    >>> shorten_value("a"), shorten_value(None), shorten_value({"mu": None, "name": "fedprox"})
    ("'a'", 'null', '{mu: null, name: fedprox}')
    """
    return shorten_repr(value) if isinstance(value, str | float) else shorten(describe_value(value))


def describe_stored_value(text: str) -> str:
    """Format a value of identity.json, which is stored as its Python repr, in the syntax of a config.

    >>> describe_stored_value("None"), describe_stored_value("['a', 'b']"), describe_stored_value("digits")
    ('null', '[a, b]', 'digits')
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return text if isinstance(value, int | float) and not isinstance(value, bool) else describe_value(value)
