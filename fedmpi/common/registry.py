"""Import the method, model, task, data source, partition or server rule that a config names.

A name has one of four forms:

    fedavg                      a key of the registry for its kind of component
    my/file.py:Name             `Name` in a Python file (relative: to the working directory)
    package.module:Name         `Name` in an importable module
    library:name                a component of a library that fedmpi knows, such as timm:resnet18

Registries map keys to "package.module:Name" strings, so reading them imports nothing. `make_component` turns a
section of a config, which has a name and options, into the object. Within `registered_code_only()` names of the second
and third form are rejected.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fedmpi.common import options, plugin_imports
from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten, shorten_repr, suggest_name
from fedmpi.common.user_code_errors import is_users_file

_registered_only = ContextVar("own_only", default=False)


@contextmanager
def registered_code_only() -> Iterator[None]:
    """Reject imports of objects outside the registries within the `with` block; used for untrusted configs."""
    token = _registered_only.set(True)
    try:
        yield
    finally:
        _registered_only.reset(token)


@dataclass(frozen=True)
class PluginKind:
    """A kind of component, such as methods or models, that configs select by name."""

    label: str  # "model", for messages
    registry: Mapping[str, str]
    section: str  # the section of a config that selects it, "model"
    engine_arguments: tuple[str, ...] = ()  # parameters that the engine passes itself, in their order
    optional_arguments: tuple[str, ...] = ()  # parameters that the engine passes by name to components that have them
    # prefix of names, "timm" -> "package.module:function", which returns the component with the rest of the name
    libraries: Mapping[str, str] = field(default_factory=dict)


class ComponentSection(Protocol):
    """A section of a config that selects a component, such as a method or a model, and contains its options."""

    @property
    def selected_name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def reserved_keys(self) -> tuple[str, ...]: ...  # keys of the section that are not options of the component


@dataclass(frozen=True)
class Selection:
    """A component and its options, selected by code rather than by a section of a config."""

    selected_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reserved_keys: tuple[str, ...] = ()


def make_component(
    kind: PluginKind, choice: ComponentSection, origins: Mapping[str, str] | None = None
) -> partial[Any]:
    """Import a selected component, check its options, and bind the options to the component.

    Args:
        kind: the kind of component.
        choice: the name and the options of the component.
        origins: option -> where it was written (`Settings.origins`); the key "" is for the component itself.

    Returns:
        A partial function, to be called with the arguments `kind.engine_arguments`.

    Raises:
        UserError: the name is unknown, the user's file raises an error, or an option is unknown or invalid.
    """
    origins = origins or {}
    origin, named = origins.get("", ""), f"{kind.label} {choice.selected_name}"
    target = load_object(choice.selected_name, kind.registry, kind.label, origin, kind.libraries)
    where = f"{origin}: {named}" if origin else named
    if not callable(target):
        raise UserError(f"{where}: {shorten_repr(target)} is not allowed; must be a function or class")
    passed = kind.engine_arguments
    try:
        signature = inspect.signature(target)
        taken = signature.bind_partial(*passed).arguments
        optional = [name for name in taken if signature.parameters[name].default is not inspect.Parameter.empty]
        if wrong := [name for name in optional if name not in passed]:
            raise TypeError(f"option {wrong[0]} comes before these arguments")
    except (TypeError, ValueError) as error:  # ValueError: a function written in C without a signature
        expected = f"the arguments ({', '.join(passed)}, **options)" if passed else "options only"
        raise UserError(f"{where} cannot be called with {expected}: {error}; correct its parameters") from error
    bound_options = options.check_options(
        target,
        choice.options,
        kind.section,
        kind.engine_arguments,
        origins,
        named,
        choice.reserved_keys,
        kind.optional_arguments,
    )
    return partial(target, **bound_options)


def is_file_reference(name: str) -> bool:
    """Return whether `name` has the form `path/to/file.py:Name`."""
    return name.rpartition(":")[0].endswith(".py")


def is_external_code(name: str, registry: Mapping[str, str], libraries: Collection[str] = ()) -> bool:
    """Return whether `load_object` would import code that is neither in the registry nor in one of the libraries."""
    place, _, attribute = name.rpartition(":")
    is_known = name in registry or name in registry.values() or split_library_name(name, libraries) is not None
    return bool(place and attribute) and not is_known


def split_library_name(name: str, libraries: Collection[str]) -> tuple[str, str] | None:
    """Return the prefix and the rest of a name such as timm:resnet18; None if the prefix is not one of the libraries.

    >>> split_library_name("timm:resnet18", ["timm"]), split_library_name("own.py:resnet18", ["timm"])
    (('timm', 'resnet18'), None)
    """
    prefix, _, rest = name.partition(":")
    return (prefix, rest) if rest and prefix in libraries else None


def load_object(
    name: str,
    registry: Mapping[str, str],
    kind: str,
    origin: str = "",
    libraries: Mapping[str, str] | None = None,
) -> Any:
    """Import and return the object with this name.

    Args:
        name: a registry key, `library:name`, `path/to/file.py:Name` or `package.module:Name`.
        registry: key -> "package.module:Name".
        kind: the kind of object ("method", "model", ...), for messages.
        origin: where the name was written ("run.yaml:7"), for messages; "" if unknown.
        libraries: see `PluginKind.libraries`.

    Raises:
        UserError: the name is unknown, the file, module or attribute is missing, or the user's code raises an error.

    >>> load_object("root", {"root": "math:sqrt"}, "function")(9.0)
    3.0
    """
    prefix = f"{origin}: " if origin else ""
    if name in registry:
        return _import_registered(registry[name])
    if parts := split_library_name(name, libraries or {}):
        assert libraries is not None
        try:
            return _import_registered(libraries[parts[0]])(parts[1])
        except UserError as error:
            raise UserError(f"{prefix}{kind} '{shorten(name)}': {error}") from error
    place, _, attribute = name.rpartition(":")
    if not place or not attribute or place.startswith("."):
        forms = ", ".join([*(f"{each}:NAME" for each in libraries or ()), "path/to/file.py:Name"])
        advice = f"{suggest_name(name, registry)}; also allowed: {forms} and package.module:Name"
        raise UserError(f"{prefix}unknown {kind} '{shorten(name)}'; {advice}")
    if _registered_only.get() and is_external_code(name, registry):
        raise UserError(
            f"{prefix}{kind} '{name}' is not fedmpi's own code and was not imported; if you trust its author, use "
            "--trust on the command line, or trust=True in Python"
        )
    from fedmpi.common import seeds  # imports torch, as the user's module does, too

    try:
        with seeds.temporary_seed(0, "import"):  # a fixed seed, because all runs of this process share the module
            module = _import_file(Path(place)) if is_file_reference(name) else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # the user's module may raise anything while it is imported
        text = str(error) if isinstance(error, UserError) else _describe_import_error(error, place)
        raise UserError(f"{prefix}{kind} '{name}': {text}") from error
    if not hasattr(module, attribute):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        suggestion = suggest_name(attribute, [each for each in own if each[0] != "_"]).replace(
            "allowed:", "it defines:"
        )
        raise UserError(f"{prefix}{kind} '{name}': '{place}' does not define '{attribute}'; {suggestion}")
    return getattr(module, attribute)


def _import_registered(target: str) -> Any:
    """Import and return `target`, which has the form "package.module:Name"."""
    module_name, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def _import_file(path: Path) -> ModuleType:
    """Import a Python file under a module name that depends on its path and content.

    Objects of the same file therefore share a module, and an edited file is imported again.
    """
    if not path.is_file():
        raise UserError(f"file not found: {path.absolute()}; correct the path")
    text = path.read_bytes()
    unique = f"fedmpi_plugin_{path.stem}_{hashlib.sha256(bytes(path.resolve()) + text).hexdigest()[:16]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path.resolve())
    assert spec is not None  # a name that ends in .py always has a spec and a source loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses look up their module here while the file is executed
    try:
        with plugin_imports.temporary_import_path(path.resolve()):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _describe_import_error(error: BaseException, place: str) -> str:
    """Describe an error as `file.py:12: NameError: ...`, with the innermost line of the user's code if there is one.

    place: the module or file whose import failed.
    """
    if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
        return f"no module named '{error.name}'; install it, or add the folder that contains it to PYTHONPATH"
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    last = ([frame for frame in frames if is_users_file(frame.filename)] or frames)[-1]
    return f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"
