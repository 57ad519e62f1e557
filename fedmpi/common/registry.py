"""Look up the object that a name in a config stands for.

Wherever a method, model, task, data source, partition or server rule is named, three spellings are understood:

    fedavg                      a key of the registry of its kind
    my/file.py:Name             `Name` in a Python file (relative: to the working directory)
    package.module:Name         `Name` in an importable module

Registries map keys to "package.module:Name" strings, so reading them imports nothing. `make` is the way from a section
of a config, a name and its options, to the object. Within `own_code_only()` the last two spellings are refused.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fedmpi.common import options, plugin_imports
from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest, shorten, show
from fedmpi.common.user_code_errors import is_users_file

_own_only = ContextVar("own_only", default=False)


@contextmanager
def own_code_only() -> Iterator[None]:
    """Refuse to import anything that is not in a registry, as for a config of somebody else."""
    token = _own_only.set(True)
    try:
        yield
    finally:
        _own_only.reset(token)


@dataclass(frozen=True)
class PluginKind:
    """A kind of thing that configs name: methods, models, ..."""

    label: str  # "model", for messages
    registry: Mapping[str, str]
    section: str  # where configs name it, "model"
    supplied: tuple[str, ...] = ()  # parameters that the engine passes itself, in their order


class Choice(Protocol):
    """A section of a config that names a method, a model, ... and holds its options."""

    @property
    def selected_name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def reserved_keys(self) -> tuple[str, ...]: ...  # keys of the section that are not the thing's own


@dataclass(frozen=True)
class Selection:
    """A choice that is not a section of a config."""

    selected_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reserved_keys: tuple[str, ...] = ()


def make(kind: PluginKind, choice: Choice, origins: Mapping[str, str] | None = None) -> partial[Any]:
    """Return the object that `choice` names with its checked options bound, to be called with what the engine supplies.

    Args:
        origins: key -> where it was written; "" for the section's name (`Settings.origins`).

    Raises:
        UserError: unknown name, an error inside the user's file, unknown or wrong options.
    """
    origins = origins or {}
    origin, named = origins.get("", ""), f"{kind.label} {choice.selected_name}"
    target = load(choice.selected_name, kind.registry, kind.label, origin)
    where = f"{origin}: {named}" if origin else named
    if not callable(target):
        raise UserError(f"{where}: is {show(target)}, but a function or class is needed")
    # The engine passes what it supplies by position; a `site` is passed by its name, or not.
    passed = [name for name in kind.supplied if name != "site"]
    try:
        signature = inspect.signature(target)
        taken = signature.bind_partial(*passed).arguments
        optional = [name for name in taken if signature.parameters[name].default is not inspect.Parameter.empty]
        if wrong := [name for name in optional if name not in passed]:
            raise TypeError(f"{wrong[0]}, an option, stands in their way")
    except (TypeError, ValueError) as error:  # ValueError: written in C, and it does not tell
        wanted = f"({', '.join(passed)}, **options)" if passed else "options only"
        raise UserError(f"{where}: cannot be called with {wanted}: {error}") from error
    given = options.check(target, choice.options, kind.section, kind.supplied, origins, named, choice.reserved_keys)
    return partial(target, **given)


def is_file(name: str) -> bool:
    """Return whether `name` has the form `path/to/file.py:Name`."""
    return name.rpartition(":")[0].endswith(".py")


def is_foreign(name: str, registry: Mapping[str, str]) -> bool:
    """Return whether `load` would import code for `name` that is not in the registry."""
    place, _, attribute = name.rpartition(":")
    return bool(place and attribute) and name not in registry and name not in registry.values()


def load(name: str, registry: Mapping[str, str], kind: str, origin: str = "") -> Any:
    """Return the object that `name` stands for.

    Args:
        name: a registry key, `path/to/file.py:Name` or `package.module:Name`.
        registry: keys to "package.module:Name".
        kind: what is looked for ("method", "model", ...), for the messages.
        origin: where the name was written ("run.yaml:7"), for the messages; "" if unknown.

    Raises:
        UserError: unknown name, missing file, module or attribute, or an error inside the user's code.

    >>> load("root", {"root": "math:sqrt"}, "function")(9.0)
    3.0
    """
    prefix = f"{origin}: " if origin else ""
    if name in registry:
        module_name, _, attribute = registry[name].partition(":")
        return getattr(importlib.import_module(module_name), attribute)
    place, _, attribute = name.rpartition(":")
    if not place or not attribute or place.startswith("."):
        advice = f"{nearest(name, registry)}; or path/to/file.py:Name, or package.module:Name"
        raise UserError(f"{prefix}unknown {kind} '{shorten(name)}'; {advice}")
    if _own_only.get() and is_foreign(name, registry):
        raise UserError(f"{prefix}{kind} '{name}' is code that is not fedmpi's own, and this run is not trusted")
    from fedmpi.common import seeds  # and torch, which the user's module imports as well

    try:
        with seeds.seeded(0, "import"):  # of no run's seed: the module is there for all runs of this process
            module = _from_file(Path(place)) if is_file(name) else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # whatever the user's module does while it is being imported
        text = str(error) if isinstance(error, UserError) else _import_error(error, place)
        raise UserError(f"{prefix}{kind} '{name}': {text}") from error
    if not hasattr(module, attribute):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        suggestion = nearest(attribute, [each for each in own if each[0] != "_"]).replace("allowed:", "it defines:")
        raise UserError(f"{prefix}{kind} '{name}': '{place}' has no '{attribute}'; {suggestion}")
    return getattr(module, attribute)


def _from_file(path: Path) -> ModuleType:
    """Import a file under a name that depends on its path and text.

    Two names in one file share their classes, and an edited file is imported again.
    """
    if not path.is_file():
        raise UserError(f"there is no such file: {path.absolute()}")
    text = path.read_bytes()
    unique = f"fedmpi_plugin_{path.stem}_{hashlib.sha256(bytes(path.resolve()) + text).hexdigest()[:16]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path.resolve())
    assert spec is not None  # a name that ends in .py always has a spec and a source loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses look their module up here while the file is running
    try:
        with plugin_imports.plugin_import_path(path.resolve()):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _import_error(error: BaseException, place: str) -> str:
    """Return `file.py:12: NameError: ...` with the innermost line of the user's code, else the innermost of any."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
        return f"no module named '{error.name}'; is it installed, or on PYTHONPATH?"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    last = ([frame for frame in frames if is_users_file(frame.filename)] or frames)[-1]
    return f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"
