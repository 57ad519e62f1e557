"""One view of every architecture: features z, head, logits, whatever the module calls them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Samples, Shape, Type, arguments, call, describe, zeros
from fedmpi.common.user_code_errors import in_user_code, located_error, source_location


class Net:
    """A module and the cut between its features and its head: logits = head(z), z (B, `feature_dim`).

    The head is the part whose output the module returns: `module.head` where there is one, else an `nn.Linear`; z is
    the input of that part. Where no part is the last one (a softmax behind it, say), `head` is None; there, and where
    features or logits of a sample are more than one row (text, a map), `feature_dim` is None, and `forward` gives
    (None, logits). The logits are the module's own output in any case.

    The head is looked for in one dry run, in evaluation mode on two samples of zeros of shape `input_shape` and type
    `dtype` (default: that of the parameters). `output_shape` is that of a sample's outputs, `outputs` the first of its
    sizes: the number of logits of a sample.

    Raises UserError for a module that fails on such samples, or does not return outputs (B, ...) of each.

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
        """Count the bytes that a forward pass in training keeps of one sample for the backward pass."""
        kept, weights = dict[int, int](), {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with _undisturbed(self.module), torch.enable_grad(), hooks:
            self.module.train()
            logits = call(self.module, self._samples)
        del logits  # until here it holds the tensors, so that no two have one address
        return sum(size for at, size in kept.items() if at not in weights) // len(self._samples)

    def forward(self, x: Samples) -> tuple[Tensor | None, Tensor]:
        """(z, logits) in one pass; z is None where `feature_dim` is None."""
        if self.head is None or self.feature_dim is None:
            return None, call(self.module, x)
        # The hook (5 us) lives for this call only: one that stayed would keep z, and the graph behind it, alive.
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            positional, named = arguments(self.module, x)
            logits = self.module._call_impl(*positional, **named)
        finally:
            hook.remove()
        return seen[-1], logits

    def head_names(self) -> set[str]:
        """Names, as in `module.named_parameters()`, of the parameters that belong to the head."""
        own = {id(parameter) for parameter in self.head.parameters()} if self.head else set()
        return {name for name, parameter in self.module.named_parameters() if id(parameter) in own}


def _last_part(module: nn.Module, x: Samples) -> tuple[Tensor, nn.Module | None, Tensor | None]:
    """(logits, the head, its input) of one pass of `module` over x; (logits, None, None) without a head."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []  # of parts that may be the head: part, its input, its output

    def note(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs:
            calls[:] = [(part, inputs[0], output)]

    candidates: list[nn.Module] = [part for part in module.modules() if isinstance(part, nn.Linear)]
    named = getattr(module, "head", None)
    if isinstance(named, nn.Module) and not isinstance(named, nn.Linear):
        candidates.append(named)  # it may itself end in a linear layer; of the two it finishes last and is the head
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
    """Evaluation mode without gradients; afterwards every submodule's mode and every buffer is what it was."""
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
