"""Functions that the losses and steps of several methods share.   B batch, c classes, d parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div


def distillation(f: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Return KL(softmax(teacher / tau) || softmax(f / tau)), batch mean, without tau^2.   (B, c), (B, c) -> ()

    >>> t, s = torch.tensor([[1.0, 1, 0], [0, 0, 2]]), torch.tensor([[2.0, 0, 0], [0, 1, 0]])
    >>> round(distillation(s, t, 1.0).item(), 6)
    0.578458
    """
    return kl_div((f / tau).log_softmax(1), (teacher / tau).log_softmax(1), reduction="batchmean", log_target=True)


def retention(f: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Return `distillation`, with a gradient that is exactly 0 if f and teacher are equal.   (B, c), (B, c) -> ()

    Near w0 the gradient consists of rounding errors, with a norm of about 1e-8. Methods that use only its direction
    (FedSOL, GradProj) would follow this noise. Logits count as equal if they differ by rounding errors only, since
    kernels may round differently with autograd. To recognise w = w0 use `client.at_w0`: with dropout or batch
    normalisation the logits of student and teacher differ even there, because only the student is in training mode.
    """
    loss = distillation(f, teacher, tau)
    return torch.where(differ(f.detach(), teacher), loss, torch.zeros_like(loss))


def differ(x: Tensor, y: Tensor) -> Tensor:
    """Return whether tensors differ by more than rounding, 8 units in the last place of the largest entry, as () bool.

    Logits that differ by less give a gradient in float32 that has little to do with the true one (cosine below .9).
    """
    return (x - y).abs().max() > 8 * torch.finfo(x.dtype).eps * y.abs().max()


def perturbation(g: Tensor, rho: float, strength: Tensor | None = None) -> Tensor:
    """Return the perturbation rho strength g / ||g||, or 0 if g consists of rounding errors only.   (d,) -> (d,)

    Args:
        strength: (d,) factors; None: 1.
    """
    length = g.norm()
    scale = torch.where(length < 1e-10, 0.0, rho / length)
    return (g if strength is None else strength * g) * scale


def share_of_norm(moved: Tensor, norm: str = "tensor") -> Tensor:
    """Return |moved| / ||moved||, elementwise in [0, 1]; norm="dim0" takes norms along the first dimension."""
    return moved.abs() / moved.norm(dim=0 if norm == "dim0" else None, keepdim=True).clamp(min=1e-12)
