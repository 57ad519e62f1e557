"""From a name in a config to the object it stands for.

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
import os
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

_own_only = ContextVar("own_only", default=False)


@contextmanager
def own_code_only() -> Iterator[None]:
    """Refuse, while this lasts, to import what is not in a registry: the config is somebody else's."""
    token = _own_only.set(True)
    try:
        yield
    finally:
        _own_only.reset(token)


@dataclass(frozen=True)
class PluginKind:
    """Something that configs name: a method, a model, ..."""

    label: str  # "model", for messages
    registry: Mapping[str, str]
    section: str  # where configs name it, "model"
    supplied: tuple[str, ...] = ()  # parameters that the engine passes itself, in their order


class Choice(Protocol):
    """A section of a config that names a method, a model, ..., with its options."""

    @property
    def selected_name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def reserved_keys(self) -> tuple[str, ...]: ...  # keys of the section that are not the thing's own


@dataclass(frozen=True)
class Selection:
    """A choice made outside of a config."""

    selected_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reserved_keys: tuple[str, ...] = ()


def make(kind: PluginKind, choice: Choice, origins: Mapping[str, str] | None = None) -> partial[Any]:
    """The object that `choice` names, with its checked options bound; call it with what the engine supplies.

    Args:
        origins: key -> where it was written; "" for the section's name (`Settings.origins`).

    Raises:
        UserError: unknown name, an error inside the user's file, unknown or wrong options.
    """
    origins = origins or {}
    origin, named = origins.get("", ""), f"{kind.label} {choice.selected_name}"
    found = load(choice.selected_name, kind.registry, kind.label, origin)
    said = f"{origin}: {named}" if origin else named
    if not callable(found):
        raise UserError(f"{said}: is {show(found)}, but a function or class is needed")
    # The engine passes what it supplies by position; a `site` is passed by its name, or not.
    passed = [name for name in kind.supplied if name != "site"]
    wanted = f"({', '.join(passed)}, **options)" if passed else "options only"
    try:
        signature = inspect.signature(found)
        taken = signature.bind_partial(*passed).arguments
    except (TypeError, ValueError) as error:  # ValueError: written in C, and it does not tell
        raise UserError(f"{said}: cannot be called with {wanted}: {error}") from error
    for name in taken:  # an option, which has a default, must not stand where the engine passes something else
        if name not in passed and signature.parameters[name].default is not inspect.Parameter.empty:
            raise UserError(f"{said}: cannot be called with {wanted}: {name}, an option, stands in their way")
    given = options.check(found, choice.options, kind.section, kind.supplied, origins, named, choice.reserved_keys)
    return partial(found, **given)


def is_file(name: str) -> bool:
    """Whether `name` has the form `path/to/file.py:Name`."""
    return name.rpartition(":")[0].endswith(".py")


def is_foreign(name: str, registry: Mapping[str, str]) -> bool:
    """Whether `load` would import something for `name` that the registry does not name."""
    place, _, attribute = name.rpartition(":")
    return bool(place and attribute) and name not in registry and name not in registry.values()


def load(name: str, registry: Mapping[str, str], kind: str, origin: str = "") -> Any:
    """The object that `name` stands for.

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
        advice = nearest(name, registry)
        raise UserError(
            f"{prefix}unknown {kind} '{shorten(name)}'; {advice}; or path/to/file.py:Name, or package.module:Name"
        )
    if _own_only.get() and is_foreign(name, registry):
        raise UserError(f"{prefix}{kind} '{name}' is code that is not fedmpi's own, and this run is not trusted")
    from fedmpi.common import seeds  # and torch, which the user's module imports as well

    try:
        with seeds.seeded(0, "import"):  # of no run's seed: the module is there for all runs of this process
            module = _from_file(Path(place)) if is_file(name) else importlib.import_module(place)
    except UserError as error:
        raise UserError(f"{prefix}{kind} '{name}': {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does while it is being imported
        raise UserError(f"{prefix}{kind} '{name}': {_blame(error, place)}") from error
    if not hasattr(module, attribute):
        found = nearest(attribute, _defined(module)).replace("allowed:", "it defines:")
        raise UserError(f"{prefix}{kind} '{name}': '{place}' has no '{attribute}'; {found}")
    return getattr(module, attribute)


def _from_file(path: Path) -> ModuleType:
    """Imports one file under a name of its own: the same text at the same path is the same module, so that two names
    taken from one file share their classes, and an edited file is read anew."""
    if not os.path.isfile(path):
        what = "is a directory" if os.path.isdir(path) else "there is no such file"
        raise UserError(f"{what}: {path.absolute()}")
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


def _blame(error: BaseException, place: str) -> str:
    """`file.py:12: NameError: ...`: the innermost line of the user's own code, else the innermost line of any."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
        return f"no module named '{error.name}'; is it installed, or on PYTHONPATH?"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    tail = Path(place).name if place.endswith(".py") else place.rpartition(".")[2] + ".py"
    own = [frame for frame in frames if Path(frame.filename).name == tail] or frames
    return f"{own[-1].filename}:{own[-1].lineno}: {text}"


def _defined(module: ModuleType) -> list[str]:
    """The public functions and classes written in the module itself, not those it imports."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]
