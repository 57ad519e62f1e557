"""What a client keeps of its optimiser from round to round, in its state row.

_optim (slots, d)      velocities or moments, entry for entry those of w
_optim_steps (tensors) the steps that each parameter has made
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmpi.engine.local.recipe import Recipe
from fedmpi.flat.layout import Layout, Segment
from fedmpi.flat.packing import Views

ROWS, STEPS = "_optim", "_optim_steps"


def shapes(how: Recipe, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Of the slots in a client's row; none where nothing is kept."""
    if not how.keep:
        return {}
    slots = {"sgd": 1, "rmsprop": 2 if how.momentum else 1, "adagrad": 1}.get(how.optim, 2)
    return {ROWS: (slots, layout.size), STEPS: (len(layout.segments),)}


class Kept:
    """A copy of it for one round; `steps` in float32, as torch's kernels want them."""

    def __init__(self, state: Views, layout: Layout) -> None:
        self.rows = getattr(state, ROWS).clone()
        self.steps = getattr(state, STEPS).to(torch.float32, copy=True)
        self.places = {s.name: i for i, s in enumerate(layout.segments)}

    def state(self) -> dict[str, Tensor]:
        """What the row is to hold from now on."""
        return {ROWS: self.rows, STEPS: self.steps.to(self.rows.dtype)}

    def of(self, segments: Sequence[Segment]) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Views: slot by slot the tensors of these segments, and their steps ()."""
        rows = [[s.view(row) for s in segments] for row in self.rows]
        return rows, [self.steps[self.places[s.name]] for s in segments]
