"""The flat model: every parameter is a view of one vector.

    w = [ p_1 | p_2 | ... ]   (d,)     in state_dict order
Loading a client and sending an update are one operation each, and a server rule sees one matrix of rows. Convolution
weights may lie in the vector as O,H,W,I blocks, which channels-last kernels read in place; names, order and row-major
shapes of the state_dict are what the outside world sees.
A frozen parameter (requires_grad False in the module given) is no part of it, and stays what it is on every rank; so
does a buffer that is not persistent (engine/checks.py sees to it).
Float buffers (batch-norm statistics) are a second vector `b`. Integer buffers (counters of batches) do not travel: they
start every client's round as they started the experiment.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn

from fedmpi.flat.layout import BODY, EVERYTHING, HEAD, NORM, Layout, Segment

NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
# Of cuDNN, which would have the weights of recurrent layers in an order of its own: it copies them at each call. Its
# advice, `flatten_parameters`, would take them out of the flat model.
ORDER = "RNN module weights are not part of single contiguous chunk of memory"
CUDNN_ALIGNMENT = 16  # bytes, at a multiple of which cuDNN's batch normalisation takes its tensors to begin


class FlatModel:
    """A PyTorch module that keeps its parameters in one vector, `w` (d,), and its float buffers in another, `b`.

    `head` holds the parameter names of the head. A module may declare groups of its own through
    `parameter_groups() -> {parameter name: group}`.
    """

    def __init__(
        self,
        module: nn.Module,
        head: Collection[str] = (),
        *,
        channels_last: bool = True,
        names: Collection[str] | None = None,
    ) -> None:
        """names: the parameters in `w`, if not those that require gradients."""
        self.module = module
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            warnings.filterwarnings("ignore", ORDER)
        groups = getattr(module, "parameter_groups", None)
        declared: dict[str, str] = groups() if callable(groups) else {}
        owners = {  # of each parameter and buffer
            f"{path}.{leaf}" if path else leaf: (owner, leaf)
            for path, owner in module.named_modules()
            for leaf in (*owner._parameters, *owner._buffers)
        }
        parameters = dict(module.named_parameters())
        named = {n: p for n, p in parameters.items() if (p.requires_grad if names is None else n in names)}
        self.frozen = {n: p for n, p in parameters.items() if n not in named}
        first_name = {id(p): name for name, p in named.items()}  # of tied weights, which lie in w once
        every = module.named_parameters(remove_duplicate=False)
        self.names = {n: first_name[id(p)] for n, p in every if id(p) in first_name}
        self.layout = _lay_out(named, owners, head, declared, channels_last)
        buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point() and n in module.state_dict()}
        self.buffer_layout = _lay_out(buffers, owners, head, declared, False)

        first = next(iter(named.values()))
        self.w = torch.empty(self.layout.size, dtype=first.dtype, device=first.device)
        self.b = torch.empty(self.buffer_layout.size, dtype=first.dtype, device=first.device)
        # What the engine writes does not count as written to `w` or `b` (engine/checks.py).
        self.live, self.live_b = self.w.data, self.b.data
        states = module.state_dict()
        self.counters = [b for n, b in module.named_buffers() if not b.is_floating_point() and n in states]
        self._counters0 = [counter.clone() for counter in self.counters]
        self.buffered = bool(self.counters) or self.buffer_layout.size > 0
        self._g: Tensor | None = None
        self._attached = False  # whether parameters have their gradients in it
        self.parameters: list[nn.Parameter] = []
        with torch.no_grad():
            for s in self.layout.segments:
                # .data gives each view its own version counter: rewriting `w` between two passes is the engine's
                # business, not autograd's.
                view = s.view(self.w.data)
                view.copy_(named[s.name])
                named[s.name].data = view
                self.parameters.append(named[s.name])
            self.members = list(zip(self.layout.segments, self.parameters, strict=True))
            for s in self.buffer_layout.segments:
                view = s.view(self.b.data)
                view.copy_(buffers[s.name])
                owner, leaf = owners[s.name]
                owner._buffers[leaf] = view
            for p in self.frozen.values():
                if channels_last and p.dim() == 4:
                    p.data = p.data.contiguous(memory_format=torch.channels_last)
        if self.w.is_cuda:
            self._avoid_cudnn_where_misaligned()

    def _avoid_cudnn_where_misaligned(self) -> None:
        """Let batch normalisation whose tensors begin where cuDNN cannot read them take PyTorch's own kernels: cuDNN's
        for channels-last images end with the CUDA error "misaligned address"."""
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                tensors = [x for x in (*layer._parameters.values(), *layer._buffers.values()) if x is not None]
                if any(x.is_floating_point() and x.data_ptr() % CUDNN_ALIGNMENT for x in tensors):
                    layer.__dict__["forward"] = MethodType(_forward_without_cudnn, layer)

    def move_into(self, w: Tensor) -> None:
        """Live in the memory of `w` (d,), with the values that are there."""
        self.w, self.live = w, w.data
        for s, p in self.members:
            p.data = s.view(self.live)
        if self.w.is_cuda:
            self._avoid_cudnn_where_misaligned()

    def attach_gradient(self) -> Tensor:
        """(d,) flat gradient; until `drop_gradient`, autograd accumulates straight into it."""
        if self._g is None:  # made once: CUDA graphs write to where it was when they were captured
            self._g = torch.zeros_like(self.w)
        if not self._attached:
            self._g.zero_()
            for s, p in self.members:
                p.grad = s.view(self._g)
            self._attached = True
        return self._g

    def add_gradient(self, g: Tensor) -> None:
        """Add a flat gradient (d,) to the gradients that autograd has allocated, of what is being trained."""
        for s, p in self.members:
            if p.requires_grad:
                p.grad = s.view(g).clone() if p.grad is None else p.grad.add_(s.view(g))

    def drop_gradient(self) -> None:
        """Back to gradients that autograd allocates itself (the fastest form while no hook reads them)."""
        self._attached = False
        for p in self.parameters:
            p.grad = None

    def load(self, w: Tensor, b: Tensor | None = None, counters: Sequence[Tensor] | None = None) -> None:
        """Copy weights in, and with float buffers all buffers; the counters start anew where none are given.

        Raises ValueError for weights of another shape: one number would be spread over all.
        """
        if w.shape != self.w.shape or (b is not None and b.shape != self.b.shape):
            shape = tuple(w.shape) if b is None else (tuple(w.shape), tuple(b.shape))
            raise ValueError(f"weights of shape {shape} for a model of {tuple(self.w.shape)}, {tuple(self.b.shape)}")
        with torch.no_grad():
            if w.data_ptr() != self.live.data_ptr():
                self.live.copy_(w)
            if b is not None and self.buffered:
                self.live_b.copy_(b)
                for counter, value in zip(self.counters, counters or self._counters0, strict=True):
                    counter.copy_(value)

    @contextmanager
    def only(self, groups: Collection[str]) -> Iterator[list[nn.Parameter]]:
        """Train these groups alone; yields their parameters."""
        rest = [p for s, p in self.members if p.requires_grad and s.group not in groups and EVERYTHING not in groups]
        try:
            for p in rest:
                p.requires_grad_(False)
            yield [p for p in self.parameters if p.requires_grad]
        finally:
            for p in rest:
                p.requires_grad_(True)

    def twin(self) -> FlatModel:
        """An independent copy with the same layout, without gradients (teachers, anchors); what is frozen is shared."""
        shared = {id(p): p for p in self.frozen.values()}
        module = copy.deepcopy(self.module, shared).requires_grad_(False).eval()
        head, names = [s.name for s in self.layout.segments if s.group == HEAD], [s.name for s in self.layout.segments]
        channels_last = any(s.channels_last for s in self.layout.segments)
        return FlatModel(module, head, channels_last=channels_last, names=names)

    def state_dict(self, w: Tensor, b: Tensor) -> dict[str, Tensor]:
        """name -> value under the module's own names: parameters from `w`, float buffers from `b`, counters as they
        start (the module's are of whom it trained last, on this rank), the rest its own."""
        start = {id(counter): value for counter, value in zip(self.counters, self._counters0, strict=True)}
        every = self.module.named_buffers(remove_duplicate=False)
        values = self.module.state_dict() | {n: start[id(b)] for n, b in every if id(b) in start}
        tensors = self.layout.tensors(w)
        return {**values, **{n: tensors[first] for n, first in self.names.items()}, **self.buffer_layout.tensors(b)}


def _forward_without_cudnn(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.backends.cudnn.flags(enabled=False):
        output: Tensor = type(layer).forward(layer, x)
    return output


def _lay_out(
    tensors: dict[str, Tensor] | dict[str, nn.Parameter],
    owners: dict[str, tuple[nn.Module, str]],
    head: Collection[str],
    declared: dict[str, str],
    channels_last: bool,
) -> Layout:
    segments, at = [], 0
    for name, t in tensors.items():
        group = HEAD if name in head else NORM if isinstance(owners[name][0], NORM_LAYERS) else BODY
        group = declared.get(name, group)
        segments.append(Segment(name, tuple(t.shape), at, group, channels_last and t.dim() == 4))
        at = segments[-1].stop
    return Layout(tuple(segments))
