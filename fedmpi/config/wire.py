"""comm.wire: the format in which vectors of the model's size travel, up and down."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedmpi.config.sections import ShortSection

FormatName = Literal["fp32", "bf16", "fp16", "int8", "topk"]
FRACTION = 0.01  # of topk, where none is given


class Down(ShortSection):
    """What the server sends. int8, topk: of the difference to what was sent before."""

    short = "name"
    name: FormatName = "fp32"  # the format (docs/wire.md)
    # of topk: the share of the entries that travels, by default 0.01; they take 8 bytes each, so that 1/2 saves nothing
    fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = None

    @model_validator(mode="after")
    def _fraction_of_what(self) -> Down:
        if self.fraction is not None and self.name != "topk":
            raise ValueError(f"fraction: {self.fraction:g} has no effect with {self.name}; it is topk's; leave it out")
        return self


class Up(Down):
    """What clients send. With error feedback a client keeps what the format left out, and adds it the next time."""

    feedback: bool = True  # whether a client adds what the format left out the next time

    @model_validator(mode="after")
    def _feedback_of_what(self) -> Up:
        if self.name == "fp32" and not self.feedback:
            raise ValueError("feedback: false has no effect with fp32, which leaves nothing out; leave it out")
        return self


class WireSettings(ShortSection):
    """`wire: bf16` is short for `wire: {up: bf16}`: what clients send."""

    short = "up"
    up: Up = Up()
    down: Down = Down()
