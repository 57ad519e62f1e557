"""Build the model of an experiment from its settings: architecture, pretrained weights, changes made by the method."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedmpi import models
from fedmpi.common import registry, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type, call_module, zero_samples
from fedmpi.common.text import locate_key
from fedmpi.common.user_code_errors import add_error_context
from fedmpi.config import Settings
from fedmpi.method.base import Method
from fedmpi.models import hugging_face, pretrained
from fedmpi.models.lora import LoraConfig, add_adapters, iter_adapted_layers
from fedmpi.models.net import FeaturesAndHead
from fedmpi.models.pretrained import PretrainedWeights
from fedmpi.runtime.compatibility import check_trainable_parameters


def find_pretrained_weights(settings: Settings) -> PretrainedWeights | None:
    """Find the trained weights of the configured model: those of model.pretrained, or in the folder of hf:FOLDER.

    Raises:
        UserError: The file or folder does not exist or contains no weights.
    """
    given, name = settings.model.pretrained, settings.model.name
    if isinstance(given, Path):
        return pretrained.find_weights("model.pretrained", settings.working_dir / given)
    if given is None and (folder := hugging_face.find_weight_folder(name)) is not None:
        return pretrained.find_weights("model.name", folder)
    return None


def make_module(
    settings: Settings,
    input_shape: Shape,
    classes: int,
    dtype: Type = torch.float32,
    weights: PretrainedWeights | None = None,
) -> nn.Module:
    """Make the configured model. Its initial random weights depend only on the seed.

    Args:
        input_shape: Shape of one sample, without the batch axis; a dict if a sample has several tensors.
        dtype: The dtype of the samples; a dict if a sample has several tensors.
        weights: Trained weights, from `find_pretrained_weights`; None: all weights are random.
    """
    construct = registry.make_component(models.KIND, settings.model, settings.key_origins("model"))
    if isinstance(input_shape, dict) and settings.model.name in models.registry:
        named = ", ".join(input_shape)
        raise UserError(
            f"model.name: {settings.model.name} takes one tensor per sample, but the samples of this data set have "
            f"several ({named}); write a model with forward(self, {named}), and set model.name: file.py:Name"
        )
    with seeds.temporary_seed(settings.seed, "init"):
        with add_error_context(f"model {settings.model.name}"):
            accepted = signature(construct.func).parameters
            context = {k: x for k, x in {"task": settings.task.name, "weights": weights}.items() if k in accepted}
            module = construct(input_shape, classes, **context)
            check_trainable_parameters(f"model.name: {settings.model.name}", module, construct)
            # Lazy parameters are created by the first forward pass, which is made here, with the seed.
            if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
                training = module.training
                with torch.no_grad():
                    call_module(module.eval(), zero_samples(2, input_shape, dtype))
                module.train(training)
            if weights is not None and "weights" not in accepted:
                head = FeaturesAndHead(module, input_shape, dtype).head_parameter_names()
                weights.load_into(module, head)
        config = make_lora_config(settings)
        return module if config is None else add_lora_adapters(settings, module, config, input_shape, dtype)


def make_lora_config(settings: Settings) -> LoraConfig | None:
    """Return the options of adapters (model.lora); None if the model has no adapters."""
    if settings.model.lora is None:
        return None
    options = settings.model.lora.model_dump()
    if options["head"] is None:  # the head of a language model has been trained, and is as large as its vocabulary
        options["head"] = settings.task.name not in hugging_face.CAUSAL_TASKS
    return LoraConfig(**options, freeze_a=settings.server.lora == "freeze_a")


def add_lora_adapters(
    settings: Settings, module: nn.Module, config: LoraConfig, input_shape: Shape, dtype: Type
) -> nn.Module:
    """Add adapters to a module; messages about their options name the line of the config."""
    try:
        return add_adapters(module, config, input_shape, dtype)
    except UserError as error:
        key, text = re.split("(?=[: ])", str(error), maxsplit=1)  # every message begins with a key
        raise UserError(locate_key(settings.origin(key), key) + text) from error


def make_prepared_module(
    settings: Settings,
    method: Method,
    input_shape: Shape,
    classes: int,
    dtype: Type = torch.float32,
    weights: PretrainedWeights | None = None,
) -> nn.Module:
    """Build the configured model with its initial weights, adapted by the method's hook `prepare_model`.

    Args:
        weights: Trained weights, from `find_pretrained_weights`. They are not needed for the model of a finished run.
    """
    module = make_module(settings, input_shape, classes, dtype, weights)
    where = f"method {settings.method.name}, hook prepare_model"
    fixed = _find_lora_parameters(module)
    with add_error_context(where), seeds.temporary_seed(settings.seed, "prepare"):
        module = method.prepare_model(module, classes)
        check_trainable_parameters(where, module, method.prepare_model)
    trainable = {id(p): p.requires_grad for p in module.parameters()}
    if changed := [name for name, p in fixed.items() if trainable.get(id(p)) is not p.requires_grad]:
        raise UserError(
            f"method.name: {settings.method.name} is not possible with model.lora, because it replaces the layer of "
            f"{changed[0]}, which has an adapter or is frozen; choose another method, or set model.lora: null"
        )
    return module


def _find_lora_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, by name, of adapters and of all frozen layers; {} if the module has no adapters."""
    layers = list(iter_adapted_layers(module))
    adapters = {name for layer in layers for name in (layer.a, layer.b)}
    return {n: p for n, p in module.named_parameters() if layers and (n in adapters or not p.requires_grad)}
