"""The samples of a data set: one tensor (n, ...), or several named tensors, such as the token ids and mask of a text.

`Inputs` implements the tensor methods that select rows or move them to a device, so that code that merely forwards
samples works with tensors and with `Inputs`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

Shape: TypeAlias = tuple[int, ...] | dict[str, tuple[int, ...]]  # of one sample
Type: TypeAlias = torch.dtype | dict[str, torch.dtype]


@final
class Inputs:
    """Samples that consist of several named tensors (n, ...); row i of each tensor belongs to sample i.

    >>> x = Inputs({"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2)})
    >>> len(x), x["ids"].shape, x[:2].shape, sorted(x)
    (3, torch.Size([3, 2]), {'ids': (2, 2), 'mask': (2, 2)}, ['ids', 'mask'])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, key: Any) -> Any:
        """Return one tensor by its name, or the same rows of all tensors."""
        return self._tensors[key] if isinstance(key, str) else Inputs({k: x[key] for k, x in self.items()})

    def keys(self) -> Iterator[str]:
        """Return the names of the tensors."""
        return iter(self._tensors)

    __iter__ = keys

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def index_select(self, dim: int, rows: Tensor) -> Inputs:
        return Inputs({k: x.index_select(dim, rows) for k, x in self.items()})

    def chunk(self, parts: int) -> tuple[Inputs, ...]:
        cut = [x.chunk(parts) for _, x in self.items()]
        return tuple(Inputs(dict(zip(self.keys(), each, strict=True))) for each in zip(*cut, strict=True))

    def to(self, device: torch.device | str) -> Inputs:
        return Inputs({k: x.to(device) for k, x in self.items()})

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values())).device

    @property
    def shape(self) -> dict[str, tuple[int, ...]]:
        return {k: tuple(x.shape) for k, x in self.items()}

    @property
    def dtype(self) -> dict[str, torch.dtype]:
        return {k: x.dtype for k, x in self.items()}

    @property
    def _version(self) -> int:
        return sum(x._version for _, x in self.items())


Samples: TypeAlias = Tensor | Inputs


def list_named_tensors(x: Samples, name: str) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) pairs of samples; the names are meant for messages.

    A single tensor is called `name`. A named tensor `ids` is called `train_x['ids']` if `name` is `train_x`, and `ids`
    if `name` is empty.
    """
    if not isinstance(x, Inputs):
        return [(name, x)]
    return [(f"{name}[{k!r}]" if name else k, part) for k, part in x.items()]


def concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate several batches of samples along the first dimension."""
    if isinstance(parts[0], Inputs):
        return Inputs({k: torch.cat([x[k] for x in parts]) for k in parts[0].keys()})  # noqa: SIM118
    return torch.cat(list(parts))


def get_sample_shape(x: Samples) -> Shape:
    """Return the shape of one sample, or the shape of each of its named tensors."""
    return {k: tuple(part.shape[1:]) for k, part in x.items()} if isinstance(x, Inputs) else tuple(x.shape[1:])


def describe_axes(shape: Sequence[int], axes: str) -> str:
    """Describe the number of channels and the size of images or volumes, for messages.

    Args:
        shape: the shape of a tensor of images or volumes.
        axes: one letter per axis: N for samples, C for channels, D, H and W for the spatial axes.

    >>> describe_axes((100, 64, 48, 13), "NHWC")
    '13 channels of 64 x 48 pixels'
    """
    sizes = dict(zip(axes, shape, strict=True))
    channels = sizes.get("C", 1)
    space = " x ".join(str(sizes[axis]) for axis in "DHW" if axis in sizes)
    return f"{channels} channel{'s' if channels > 1 else ''} of {space} {'voxels' if 'D' in sizes else 'pixels'}"


def zero_samples(n: int, shape: Shape, dtype: Type, device: torch.device | str = "cpu") -> Any:
    """Return n samples whose values are all zero.

    Args:
        shape: the shape of one sample, or of each named tensor of a sample.
        dtype: one dtype for all tensors, or the dtype of each named tensor.
    """
    if isinstance(shape, dict):
        kinds = dtype if isinstance(dtype, dict) else dict.fromkeys(shape, dtype)
        return Inputs({k: torch.zeros(n, *size, dtype=kinds[k], device=device) for k, size in shape.items()})
    assert isinstance(dtype, torch.dtype)
    return torch.zeros(n, *shape, dtype=dtype, device=device)


def to_call_arguments(module: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for a call of a module on samples x.

    Several named tensors are passed as keyword arguments if `forward` has parameters with all these names (or
    **kwargs); otherwise they are passed as one argument, a dictionary.
    """
    if isinstance(x, Tensor):
        return (x,), {}
    kind: Any = type(module)
    tensors = dict(x.items())
    return ((), tensors) if _accepts_keywords(kind, tuple(tensors)) else ((tensors,), {})


def call_module(module: nn.Module, x: Any) -> Any:
    """Call a module on samples x and return its outputs."""
    positional, named = to_call_arguments(module, x)
    return module(*positional, **named)


@lru_cache
def _accepts_keywords(kind: Any, names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(kind.forward).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or set(names) <= set(parameters)


def describe_samples(x: Samples) -> str:
    """Describe samples for a message: `shape (2, 3), torch.float32`."""
    return "; ".join(
        f"{name} shape {tuple(part.shape)}, {part.dtype}".strip() for name, part in list_named_tensors(x, "")
    )


def encode_format(shape: Shape, dtype: Type) -> str:
    """Encode the shape and dtype of a sample as JSON, such as `[[3],"float32"]`.

    If a sample is a dict of tensors, the result is a JSON object with such a pair for each of their names.
    """
    if isinstance(shape, dict):
        kinds = dtype if isinstance(dtype, dict) else dict.fromkeys(shape, dtype)
        return "{" + ",".join(f"{json.dumps(k)}:{encode_format(shape[k], kinds[k])}" for k in shape) + "}"
    return json.dumps([list(shape), str(dtype).removeprefix("torch.")], separators=(",", ":"))


def decode_format(text: str) -> tuple[Shape, Type]:
    """Decode the shape and dtype of a sample from the output of `encode_format`; raise ValueError for other strings."""
    value = json.loads(text)
    try:
        if isinstance(value, dict):
            pairs = {k: decode_format(json.dumps(pair)) for k, pair in value.items()}
            return {k: pair[0] for k, pair in pairs.items()}, {k: pair[1] for k, pair in pairs.items()}  # type: ignore[misc]
        (shape, kind) = value
        dtype = getattr(torch, kind)
        if not isinstance(dtype, torch.dtype) or not all(isinstance(size, int) for size in shape):
            raise ValueError
        return tuple(shape), dtype
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{text!r} is not the shape and dtype of a sample") from error
