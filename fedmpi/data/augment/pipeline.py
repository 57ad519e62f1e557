"""How stored pictures become inputs of a model: bytes -> pixels in 0..1 -> normalised, with operations in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest
from fedmpi.data import augment
from fedmpi.data.augment.colour import Normalise
from fedmpi.data.augment.operation import Operation, Shape, constants

Step = Callable[[Tensor, Tensor], Tensor]


def operation(name: str, given: Any, where: str, origins: Mapping[str, str]) -> Operation:
    """One operation. given: its options; None: none; anything else is the option that it is mostly given.

    Raises UserError: an unknown name, unknown or wrong options.
    """
    at = f"{origins['']}: " if origins.get("") else ""
    if name not in augment.registry:
        raise UserError(f"{at}{where}: unknown augmentation '{name}'; {nearest(name, augment.registry)}")
    kind, options = registry.load(name, augment.registry, "augmentation"), given or {}
    if given is not None and not isinstance(given, dict):
        if not kind.short:
            raise UserError(f"{at}{where}.{name}: {given!r} is not allowed; it takes options by their names")
        options, origins = {kind.short: given}, {**origins, kind.short: origins.get("", "")}
    plugin = registry.PluginKind("augmentation", augment.registry, f"{where}.{name}")
    made: Operation = registry.make(plugin, registry.Selection(name, options), origins)()
    return made


def named(operation: Operation) -> str:
    """The operation as configs name it: `crop`."""
    kind = type(operation)
    known = (name for name, place in augment.registry.items() if place == f"{kind.__module__}:{kind.__name__}")
    return next(known, kind.__name__)


@dataclass(frozen=True)
class ImagePipeline:
    """Pipeline from stored pictures to inputs: division by 255 before the first operation that needs it, normalisation
    after the last one that works on pixels. normal None: pixels in 0..1, or floats as they are stored."""

    bytes: bool = False  # whether pictures are stored as uint8
    unit: bool = False  # whether they are stored as floats in 0..1
    normal: Normalise | None = None  # of the data source; an operation `normalise` takes its place
    channels: int | None = None  # to which one grey channel is repeated
    operations: tuple[Operation, ...] = ()

    @cached_property
    def columns(self) -> int:
        """Numbers drawn for a sample."""
        return sum(operation.columns for operation in self.operations)

    def out(self, shape: Shape, drawn: bool = False) -> Shape:
        """Shape of a sample that is stored as `shape`; `drawn`: in training. Raises UserError if that cannot be."""
        if self.channels and shape[0] == 1:
            shape = (self.channels, *shape[1:])
        for i, operation in enumerate(self.operations):
            where = f"data.augment.{i}: {named(operation)}"
            if len(shape) != 3:
                raise UserError(f"{where} is for pictures (C, H, W), and a sample of these data has the shape {shape}")
            try:
                behind = operation.out(shape)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
            shape = behind if drawn or not operation.columns else shape
        return shape

    @cached_property
    def steps(self) -> Sequence[tuple[Step, slice | None]]:
        """The steps in their order, each with the columns of random numbers it reads; None: done at tests too.

        Raises UserError if operations stand in an order that makes no sense.
        """
        stage, column = "any" if self.bytes else "unit" if self.unit else "normal", 0
        steps: list[tuple[Step, slice | None]] = []
        own_normalise = any(isinstance(operation, Normalise) for operation in self.operations)
        normal = None if own_normalise else self.normal

        def rise(to: str) -> None:
            nonlocal stage
            if stage == "any":
                steps.append((self._to_unit, None))
                stage = "unit"
            if stage == "unit" and to == "normal":
                steps.extend([(normal, None)] if normal else [])
                stage = "normal"

        for i, operation in enumerate(self.operations):
            where = f"data.augment.{i}: {named(operation)}"
            if operation.on == "unit" and stage == "normal":
                if not (self.bytes or self.unit):
                    raise UserError(f"{where} works on pixels in 0..1, and this data source gives numbers of its own")
                raise UserError(f"{where} works on pixels in 0..1; put it before normalise and cutout")
            if operation.on == "normal" and own_normalise and stage != "normal":
                raise UserError(f"{where} follows normalisation; put it behind normalise")
            if operation.on != "any":
                rise(operation.on)
            steps.append((operation, slice(column, column + operation.columns) if operation.columns else None))
            column += operation.columns
            if isinstance(operation, Normalise):
                stage = "normal"
        rise("normal")
        return tuple(steps)

    def __call__(self, x: Tensor, u: Tensor | None = None) -> Tensor:
        """(B, ...) as stored, to be written to -> (B, ...) float32. u: (B, columns) drawn; None: as at tests."""
        nothing = x.new_empty(0)
        for step, columns in self.steps:
            if columns is None:
                x = step(x, nothing)
            elif u is not None:
                x = step(x, u[:, columns])
        return x

    def _to_unit(self, x: Tensor, _: Tensor) -> Tensor:
        if self.channels and x.shape[1] == 1:
            x = x.repeat(1, self.channels, *[1] * (x.ndim - 2))
        # A tensor, not a number: by a number GPUs multiply with 1 / 255, which has other last bits.
        return x.float().div_(constants((255.0,), x.shape, False, x.device))
