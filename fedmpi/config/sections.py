"""What the sections of a config are made of; and the one section whose key is a word of Python's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from fedmpi.config.values import Place


class Section(BaseModel):
    """Closed: any key that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class ShortSection(Section):
    """A bare text in place of the section is the value of its key `short`."""

    short: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        return {cls.short: value} if isinstance(value, str) else value


class OpenSection(BaseModel):
    """Keys that are not declared are the options of the thing that `selector` names."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, ser_json_inf_nan="constants")
    selector: ClassVar[str] = "name"

    @property
    def chosen(self) -> str:
        """The name of the thing."""
        return str(getattr(self, self.selector))

    @property
    def options(self) -> dict[str, Any]:
        """The thing's own options."""
        return dict(self.model_extra or {})

    @property
    def beside(self) -> tuple[str, ...]:
        """The section's other keys."""
        return tuple(type(self).model_fields)


FROM = "a run directory, or a file of safetensors under state_dict names; null: weights are drawn"


class Init(Section):
    """Given weights to start from, `from`: a run directory, or a file of safetensors under state_dict names."""

    strict: bool = False  # whether all tensors of the file and of the model must match

    @model_validator(mode="after")
    def _of_what(self) -> Init:
        if self.strict and self.source is None:
            raise ValueError("strict: true needs init.from, whose tensors it is about; name a run or a file there")
        return self

    @property
    def source(self) -> Path | None:
        found: Path | None = getattr(self, "from")
        return found


if TYPE_CHECKING:
    InitSettings = Init
else:
    InitSettings = create_model(
        "InitSettings", __base__=Init, **{"from": (Place | None, Field(None, description=FROM))}
    )
