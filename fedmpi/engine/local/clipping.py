"""Gradient clipping, over the flat gradient of what is being trained."""

from __future__ import annotations

from torch import Tensor

from fedmpi.engine.local.recipe import Recipe
from fedmpi.flat.layout import Selection


def clip(g: Tensor, trained: Selection, how: Recipe) -> None:
    """Entries of g (d,) to [-clip_value, clip_value], then g to the norm clip_norm where it is longer, in place:

        g <- g min(1, clip_norm / (||g|| + 1e-6))        as torch.nn.utils.clip_grad_norm_ has it
    trained: the entries that count; a method's correction may have written to others.
    """
    if how.clip_value is not None:
        g.clamp_(-how.clip_value, how.clip_value)
    if how.clip_norm is not None:
        norm = (g if trained.whole else trained.take(g)).norm()
        g.mul_((how.clip_norm / (norm + 1e-6)).clamp_(max=1))  # no question to the device
