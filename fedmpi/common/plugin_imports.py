"""Find the modules that a plug-in file imports from its own directory or package; they are part of its code.

The source text is searched rather than sys.modules, which may contain modules of another run and lacks modules that
hooks import only when they are called. Imports whose name is computed at run time are not found.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import is_users_file


def find_imports(plugin: Path) -> dict[str, Path]:
    """Return {name: file} of all modules that a plug-in imports from its own directory, directly or indirectly."""
    roots = _find_import_roots(plugin)
    files: dict[str, Path] = {}
    waiting = [(plugin, "")]
    while waiting:
        file, package = waiting.pop()
        for name in _find_imported_names(file, package or _get_dotted_package(plugin, roots[-1])):
            path = _find_module_file(name, roots)
            if path is not None and path != plugin and path not in files.values() and is_users_file(str(path)):
                files[name] = path
                waiting.append((path, name if path.name == "__init__.py" else name.rpartition(".")[0]))
    return dict(sorted(files.items()))


@contextmanager
def temporary_import_path(plugin: Path) -> Iterator[None]:
    """Append the directory of a plug-in to the import path while the plug-in is loaded.

    Raises:
        UserError: another plug-in has imported a different module under the name of a module in that directory.
    """
    for name in {name.partition(".")[0] for name in _find_imported_names(plugin, "")}:
        _check_name_clash(name, plugin.parent)
    place = str(plugin.parent)
    added = [place] if place not in sys.path else []
    sys.path.extend(added)
    try:
        yield
    finally:
        for each in added:
            sys.path.remove(each)


def _check_name_clash(name: str, place: Path) -> None:
    """Raise UserError if sys.modules already contains a module of another plug-in with this name."""
    known = getattr(sys.modules.get(name), "__file__", None)
    if known is None or Path(known).is_relative_to(place) or PathFinder.find_spec(name) is not None:
        return
    meant = PathFinder.find_spec(name, [str(place)])
    if meant is not None and meant.origin is not None:
        raise UserError(
            f"import {name} refers to {meant.origin} here, but another plug-in has already imported {known} under that "
            "name; rename one of the two files"
        )


def _find_import_roots(plugin: Path) -> list[Path]:
    """Return the directories in which a plug-in's absolute imports find modules.

    These are the plug-in's own directory, and the directory that contains its top-level package.
    """
    top = plugin.parent
    while (top / "__init__.py").is_file() and top != top.parent:
        top = top.parent
    return list(dict.fromkeys((plugin.parent, top)))


def _get_dotted_package(plugin: Path, top: Path) -> str:
    return ".".join(plugin.parent.relative_to(top).parts)


def _find_imported_names(file: Path, package: str) -> Iterator[str]:
    """Yield the names of the modules that a file imports, parents first.

    For `from a import b`, a.b is also yielded, even if b is not a module.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # reported when the file is loaded
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = _resolve_import(node, package)
            names = [f"{start}.{alias.name}".strip(".") for alias in node.names] if start is not None else []
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def _resolve_import(node: ast.ImportFrom, package: str) -> str | None:
    """Return the absolute name of the module in a `from` import; None if its dots lead out of the package."""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
    except ImportError:
        return None


def _find_module_file(name: str, roots: list[Path]) -> Path | None:
    if name.partition(".")[0] == "fedmpi":  # the directory may contain a clone of fedmpi
        return None
    parts = Path(*name.split("."))
    places = (place for root in roots for place in (root / parts / "__init__.py", (root / parts).with_suffix(".py")))
    return next((place for place in places if place.is_file()), None)
