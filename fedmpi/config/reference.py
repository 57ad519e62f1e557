"""List all config keys with their types, defaults and meanings, from the schema and the comments on its fields."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedmpi.common.type_descriptions import describe_type, describe_value
from fedmpi.config.field_types import OpenSection
from fedmpi.config.schema import section_class


@dataclass(frozen=True)
class ConfigKey:
    """A config key with its type, default and meaning, for the documentation."""

    name: str  # dotted
    kind: str  # the type with its bounds; "section" for a section
    default: str  # "" for a section; "required" if there is none
    meaning: str
    section: type[BaseModel] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the key is a section that also contains the options of a component, such as a method."""
        return self.section is not None and issubclass(self.section, OpenSection)


def list_keys(path: tuple[str, ...] = ()) -> Iterator[ConfigKey]:
    """Yield all keys of a section and of its subsections, each section before its keys.

    Args:
        path: The keys that lead to the section, outermost first; () for the whole config.
    """
    holder = section_class(path)
    assert holder is not None
    for name, declared in holder.model_fields.items():
        key_path = (*path, name)
        inner, dotted = section_class(key_path), ".".join(key_path)
        meaning = declared.description or _field_comment(holder, name)
        if inner is None:
            kind = describe_type(declared.annotation, declared.metadata)
            yield ConfigKey(dotted, kind, _format_default(declared), meaning)
        else:
            own_text = ("__doc__" in vars(inner) and inner.__doc__) or ""
            yield ConfigKey(dotted, "section", "", meaning or " ".join(own_text.split("\n\n")[0].split()), inner)
            yield from list_keys(key_path)


def _format_default(declared: FieldInfo) -> str:
    """Return the default of a field as text."""
    if declared.is_required():
        return "required"
    if isinstance(declared.json_schema_extra, dict):  # the default depends on the environment
        return str(declared.json_schema_extra["default"])
    return describe_value(declared.default)


def _field_comment(holder: type[BaseModel], name: str) -> str:
    """Return the comments above a field and on its line, in the source code of the class that declares it."""
    kinds = [kind for kind in holder.__mro__ if name in vars(kind).get("__annotations__", {})]
    return _class_comments(kinds[0]).get(name, "")


@lru_cache
def _class_comments(kind: type[BaseModel]) -> dict[str, str]:
    """Return {field: comment} for a class, read from its source code."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    by_name = {}
    for field in (each for each in ast.walk(definition) if isinstance(each, ast.AnnAssign)):
        first = field.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        matches = (re.search(r"(?:^|\s)# (.*)$", line) for line in lines[first : field.end_lineno])
        by_name[ast.unparse(field.target)] = " ".join(each[1] for each in matches if each)
    return by_name
