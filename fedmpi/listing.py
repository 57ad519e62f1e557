"""What a config may name: the registries and the first lines of docstrings, read from the sources.

Importing would load torch, which takes seconds; reading takes milliseconds.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "methods": "fedmpi.methods",
    "models": "fedmpi.models",
    "datasets": "fedmpi.data.sources",
    "partitions": "fedmpi.data.partition",
    "tasks": "fedmpi.tasks",
}
_ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    name: str
    summary: str  # of a method: its module's, which is the reference; else the function's or class's


def entries(kind: str) -> list[Entry]:
    """The entries of one of `KINDS`, in the order of its registry."""
    found = []
    for name, target in _registry(_tree(KINDS[kind])).items():
        module, _, attribute = target.partition(":")
        tree = _tree(module)
        node = next((each for each in tree.body if getattr(each, "name", None) == attribute), None)
        found.append(Entry(name, _first_line(tree if kind == "methods" else node)))
    return found


def _tree(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8"), str(source))


def _registry(tree: ast.Module) -> dict[str, str]:
    """The right-hand side of `registry = ...` or `registry: type = ...`."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "registry" for target in targets):
            registry: dict[str, str] = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            return registry
    raise AssertionError("every module of KINDS has a registry")  # a test reads them all


def _first_line(node: ast.AST | None) -> str:
    documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    text = ast.get_docstring(node) if documented else None  # type: ignore[arg-type]
    return (text or "").split("\n", 1)[0]
