"""Every key of a config with its type, default and meaning, from the schema and the comments beside its fields."""

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedmpi.common.type_descriptions import describe_type, describe_value
from fedmpi.config.field_types import OpenSection, ShortSection
from fedmpi.config.schema import section


@dataclass(frozen=True)
class Key:
    name: str  # dotted
    kind: str  # with bounds; "section" of a section
    default: str  # "" of a section; "required"
    meaning: str
    section: type[BaseModel] | None = None

    @property
    def open(self) -> bool:
        """Whether a section takes the options of the thing that it names."""
        return self.section is not None and issubclass(self.section, OpenSection)


def keys(path: tuple[str, ...] = ()) -> Iterator[Key]:
    """All keys below a section, () for the whole config, each section before what it holds."""
    holder = section(path)
    assert holder is not None
    for name, declared in holder.model_fields.items():
        here = (*path, name)
        inner = section(here)
        meaning = declared.description or _beside(holder, name)
        if inner is None:
            yield Key(
                ".".join(here), describe_type(declared.annotation, declared.metadata), _default(declared), meaning
            )
        else:
            yield Key(".".join(here), "section", "", meaning or _docstring(inner), inner)
            yield from keys(here)


def _default(declared: FieldInfo) -> str:
    if declared.is_required():
        return "required"
    if isinstance(declared.json_schema_extra, dict):  # what the environment says
        return str(declared.json_schema_extra["default"])
    return describe_value(declared.default)


def _docstring(kind: type[BaseModel]) -> str:
    """The first paragraph, unless it is that of the class it derives from."""
    inherited = kind.__doc__ in (None, OpenSection.__doc__, ShortSection.__doc__)
    return "" if inherited else re.sub(r"\s+", " ", inspect.cleandoc(str(kind.__doc__)).split("\n\n")[0])


def _beside(holder: type[BaseModel], name: str) -> str:
    """The comment above a field and on its own lines, in the first class that declares it."""
    for kind in holder.__mro__:
        if kind.__module__.startswith("fedmpi.config") and name in vars(kind).get("__annotations__", {}):
            comment = _commented(str(inspect.getsourcefile(kind))).get((kind.__name__, name))
            if comment is not None:
                return comment
    return ""


@lru_cache
def _commented(file: str) -> dict[tuple[str, str], str]:
    """(class, field) -> comment, of one source file."""
    source = Path(file).read_text(encoding="utf-8")
    lines = source.splitlines()
    with open(file, "rb") as stream:
        tokens = [token for token in tokenize.tokenize(stream.readline) if token.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens}
    alone = {token.start[0] for token in tokens if lines[token.start[0] - 1].lstrip().startswith("#")}
    by_name = {}
    for kind in (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)):
        for field in (each for each in kind.body if isinstance(each, ast.AnnAssign)):
            first = field.lineno
            while first - 1 in alone:
                first -= 1
            parts = [comments[n] for n in range(first, (field.end_lineno or field.lineno) + 1) if n in comments]
            by_name[kind.name, ast.unparse(field.target)] = " ".join(parts)
    return by_name
