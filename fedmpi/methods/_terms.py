"""Terms that several methods' losses and steps share: pure functions.   B batch, c classes, d parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div


def distillation(f: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """KL(softmax(teacher / tau) || softmax(f / tau)), batch mean, without the factor tau^2.   (B, c), (B, c) -> ()

    >>> t, s = torch.tensor([[1.0, 1, 0], [0, 0, 2]]), torch.tensor([[2.0, 0, 0], [0, 1, 0]])
    >>> round(distillation(s, t, 1.0).item(), 6)
    0.578458
    """
    return kl_div((f / tau).log_softmax(1), (teacher / tau).log_softmax(1), reduction="batchmean", log_target=True)


def retention(f: Tensor, teacher: Tensor, tau: float) -> Tensor:
    """`distillation` whose gradient is exactly 0 where student and teacher say the same.   (B, c), (B, c) -> ()

    Near w0 the gradient is what rounding leaves of it, some 1e-8 long. A rule that asks for its direction alone
    (FedSOL, GradProj) would take that noise for one. "The same" is up to rounding: kernels may round differently with
    autograd. For w = w0 itself there is `client.at_w0`: with dropout or batch normalisation logits cannot tell, because
    the student trains and the teacher does not.
    """
    loss = distillation(f, teacher, tau)
    return torch.where(differ(f.detach(), teacher), loss, torch.zeros_like(loss))


def differ(x: Tensor, y: Tensor) -> Tensor:
    """Whether two tensors differ by more than rounding: 8 units in the last place of the largest entry.   -> () bool

    Logits that differ by less give a gradient in float32 that has little to do with the true one (cosine below .9).
    """
    return (x - y).abs().max() > 8 * torch.finfo(x.dtype).eps * y.abs().max()


def perturbation(g: Tensor, rho: float, strength: Tensor | None = None) -> Tensor:
    """eps = rho strength g / ||g||, strength 1 if not given; 0 where g is nothing but rounding noise.   (d,) -> (d,)"""
    length = g.norm()
    scale = torch.where(length < 1e-10, 0.0, rho / length)
    return (g if strength is None else strength * g) * scale


def share_of_norm(moved: Tensor, norm: str = "tensor") -> Tensor:
    """|moved| / ||moved||, elementwise in [0, 1]; norm of the whole tensor, or along its first dimension (dim0)."""
    return moved.abs() / moved.norm(dim=0 if norm == "dim0" else None, keepdim=True).clamp(min=1e-12)
