"""Capture of forward and backward passes as CUDA graphs (`compute.graphs`).

For a small model, launching kernels takes longer than running them; a CUDA graph launches all kernels of a pass at
once. A graph reads and writes the memory that was used during its capture. All clients of a rank are loaded into the
same flat vector, one after another, so one capture serves all clients and rounds. Optimisers, gradient corrections and
clipping are not captured, because their coefficients change from round to round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmpi.common.errors import RankWarning, UserError

# Number of passes of one kind that run without a graph. Libraries are initialised in the first passes, which is not
# possible in a capture; and a batch size that few clients have is not worth a capture.
PASSES_BEFORE_CAPTURE = 3
# Maximum number of graphs, one for each batch shape. Each graph has its own memory, and with full batches each client
# may have a different batch shape.
MAX_GRAPHS = 64

KNOWN_PACKAGES = ("torch", "torchvision", "fedmpi")  # top-level packages whose code can be captured

Passes = Callable[[Tensor, Tensor], Tensor]  # (x, y) -> loss; stores the gradients in the parameters' .grad


def consists_of_known_parts(module: nn.Module, task: Any) -> bool:
    """Return whether a model and its task consist only of code that is known to permit CUDA graphs.

    Such code belongs to PyTorch, torchvision or fedmpi, and its results depend only on tensors. A graph repeats the
    captured operations, which would be wrong for code that, for example, counts its calls. Batch normalisation with
    momentum=None cannot be captured, because it reads the number of batches from the GPU.
    """
    parts = [*module.modules()]
    if not all(type(part).__module__.partition(".")[0] in KNOWN_PACKAGES for part in (*parts, task)):
        return False
    if not task.capturable or any(isinstance(part, _BatchNorm) and part.momentum is None for part in parts):
        return False
    # The flat model may have replaced `forward` of batch normalisation itself.
    changed = any("forward" in part.__dict__ for part in parts if not isinstance(part, _BatchNorm))
    return not changed and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)


class _CapturedPass(NamedTuple):
    """A captured graph with the tensors that it reads and writes."""

    graph: Any
    x: Tensor
    y: Tensor
    loss: Tensor
    gradients: list[Tensor | None]  # one for each parameter
    first_used: int  # index of the first parameter that has a gradient


def _end_capture_of_generators() -> None:
    """Reset the random generators of the GPU, because a failed capture leaves them in capture mode."""
    for generator in torch.cuda.default_generators:  # one for each GPU
        generator.graphsafe_set_state(generator.clone_state())


@final
class PassGraphs:
    """Runs the passes of one rank's model as CUDA graphs, one for each kind of pass and batch shape."""

    def __init__(self, strict: bool = True) -> None:
        """Create an empty set of graphs.

        Args:
            strict: whether to raise an error if a pass cannot be captured; otherwise all later passes run without
                graphs.
        """
        self.strict, self._enabled = strict, True
        self._counts: dict[Hashable, int] = {}
        self._captured: dict[Hashable, _CapturedPass] = {}
        self._pool: Any = None  # graphs run one after another, so they share one memory pool

    def run(self, kind: Hashable, passes: Passes, parameters: Sequence[nn.Parameter], x: Tensor, y: Tensor) -> Tensor:
        """Run a forward and a backward pass.

        The first PASSES_BEFORE_CAPTURE passes of a kind run directly. The next one is captured as a CUDA graph, and all
        later ones replay this graph.

        Args:
            kind: the name of the computation; passes of the same kind and batch shape share a graph.
            passes: a function (x, y) that runs both passes. Only x, y and the model may depend on the client and the
                step.
            parameters: the trained parameters, whose .grad the passes set.
            x, y: the batch. If x consists of several named tensors, no graph is used.

        Returns:
            The loss, a scalar.

        Raises:
            UserError: the passes cannot be captured, and strict is true.
        """
        if not (self._enabled and isinstance(x, Tensor)):
            return passes(x, y)
        key = kind, x.shape, x.dtype, x.stride(), y.shape, y.dtype
        captured = self._captured.get(key)
        if captured is None:
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if count <= PASSES_BEFORE_CAPTURE or len(self._captured) >= MAX_GRAPHS:
                return passes(x, y)
            captured = self._capture(passes, x, y, parameters)
            if captured is None:
                return passes(x, y)
            self._captured[key] = captured
        captured.x.copy_(x)
        captured.y.copy_(y)
        captured.graph.replay()
        if (
            parameters[captured.first_used].grad is not captured.gradients[captured.first_used]
        ):  # another pass has replaced .grad
            for p, gradient in zip(parameters, captured.gradients, strict=True):
                p.grad = gradient
        return captured.loss.clone()  # the next pass overwrites this tensor

    def _capture(
        self, passes: Passes, x: Tensor, y: Tensor, parameters: Sequence[nn.Parameter]
    ) -> _CapturedPass | None:
        """Capture a forward and a backward pass; return None if that is impossible and strict is false."""
        graph, x, y = torch.cuda.CUDAGraph(), x.clone(), y.clone()
        try:
            # Other threads, which read data or listen for errors, may use CUDA during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = passes(x, y)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            text = f"the passes of this model cannot be captured as a CUDA graph ({reason})"
            if self.strict:
                raise UserError(
                    f"compute.graphs: true is not possible: {text}; the usual cause is a forward pass that reads "
                    "tensor values; set compute.graphs: false"
                ) from error
            self._enabled = False
            _end_capture_of_generators()
            warnings.warn(RankWarning(f"compute.graphs: auto: {text}; passes run without graphs"), stacklevel=2)
            return None
        self._pool = graph.pool()
        gradients = [p.grad for p in parameters]
        first_used = next(i for i, gradient in enumerate(gradients) if gradient is not None)
        return _CapturedPass(graph, x, y, loss.detach(), gradients, first_used)
