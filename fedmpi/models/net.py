"""The division of a module into features and head, which does not depend on the names of its submodules."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Samples, Shape, Type, call_module, describe_samples, to_call_arguments, zero_samples
from fedmpi.common.user_code_errors import describe_source_location, find_user_line, make_located_error


class FeaturesAndHead:
    """A module divided into features and head: logits = head(z), with features z (B, feature_dim).

    The head is the submodule whose output the module returns unchanged: `module.head` or an `nn.Linear`. z is the input
    of the head. The head is found by one forward pass in evaluation mode on two samples of zeros.

    Args:
        module: the module, which must return one tensor of logits (B, ...).
        input_shape: the shape of a sample.
        dtype: the type of samples; None: the type of the parameters.

    Attributes:
        head: the head; None if there is no such submodule, for example because a softmax follows the last layer.
        feature_dim: the number of features of a sample; None if there is no head, or if the features or logits of a
            sample are not one vector (text, segmentation).
        output_shape: the shape of the logits of one sample.
        num_outputs: the first size of output_shape, which is the number of classes for a classifier.

    Raises:
        UserError: the module fails on samples of this shape, or does not return one tensor (B, ...).

    >>> net = FeaturesAndHead(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,))
    >>> z, logits = net.forward(torch.zeros(5, 4))
    >>> z.shape, logits.shape, sorted(net.head_parameter_names())
    (torch.Size([5, 3]), torch.Size([5, 2]), ['2.bias', '2.weight'])
    """

    def __init__(self, module: nn.Module, input_shape: Shape, dtype: Type | None = None) -> None:
        self.module = module
        parameter = next(module.parameters(), torch.empty(0))
        self._samples = zero_samples(2, input_shape, dtype or parameter.dtype, parameter.device)
        with _evaluation_mode(module):
            logits, self.head, z = _run_and_find_head(module, self._samples)
        self.output_shape = tuple(logits.shape[1:])
        self.num_outputs: int = logits.shape[1]
        self.feature_dim: int | None = z.shape[1] if z is not None and z.ndim == logits.ndim == 2 else None

    def activation_bytes(self) -> int:
        """Return how many bytes per sample a forward pass in training stores for the backward pass."""
        saved_bytes, weights = dict[int, int](), {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def record_size(x: Tensor) -> Tensor:
            saved_bytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(record_size, lambda x: x)
        with _evaluation_mode(self.module), torch.enable_grad(), hooks:
            self.module.train()
            logits = call_module(self.module, self._samples)
        del logits  # keeps the tensors alive until here, so that no two have the same address
        return sum(size for address, size in saved_bytes.items() if address not in weights) // len(self._samples)

    def forward(self, x: Samples) -> tuple[Tensor | None, Tensor]:
        """Return the features and logits (z, logits) of one forward pass; z is None if `feature_dim` is None."""
        if self.head is None or self.feature_dim is None:
            return None, call_module(self.module, x)
        # The hook (5 us) is removed after this call: a permanent one would keep z, and its autograd graph, in memory.
        head_inputs: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
        try:
            positional, named = to_call_arguments(self.module, x)
            logits = self.module._call_impl(*positional, **named)
        finally:
            hook.remove()
        return head_inputs[-1], logits

    def head_parameter_names(self) -> set[str]:
        """Return the names of the head's parameters, as in `module.named_parameters()`.

        A module without a separate head can list these names in an attribute `head_names`.
        """
        if self.head is None:
            return set(getattr(self.module, "head_names", ()))
        own = {id(parameter) for parameter in self.head.parameters()}
        return {name for name, parameter in self.module.named_parameters() if id(parameter) in own}


def _run_and_find_head(module: nn.Module, x: Samples) -> tuple[Tensor, nn.Module | None, Tensor | None]:
    """Run the module on x and return (logits, head, input of the head); the last two are None if it has no head."""
    calls: list[
        tuple[nn.Module, Tensor, Tensor]
    ] = []  # (part, its input, its output) of the last call of a part that may be the head

    def record_call(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs:
            calls[:] = [(part, inputs[0], output)]

    candidates: list[nn.Module] = [part for part in module.modules() if isinstance(part, nn.Linear)]
    declared_head = getattr(module, "head", None)
    if isinstance(declared_head, nn.Module) and not isinstance(declared_head, nn.Linear):
        candidates.append(declared_head)  # if it ends in a linear layer, its hook is the last and replaces the layer's
    hooks = [part.register_forward_hook(record_call) for part in candidates]
    name, before = f"model {type(module).__name__}", x._version
    try:
        logits = call_module(module, x)
    except Exception as error:
        location = find_user_line(error) or describe_source_location(module)
        raise UserError(
            f"{name} fails on a batch of two samples, {describe_samples(x)}: {error}; choose a model that accepts "
            f"samples of this shape{f' ({location})' if location else ''}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if x._version != before:
        raise make_located_error(
            f"{name} modifies its input in place (by an operation whose name ends in _, or by ReLU(inplace=True) as "
            "the "
            "first layer), which would affect other passes over the batch; work on a copy, for example x = x - mean",
            module,
        )
    if not isinstance(logits, Tensor) or logits.ndim < 2 or len(logits) != len(x):
        returned = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        needed = f"it must return one tensor of shape ({len(x)}, outputs) or ({len(x)}, ...)"
        raise make_located_error(f"{name} returns {returned} for a batch of {len(x)} samples; {needed}", module)
    part, z, output = calls[0] if calls else (None, None, None)
    return (logits, part, z) if output is logits else (logits, None, None)


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Context manager: use evaluation mode without gradients, then restore modes and buffers of all submodules."""
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
