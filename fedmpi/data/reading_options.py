"""Options of data sources by which a file is read: a new file may have others than the training's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from fedmpi.common import options
from fedmpi.common.errors import UserError
from fedmpi.data.preparation import Preparation, from_facts
from fedmpi.data.sources.pictures.decode import PixelRange

Character = Annotated[str, Field(min_length=1, max_length=1)]
Name = Annotated[str, Field(min_length=1)]

FIELDS: Mapping[str, Mapping[str, str]] = {  # kind of a preparation: option -> its field
    "arrays": {"pixel_range": "options.pixel_range"},
    "images": {
        "delimiter": "delimiter",
        "folder": "folder",
        "picture_column": "picture_column",
        "image_column": "picture_column",
        "label_column": "label_column",
        "pixel_range": "decoding.pixel_range",
    },
    "table": {key: key for key in ("delimiter", "decimal")},
    "texts": {key: key for key in ("delimiter", "author_column", "text_column")},
    "volumes": {"image_pattern": "image_pattern"},
}
ALL = frozenset(key for fields in FIELDS.values() for key in fields)
WITHOUT_EFFECT = ("root", "download")  # they concern the training's files alone


def with_options(preparation: Preparation, given: Mapping[str, Any], others: bool = False) -> Preparation:
    """Return the preparation with these options of the data source for new files.

    Args:
        given: options as a config has them, without `data.`.
        others: whether options that do not concern the new file are meant for something else, and ignored.

    Raises:
        UserError: an option by which no new file of this run is read, or a value that it cannot have.
    """
    facts = preparation.facts()
    fields = {key: path.split(".") for key, path in FIELDS.get(preparation.kind, {}).items()}
    known = {key: path for key, path in fields.items() if len(path) == 1 or facts[path[0]] is not None}
    odd = next((key for key in given if key not in known and key not in WITHOUT_EFFECT), None)
    if odd is not None and not (others and odd not in ALL):
        names = ", ".join(f"data.{key}" for key in known)
        remedy = f"of data, {names} can be given here, which say how FILE is read" if names else "leave it out"
        raise UserError(f"data.{odd}: new rows are prepared as those of the training were; {remedy}")
    chosen = options.check(_declared, {key: value for key, value in given.items() if key in known}, "data")
    if not chosen:
        return preparation
    for key, value in chosen.items():
        *outer, last = known[key]
        (facts[outer[0]] if outer else facts)[last] = value
    return from_facts(facts)


def _declared(
    *,
    delimiter: Character = ",",
    decimal: Literal[".", ","] = ".",
    folder: Name = ".",
    picture_column: Name = "path",
    image_column: Name = "image",
    label_column: Name = "label",
    author_column: Name = "author",
    text_column: Name = "text",
    image_pattern: Name = "*",
    pixel_range: PixelRange | None = None,
) -> None:
    """Declare the types of these options as the data sources do."""
