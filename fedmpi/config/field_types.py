"""Types of config values, and the base classes of config sections."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from fedmpi.common.text import find_control_character, shorten_repr
from fedmpi.common.type_descriptions import describe_value, join_alternatives, shorten_value

# The upper bounds exceed all useful values, and are low enough to prevent endless loops and overflows.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Rounds = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(ge=0.01, le=30 * 86400)]
NonNegative = Annotated[float, Field(ge=0)]
DecayFactor = Annotated[float, Field(ge=0, lt=1)]  # the weight of past values in a running mean


def _check_plain_text(text: str) -> str:
    """Return a name or path unchanged; raise ValueError if it contains a line feed, tab or other control character."""
    mark = next((c for c in "\n\t" if c in text), "")
    if mark or find_control_character(text):
        unwanted = find_control_character(text) or ("a line feed" if mark == "\n" else "a tab")
        raise ValueError(f"{shorten_repr(text)} is not allowed; must be a name or path without {unwanted}")
    return text


def _check_evaluation_protocol(name: str) -> str:
    """Return the name unchanged if it is an evaluation protocol; otherwise raise ValueError."""
    if not re.fullmatch(r"global|sites|personal|personal_on_global|ft\([1-9][0-9]{0,4}\)", name):
        raise ValueError(
            f"{shorten_repr(name)} is not allowed; must be 'global', 'sites', 'personal', 'personal_on_global' or "
            "'ft(EPOCHS)' with EPOCHS from 1 to 99999"
        )
    return name


def check_unique(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names unchanged; raise ValueError if a name occurs twice."""
    duplicate = next((name for position, name in enumerate(items) if name in items[:position]), None)
    if duplicate is not None:
        raise ValueError(f"{shorten_repr(duplicate)} is listed twice; list each name only once")
    return items


def _expand_home(path: Path) -> Path:
    """Return the path with the home directory instead of a leading ~."""
    return Path(os.path.expanduser(_check_plain_text(str(path))))


def _check_directory_name(name: str) -> str:
    """Return the name unchanged; raise ValueError if it cannot be the name of a directory."""
    if find_control_character(name) or len(os.fsencode(name)) > 200 or not re.fullmatch(r"[^/\\\s.][^/\\\s]*", name):
        raise ValueError(
            f"{shorten_repr(name)} is not a valid directory name; it must not contain spaces or slashes, must "
            "not start with a dot, and must be at most 200 bytes long"
        )
    return name


def _check_name_with_options(item: Any) -> Any:
    """Return the item unchanged if it is a name or {name: options}; otherwise raise ValueError."""
    name = item if isinstance(item, str) else next(iter(item)) if isinstance(item, dict) and len(item) == 1 else ""
    if isinstance(item, dict) and len(item) > 1:
        raise ValueError(
            f"{shorten_value(item)} has {len(item)} keys; must be a name or a mapping with a single key, "
            "{name: options}; write each of the keys as an item of its own"
        )
    if not name:
        raise ValueError(f"{shorten_value(item)} is not allowed; must be a name or {{name: options}}")
    _check_plain_text(name)
    return item


Name = Annotated[str, Field(min_length=1), AfterValidator(_check_plain_text)]
# An augmentation, a logger or a callback; the last argument describes several of them.
NameWithOptions = Annotated[Any, AfterValidator(_check_name_with_options), "names or {name: options}"]
Protocol = Annotated[str, AfterValidator(_check_evaluation_protocol)]
ExpandedPath = Annotated[Path, AfterValidator(_expand_home)]
DirectoryName = Annotated[str, AfterValidator(_check_directory_name)]


def flatten(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Flatten nested settings into one dict with dotted keys, each with the prefix `path`."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            items.update(flatten(value, f"{path}{key}."))
        else:
            items[f"{path}{key}"] = value
    return items


SECTION = "<section>."  # in the message of a validator: stands for the section's dotted path, such as `train.`


class Section(BaseModel):
    """A section of a config; unknown keys are rejected.

    Attributes:
        prerequisites: {key: (other key, values)}. The key has an effect only if the other key has one of these values
            (None: any value except null, false and 0). Otherwise the key must keep its default, or be false, 0 or null.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")
    prerequisites: ClassVar[dict[str, tuple[str, tuple[Any, ...] | None]]] = {}

    @model_validator(mode="after")
    def _check_prerequisites(self) -> Self:
        """Raise ValueError if a key is set but has no effect, because its prerequisite is not fulfilled."""
        for key, (other, needed) in self.prerequisites.items():
            value, have = getattr(self, key), getattr(self, other)
            has_effect = have in needed if needed is not None else bool(have)
            if not has_effect and value and value != type(self).model_fields[key].default:
                allowed = join_alternatives([describe_value(each) for each in needed]) if needed else ""
                remedy = f"set {SECTION}{other}: {allowed}" if needed is not None else f"set {SECTION}{other}"
                raise ValueError(
                    f"{key}: {describe_value(value)} has no effect, because {SECTION}{other} is "
                    f"{describe_value(have)}; {remedy}, or remove {SECTION}{key}"
                )
        return self


class ExclusiveKeysSection(Section):
    """A section with two alternative keys, exactly one of which must be set.

    Attributes:
        exclusive_keys: The two keys. If a config sets the first key, the default of the second key becomes null.
    """

    exclusive_keys: ClassVar[tuple[str, str]]

    @model_validator(mode="before")
    @classmethod
    def _clear_alternative(cls, value: Any) -> Any:
        """Set the second key to null if the config sets only the first key."""
        first, second = cls.exclusive_keys
        return {second: None} | value if isinstance(value, dict) and value.get(first) is not None else value

    @model_validator(mode="after")
    def _check_exactly_one_is_set(self) -> Self:
        """Raise ValueError unless exactly one of the two keys is set."""
        values = {key: getattr(self, key) for key in self.exclusive_keys}
        if sum(value is not None for value in values.values()) != 1:
            first, second = self.exclusive_keys
            if values[first] is None:
                raise ValueError(f"neither {first} nor {second} is set; set exactly one of them")
            raise ValueError(
                f"{first}: {describe_value(values[first])} is not allowed together with {SECTION}{second}: "
                f"{describe_value(values[second])}; set one of them to null"
            )
        return self


class ShortFormSection(Section):
    """A section that a config may shorten to a string, which is the value of the section's key `short_key`."""

    short_key: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        """Convert a string to a mapping with the key `short_key`."""
        return {cls.short_key: value} if isinstance(value, str) else value


class OpenSection(Section):
    """A section that selects a component, such as a method or a model; other keys are the component's options.

    Attributes:
        selector: The key whose value is the name of the component.
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
        """The declared keys of the section; options cannot have these names."""
        return tuple(type(self).model_fields)
