"""The flat model: every parameter of a module is a view of one vector.

    w = [ p_1 | p_2 | ... ]   (d,)     in the order of the state_dict

Loading a client's weights is one operation, and so is sending an update. A server rule receives the updates as the rows
of a matrix.
Convolution weights may be stored in the vector as O,H,W,I blocks, which channels-last kernels read in place; the
state_dict keeps its names, order and row-major shapes.
Frozen parameters (those with requires_grad=False in the given module) and non-persistent buffers are not part of the
vectors; their values are the same on every rank and must not change (engine/hook_checks.py checks this).
Float buffers (batch statistics) form a second vector `b`. Integer buffers (counters of batches) are not sent; each
client starts every round with their initial values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn

from fedmpi.flat.layout import ALL_GROUPS, BODY, HEAD, NORM, Layout, Segment

NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
# The beginning of a PyTorch warning: cuDNN wants the weights of recurrent layers in an order of its own, and copies
# them at each call. `flatten_parameters`, which the warning recommends, would move them out of the flat vector.
CUDNN_WEIGHTS_WARNING = "RNN module weights are not part of single contiguous chunk of memory"
CUDNN_ALIGNMENT = 16  # bytes; cuDNN's batch normalisation assumes that its tensors begin at multiples of this


class FlatModel:
    """A PyTorch module whose parameters are views of a vector `w` (d,), and whose float buffers are views of `b`.

    A module can assign its parameters to layout groups with a method `parameter_groups() -> {parameter name: group}`.
    """

    def __init__(
        self,
        module: nn.Module,
        head: Collection[str] = (),
        *,
        channels_last: bool = True,
        names: Collection[str] | None = None,
    ) -> None:
        """Move the parameters and float buffers of a module into flat vectors, in place.

        Args:
            module: the module, whose structure and names do not change.
            head: names of the parameters that form the layout group "head".
            channels_last: whether to store 4-dimensional tensors as O,H,W,I blocks.
            names: names of the parameters in `w`; None: those that require gradients.
        """
        self.module = module
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            warnings.filterwarnings("ignore", CUDNN_WEIGHTS_WARNING)
        groups = getattr(module, "parameter_groups", None)
        declared: dict[str, str] = groups() if callable(groups) else {}
        owners = {  # name of each parameter and buffer -> the module that owns it, and its name there
            f"{path}.{leaf}" if path else leaf: (owner, leaf)
            for path, owner in module.named_modules()
            for leaf in (*owner._parameters, *owner._buffers)
        }
        parameters = dict(module.named_parameters())
        named = {n: p for n, p in parameters.items() if (p.requires_grad if names is None else n in names)}
        self.frozen = {n: p for n, p in parameters.items() if n not in named}
        first_name = {id(p): name for name, p in named.items()}  # `w` contains tied weights once, under this name
        all_names = module.named_parameters(remove_duplicate=False)
        self.names = {n: first_name[id(p)] for n, p in all_names if id(p) in first_name}
        self.layout = _build_layout(named, owners, head, declared, channels_last)
        buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point() and n in module.state_dict()}
        self.buffer_layout = _build_layout(buffers, owners, head, declared, False)

        first = next(iter(named.values()))
        self.w = torch.empty(self.layout.size, dtype=first.dtype, device=first.device)
        self.b = torch.empty(self.buffer_layout.size, dtype=first.dtype, device=first.device)
        # The engine writes through these, which leaves the version counters of `w` and `b` unchanged; the counters show
        # whether a hook has written to them (engine/hook_checks.py).
        self.w_data, self.b_data = self.w.data, self.b.data
        states = module.state_dict()
        self.batch_counters = [b for n, b in module.named_buffers() if not b.is_floating_point() and n in states]
        self._initial_counters = [counter.clone() for counter in self.batch_counters]
        self.has_buffers = bool(self.batch_counters) or self.buffer_layout.size > 0
        self._g: Tensor | None = None
        self._attached = False  # whether the gradients of the parameters are views of _g
        self.parameters: list[nn.Parameter] = []
        with torch.no_grad():
            for s in self.layout.segments:
                # .data gives each view its own version counter, so that autograd raises no error if the engine
                # overwrites `w` between two passes.
                view = s.view(self.w.data)
                view.copy_(named[s.name])
                named[s.name].data = view
                self.parameters.append(named[s.name])
            self.segment_parameters = list(zip(self.layout.segments, self.parameters, strict=True))
            for s in self.buffer_layout.segments:
                view = s.view(self.b.data)
                view.copy_(buffers[s.name])
                owner, leaf = owners[s.name]
                owner._buffers[leaf] = view
            for p in self.frozen.values():
                if channels_last and p.dim() == 4:
                    p.data = p.data.contiguous(memory_format=torch.channels_last)
        if self.w.is_cuda:
            self._avoid_cudnn_if_misaligned()

    def _avoid_cudnn_if_misaligned(self) -> None:
        """Make batch normalisation use PyTorch's own kernels if its tensors are not aligned as cuDNN requires.

        In that case cuDNN's kernels for channels-last images fail with the CUDA error "misaligned address".
        """
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                tensors = [x for x in (*layer._parameters.values(), *layer._buffers.values()) if x is not None]
                if any(x.is_floating_point() and x.data_ptr() % CUDNN_ALIGNMENT for x in tensors):
                    layer.__dict__["forward"] = MethodType(_forward_without_cudnn, layer)

    def move_into(self, w: Tensor) -> None:
        """Make the parameters views of another vector `w` (d,), so that they have the values that `w` contains."""
        self.w, self.w_data = w, w.data
        for s, p in self.segment_parameters:
            p.data = s.view(self.w_data)
        if self.w.is_cuda:
            self._avoid_cudnn_if_misaligned()

    def attach_gradient(self) -> Tensor:
        """Return a zero vector (d,) into which autograd accumulates gradients until `drop_gradient` is called."""
        if self._g is None:  # allocated once, because CUDA graphs write to the address at which they were captured
            self._g = torch.zeros_like(self.w)
        if not self._attached:
            self._g.zero_()
            for s, p in self.segment_parameters:
                p.grad = s.view(self._g)
            self._attached = True
        return self._g

    def add_gradient(self, g: Tensor) -> None:
        """Add a flat gradient (d,) to the gradients in .grad of the trainable parameters."""
        for s, p in self.segment_parameters:
            if p.requires_grad:
                p.grad = s.view(g).clone() if p.grad is None else p.grad.add_(s.view(g))

    def drop_gradient(self) -> None:
        """Detach the flat gradient; autograd then allocates gradients itself, which is faster if no hook reads them."""
        self._attached = False
        for p in self.parameters:
            p.grad = None

    def load(self, w: Tensor, b: Tensor | None = None, counters: Sequence[Tensor] | None = None) -> None:
        """Copy weights, and optionally buffers, into the model.

        Args:
            w: the weights (d,).
            b: the float buffers; None: all buffers keep their values.
            counters: the integer buffers; None: their initial values if `b` is given.

        Raises:
            ValueError: a shape is wrong; a single number would otherwise be copied to all entries.
        """
        if w.shape != self.w.shape or (b is not None and b.shape != self.b.shape):
            given = f"{tuple(w.shape)}" if b is None else f"{tuple(w.shape)} and buffers {tuple(b.shape)}"
            needed = f"{tuple(self.w.shape)}" if b is None else f"{tuple(self.w.shape)} and {tuple(self.b.shape)}"
            raise ValueError(f"the weights have shape {given}, but the model needs {needed}")
        with torch.no_grad():
            if w.data_ptr() != self.w_data.data_ptr():
                self.w_data.copy_(w)
            if b is not None and self.has_buffers:
                self.b_data.copy_(b)
                for counter, value in zip(self.batch_counters, counters or self._initial_counters, strict=True):
                    counter.copy_(value)

    @contextmanager
    def train_only(self, groups: Collection[str]) -> Iterator[list[nn.Parameter]]:
        """Context manager: freeze all layout groups except `groups`, and yield the parameters that remain trainable."""
        others = [
            p
            for s, p in self.segment_parameters
            if p.requires_grad and s.group not in groups and ALL_GROUPS not in groups
        ]
        try:
            for p in others:
                p.requires_grad_(False)
            yield [p for p in self.parameters if p.requires_grad]
        finally:
            for p in others:
                p.requires_grad_(True)

    def frozen_copy(self) -> FlatModel:
        """Return a copy of the model that has the same layout and needs no gradients.

        The copy shares only frozen parameters with the model. Methods use such copies as teachers and anchors.
        """
        shared = {id(p): p for p in self.frozen.values()}
        module = copy.deepcopy(self.module, shared).requires_grad_(False).eval()
        head, names = [s.name for s in self.layout.segments if s.group == HEAD], [s.name for s in self.layout.segments]
        channels_last = any(s.channels_last for s in self.layout.segments)
        return FlatModel(module, head, channels_last=channels_last, names=names)

    def state_dict(self, w: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Return the state_dict of the module, with parameters from `w` (d,) and float buffers from `b`.

        Integer buffers get their initial values, because their current values belong to the client that this rank
        trained last. All other entries are taken from the module.
        """
        start = {id(counter): value for counter, value in zip(self.batch_counters, self._initial_counters, strict=True)}
        all_buffers = self.module.named_buffers(remove_duplicate=False)
        values = self.module.state_dict() | {n: start[id(b)] for n, b in all_buffers if id(b) in start}
        tensors = self.layout.named_views(w)
        return {**values, **{n: tensors[first] for n, first in self.names.items()}, **self.buffer_layout.named_views(b)}


def _forward_without_cudnn(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute the forward pass of a layer with PyTorch's own kernels in place of cuDNN's."""
    with torch.backends.cudnn.flags(enabled=False):
        output: Tensor = type(layer).forward(layer, x)
    return output


def _build_layout(
    tensors: dict[str, Tensor] | dict[str, nn.Parameter],
    owners: dict[str, tuple[nn.Module, str]],
    head: Collection[str],
    declared: dict[str, str],
    channels_last: bool,
) -> Layout:
    """Return the layout of these tensors, in this order, with the layout group and storage order of each tensor."""
    segments, offset = [], 0
    for name, t in tensors.items():
        group = HEAD if name in head else NORM if isinstance(owners[name][0], NORM_LAYERS) else BODY
        group = declared.get(name, group)
        segments.append(Segment(name, tuple(t.shape), offset, group, channels_last and t.dim() == 4))
        offset = segments[-1].stop
    return Layout(tuple(segments))
