"""The cosine between the gradients of local steps and the gradient of FedSOL's proximal loss (FedSOL, Fig. 3).

    L_p = KL(softmax(f_w0 / tau) || softmax(f_w / tau)), mean over samples, tau = 3
This is FedSOL's Eq. 5 with the paper's tau. It is used for every method, so that methods can be compared. At each local
step, on its batch, g_p = grad L_p at w, and g_u is the gradient that the optimiser gets, before momentum and weight
decay:
    cosine = <g_u, g_p> / (|g_u| |g_p|)
over the trained parameters, and over those of the head, which FedSOL perturbs. If it is negative, the step raises L_p.
At w = w0, where g_p = 0, there is no cosine. L_p is computed in evaluation mode, without dropout; batch statistics do
not change.
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
FIRST = 100  # number of steps of a round that are recorded individually
WIDTH = 3 + 2 * FIRST


def proximal(f: Tensor, teacher: Tensor) -> Tensor:
    """Return L_p () from the logits f (B, C) of a model and those of w0.

    >>> round(proximal(torch.tensor([[2.0, 0, 0], [0, 1, 0]]), torch.tensor([[1.0, 1, 0], [0, 0, 2]])).item(), 7)
    0.0671393
    """
    s, q = ((each.double() / TAU).log_softmax(1) for each in (f, teacher))
    return kl_div(s, q, reduction="batchmean", log_target=True)


class Steps:
    """Records L_p and cosines at each step of one client's local training, without changing the training."""

    def __init__(self, client: ClientContext) -> None:
        self.k = client
        self.seen: list[Tensor] = []  # (3,) for each step: L_p, cosine, cosine over the head

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Record a step on the batch x (B, ...), after its gradient has been computed and before the weights change."""
        k, model = self.k, self.k.trainer.model
        if torch.equal(k.w, k.w0):
            self.seen.append(k.w.new_tensor([0.0, torch.nan, torch.nan], dtype=torch.float64))
            return
        members = [(s, p) for s, p in model.segment_parameters if p.requires_grad]
        value = self._proximal(x)
        slopes = torch.autograd.grad(value, [p for _, p in members], allow_unused=True)
        g_p, g_u = torch.zeros_like(k.w), torch.zeros_like(k.w)
        for (s, p), slope in zip(members, slopes, strict=True):
            for flat, g in ((g_p, slope), (g_u, p.grad)):
                if g is not None:
                    s.view(flat).copy_(g)
        head = k.trainer.messages.head
        self.seen.append(torch.stack([value.detach(), cosine(g_u, g_p), cosine(head.take(g_u), head.take(g_p))]))

    def row(self) -> Tensor:
        """Return the client's row (WIDTH,): L_p on its samples after training, mean cosines, values of single steps."""
        out = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
        with torch.no_grad():
            losses = [(self._proximal(x), len(y)) for x, y in self.k.batches()]
        if losses:
            out[0] = sum(float(value) * n for value, n in losses) / sum(n for _, n in losses)
        if self.seen:
            steps = torch.stack(self.seen).cpu()
            out[1:3] = steps[:, 1:].nanmean(0)
            out[3:].view(2, FIRST)[:, : len(steps)] = steps[:FIRST, :2].T
        return out

    def _proximal(self, x: Tensor) -> Tensor:
        module, (_, teacher) = self.k.trainer.model.module, self.k.reference_forward(x)
        training = module.training
        module.eval()
        try:
            with without_cudnn_rnn(module):
                return proximal(self.k.logits(x), teacher)
        finally:
            module.train(training)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine () float64 of two vectors (d,); nan if one of them is 0."""
    a, b = a.double(), b.double()
    return (a @ b) / (a.norm() * b.norm())


def summary(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return means over the clients, values of each client, and means at each step over the clients that made it."""
    losses, cosines, heads = rows[:, :3].T
    steps = rows[:, 3:].view(-1, 2, FIRST).nanmean(0)
    made = int((~steps[0].isnan()).sum())
    return {
        "loss": losses.nanmean().item(),
        "cosine": cosines.nanmean().item(),
        "head": heads.nanmean().item(),
        "losses": losses.tolist(),
        "cosines": cosines.tolist(),
        "heads": heads.tolist(),
        "step_losses": steps[0, :made].tolist(),
        "step_cosines": steps[1, :made].tolist(),
    }


ORTHOGONALITY = Probe(lambda c: (WIDTH, c.steps), summary)
