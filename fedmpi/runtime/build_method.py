"""Make the method of an experiment, with the methods that its options name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from fedmpi import methods
from fedmpi.common import registry, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.text import locate_key
from fedmpi.common.user_code_errors import add_error_context
from fedmpi.config import Settings
from fedmpi.method.base import Method


def make_method(
    settings: Settings,
    choice: registry.ComponentSection | None = None,
    origins: Mapping[str, str] | None = None,
    where: str = "method",
) -> Method:
    """Make the configured method and any methods that its options name, and check their hyperparameters.

    Args:
        choice: Name and options of the method; default: the section `method` of the settings.
        origins: A dict from option to the file and line in which it was set; the key "" stands for the method's name.
        where: The config key that names the method, for error messages.

    Raises:
        UserError: The name or an option is unknown or invalid, or the class is not a subclass of `Method`.
    """
    choice, origins = choice or settings.method, settings.key_origins("method") if origins is None else origins
    kind = registry.PluginKind(methods.KIND.label, methods.registry, where)
    target = registry.load_object(choice.selected_name, kind.registry, kind.label, origins.get("", ""))
    if not (isinstance(target, type) and issubclass(target, Method)):
        raise UserError(
            f"{where}.name: {choice.selected_name} is not a subclass of fedmpi.Method; set {where}.name to the name of "
            "such a class"
        )
    inner: set[str] = {f.name for f in fields(target) if f.metadata.get("method")} if is_dataclass(target) else set()
    plain = {key: value for key, value in choice.options.items() if key not in inner}
    construct = registry.make_component(
        kind, registry.Selection(choice.selected_name, plain, ("name", *inner)), origins
    )
    options = dict[str, Method]()
    for key in inner & {*choice.options}:  # the value is a name, {name, ...options}, or null for no method
        given, at = choice.options[key], origins.get(key, "")
        section = dict(given) if isinstance(given, dict) else {"name": given}
        name = section.pop("name", None)
        if name is not None:
            own = {k.removeprefix(f"{key}."): v for k, v in origins.items() if k.startswith(f"{key}.")}
            selection = registry.Selection(str(name), section)
            options[key] = make_method(settings, selection, own | {"": own.get("name", at)}, f"{where}.{key}")
        elif section:
            raise UserError(
                f"{locate_key(at, f'{where}.{key}')}: name is missing; it is required when options (here "
                f"{', '.join(section)}) are given"
            )
    try:
        with seeds.temporary_seed(settings.seed, "method"), add_error_context(f"{where}: {choice.selected_name}"):
            method: Method = construct(**options)
    except RuntimeError as error:  # raised for a mistake in the class itself (Method.__new__)
        raise UserError(str(error)) from error
    return method
