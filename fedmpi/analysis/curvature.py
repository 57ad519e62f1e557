"""How sharp the minimum is that a run has found (FedSOL, Fig. 8).

The Hessian H of the mean loss of the run's final model over a fixed part of the training samples, in evaluation mode
and without augmentation: its largest eigenvalues, and the loss at w + x v1 + y v2 along the unit eigenvectors of the
first two. H is never formed: H v is the exact derivative of <gradient, v>. lambda_1 / lambda_5 tells whether one
direction stands out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.analysis import charts, report
from fedmpi.analysis.local_models import experiment
from fedmpi.common import formatting, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import call
from fedmpi.config.schema import Settings
from fedmpi.data.batches import Shard, batches, pooled_rows, samples_of
from fedmpi.models.recurrent import differentiable
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.finished.models import rebuild_model
from fedmpi.runtime.record.run_dir import MODEL
from fedmpi.runtime.record.saved_model import facts_of, personal_notice
from fedmpi.tasks import contract

TOLERANCE = 1e-3  # of an eigenvalue, relative
MOST_RESTARTS = 20  # of Lanczos with 2 k + 1 vectors


@dataclass(frozen=True)
class CurvatureOptions:
    samples: int = 2048  # training samples that the loss is over
    top: int = 5  # eigenvalues
    grid: int = 21  # points a side of the landscape
    span: float = 1.0  # it reaches from -span to span along both vectors


def analyse(run: Path, settings: Settings, options: CurvatureOptions, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse curvature`; settings: those of the run."""
    to, module = report.folder(to), rebuild_model(run, settings)
    if notice := personal_notice(facts_of(run / MODEL)):
        say(notice)
    made = experiment(settings)
    made.model.module.load_state_dict(module.state_dict())
    facts = measure(made, options, say)
    say(f"eigenvalues: {'  '.join(formatting.number(value) for value in facts['eigenvalues'])}")
    if facts["ratio"] is not None:
        say(f"the first over the last of them: {formatting.number(facts['ratio'])}")
    charts.write(landscape(facts), to / "landscape.png", "loss around the model, above its least")
    say(f"written: {report.write(to / 'curvature.json', {'run': str(run), **facts})}, {to / 'landscape.png'}")


def landscape(facts: dict[str, Any]) -> charts.Grid:
    """Return the chart of the loss along the first two eigenvectors; the model lies in the middle."""
    axis, least = [f"{round(float(x), 3):g}" for x in facts["axis"]], min(map(min, facts["loss"]))
    above = [[loss - least for loss in row] for row in facts["loss"]]
    return charts.Grid(axis, axis, above, "along the second", "along the first eigenvector", "loss")


def measure(
    made: Experiment, options: CurvatureOptions, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    loss, w = Loss(made, options.samples), made.model.w.detach().clone()
    of = f"{len(made.data.train)} clients, {w.numel()} weights"
    say(f"loss over {len(loss.shard)} training samples of {of}")
    generator = seeds.generator(made.settings.seed, "lanczos")
    eigenvalues, vectors = largest_eigenpairs(lambda v: loss.hessian(w, v), w, options.top, generator)
    axis = torch.linspace(-options.span, options.span, options.grid)
    first, second = vectors[0], vectors[min(1, len(vectors) - 1)]
    height = [[loss(w + float(x) * first + float(y) * second) for x in axis] for y in axis]
    made.model.load(w)
    values = eigenvalues.tolist()
    ratio = values[0] / values[-1] if values[-1] else None
    return {"samples": len(loss.shard), "eigenvalues": values, "ratio": ratio, "axis": axis, "loss": height}


def largest_eigenpairs(
    product: Callable[[Tensor], Tensor], like: Tensor, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the k algebraically largest eigenvalues of a symmetric A (d, d) with their vectors, by Lanczos (ARPACK).

    Args:
        product: v (d,) -> A v.
        like: a tensor (d,) of the type and device to work with.
        generator: draws the vector to start from.

    Returns:
        (k,) float64, falling; a repeated eigenvalue may be counted once.
        (k, d), of unit length; the sign is arbitrary.

    >>> A = torch.diag(torch.tensor([3.0, -5.0, 1.0, 2.0]))
    >>> g = torch.Generator().manual_seed(0)
    >>> largest_eigenpairs(lambda v: A @ v, torch.zeros(4), 2, g)[0].round(decimals=4).tolist()
    [3.0, 2.0]
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    def multiply(v: Any) -> Any:
        return product(torch.from_numpy(v.ravel()).to(like)).double().cpu().numpy()

    d, start = like.numel(), torch.randn(like.numel(), generator=generator, dtype=torch.float64).numpy()
    if k >= d:  # ARPACK finds fewer than all
        values, vectors = np.linalg.eigh(np.stack([multiply(row) for row in np.eye(d)]))
    else:
        operator = LinearOperator((d, d), matvec=multiply, dtype=np.float64)
        try:
            values, vectors = eigsh(operator, k, which="LA", v0=start, tol=TOLERANCE, maxiter=MOST_RESTARTS)
        except ArpackNoConvergence as error:
            settled = f"{len(error.eigenvalues)} of {k} eigenvalues have settled"
            raise UserError(f"curvature: {settled}; use more --samples, or a smaller --top") from error
    order = np.argsort(-values)[:k]
    return torch.from_numpy(values[order]), torch.from_numpy(vectors.T[order]).to(like)


class Loss:
    """w (d,) -> mean loss over the first samples of a fixed order of all clients' training rows."""

    BATCH = 512

    def __init__(self, made: Experiment, samples: int) -> None:
        self.made = made
        train = made.data.train
        if not train or len({id(x) for _, x, _ in samples_of(train)}) > 1:
            raise UserError("curvature needs the clients' samples in one place, and those of silos are not")
        pool = pooled_rows(train)
        order = torch.randperm(len(pool), generator=seeds.generator(made.settings.seed, "curvature"))
        self.shard = Shard(pool.x, pool.y, pool.index[order[:samples]].sort().values)
        self.weight = made.task.batch_weight(self.shard.y[self.shard.index])

    def __call__(self, w: Tensor) -> float:
        self.made.model.load(w)
        with torch.no_grad():
            return sum(self._part(x, y).item() for x, y in self._batches())

    def hessian(self, w: Tensor, v: Tensor) -> Tensor:
        """H v (d,), by two passes back."""
        model = self.made.model
        model.load(w)
        segments = [(s, p) for s, p in model.members if p.requires_grad]
        parameters, out = [p for _, p in segments], torch.zeros_like(w)
        along = [s.view(v) for s, _ in segments]
        for x, y in self._batches():
            with differentiable(model.module):
                part = self._part(x, y)
            first = torch.autograd.grad(part, parameters, create_graph=True, allow_unused=True)
            slope = sum((g * u).sum() for g, u in zip(first, along, strict=True) if g is not None)
            if isinstance(slope, Tensor) and slope.requires_grad:
                second = torch.autograd.grad(slope, parameters, allow_unused=True)
                for (s, _), h in zip(segments, second, strict=True):
                    if h is not None:
                        s.view(out).add_(h)
        return out

    def _batches(self) -> Any:
        self.made.model.module.eval()
        return batches(self.shard, self.BATCH, None)

    def _part(self, x: Any, y: Tensor) -> Tensor:
        """This batch's part of the mean."""
        f = call(self.made.model.module, x)
        return contract.mean_loss(self.made.task, f, x, y) * (self.made.task.batch_weight(y) / self.weight)
