"""Backward passes straight into torch's engine: the way there through Python takes as long as a small model's pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.variable import Variable

_run = Variable._execution_engine.run_backward


def backward(loss: Tensor) -> None:
    """loss.backward() of a loss (), or of the sum of losses (n,): gradients are added to the parameters' own.

    What that method looks after beyond the engine's call is left to it: subclasses of tensors, threads of
    devices, transforms.
    """
    if type(loss) is not Tensor or not loss.is_cpu or torch._C._are_functorch_transforms_active():
        loss.sum().backward()
        return
    _run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
