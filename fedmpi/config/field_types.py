"""The types of values in a config, and the base classes of its sections."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from fedmpi.common.text import control_character, show
from fedmpi.common.type_descriptions import describe_value

# The upper bounds exceed all useful values, and are low enough to prevent endless loops and overflows.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Rounds = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(ge=0.01, le=30 * 86400)]
NonNegative = Annotated[float, Field(ge=0)]
Fading = Annotated[float, Field(ge=0, lt=1)]  # the weight of past values in a running mean


def _plain(text: str) -> str:
    odd = next((c for c in "\n\t" if c in text), "")
    if odd or control_character(text):
        raise ValueError(f"{show(text)} is not allowed; a name or path without {control_character(text) or repr(odd)}")
    return text


def _protocol(name: str) -> str:
    if not re.fullmatch(r"global|sites|personal|personal_on_global|ft\([1-9][0-9]{0,4}\)", name):
        raise ValueError(
            f"{show(name)} is not allowed; must be 'global', 'sites', 'personal', 'personal_on_global' or "
            "'ft(EPOCHS)', EPOCHS from 1 to 99999"
        )
    return name


def each_once(items: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((name for position, name in enumerate(items) if name in items[:position]), None)
    if twice is not None:
        raise ValueError(f"each name once; {show(twice)} stands twice")
    return items


def _at_home(path: Path) -> Path:
    return Path(os.path.expanduser(_plain(str(path))))


def _directory_name(name: str) -> str:
    if control_character(name) or len(os.fsencode(name)) > 200 or not re.fullmatch(r"[^/\\\s.][^/\\\s]*", name):
        raise ValueError(
            f"{show(name)} cannot name a directory; no spaces or slashes, no dot in front, at most 200 bytes"
        )
    return name


def _named(item: Any) -> Any:
    name = item if isinstance(item, str) else next(iter(item)) if isinstance(item, dict) and len(item) == 1 else ""
    if not name:
        raise ValueError(f"{show(item)} is not allowed; a name, or {{name: its options}}, is needed")
    _plain(name)
    return item


Name = Annotated[str, Field(min_length=1), AfterValidator(_plain)]
NameWithOptions = Annotated[Any, AfterValidator(_named)]  # an augmentation, a logger or a callback
Protocol = Annotated[str, AfterValidator(_protocol)]
Place = Annotated[Path, AfterValidator(_at_home)]
DirectoryName = Annotated[str, AfterValidator(_directory_name)]


def flat(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Flatten nested settings into one dict with dotted keys, each of which begins with `path`."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            items.update(flat(value, f"{path}{key}."))
        else:
            items[f"{path}{key}"] = value
    return items


class Section(BaseModel):
    """A section of a config, in which a key that is not declared is an error.

    Attributes:
        goes_with: key -> (another key, the values of the other key for which the first key has an effect). None in
            place of the values stands for all values except null, false and 0. If the key has no effect, it must be
            left at its default or be off (false, 0, null).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")
    goes_with: ClassVar[dict[str, tuple[str, tuple[Any, ...] | None]]] = {}

    @model_validator(mode="after")
    def _check_keys_that_go_together(self) -> Self:
        for key, (other, needed) in self.goes_with.items():
            value, have = getattr(self, key), getattr(self, other)
            has_effect = have in needed if needed is not None else bool(have)
            if not has_effect and value and value != type(self).model_fields[key].default:
                values = f": {', '.join(map(describe_value, needed))}" if needed is not None else ""
                raise ValueError(
                    f"{key}: {describe_value(value)} goes with {other}{values}, and {other} is {describe_value(have)}; "
                    f"give another {other}, or leave {key} out"
                )
        return self


class EitherSection(Section):
    """A section with two keys `either`, of which exactly one must be set; if the first is given, the second is null."""

    either: ClassVar[tuple[str, str]]

    @model_validator(mode="before")
    @classmethod
    def _take_place(cls, value: Any) -> Any:
        first, second = cls.either
        return {second: None} | value if isinstance(value, dict) and value.get(first) is not None else value

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        values = {key: getattr(self, key) for key in self.either}
        if sum(value is not None for value in values.values()) != 1:
            given = ", ".join(f"{key}: {describe_value(value)}" for key, value in values.items())
            raise ValueError(f"{given}; give one of them, and set the other to null")
        return self


class ShortSection(Section):
    """A section for which a config may contain a plain text, which is then the value of its key `short`."""

    short: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        return {cls.short: value} if isinstance(value, str) else value


class OpenSection(Section):
    """A section that selects a component, such as a method or a model, and takes the component's options as keys.

    Attributes:
        selector: the key whose value is the name of the component.
    """

    model_config = ConfigDict(extra="allow")
    selector: ClassVar[str] = "name"

    @property
    def selected_name(self) -> str:
        """The name of the selected component."""
        return str(getattr(self, self.selector))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the selected component: all keys that the section does not declare."""
        return dict(self.model_extra or {})

    @property
    def reserved_keys(self) -> tuple[str, ...]:
        """The declared keys of the section, which cannot be names of options."""
        return tuple(type(self).model_fields)
