"""A uniform view of a model: its features z, its head and its logits, whatever their names in the module."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Samples, Shape, Type, arguments, call, describe, zeros
from fedmpi.common.user_code_errors import in_user_code, located_error, source_location


class Net:
    """A module divided into features and head: logits = head(z), with features z (B, `feature_dim`).

    The head is the part whose output the module returns: `module.head` if it exists, otherwise an `nn.Linear`; z is the
    input of the head. `head` is None if the output of no such part is returned, as with a softmax after it.
    `feature_dim` is None, and `forward` returns (None, logits), if there is no head, or if the features or logits of a
    sample are not one vector (text, segmentation). The logits are always the module's own output.

    The head is found by one forward pass in evaluation mode on two samples of zeros of shape `input_shape` and type
    `dtype` (default: that of the parameters). `output_shape` is the shape of the outputs of a sample, and `outputs` its
    first size: the number of logits of a sample.

    Raises UserError if the module fails on such samples, or does not return one tensor of outputs (B, ...).

    >>> net = Net(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,))
    >>> z, logits = net.forward(torch.zeros(5, 4))
    >>> z.shape, logits.shape, sorted(net.head_names())
    (torch.Size([5, 3]), torch.Size([5, 2]), ['2.bias', '2.weight'])
    """

    def __init__(self, module: nn.Module, input_shape: Shape, dtype: Type | None = None) -> None:
        self.module = module
        like = next(module.parameters(), torch.empty(0))
        self._samples = zeros(2, input_shape, dtype or like.dtype, like.device)
        with _undisturbed(module):
            logits, self.head, z = _last_part(module, self._samples)
        self.output_shape = tuple(logits.shape[1:])
        self.outputs: int = logits.shape[1]
        self.feature_dim: int | None = z.shape[1] if z is not None and z.ndim == logits.ndim == 2 else None

    def activation_bytes(self) -> int:
        """Return how many bytes per sample a forward pass in training keeps for the backward pass."""
        kept, weights = dict[int, int](), {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with _undisturbed(self.module), torch.enable_grad(), hooks:
            self.module.train()
            logits = call(self.module, self._samples)
        del logits  # keeps the tensors alive until here, so that no two have the same address
        return sum(size for at, size in kept.items() if at not in weights) // len(self._samples)

    def forward(self, x: Samples) -> tuple[Tensor | None, Tensor]:
        """Return features and logits (z, logits) of one forward pass; z is None if `feature_dim` is None."""
        if self.head is None or self.feature_dim is None:
            return None, call(self.module, x)
        # The hook (5 us) is removed after this call: a permanent one would keep z, and its autograd graph, in memory.
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            positional, named = arguments(self.module, x)
            logits = self.module._call_impl(*positional, **named)
        finally:
            hook.remove()
        return seen[-1], logits

    def head_names(self) -> set[str]:
        """Return the names, as in `module.named_parameters()`, of the parameters of the head."""
        own = {id(parameter) for parameter in self.head.parameters()} if self.head else set()
        return {name for name, parameter in self.module.named_parameters() if id(parameter) in own}


def _last_part(module: nn.Module, x: Samples) -> tuple[Tensor, nn.Module | None, Tensor | None]:
    """Return (logits, head, input of the head) of one forward pass over x; (logits, None, None) without a head."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []  # (part, its input, its output), of parts that may be the head

    def note(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs:
            calls[:] = [(part, inputs[0], output)]

    candidates: list[nn.Module] = [part for part in module.modules() if isinstance(part, nn.Linear)]
    named = getattr(module, "head", None)
    if isinstance(named, nn.Module) and not isinstance(named, nn.Linear):
        candidates.append(named)  # if it ends in a linear layer, its hook is the last and replaces the layer's
    hooks = [part.register_forward_hook(note) for part in candidates]
    name, before = f"model {type(module).__name__}", x._version
    try:
        logits = call(module, x)
    except Exception as error:
        place = in_user_code(error) or source_location(module)
        raise UserError(
            f"{name} fails on a batch of two samples of the data set, {describe(x)}: "
            f"{error}; choose a model for samples of this shape{f' ({place})' if place else ''}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if x._version != before:
        raise located_error(
            f"{name} writes to its input (an operation that ends in _, or ReLU(inplace=True) as the first layer): "
            "other passes over the batch would see it; work on a copy, such as x = x - mean",
            module,
        )
    if not isinstance(logits, Tensor) or logits.ndim < 2 or len(logits) != len(x):
        given = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        needed = f"it must return one tensor of shape ({len(x)}, outputs), or ({len(x)}, ...)"
        raise located_error(f"{name} returns {given} for a batch of {len(x)} samples; {needed}", module)
    part, z, output = calls[0] if calls else (None, None, None)
    return (logits, part, z) if output is logits else (logits, None, None)


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Use evaluation mode without gradients; afterwards restore the mode of every submodule and every buffer."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for part, training in modes:
            part.training = training
