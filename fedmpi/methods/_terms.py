"""Functions that several methods use in their losses and steps.

Shapes: B samples in a batch, c classes, d parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div


def distillation_loss(f: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Return the mean of KL(softmax(teacher / tau) || softmax(f / tau)) over a batch, without the factor tau^2.

    f and teacher are logits (B, c).

    >>> t, s = torch.tensor([[1.0, 1, 0], [0, 0, 2]]), torch.tensor([[2.0, 0, 0], [0, 1, 0]])
    >>> round(distillation_loss(s, t, 1.0).item(), 6)
    0.578458
    """
    return kl_div((f / tau).log_softmax(1), (teacher / tau).log_softmax(1), reduction="batchmean", log_target=True)


def distillation_with_exact_zero(f: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """Return `distillation_loss`, with a gradient that is exactly 0 if the logits f and teacher are equal.

    Near w0 the gradient consists of rounding errors, with a norm of about 1e-8. Methods that use only its direction
    (FedSOL, GradProj) would follow this noise. Logits count as equal if they differ by rounding errors only, because
    kernels may round differently under autograd. To detect w = w0 use `client.at_w0`: with dropout or batch
    normalisation the logits of student and teacher differ even then, because only the student is in training mode.
    """
    loss = distillation_loss(f, teacher, tau)
    return torch.where(differ_beyond_rounding(f.detach(), teacher), loss, torch.zeros_like(loss))


def differ_beyond_rounding(x: Tensor, y: Tensor) -> Tensor:
    """Return a bool scalar: whether x and y differ by more than 8 units in the last place of the largest entry of y.

    If the logits x and y differ by less, the float32 gradient of a distance between them is mostly rounding error (its
    cosine similarity to the exact gradient is below 0.9).
    """
    return (x - y).abs().max() > 8 * torch.finfo(x.dtype).eps * y.abs().max()


def scale_perturbation(g: Tensor, rho: float, strength: Tensor | None = None) -> Tensor:
    """Return the perturbation rho * strength * g / ||g|| (d,); it is zero if ||g|| is below 1e-10 (rounding errors).

    Args:
        g: (d,) gradient.
        rho: length of the perturbation if strength is None.
        strength: (d,) a factor for each entry; None: 1.
    """
    norm = g.norm()
    scale = torch.where(norm < 1e-10, 0.0, rho / norm)
    return (g if strength is None else strength * g) * scale


def normalized_magnitude(change: Tensor, norm: str = "tensor") -> Tensor:
    """Return |change| / ||change|| elementwise, in [0, 1]; norm="dim0" uses norms along the first dimension."""
    return change.abs() / change.norm(dim=0 if norm == "dim0" else None, keepdim=True).clamp(min=1e-12)
