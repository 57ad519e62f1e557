"""List the components that a config can select, such as methods and models, and describe their options.

Names and summaries are parsed from the source files, which takes milliseconds, without importing torch.
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
from fedmpi.common.registry import load_object, split_library_name
from fedmpi.common.type_descriptions import describe_type, describe_value

KIND_MODULES = {
    "methods": "fedmpi.methods",
    "models": "fedmpi.models",
    "datasets": "fedmpi.data.sources",
    "partitions": "fedmpi.data.partitions",
    "augmentations": "fedmpi.data.transforms",
    "tasks": "fedmpi.tasks",
    "rules": "fedmpi.aggregation.rules",
    "loggers": "fedmpi.runtime.record.loggers",
}
_ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class OptionDescription:
    """The name, type, default and meaning of one option of a component."""

    name: str
    type: str  # the type with its bounds, in words
    default: str  # "required" if there is none
    meaning: str


@dataclasses.dataclass(frozen=True)
class ComponentDescription:
    """The description of a component that a config can name, with its options."""

    kind: str  # a key of KIND_MODULES
    name: str
    text: str  # the docstring of a method's module, or of another component's function or class
    options: tuple[OptionDescription, ...]


def list_summaries(kind: str) -> dict[str, str]:
    """Return the first line of the docstring of each component of a kind (a key of `KIND_MODULES`), by name.

    For a method, the first paragraph of its module's docstring is used, because it cites the paper.
    """
    return _summarize(kind, read_registry(kind))


def list_library_summaries(kind: str) -> dict[str, str]:
    """Return the first line of the docstring for each library of a kind, by the form of its names: `timm:NAME`."""
    return _summarize(kind, {f"{prefix}:NAME": target for prefix, target in read_libraries(kind).items()})


def _summarize(kind: str, targets: dict[str, str]) -> dict[str, str]:
    listed = {}
    for name, target in targets.items():
        module, _, attribute = target.partition(":")
        source = parse_module(module)
        node = source if kind == "methods" else next(n for n in source.body if getattr(n, "name", None) == attribute)
        text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
        listed[name] = " ".join(text.partition("\n\n" if kind == "methods" else "\n")[0].split())
    return listed


def read_registry(kind: str) -> dict[str, str]:
    """Return the registry of one kind of component: name -> "package.module:Name".

    The assignment `registry = ...` is parsed from source code, without importing the module.
    """
    entries = _read_table(kind, "registry")
    assert entries is not None, "every module of KIND_MODULES has a registry"  # a test reads all of them
    return entries


def read_libraries(kind: str) -> dict[str, str]:
    """Return the libraries whose components a config can select, such as timm for models: prefix -> "module:Name".

    The assignment `LIBRARIES = ...` is parsed from the source code of the kind's module. Without it the result is {}.
    """
    return _read_table(kind, "LIBRARIES") or {}


def _read_table(kind: str, variable: str) -> dict[str, str] | None:
    """Parse the dictionary that the module of a kind assigns to a variable; None if there is no such variable."""
    for statement in parse_module(KIND_MODULES[kind]).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            entries: dict[str, str] = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            return entries
    return None


def parse_module(module: str) -> ast.Module:
    """Return the syntax tree of a module of fedmpi, without importing it."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8"), str(source))


def describe_components_named(name: str) -> list[ComponentDescription]:
    """Return the descriptions of all components with this name, which, for example, a method and a model may share."""
    return [
        describe_component(kind, name)
        for kind in KIND_MODULES
        if name in read_registry(kind) or split_library_name(name, read_libraries(kind))
    ]


def describe_component(kind: str, name: str) -> ComponentDescription:
    """Return the description of one component with its options. This imports the component and torch."""
    module = importlib.import_module(KIND_MODULES[kind])
    target = load_object(name, module.registry, module.KIND.label, "", module.KIND.libraries)
    text = inspect.cleandoc((sys.modules[target.__module__] if kind == "methods" else target).__doc__ or "")
    own = ("download",) if kind == "datasets" else ()  # data.download
    supplied = (*module.KIND.engine_arguments, *module.KIND.optional_arguments, *own)
    hints, required, _ = options.read_declared_options(target, inspect.signature(target).parameters, supplied)
    if dataclasses.is_dataclass(target):
        documented = {each.name: (each.default, each.metadata.get("doc", "")) for each in dataclasses.fields(target)}
    else:
        about, parameters = inspect.cleandoc(target.__doc__ or ""), inspect.signature(target).parameters
        documented = {key: (each.default, _describe_parameter(about, key)) for key, each in parameters.items()}
    described_options = []
    for key, hint in hints.items():
        default = "required" if key in required else describe_value(documented[key][0])
        described_options.append(OptionDescription(key, describe_type(hint), default, documented[key][1]))
    return ComponentDescription(kind, name, text, tuple(described_options))


def _describe_parameter(text: str, name: str) -> str:
    """Find a parameter's description in a docstring: the text after `name:`, or the first sentence with the name."""
    plain = re.sub(r"\s+", " ", text)
    own = re.search(rf"(?:^|[.;:,)] ){name}: (.+?)(?=\. |[;.] \w+: |\.?$)", plain)
    if own:
        return own[1].strip()
    sentences = re.split(r"(?<=[.;]) ", plain)
    sentence = next((each.rstrip(".;") for each in sentences if re.search(rf"\b{name}\b", each)), "")
    return sentence if sentence.count("(") == sentence.count(")") else sentence.rpartition(" (")[0]
