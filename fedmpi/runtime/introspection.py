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


@dataclasses.dataclass(frozen=True)
class Option:
    name: str
    type: str  # with its bounds, in words
    default: str  # "required" where there is none
    meaning: str


@dataclasses.dataclass(frozen=True)
class Description:
    kind: str  # of KINDS
    name: str
    text: str  # the docstring: of a method's file, else of the function or class
    options: tuple[Option, ...]


def summaries(kind: str) -> dict[str, str]:
    """Return {name: first line of its docstring} of one of `KINDS`; of a method the reference, with which its module
    begins."""
    listed = {}
    for name, target in registry(kind).items():
        module, _, attribute = target.partition(":")
        source = tree(module)
        node = source if kind == "methods" else next(n for n in source.body if getattr(n, "name", None) == attribute)
        text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
        listed[name] = " ".join(text.partition("\n\n" if kind == "methods" else "\n")[0].split())
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
