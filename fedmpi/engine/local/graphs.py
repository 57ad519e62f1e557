"""Forward and backward passes as CUDA graphs (`compute.graphs`).

The kernels of a small model take less time than their launches. A CUDA graph launches all kernels of a pass at once. It
reads and writes the memory with which it was captured; that fits a model which lives in one flat vector, into which
clients are loaded one after another: one capture serves all clients and rounds. Optimisers, corrections of gradients
and clipping stay outside of it, as their numbers change from round to round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmpi.common.errors import RankWarning, UserError

# Passes of one kind that are made as they come. In the first ones libraries set up what must not happen in a capture,
# and a batch size that few clients have is not worth one.
PASSES_BEFORE_CAPTURE = 3
# Shapes of batches. Each graph has memory of its own, and clients that train on all they have differ in their shapes.
MOST_CAPTURED = 64

KNOWN = ("torch", "torchvision", "fedmpi")  # packages

Passes = Callable[[Tensor, Tensor], Tensor]  # (x, y) -> loss; leaves gradients with the parameters


def consists_of_known_parts(module: nn.Module, task: Any) -> bool:
    """Return whether the code of a model's and a task's passes is PyTorch's, torchvision's and fedmpi's own.

    What such code computes depends on nothing but tensors. A graph repeats what it did when it was captured: of other
    code, which may count its calls, say, the results could be wrong. Batch normalisation that averages over all batches
    (momentum None) cannot be captured: it asks the GPU how many there were.
    """
    parts = [*module.modules()]
    if not all(type(part).__module__.partition(".")[0] in KNOWN for part in (*parts, task)):
        return False
    if not task.capturable or any(isinstance(part, _BatchNorm) and part.momentum is None for part in parts):
        return False
    # Of batch normalisation the flat model may have replaced `forward`.
    changed = any("forward" in part.__dict__ for part in parts if not isinstance(part, _BatchNorm))
    return not changed and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)


class _Captured(NamedTuple):
    graph: Any
    x: Tensor
    y: Tensor
    loss: Tensor
    gradients: list[Tensor | None]  # of each parameter
    used: int  # the first parameter that has one


def _end_capture_of_generators() -> None:
    """Let random generators draw again after a capture that failed: they would go on to count for the graph."""
    for generator in torch.cuda.default_generators:  # of each GPU
        generator.graphsafe_set_state(generator.clone_state())


@final
class PassGraphs:
    """The passes of one rank's model that have been captured, by what they compute and the shapes of their batches."""

    def __init__(self, strict: bool = True) -> None:
        """strict: whether passes that cannot be captured are an error; else all are made as they come."""
        self.strict, self._enabled = strict, True
        self._counts: dict[Hashable, int] = {}
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None  # they run one after another, so one memory pool serves all

    def run(self, kind: Hashable, passes: Passes, parameters: Sequence[nn.Parameter], x: Tensor, y: Tensor) -> Tensor:
        """Make a forward and a backward pass, as a graph if there were enough of them.

        Args:
            kind: a name for what the passes compute.
            passes: makes them; nothing in it may depend on the client or the step but through x, y and the model.
            parameters: what is trained; their gradients are afterwards those of this batch.
            x, y: the batch; one of several named tensors makes its passes as they come.

        Returns:
            () the loss.

        Raises:
            UserError: the passes cannot be captured, and strict is true.
        """
        if not (self._enabled and isinstance(x, Tensor)):
            return passes(x, y)
        key = kind, x.shape, x.dtype, x.stride(), y.shape, y.dtype
        captured = self._captured.get(key)
        if captured is None:
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if count <= PASSES_BEFORE_CAPTURE or len(self._captured) >= MOST_CAPTURED:
                return passes(x, y)
            captured = self._capture(passes, x, y, parameters)
            if captured is None:
                return passes(x, y)
            self._captured[key] = captured
        captured.x.copy_(x)
        captured.y.copy_(y)
        captured.graph.replay()
        if parameters[captured.used].grad is not captured.gradients[captured.used]:  # another pass came in between
            for p, gradient in zip(parameters, captured.gradients, strict=True):
                p.grad = gradient
        return captured.loss.clone()  # the next pass writes to the same place

    def _capture(self, passes: Passes, x: Tensor, y: Tensor, parameters: Sequence[nn.Parameter]) -> _Captured | None:
        """Capture a forward and a backward pass; None if that is impossible and not an error."""
        graph, x, y = torch.cuda.CUDAGraph(), x.clone(), y.clone()
        try:
            # Other threads may go on meanwhile: those that read data, and the one that listens for errors.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = passes(x, y)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            text = f"the passes of this model cannot be captured as a CUDA graph ({reason})"
            if self.strict:
                raise UserError(
                    f"compute.graphs: {text}; a model whose forward pass asks for values of tensors cannot be. Set "
                    "compute.graphs: false"
                ) from error
            self._enabled = False
            _end_capture_of_generators()
            warnings.warn(RankWarning(f"compute.graphs: auto: {text}; they are made one by one"), stacklevel=2)
            return None
        self._pool = graph.pool()
        gradients = [p.grad for p in parameters]
        used = next(i for i, gradient in enumerate(gradients) if gradient is not None)
        return _Captured(graph, x, y, loss.detach(), gradients, used)
