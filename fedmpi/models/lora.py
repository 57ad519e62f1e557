"""Low-rank adapters (LoRA) in the layers of any model, made by the PEFT library.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022.
https://arxiv.org/abs/2106.09685

    W x + s B A x        A (r, in), B (out, r), s = alpha / r, or alpha / sqrt(r) with rslora                        (1)
W, the base weight, is frozen. A convolution is treated as a linear map of its input patches: A has the shape
(r, in, height, width), and B the shape (out, r, 1, 1). The base weights of embeddings, and of the Conv1D layer of the
transformers library, are stored transposed.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type
from fedmpi.common.text import shorten
from fedmpi.models.libraries import import_library
from fedmpi.models.net import FeaturesAndHead

ADAPTER = "default"  # PEFT's name for the only adapter of a layer


@dataclass(frozen=True)
class LoraConfig:
    """The options of the adapters; their meanings are those of the config section `model.lora`."""

    r: int
    alpha: float
    targets: tuple[str, ...] | None
    rslora: bool
    dropout: float
    head: bool
    base_precision: str
    freeze_a: bool = False


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer with an adapter; see equation (1) of the module docstring."""

    name: str  # of the layer, as in module.named_modules()
    a: str  # name of the parameter A
    b: str  # name of the parameter B
    base: nn.Parameter  # W
    scale: float  # s
    transposed: bool  # whether W is stored as (in, out)
    is_embedding: bool

    @property
    def base_name(self) -> str:
        """The name of the parameter W."""
        return f"{self.name}.base_layer.weight"

    @property
    def frozen_factor(self) -> str:
        """The name of the parameter that is not trained with `freeze_a`: A; B for embeddings, whose A is zero."""
        return self.b if self.is_embedding else self.a

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes (out, in) of the product B A."""
        rows, columns = self.base.shape[0], self.base[0].numel()
        return (columns, rows) if self.transposed else (rows, columns)

    def add_to_base(self, product: Tensor) -> None:
        """Add s times a matrix (out, in) to the base weight, in place."""
        change = product.T if self.transposed else product
        self.base.data.add_(change.reshape(self.base.shape).to(self.base.dtype), alpha=self.scale)


def iter_adapted_layers(module: nn.Module) -> Iterator[AdaptedLayer]:
    """Yield the layers of a module that have an adapter, in the order of its submodules."""
    for name, layer in module.named_modules():
        if not hasattr(layer, "lora_A") or not hasattr(layer, "get_base_layer"):
            continue
        embedding = ADAPTER in layer.lora_embedding_A
        a, b, end = ("lora_embedding_A", "lora_embedding_B", "") if embedding else ("lora_A", "lora_B", ".weight")
        transposed = embedding or bool(getattr(layer, "fan_in_fan_out", False))
        yield AdaptedLayer(
            name,
            f"{name}.{a}.{ADAPTER}{end}",
            f"{name}.{b}.{ADAPTER}{end}",
            layer.get_base_layer().weight,
            float(layer.scaling[ADAPTER]),
            transposed,
            embedding,
        )


def add_adapters(module: nn.Module, config: LoraConfig, input_shape: Shape, dtype: Type) -> nn.Module:
    """Add adapters to layers of a module, in place, and freeze everything else except the head; return the module.

    The initial values are PEFT's: A is random and B is zero (for embeddings, A is zero and B is random), so the outputs
    do not change.

    Args:
        input_shape: the shape of a sample, and `dtype` its type, with which the head is targets.

    Raises:
        UserError: PEFT is not installed; a target does not exist, is never called, cannot have an adapter, or shares
            its weight with another layer; the rank is larger than a layer; or there is no layer to adapt.
    """
    try:
        peft = import_library("peft", "lora")
    except UserError as error:
        raise UserError(f"model.lora {error}") from error
    _use_layers_in_evaluation(module)
    with _record_calls(module) as called:
        head = FeaturesAndHead(module, input_shape, dtype).head_parameter_names()
    head |= set(getattr(module, "head_names", ()))
    shared = _find_tied_parameters(module)
    targets = _find_targets(module, config, head, shared, called)
    for name in targets:
        _check_target(name, module.get_submodule(name), config.r, shared)
    if config.head and (tied := sorted(head & shared.keys())):
        raise UserError(
            f"model.lora.head: true trains the head, but its weight {tied[0]} is shared with {shared[tied[0]]}; set "
            "model.lora.head: false"
        )
    library_config = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type,unused-ignore]
        target_modules=targets,
        use_rslora=config.rslora,
        lora_dropout=config.dropout,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # PEFT then sets it as the layer needs
            peft.inject_adapter_in_model(library_config, module)
    except ValueError as error:
        raise UserError(f"model.lora: {error}") from error
    layers = list(iter_adapted_layers(module))
    trained = {name for layer in layers for name in (layer.a, layer.b)}
    if config.freeze_a:
        trained -= {layer.frozen_factor for layer in layers}
    trained |= head if config.head else set()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    if config.base_precision == "bf16":
        _convert_base(module, trained)
    return module


def _adaptable(layer: nn.Module) -> bool:
    """Return whether PEFT can add an adapter to a layer."""
    return isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)) or _is_conv1d(layer)


def _is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D, a linear layer with a transposed weight."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _use_layers_in_evaluation(module: nn.Module) -> None:
    """Let torch's transformer encoders call their linear layers in evaluation mode, too.

    By default a fused kernel reads the weights of these layers instead, which would leave out their adapters.
    """
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


@contextmanager
def _record_calls(module: nn.Module) -> Iterator[set[nn.Module]]:
    """Return the set of submodules whose forward functions are called in this context."""
    called = set[nn.Module]()
    hooks = [x.register_forward_pre_hook(lambda layer, inputs: called.add(layer)) for x in module.modules()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _find_targets(
    module: nn.Module, config: LoraConfig, head: set[str], tied: Mapping[str, str], called: set[nn.Module]
) -> list[str]:
    """Return the names of the layers to adapt: those that `targets` names, or all linear layers except the head.

    Args:
        head: the names of the parameters of the head.
        tied: the names of parameters that have several names.
        called: the submodules that a forward pass calls. An adapter of another layer would have no effect.
    """
    layers = {name: layer for name, layer in module.named_modules() if name and _adaptable(layer)}
    in_head = {name.rpartition(".")[0] for name in head}
    if config.targets is None:
        in_head |= {name.rpartition(".")[0] for name in tied}  # the output layer of a language model
        linear = {n: x for n, x in layers.items() if isinstance(x, nn.Linear) or _is_conv1d(x)}
        targets = [name for name, layer in linear.items() if layer in called and name not in in_head]
        if not targets:
            raise UserError(
                "model.lora.targets: null stands for all linear layers except the head, but this model has none; name "
                f"the layers: {shorten(', '.join(layers), 200)}"
            )
        return targets
    targets = []
    for target in config.targets:
        matching = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matching:
            others = [name for name, _ in module.named_modules() if name == target or name.endswith(f".{target}")]
            why = f"is a {type(module.get_submodule(others[0])).__name__}" if others else "does not exist"
            raise UserError(
                f"model.lora.targets: layer {target!r} {why}; must be the name, or the end of the name, of a linear "
                f"layer, a convolution or an embedding; the nearest are {_nearest_layers(target, layers, others)}"
            )
        if config.head and (inside := [name for name in matching if name in in_head]):
            raise UserError(
                f"model.lora.targets: {inside[0]!r} is the head, which is trained itself; remove it from targets"
            )
        if unused := [name for name in matching if layers[name] not in called]:
            raise UserError(
                f"model.lora.targets: layer {unused[0]} is never called, because the model does not use it or reads "
                "its weight directly (as torch's MultiheadAttention does with out_proj), so an adapter would have no "
                "effect; remove it from targets"
            )
        targets += matching
    return list(dict.fromkeys(targets))


def _nearest_layers(target: str, layers: Iterable[str], others: Sequence[str]) -> str:
    """Return names of layers, or ends of names, for a message about a target that cannot have an adapter.

    Args:
        layers: the names of the layers that can have an adapter.
        others: the names of the modules that `target` stands for; the layers in these modules are the nearest.
    """
    inside = [name for name in layers if any(name.startswith(f"{other}.") for other in others)]
    ends = {name.rpartition(".")[2].casefold(): name.rpartition(".")[2] for name in inside or layers}
    known = ends if inside else {name.casefold(): name for name in layers} | ends
    near = difflib.get_close_matches(target.casefold(), known, n=3, cutoff=0.4)
    return shorten(", ".join([known[each] for each in near] or ends.values()), 200)


def _find_tied_parameters(module: nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter that has several names, another of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [group for group in names.values() if len(group) > 1]
    return {name: next(other for other in group if other != name) for group in tied for name in group}


def _check_target(name: str, layer: nn.Module, r: int, tied: Mapping[str, str]) -> None:
    """Raise UserError if PEFT cannot adapt a layer, if it shares its weight with another one, or is smaller than r."""
    if other := tied.get(f"{name}.weight"):
        raise UserError(
            f"model.lora.targets: the weight of {name} is shared with {other} (tied weights), so an adapter of one "
            "layer would not apply to the other; remove it from targets"
        )
    for option, needed in (("groups", 1), ("dilation", 1), ("padding_mode", "zeros")):  # all that PEFT supports
        value = getattr(layer, option, needed)
        if value not in (needed, (needed,) * (layer.weight.ndim - 2)):  # type: ignore[operator]
            raise UserError(
                f"model.lora.targets: the convolution {name} has {option}={value!r}, but adapters of PEFT need "
                f"{option}={needed!r}; remove it from targets"
            )
    weight: Tensor = layer.weight  # type: ignore[assignment]
    largest = min(weight.shape[0], weight[0].numel())
    if r > largest:
        raise UserError(
            f"model.lora.r: {r} is larger than layer {name} with a weight of {tuple(weight.shape)}; must be at most "
            f"{largest}, or name other layers in model.lora.targets"
        )


def _convert_base(module: nn.Module, trained: set[str]) -> None:
    """Convert frozen linear layers, convolutions and embeddings to bfloat16, in place.

    Such a layer computes in bfloat16, but its inputs and outputs keep the type that they have in the other layers.
    Subclasses are not converted, because their forward functions may read the weights.
    """
    for name, layer in module.named_modules():
        if type(layer) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding) and not _is_conv1d(layer):
            continue
        if not any(f"{name}.{leaf}" in trained for leaf, _ in layer.named_parameters()):
            layer.to(torch.bfloat16)
            layer.register_forward_pre_hook(_convert_inputs)
            layer.register_forward_hook(_convert_output)


def _convert_inputs(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs)


def _convert_output(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.float()
