"""Models that are linear layers with pointwise functions between them."""

from collections.abc import Callable

from torch import Tensor, nn

from fedmpi.models.mlp import MLP

POINTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


def layers_of(module: nn.Module) -> list[nn.Module] | None:
    """The layers one after the other; None where the module is no such model, or says it in a way not known here."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    if type(module) in (MLP, nn.Sequential):  # children() leaves out what stands there a second time
        found = [layers_of(part) for part in module._modules.values() if part is not None]
        return None if None in found else [layer for each in found if each for layer in each]
    flattens = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return [module] if flattens or type(module) is nn.Linear or type(module) in POINTWISE else None


def straight(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """module(x) from layer to layer, without nn.Module's way of calling each of its parts; None for other models."""
    layers = layers_of(module)
    if not layers or any(part._compiled_call_impl is not None for part in module.modules()):
        return None
    steps = [layer.forward for layer in layers]

    def forward(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return forward
