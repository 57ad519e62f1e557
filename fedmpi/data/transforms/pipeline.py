"""The pipeline from stored images to inputs of a model: division by 255, normalisation and transforms, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name
from fedmpi.common.type_descriptions import shorten_value
from fedmpi.data import transforms
from fedmpi.data.transforms.base import Shape, Transform, channel_constants
from fedmpi.data.transforms.color import Normalize

Step = Callable[[Tensor, Tensor], Tensor]


def make_transform(name: str, value: Any, where: str, origins: Mapping[str, str]) -> Transform:
    """Return a transform by its name in the config; raise UserError if the name or an option is not valid.

    Args:
        name: the transform's name in the config, such as `random_crop`.
        value: its options as a dictionary, or the value of its main option; None: all options keep their defaults.
        where: the key in the config, for messages.
        origins: a dict from each option to the place where it was set, for messages. The key "" stands for the
            transform itself.
    """
    origin = f"{origins['']}: " if origins.get("") else ""
    if name not in transforms.registry:
        raise UserError(f"{origin}{where}: unknown augmentation '{name}'; {suggest_name(name, transforms.registry)}")
    kind, options = registry.load_object(name, transforms.registry, "augmentation"), value or {}
    if value is not None and not isinstance(value, dict):
        if not kind.main_option:
            raise UserError(
                f"{origin}{where}.{name}: {shorten_value(value)} is not allowed; give its options by name, as in "
                f"{name}: {{OPTION: VALUE}}"
            )
        options, origins = {kind.main_option: value}, {**origins, kind.main_option: origins.get("", "")}
    plugin = registry.PluginKind("augmentation", transforms.registry, f"{where}.{name}")
    transform: Transform = registry.make_component(plugin, registry.Selection(name, options), origins)()
    return transform


def config_name(transform: Transform) -> str:
    """Return the name of a transform in configs, such as `random_crop`."""
    kind = type(transform)
    names = (name for name, path in transforms.registry.items() if path == f"{kind.__module__}:{kind.__name__}")
    return next(names, kind.__name__)


@dataclass(frozen=True)
class ImagePipeline:
    """The pipeline from stored images to inputs of a model.

    Bytes are divided by 255 before the first transform that needs floats. Images are normalised after the last
    transform that needs pixels in 0..1. Without normalisation, inputs are pixels in 0..1, or floats as they are stored.
    """

    bytes: bool = False  # whether images are stored as uint8
    unit: bool = False  # whether images are stored as floats in 0..1
    normal: Normalize | None = None  # normalisation of the data source, unless `transforms` contain another one
    channels: int | None = None  # number of channels of the inputs; a single channel is repeated
    transforms: tuple[Transform, ...] = ()

    @cached_property
    def random_numbers(self) -> int:
        """The number of random numbers that the transforms need for one sample."""
        return sum(transform.random_numbers for transform in self.transforms)

    def output_shape(self, shape: Shape, training: bool = False) -> Shape:
        """Return the shape of the model input that the pipeline makes from a stored image.

        Args:
            shape: the shape of a stored image, (C, H, W).
            training: whether to include random transforms.

        Raises:
            UserError: a transform cannot be applied.
        """
        if self.channels and shape[0] == 1:
            shape = (self.channels, *shape[1:])
        for i, transform in enumerate(self.transforms):
            where = f"data.augment.{i}: {config_name(transform)}"
            if len(shape) != 3:
                raise UserError(f"{where} needs images (C, H, W), but a sample of this data set has the shape {shape}")
            try:
                transformed = transform.output_shape(shape)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
            shape = transformed if training or not transform.random_numbers else shape
        return shape

    @cached_property
    def steps(self) -> Sequence[tuple[Step, slice | None]]:
        """The steps of the pipeline in order, each with the columns of u (see `__call__`) that it uses.

        The columns are None for steps without random numbers, which are also applied to test images. Raises UserError
        if the transforms cannot be applied in this order.
        """
        stage, column = "any" if self.bytes else "unit" if self.unit else "normal", 0
        steps: list[tuple[Step, slice | None]] = []
        has_normalize = any(isinstance(transform, Normalize) for transform in self.transforms)
        normal = None if has_normalize else self.normal

        def advance_to(to: str) -> None:
            nonlocal stage
            if stage == "any":
                steps.append((self._to_unit, None))
                stage = "unit"
            if stage == "unit" and to == "normal":
                steps.extend([(normal, None)] if normal else [])
                stage = "normal"

        for i, transform in enumerate(self.transforms):
            where = f"data.augment.{i}: {config_name(transform)}"
            if transform.input_stage == "unit" and stage == "normal":
                if not (self.bytes or self.unit):
                    problem = "needs pixels between 0 and 1, but the data source provides values on another scale"
                    raise UserError(f"{where} {problem}; remove {config_name(transform)}")
                raise UserError(f"{where} needs pixels between 0 and 1; put it before normalize and cutout")
            if transform.input_stage == "normal" and has_normalize and stage != "normal":
                raise UserError(f"{where} needs normalised pixels; put it after normalize")
            if transform.input_stage != "any":
                advance_to(transform.input_stage)
            steps.append(
                (transform, slice(column, column + transform.random_numbers) if transform.random_numbers else None)
            )
            column += transform.random_numbers
            if isinstance(transform, Normalize):
                stage = "normal"
        advance_to("normal")
        return tuple(steps)

    def __call__(self, x: Tensor, u: Tensor | None = None) -> Tensor:
        """Convert stored images (B, ...) to inputs (B, ...) float32.

        Args:
            x: the stored images, which may be changed in place.
            u: random numbers, (B, random_numbers); None (used in evaluations): no random transform is applied.
        """
        no_numbers = x.new_empty(0)
        for step, columns in self.steps:
            if columns is None:
                x = step(x, no_numbers)
            elif u is not None:
                x = step(x, u[:, columns])
        return x

    def _to_unit(self, x: Tensor, _: Tensor) -> Tensor:
        """Convert bytes to floats in 0..1, and repeat a single channel if the inputs have several."""
        if self.channels and x.shape[1] == 1:
            x = x.repeat(1, self.channels, *[1] * (x.ndim - 2))
        # The divisor is a tensor, because GPUs replace division by a number with multiplication by 1 / 255, which
        # differs in the last bits.
        return x.float().div_(channel_constants((255.0,), x.shape, False, x.device))
