"""List what a config may name, and describe the options of each.

Names and first lines are read from the sources, in milliseconds: importing would load torch, which takes seconds.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fedmpi.common import options
from fedmpi.common.registry import load
from fedmpi.common.type_descriptions import describe_type, describe_value

KINDS = {
    "methods": "fedmpi.methods",
    "models": "fedmpi.models",
    "datasets": "fedmpi.data.sources",
    "partitions": "fedmpi.data.partitions",
    "augmentations": "fedmpi.data.augment",
    "tasks": "fedmpi.tasks",
    "rules": "fedmpi.aggregation.rules",
    "trackers": "fedmpi.runtime.record.tracking",
}
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Entry:
    name: str
    summary: str  # first line of a docstring: a method's module's (the reference), else the function's or class's
    facts: dict[str, str] = field(default_factory=dict)  # of a method: paper, what it changes, keeps and sends

    @property
    def line(self) -> str:
        """What `fedmpi list` shows."""
        if not self.facts:
            return self.summary
        parts = [self.facts["paper"], *(f"{key} {self.facts[key]}" for key in ("changes", "keeps", "sends"))]
        return "; ".join(part for part in parts if not part.endswith(" "))


@dataclass(frozen=True)
class Option:
    name: str
    type: str  # with its bounds, in words
    default: str  # "required" where there is none
    meaning: str


@dataclass(frozen=True)
class Description:
    kind: str  # of KINDS
    name: str
    text: str  # the docstring: of a method's file, else of the function or class
    options: tuple[Option, ...]


def entries(kind: str) -> list[Entry]:
    """Return the entries of one of `KINDS`, in the order of its registry."""
    listed = []
    for name, target in registry(kind).items():
        module, _, attribute = target.partition(":")
        source = tree(module)
        node = next((each for each in source.body if getattr(each, "name", None) == attribute), None)
        if kind == "methods" and isinstance(node, ast.ClassDef):
            listed.append(Entry(name, _first_line(source), _facts(node)))
        else:
            listed.append(Entry(name, _first_line(node)))
    return listed


def registry(kind: str) -> dict[str, str]:
    """Return name -> "package.module:Name" of one of `KINDS`: the right-hand side of its `registry = ...`."""
    for statement in tree(KINDS[kind]).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "registry" for target in targets):
            entries: dict[str, str] = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            return entries
    raise AssertionError("every module of KINDS has a registry")  # a test reads them all


def tree(module: str) -> ast.Module:
    """Return a module of ours, parsed."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8"), str(source))


def described(name: str) -> list[Description]:
    """Describe what has this name, in every kind."""
    return [description(kind, name) for kind in KINDS if name in registry(kind)]


def description(kind: str, name: str) -> Description:
    """Describe what `name` stands for, with its options. It is imported, with torch."""
    module = importlib.import_module(KINDS[kind])
    target = load(name, module.registry, kind)
    text = inspect.cleandoc((sys.modules[target.__module__] if kind == "methods" else target).__doc__ or "")
    supplied = (*module.KIND.supplied, *(("download",) if kind == "datasets" else ()))  # a key that the section has
    hints, required, _ = options.declared_options(target, inspect.signature(target).parameters, supplied)
    if dataclasses.is_dataclass(target):
        documented = {each.name: (each.default, each.metadata.get("doc", "")) for each in dataclasses.fields(target)}
    else:
        about, parameters = inspect.cleandoc(target.__doc__ or ""), inspect.signature(target).parameters
        documented = {key: (each.default, _meaning(about, key)) for key, each in parameters.items()}
    described_options = []
    for key, hint in hints.items():
        default = "required" if key in required else describe_value(documented[key][0])
        described_options.append(Option(key, describe_type(hint), default, documented[key][1]))
    return Description(kind, name, text, tuple(described_options))


def _meaning(text: str, name: str) -> str:
    """Return what a docstring says of a parameter: `name: ...` up to the next one, else the sentence that names it."""
    plain = re.sub(r"\s+", " ", text)
    own = re.search(rf"(?:^|[.;:,)] ){name}: (.+?)(?=\. |[;.] \w+: |\.?$)", plain)
    if own:
        return own[1].strip()
    sentences = re.split(r"(?<=[.;]) ", plain)
    sentence = next((each.rstrip(".;") for each in sentences if re.search(rf"\b{name}\b", each)), "")
    return sentence if sentence.count("(") == sentence.count(")") else sentence.rpartition(" (")[0]


def _facts(node: ast.ClassDef) -> dict[str, str]:
    """Return what a method's class body declares: paper, the hooks it changes, the slots it keeps and sends."""
    assigned = [(t, s.value) for s in node.body if isinstance(s, ast.Assign) for t in s.targets]
    values = {target.id: value for target, value in assigned if isinstance(target, ast.Name)}
    functions = {s.name: s for s in node.body if isinstance(s, ast.FunctionDef)}
    keeps = [
        f"{name} ({where})"
        for where, key in (("client", "client_state"), ("server", "server_state"))
        for name in _slots(values.get(key) or functions.get(key))
    ]
    return {
        "paper": ast.literal_eval(values["paper"]) if "paper" in values else "",
        "changes": ", ".join(name for name in functions if name in _hooks()),
        "keeps": ", ".join(keeps),
        "sends": ", ".join(_slots(values.get("sends")) or ["dw"]),
    }


def _hooks() -> set[str]:
    """Return the public functions of Method, in whose class body the hooks are listed."""
    base = next(n for n in tree("fedmpi.method.base").body if isinstance(n, ast.ClassDef) and n.name == "Method")
    return {n.name for n in base.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}


def _slots(value: ast.AST | None) -> list[str]:
    """Return the names in all Slots(name=...) of an expression, or of a function that declares them by options."""
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Slots"] if value else []
    return [k.arg for call in calls for k in call.keywords if k.arg]


def _first_line(node: ast.AST | None) -> str:
    documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    text = ast.get_docstring(node) if documented else None  # type: ignore[arg-type]
    return (text or "").split("\n", 1)[0]
