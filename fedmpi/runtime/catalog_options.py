"""The options of what a config may name: type, bounds, default and meaning, read from the sources as catalog.py does.

Of a dataclass the fields that `option` declares; of a function its parameters, of any other class those of __init__,
without what the engine supplies; their meaning is what the docstring says of them.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field

from fedmpi.common.typewords import value_words, words
from fedmpi.runtime import catalog

_BOUNDS = ("ge", "gt", "le", "lt")
_KNOWN = {
    **{"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "tuple": tuple},
    **{"Sequence": Sequence, "Callable": Callable, "Path": Path, "sorted": sorted},
    **{"Annotated": Annotated, "Literal": Literal, "Any": Any, "Field": Field, "None": None},
}


@dataclass(frozen=True)
class Option:
    name: str
    type: str
    default: str  # "required" where there is none
    meaning: str


@dataclass(frozen=True)
class Description:
    kind: str  # of catalog.KINDS
    name: str
    text: str  # the docstring: of a method's file, else of the function or class
    options: tuple[Option, ...]


def described(name: str) -> list[Description]:
    """What has this name, in every kind."""
    return [description(kind, name) for kind in catalog.KINDS if name in catalog.registry(kind)]


def description(kind: str, name: str) -> Description:
    module, _, attribute = catalog.registry(kind)[name].partition(":")
    tree = catalog.tree(module)
    node = next(n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == attribute)
    text = (ast.get_docstring(tree if kind == "methods" else node) or "").strip()
    names = _Names(tree)
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        found = list(_fields(node, names))
    else:
        found = list(_parameters(kind, node, names, ast.get_docstring(node) or ""))
    return Description(kind, name, text, tuple(found))


class _Names(dict[str, Any]):
    """What the names in a module's annotations and defaults stand for; of those that are not worth importing, the name
    itself."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(_KNOWN)
        self._assigned = {
            ast.unparse(each.target if isinstance(each, ast.AnnAssign) else each.targets[0]): each.value
            for each in tree.body
            if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value
        }
        self._from = {
            alias.asname or alias.name: (str(each.module), alias.name)
            for each in tree.body
            if isinstance(each, ast.ImportFrom)
            for alias in each.names
        }

    def __missing__(self, name: str) -> Any:
        module, there = self._from.get(name, ("", ""))
        if name in self._assigned:
            value = self.value(self._assigned[name])
        elif module.startswith("fedmpi."):
            value = _of_module(module)[there]
        else:
            value = type(name, (), {})
        self[name] = value
        return value

    def value(self, node: ast.expr) -> Any:
        """Our own source's constant or annotation, such as Annotated[float, Field(gt=0)]."""
        try:
            return eval(compile(ast.Expression(node), "annotation", "eval"), {"__builtins__": {}}, self)
        except (AttributeError, TypeError, NameError):
            return type(ast.unparse(node), (), {})


@lru_cache
def _of_module(module: str) -> _Names:
    return _Names(catalog.tree(module))


def _fields(node: ast.stmt, names: _Names) -> Iterator[Option]:
    assert isinstance(node, ast.ClassDef)
    for each in (n for n in node.body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation)):
        call = each.value if isinstance(each.value, ast.Call) else None
        given = {str(k.arg): names.value(k.value) for k in call.keywords} if call else {}
        if given.get("init") is False:
            continue
        said = [names.value(argument) for argument in call.args] if call else []
        choices = given.get("choices")
        bounds = SimpleNamespace(**{key: given[key] for key in _BOUNDS if key in given})
        kind = ", ".join(map(value_words, choices)) if choices else words(names.value(each.annotation), (bounds,))
        plain = [names.value(each.value)] if each.value and not call else []
        default = value_words([*said, *plain, given.get("default")][0]) if each.value else "required"
        doc = said[1] if len(said) > 1 else given.get("metadata", {}).get("doc", "")
        yield Option(ast.unparse(each.target), kind, default, doc)


def _parameters(kind: str, node: ast.stmt, names: _Names, text: str) -> Iterator[Option]:
    function = node
    if isinstance(node, ast.ClassDef):
        function = next((n for n in node.body if getattr(n, "name", "") == "__init__"), node)
    if not isinstance(function, ast.FunctionDef):
        return
    given = function.args
    missing = [None] * (len(given.args) - len(given.defaults))
    pairs = [*zip(given.args, [*missing, *given.defaults], strict=True)]
    pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    left_out = {"self", *_supplied(kind)}
    for parameter, default in pairs:
        if parameter.arg not in left_out:
            hint = words(names.value(parameter.annotation)) if parameter.annotation else "any"
            value = value_words(names.value(default)) if default is not None else "required"
            yield Option(parameter.arg, hint, value, _said(text, parameter.arg))


def _supplied(kind: str) -> tuple[str, ...]:
    """What the engine passes itself: the last argument of KIND = Kind(...); keys that the section has besides."""
    for each in catalog.tree(catalog.KINDS[kind]).body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "KIND" and isinstance(each.value, ast.Call):
            beside = ("download",) if kind == "datasets" else ()
            return (*(ast.literal_eval(each.value.args[3]) if len(each.value.args) > 3 else ()), *beside)
    raise AssertionError(f"{kind} has its KIND")  # a test reads them all


def _said(text: str, name: str) -> str:
    """`name: ...` up to the next option, else the sentence that speaks of it."""
    plain = re.sub(r"\s+", " ", text)
    own = re.search(rf"(?:^|[.;:,)] ){name}: (.+?)(?=\. |[;.] \w+: |\.?$)", plain)
    if own:
        return own[1].strip()
    sentences = re.split(r"(?<=[.;]) ", plain)
    found = next((each.rstrip(".;") for each in sentences if re.search(rf"\b{name}\b", each)), "")
    return found if found.count("(") == found.count(")") else found.rpartition(" (")[0]
