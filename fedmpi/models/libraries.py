"""Models from other libraries, by name: `timm:resnet18`, `torchvision:resnet50`, `monai:DenseNet121`.

A function of this module takes the name of a model in its library and returns a function `f(input_shape, classes,
**options)`. Its options are those of the library's function or class, with the same defaults; they are checked against
the signature of that function or class. The numbers of input channels, outputs and spatial dimensions come from the
data, and so does the size of images if the model depends on it. The weights are random; `model.pretrained` loads
trained ones (pretrained.py).

Models of the library `transformers` are in hugging_face.py.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.common.type_descriptions import join_alternatives

# Arguments that fedmpi sets itself: see the docstring, and model.pretrained instead of downloads.
OUTPUT_NAMES = ("num_classes", "out_channels", "classes")
CHANNEL_NAMES = ("in_chans", "in_channels", "n_input_channels", "num_channels")
SIZE_NAMES = ("img_size", "image_size", "input_size")
FIXED = {
    "aux_logits": False,  # further outputs in training, of Inception and GoogLeNet
    "init_weights": True,  # as the library recommends; without it, a warning
}
EXCLUDED = ("pretrained", "progress", "weights", "device", "dtype")
PLAIN_TYPES = (bool, int, float, str, list, tuple, dict, NoneType)


class LibraryDefault:
    """The default of an option whose value the library chooses; it cannot be written to a config."""

    def __repr__(self) -> str:
        return "that of the library"


LIBRARY_DEFAULT = LibraryDefault()
ModelFunction = Callable[..., nn.Module]


# ---- libraries ----
@lru_cache(maxsize=64)
def timm_model(name: str) -> ModelFunction:
    """A model of timm, such as timm:resnet18; `timm.list_models()` lists the names. Needs fedmpi[timm]."""
    timm = import_library("timm", "timm")
    if not timm.is_model(name):
        raise unknown_name_error("timm", name, timm.list_models())
    kind = _return_class(timm.models.model_entrypoint(name))
    if kind is None:  # 5 % of the functions do not declare the class that they return
        with torch.device("meta"):  # makes no weights
            kind = type(timm.create_model(name))
    parameters = read_parameters(kind)

    def build(arguments: Mapping[str, Any]) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        return model

    return _make_image_model(f"timm:{name}", build, parameters, required=False)


@lru_cache(maxsize=64)
def torchvision_model(name: str) -> ModelFunction:
    """A classifier of torchvision, such as torchvision:resnet50; its documentation lists the names."""
    from fedmpi.common.torchvision_compat import torchvision

    models = torchvision.models
    names = models.list_models(module=models)
    if name not in names:
        raise unknown_name_error("torchvision", name, names)
    kind = _return_class(models.get_model_builder(name))
    assert kind is not None, "all builders of torchvision declare their class"
    parameters = read_parameters(kind)

    def build(arguments: Mapping[str, Any]) -> nn.Module:
        channels = arguments.get("in_channels", 3)
        rest = {key: value for key, value in arguments.items() if key != "in_channels"}
        model: nn.Module = models.get_model(name, weights=None, **rest)
        if channels != 3:
            _replace_first_convolution(model, channels)
        return model

    parameters["in_channels"] = Parameter("in_channels", Parameter.KEYWORD_ONLY, default=3)
    return _make_image_model(f"torchvision:{name}", build, parameters, required=False)


@lru_cache(maxsize=64)
def monai_model(name: str) -> ModelFunction:
    """A network of MONAI for images or volumes, such as monai:DenseNet121. Needs fedmpi[monai]."""
    nets = import_library("monai.networks.nets", "monai")
    known = {key: value for key, value in vars(nets).items() if _is_monai_network(value)}
    if name not in known:
        raise unknown_name_error("monai", name, known)
    target = known[name]
    kind = target if inspect.isclass(target) else _return_class(target)
    assert kind is not None
    parameters = read_parameters(kind)

    def build(arguments: Mapping[str, Any]) -> nn.Module:
        model: nn.Module = target(**arguments)
        return model

    return _make_image_model(f"monai:{name}", build, parameters, required=inspect.isclass(target))


def _is_monai_network(value: Any) -> bool:
    """Return whether an object of monai.networks.nets makes a network: a class, or a function that declares one."""
    if inspect.isclass(value):
        return issubclass(value, nn.Module)
    return inspect.isfunction(value) and _return_class(value) is not None


# ---- what the libraries have in common ----
def import_library(module: str, extra: str) -> Any:
    """Import a module of an optional package; torchvision is imported first, as these packages need it themselves.

    Args:
        extra: the extra of fedmpi that installs the package.
    """
    importlib.import_module("fedmpi.common.torchvision_compat")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        reason = "is not installed" if getattr(error, "name", "") == package else f"cannot be imported ({error})"
        raise UserError(f"needs the package {package}, which {reason}; run pip install 'fedmpi[{extra}]'") from error


def unknown_name_error(library: str, name: str, known: Iterable[str]) -> UserError:
    """Return an error for a name that a library does not have, with the nearest names."""
    folded = {each.casefold(): each for each in sorted(known)}
    nearest = [folded[each] for each in difflib.get_close_matches(name.casefold(), folded, n=4, cutoff=0.5)]
    guess = f"; did you mean {join_alternatives(nearest)}?" if nearest else ""
    return UserError(f"{library} has no such model among its {len(folded)} models{guess}")


def make_function(
    name: str, build: Callable[..., nn.Module], parameters: Collection[Parameter], optional: Sequence[str] = ()
) -> ModelFunction:
    """Return a function f(input_shape, classes, **options) whose signature lists the options.

    Args:
        name: the complete name of the model, for messages.
        build: called with (input_shape, classes, **options).
        parameters: the options.
        optional: names of arguments that the engine passes by name, such as `task`.

    Raises:
        UserError: (by the returned function) the library raises an error.
    """

    def make(input_shape: Any, classes: int, **options: Any) -> nn.Module:
        try:
            return build(input_shape, classes, **options)
        except UserError:
            raise
        except Exception as error:  # a library may raise anything for options that do not suit each other
            text = (str(error).strip().splitlines() or [""])[0]
            missing = isinstance(error, ImportError)
            remedy = "install the missing package with pip" if missing else "change the options of the model"
            raise UserError(
                f"model {name} cannot be made for samples of shape {input_shape} and {classes} classes: "
                f"{type(error).__name__}: {text}; {remedy}"
            ) from error

    positional = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in ("input_shape", "classes")]
    passed = [Parameter(each, Parameter.KEYWORD_ONLY, default=None) for each in optional]
    make.__signature__ = inspect.Signature([*positional, *passed, *parameters])  # type: ignore[attr-defined]
    make.__annotations__ = {each.name: each.annotation for each in parameters}
    make.__doc__ = f"The model {name}. The options are those of the library."
    return make


def _make_image_model(
    name: str, build: Callable[[Mapping[str, Any]], nn.Module], parameters: Mapping[str, Parameter], required: bool
) -> ModelFunction:
    """Return the function of a model for images or volumes.

    Args:
        build: makes the model from all arguments of the library.
        parameters: the parameters of the class of the model.
        required: whether parameters without default are options; otherwise the library's function sets them.
    """
    outputs = next((each for each in OUTPUT_NAMES if each in parameters), None)
    if outputs is None:
        raise UserError("no argument of this model sets the number of classes or outputs, so it cannot be used by name")
    from_data = (*CHANNEL_NAMES, *SIZE_NAMES, outputs, "spatial_dims", "in_shape")
    options = [
        each.replace(default=each.default if each.default is each.empty else LIBRARY_DEFAULT)
        for key, each in parameters.items()
        if key not in (*from_data, *EXCLUDED, *FIXED, "input_shape") and (required or each.default is not each.empty)
    ]

    def build_for_data(input_shape: Any, classes: int, **given: Any) -> nn.Module:
        if not isinstance(input_shape, tuple) or len(input_shape) not in (3, 4):
            raise UserError(
                f"model {name}: a sample has the shape {input_shape}, but the model needs images (channels, height, "
                "width) or volumes (channels, depth, height, width)"
            )
        channels, *size = input_shape
        if len(size) == 3 and "spatial_dims" not in parameters:
            raise UserError(
                f"model {name}: a sample is a volume of shape {input_shape}, but the model is for images; choose a "
                "model of MONAI such as monai:DenseNet121"
            )
        values = dict.fromkeys(CHANNEL_NAMES, channels)
        for key in set(SIZE_NAMES) & parameters.keys():
            values[key] = size[0] if parameters[key].annotation is int else tuple(size)
            if parameters[key].annotation is int and len(set(size)) > 1:
                raise UserError(f"model {name}: images have {size[0]} x {size[1]} pixels, but must be square")
        values |= {outputs: classes, "spatial_dims": len(size), "in_shape": input_shape, **FIXED}
        return build({key: value for key, value in values.items() if key in parameters} | given)

    return make_function(name, build_for_data, options)


def read_parameters(kind: type) -> dict[str, Parameter]:
    """Return the parameters of a class by name, with types that a config can express.

    If `__init__` passes on other arguments (**kwargs), the parameters of the base classes are included.
    """
    parameters = dict[str, Parameter]()
    for base in kind.__mro__:
        own = vars(base).get("__init__")
        if own is None or base in (object, nn.Module):
            continue
        declared = list(inspect.signature(own).parameters.values())[1:]  # without self
        try:
            hints = typing.get_type_hints(own)
        except Exception:  # some annotations exist only for a type checker
            hints = {each.name: each.annotation for each in declared if not isinstance(each.annotation, str)}
        for each in declared:
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                hint = _config_type(hints.get(each.name, Any), each.default)
                parameters.setdefault(each.name, each.replace(kind=each.KEYWORD_ONLY, annotation=hint))
        if not any(each.kind is each.VAR_KEYWORD for each in declared):
            break
    return parameters


def _config_type(hint: Any, default: Any) -> Any:
    """Return a type for values in a config: the part of a library's annotation that YAML can express, or Any."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        parts = [part for each in inside if (part := _config_type(each, LIBRARY_DEFAULT)) is not Any]
        if not [part for part in parts if part is not NoneType]:
            return Any
        plain: Any = Union[tuple(parts)]  # noqa: UP007  # built from a list
    elif origin is Literal or hint in PLAIN_TYPES:
        plain = hint
    elif origin in (list, tuple, dict, Sequence):
        items = [each if each is ... else _config_type(each, LIBRARY_DEFAULT) for each in inside]
        items += [...] if origin is tuple and len(items) == 1 else []  # MONAI writes tuple[int] for any length
        plain = origin[tuple(items)] if items else origin
    else:
        return Any
    return Union[plain, None] if default is None else plain  # noqa: UP007  # some libraries write `x: int = None`


def _return_class(function: Callable[..., Any]) -> type | None:
    """Return the class that a function declares to return; None if it declares none."""
    try:
        declared = typing.get_type_hints(function).get("return")
    except Exception:  # some annotations exist only for a type checker
        return None
    return declared if inspect.isclass(declared) and issubclass(declared, nn.Module) else None


def _replace_first_convolution(model: nn.Module, channels: int) -> None:
    """Give the first convolution of a model another number of input channels, with new random weights."""
    for part in model.modules():
        for name, old in part.named_children():
            if isinstance(old, nn.Conv2d):
                options = {key: getattr(old, key) for key in ("kernel_size", "stride", "padding", "dilation")}
                new = nn.Conv2d(channels, old.out_channels, bias=old.bias is not None, **options)
                setattr(part, name, new)
                return
