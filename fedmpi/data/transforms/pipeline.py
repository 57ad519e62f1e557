"""The conversion of stored images to inputs of a model: division by 255, normalisation, and augmentations in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name
from fedmpi.data import transforms
from fedmpi.data.transforms.base import Shape, Transform, channel_constants
from fedmpi.data.transforms.color import Normalize

Step = Callable[[Tensor, Tensor], Tensor]


def make_transform(name: str, given: Any, where: str, origins: Mapping[str, str]) -> Transform:
    """Return an augmentation by its name in the config; raise UserError if the name or an option is invalid.

    Args:
        name: the name.
        given: its options; None: none; another value than a dictionary: the value of its main option.
        where: the key of the config, for messages.
        origins: by option, where it was set, for messages.
    """
    at = f"{origins['']}: " if origins.get("") else ""
    if name not in transforms.registry:
        raise UserError(f"{at}{where}: unknown augmentation '{name}'; {suggest_name(name, transforms.registry)}")
    kind, options = registry.load_object(name, transforms.registry, "augmentation"), given or {}
    if given is not None and not isinstance(given, dict):
        if not kind.main_option:
            raise UserError(f"{at}{where}.{name}: {given!r} is not allowed; it takes options by their names")
        options, origins = {kind.main_option: given}, {**origins, kind.main_option: origins.get("", "")}
    plugin = registry.PluginKind("augmentation", transforms.registry, f"{where}.{name}")
    transform: Transform = registry.make_component(plugin, registry.Selection(name, options), origins)()
    return transform


def config_name(operation: Transform) -> str:
    """Return the name of an augmentation in configs, such as `crop`."""
    kind = type(operation)
    known = (name for name, place in transforms.registry.items() if place == f"{kind.__module__}:{kind.__name__}")
    return next(known, kind.__name__)


@dataclass(frozen=True)
class ImagePipeline:
    """The pipeline from stored images to inputs of a model.

    Bytes are divided by 255 before the first operation that needs it; normalisation follows the last operation on
    pixels. `normal` None: inputs are pixels in 0..1, or floats as they are stored.
    """

    bytes: bool = False  # whether images are stored as uint8
    unit: bool = False  # whether they are stored as floats in 0..1
    normal: Normalize | None = None  # normalisation of the data source; an operation `normalize` replaces it
    channels: int | None = None  # number of channels of the inputs; one grey channel is repeated
    transforms: tuple[Transform, ...] = ()

    @cached_property
    def random_numbers(self) -> int:
        """The number of random numbers per sample."""
        return sum(operation.random_numbers for operation in self.transforms)

    def output_shape(self, shape: Shape, training: bool = False) -> Shape:
        """Return the shape of an input, in training if `drawn`; raise UserError if an operation cannot be applied."""
        if self.channels and shape[0] == 1:
            shape = (self.channels, *shape[1:])
        for i, operation in enumerate(self.transforms):
            where = f"data.augment.{i}: {config_name(operation)}"
            if len(shape) != 3:
                raise UserError(f"{where} is for pictures (C, H, W), and a sample of these data has the shape {shape}")
            try:
                transformed = operation.output_shape(shape)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
            shape = transformed if training or not operation.random_numbers else shape
        return shape

    @cached_property
    def steps(self) -> Sequence[tuple[Step, slice | None]]:
        """The steps of the pipeline in order, with the columns of random numbers that each uses.

        Columns are None for steps that also apply to test images. Raises UserError if the order of operations makes no
        sense.
        """
        stage, column = "any" if self.bytes else "unit" if self.unit else "normal", 0
        steps: list[tuple[Step, slice | None]] = []
        own_normalise = any(isinstance(operation, Normalize) for operation in self.transforms)
        normal = None if own_normalise else self.normal

        def raise_stage(to: str) -> None:
            nonlocal stage
            if stage == "any":
                steps.append((self._to_unit, None))
                stage = "unit"
            if stage == "unit" and to == "normal":
                steps.extend([(normal, None)] if normal else [])
                stage = "normal"

        for i, operation in enumerate(self.transforms):
            where = f"data.augment.{i}: {config_name(operation)}"
            if operation.input_stage == "unit" and stage == "normal":
                if not (self.bytes or self.unit):
                    raise UserError(f"{where} works on pixels in 0..1, and this data source gives numbers of its own")
                raise UserError(f"{where} works on pixels in 0..1; put it before normalize and cutout")
            if operation.input_stage == "normal" and own_normalise and stage != "normal":
                raise UserError(f"{where} follows normalisation; put it behind normalize")
            if operation.input_stage != "any":
                raise_stage(operation.input_stage)
            steps.append(
                (operation, slice(column, column + operation.random_numbers) if operation.random_numbers else None)
            )
            column += operation.random_numbers
            if isinstance(operation, Normalize):
                stage = "normal"
        raise_stage("normal")
        return tuple(steps)

    def __call__(self, x: Tensor, u: Tensor | None = None) -> Tensor:
        """Convert stored images (B, ...), which may be changed in place, to inputs (B, ...) float32.

        u: (B, columns) random numbers for training; None: test images.
        """
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
        # The divisor is a tensor, because GPUs replace division by a number with a multiplication by 1 / 255, which
        # gives other last bits.
        return x.float().div_(channel_constants((255.0,), x.shape, False, x.device))
