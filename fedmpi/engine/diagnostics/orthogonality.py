"""Probe `orthogonality`: cosine between the gradient of each local step and that of FedSOL's proximal loss (Fig. 3).

    L_p = KL(softmax(f_w0 / tau) || softmax(f_w / tau)), mean over samples, tau = 3
f_w are the logits of the current model, f_w0 those of the global model. This is FedSOL's Eq. 5 with the paper's tau.
The same L_p is used for every method, so that methods can be compared. In each local step, g_p = grad L_p at w on the
batch of the step, and g_u is the gradient that the optimiser gets, before momentum and weight decay:
    cosine = <g_u, g_p> / (|g_u| |g_p|)
over the trained parameters, and over the parameters of the head, which FedSOL perturbs. If the cosine is negative, the
step increases L_p. At w = w0, g_p is 0 and the cosine is undefined (nan). L_p is computed in evaluation mode: there
is no dropout, and the running statistics of batch normalisation do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from fedmpi.engine.diagnostics.cohort import Cohort, Probe
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.models.recurrent import without_cudnn_rnn

TAU = 3.0
MAX_RECORDED_STEPS = 100  # steps of a round that are recorded individually
WIDTH = 3 + 2 * MAX_RECORDED_STEPS


def proximal_loss(f: Tensor, teacher: Tensor) -> Tensor:
    """Return the proximal loss L_p, a scalar, from the logits f (B, C) of a model and the logits `teacher` of w0.

    >>> round(proximal_loss(torch.tensor([[2.0, 0, 0], [0, 1, 0]]), torch.tensor([[1.0, 1, 0], [0, 0, 2]])).item(), 7)
    0.0671393
    """
    s, q = ((each.double() / TAU).log_softmax(1) for each in (f, teacher))
    return kl_div(s, q, reduction="batchmean", log_target=True)


class GradientCosineRecorder:
    """Records L_p and the cosines of g_u and g_p in each local step of a client (see the module docstring).

    The training itself is not changed.
    """

    def __init__(self, client: ClientContext) -> None:
        self.client = client
        self.records: list[Tensor] = []  # for each step (3,): L_p, cosine, cosine over the head

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Record a step on the batch x (B, ...); called after the gradient is computed, before the weights change."""
        client, model = self.client, self.client.trainer.model
        if torch.equal(client.w, client.w0):
            self.records.append(client.w.new_tensor([0.0, torch.nan, torch.nan], dtype=torch.float64))
            return
        members = [(s, p) for s, p in model.segment_parameters if p.requires_grad]
        value = self._proximal_loss(x)
        gradients = torch.autograd.grad(value, [p for _, p in members], allow_unused=True)
        g_p, g_u = torch.zeros_like(client.w), torch.zeros_like(client.w)
        for (s, p), gradient in zip(members, gradients, strict=True):
            for flat, g in ((g_p, gradient), (g_u, p.grad)):
                if g is not None:
                    s.view(flat).copy_(g)
        head = client.trainer.messages.head
        cosines = cosine(g_u, g_p), cosine(head.take(g_u), head.take(g_p))
        self.records.append(torch.stack([value.detach(), *cosines]))

    def to_row(self) -> Tensor:
        """Return the client's row (WIDTH,): L_p after training, mean cosines, and for each step L_p and the cosine."""
        out = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
        with torch.no_grad():
            losses = [(self._proximal_loss(x), len(y)) for x, y in self.client.batches()]
        if losses:
            out[0] = sum(float(value) * n for value, n in losses) / sum(n for _, n in losses)
        if self.records:
            steps = torch.stack(self.records).cpu()
            out[1:3] = steps[:, 1:].nanmean(0)
            out[3:].view(2, MAX_RECORDED_STEPS)[:, : len(steps)] = steps[:MAX_RECORDED_STEPS, :2].T
        return out

    def _proximal_loss(self, x: Tensor) -> Tensor:
        module, (_, teacher) = self.client.trainer.model.module, self.client.reference_forward(x)
        training = module.training
        module.eval()
        try:
            with without_cudnn_rnn(module):
                return proximal_loss(self.client.logits(x), teacher)
        finally:
            module.train(training)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors (d,), as a float64 scalar; nan if a vector is 0."""
    a, b = a.double(), b.double()
    return (a @ b) / (a.norm() * b.norm())


def summarize(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return the values of each client, their means over clients, and the mean over clients at each local step."""
    losses, cosines, heads = rows[:, :3].T
    steps = rows[:, 3:].view(-1, 2, MAX_RECORDED_STEPS).nanmean(0)
    num_steps = int((~steps[0].isnan()).sum())
    return {
        "loss": losses.nanmean().item(),
        "cosine": cosines.nanmean().item(),
        "head": heads.nanmean().item(),
        "losses": losses.tolist(),
        "cosines": cosines.tolist(),
        "heads": heads.tolist(),
        "step_losses": steps[0, :num_steps].tolist(),
        "step_cosines": steps[1, :num_steps].tolist(),
    }


ORTHOGONALITY_PROBE = Probe(lambda c: (WIDTH, c.step_rows), summarize)
