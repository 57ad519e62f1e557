"""Gradient checkpointing (`compute.gradient_checkpointing`) of models that offer it.

A layer with gradient checkpointing stores only its inputs in the forward pass, and computes its activations again in
the backward pass. The gradient has the same bits, also with dropout, because torch restores the random generators.

The libraries name the switch differently: `activation_checkpointing_enable` or, in older versions,
`gradient_checkpointing_enable` in transformers, and `set_grad_checkpointing` in timm. A module of your own may define
any of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fedmpi.common.user_code_errors import make_located_error

# The weights of the first layers and the inputs may have no gradient (frozen base models with adapters), which torch's
# older, re-entrant variant does not support.
CHECKPOINT_OPTIONS = {"use_reentrant": False}
SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing")


def enable_gradient_checkpointing(module: nn.Module, name: str) -> None:
    """Switch gradient checkpointing on in a model, or in the parts of it that offer it.

    A part is not searched further if it offers a switch, because the switch covers its layers.

    Args:
        module: the model.
        name: its name in the config, for messages.

    Raises:
        UserError: the model offers no gradient checkpointing.
    """
    parts = _find_parts_with_switch(module)
    reason = "it offers none" if not parts else ""
    for part in parts:
        try:
            _switch_on(part)
        except (ValueError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip() or f"{type(part).__name__} does not support it"
            break
    if reason:
        raise make_located_error(
            f"compute.gradient_checkpointing: true is not possible with model {name}: {reason}. Models of transformers "
            "and timm offer it, and a model of your own may define set_grad_checkpointing(enable); otherwise set "
            "compute.gradient_checkpointing: false, and to save memory raise train.accumulate",
            module,
        )


def _find_parts_with_switch(module: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that offer a switch."""
    if any(callable(getattr(module, switch, None)) for switch in SWITCHES):
        return [module]
    return [part for child in module.children() for part in _find_parts_with_switch(child)]


def _switch_on(part: Any) -> None:
    if hasattr(part, "activation_checkpointing_enable"):
        part.activation_checkpointing_enable(CHECKPOINT_OPTIONS)
    elif hasattr(part, "gradient_checkpointing_enable"):
        part.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINT_OPTIONS)
    else:
        part.set_grad_checkpointing(True)
    config: Any = getattr(part, "config", None)
    if getattr(config, "use_cache", False):  # the cache for generation cannot be combined with it, and is not used
        config.use_cache = False
    # transformers makes the outputs of embeddings require a gradient, which only the re-entrant variant needs.
    if hasattr(part, "disable_input_require_grads"):
        part.disable_input_require_grads()
