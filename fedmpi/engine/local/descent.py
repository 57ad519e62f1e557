"""What a client's local steps descend along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fedmpi.engine.local.by_hand import ByHand
from fedmpi.engine.worker import Worker
from fedmpi.flat.layout import Segment, Selection
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import Client, Loss, Regularizer


class Descent(NamedTuple):
    """A loss, its gradient corrected and clipped, or a rule with gradients of its own."""

    loss: Loss
    regularizer: Regularizer | None = None
    correct: Callable[[Client, Tensor], Tensor] | None = None
    step: Callable[[Client, Tensor, Tensor], Tensor] | None = None
    clipped: Selection | None = None  # the entries that clipping looks at
    by_hand: ByHand | None = None  # which knows this loss, and leaves its gradient where the optimiser looks for it
    repeats: bool = False  # whether each pass computes the same of its batch and the model, so that a graph can do it

    @property
    def flat(self) -> bool:
        """Whether somebody looks at the gradient as one vector."""
        return bool(self.regularizer or self.correct or self.step or self.clipped)

    @classmethod
    def of(
        cls,
        worker: Worker,
        method: Method,
        loss: Loss | None,
        regularizer: Regularizer | None,
        parameters: Sequence[nn.Parameter],
        trained: Sequence[Segment],
        clips: bool,
    ) -> Descent:
        """That of a fit which now begins: gradients go to where its steps look for them.

        parameters: what is trained, and `trained`, its segments; loss, regularizer: in place of the method's hooks;
            clips: whether gradients are clipped.
        """
        model = worker.model
        how = cls(
            loss=loss or worker.direct or method.loss,
            regularizer=regularizer or (method.regularizer if overrides(method, "regularizer") else None),
            correct=method.gradient if overrides(method, "gradient") else None,
            step=method.step if overrides(method, "step") and loss is None else None,
            clipped=model.layout.entries(trained) if clips else None,
        )
        if worker.graphs is not None:
            task_s = how.loss is worker.direct or getattr(how.loss, "__func__", None) is Method.loss
            # With counts that only the sites know, a task may weigh the classes for each client in its own way.
            how = how._replace(repeats=task_s and worker.data.counts_shared)
        if how.flat:
            return how
        model.drop_gradient()
        if (
            worker.by_hand is None
            or worker.graphs is not None
            or how.loss is not worker.direct
            or len(parameters) < len(model.parameters)
        ):
            return how
        worker.by_hand.begin()
        return how._replace(by_hand=worker.by_hand)
