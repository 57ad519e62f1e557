"""Measure the curvature of the loss at the final model of a run (FedSOL, Fig. 8).

H is the Hessian of the mean loss over a fixed subset of the training samples, in evaluation mode and without
augmentation. The results are its largest eigenvalues, and the loss at w + x v1 + y v2, where v1 and v2 are the unit
eigenvectors of the two largest eigenvalues. H itself is never computed; the product H v is the exact derivative of
<gradient, v>. If lambda_1 / lambda_5 is large, the loss is much more curved in one direction than in others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.analysis import charts, output
from fedmpi.analysis.local_models import build_one_process_experiment
from fedmpi.common import formatting, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import call_module
from fedmpi.config.schema import Settings
from fedmpi.data.batches import Shard, batches, iter_samples_once_if_shared, merge_shards
from fedmpi.models.recurrent import without_cudnn_rnn
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.finished_runs.models import load_global_model
from fedmpi.runtime.record.run_dir import MODEL
from fedmpi.runtime.record.saved_model import format_personal_notice, read_model_metadata
from fedmpi.tasks import validation

TOLERANCE = 1e-3  # relative error of an eigenvalue
MAX_RESTARTS = 20  # maximum number of restarts of the Lanczos method with 2 k + 1 vectors


@dataclass(frozen=True)
class CurvatureOptions:
    """Options of `fedmpi analyse curvature`."""

    samples: int = 2048  # number of training samples over which the loss is averaged
    top: int = 5  # number of eigenvalues
    grid: int = 21  # number of points along each axis of the loss landscape
    span: float = 1.0  # the landscape extends from -span to span along both eigenvectors


def analyse_curvature(
    run: Path, settings: Settings, options: CurvatureOptions, to: Path, print_line: Callable[[str], None]
) -> None:
    """Measure and print the curvature of the loss at a run's final model; write curvature.json and landscape.png."""
    to, module = output.create_output_folder(to), load_global_model(run, settings)
    if notice := format_personal_notice(read_model_metadata(run / MODEL)):
        print_line(notice)
    experiment = build_one_process_experiment(settings)
    experiment.model.module.load_state_dict(module.state_dict())
    facts = measure_curvature(experiment, options, print_line)
    print_line(f"eigenvalues: {'  '.join(formatting.format_number(value) for value in facts['eigenvalues'])}")
    if facts["ratio"] is not None:
        print_line(f"ratio of the first to the last: {formatting.format_number(facts['ratio'])}")
    charts.write_chart(plot_landscape(facts), to / "landscape.png", "loss around the model, above its minimum")
    print_line(
        f"written: {output.write_json(to / 'curvature.json', {'run': str(run), **facts})}, {to / 'landscape.png'}"
    )


def plot_landscape(facts: dict[str, Any]) -> charts.HeatMap:
    """Return a chart of the loss along the first two eigenvectors of the Hessian, with the model at the centre."""
    axis, minimum = [f"{round(float(x), 3):g}" for x in facts["axis"]], min(map(min, facts["loss"]))
    heights = [[loss - minimum for loss in row] for row in facts["loss"]]
    return charts.HeatMap(axis, axis, heights, "along the second", "along the first eigenvector", "loss")


def measure_curvature(
    experiment: Experiment, options: CurvatureOptions, print_line: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Compute the largest eigenvalues of the Hessian at the current model of `experiment`, and the loss around it.

    Returns:
        A dict. `samples`: the number of samples over which the loss is averaged; `eigenvalues`: in descending order;
        `ratio`: the first eigenvalue divided by the last, None if the last is 0; `axis`: (grid,) coordinates of the
        landscape; `loss`: (grid, grid), with loss[i][j] at the weights w + axis[j] v1 + axis[i] v2.
    """
    loss, w = SubsetLoss(experiment, options.samples), experiment.model.w.detach().clone()
    description = f"{len(experiment.data.train)} clients, {w.numel()} weights"
    print_line(f"loss over {len(loss.shard)} training samples of {description}")
    generator = seeds.torch_generator(experiment.settings.seed, "lanczos")
    eigenvalues, vectors = compute_largest_eigenpairs(
        lambda v: loss.hessian_vector_product(w, v), w, options.top, generator
    )
    axis = torch.linspace(-options.span, options.span, options.grid)
    first, second = vectors[0], vectors[min(1, len(vectors) - 1)]
    height = [[loss(w + float(x) * first + float(y) * second) for x in axis] for y in axis]
    experiment.model.load(w)
    values = eigenvalues.tolist()
    ratio = values[0] / values[-1] if values[-1] else None
    return {"samples": len(loss.shard), "eigenvalues": values, "ratio": ratio, "axis": axis, "loss": height}


def compute_largest_eigenpairs(
    product: Callable[[Tensor], Tensor], like: Tensor, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the k algebraically largest eigenvalues of a symmetric A (d, d), and their eigenvectors (ARPACK).

    Args:
        product: computes A v from v (d,).
        like: a tensor (d,) with the data type and device of v.
        k: number of eigenvalues.
        generator: draws the initial vector.

    Returns:
        The eigenvalues, (k,) float64, in descending order (a repeated eigenvalue may be returned only once), and the
        eigenvectors, (k, d), of unit length with arbitrary signs.

    >>> A = torch.diag(torch.tensor([3.0, -5.0, 1.0, 2.0]))
    >>> g = torch.Generator().manual_seed(0)
    >>> compute_largest_eigenpairs(lambda v: A @ v, torch.zeros(4), 2, g)[0].round(decimals=4).tolist()
    [3.0, 2.0]
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    def multiply(v: Any) -> Any:
        return product(torch.from_numpy(v.ravel()).to(like)).double().cpu().numpy()

    d, start = like.numel(), torch.randn(like.numel(), generator=generator, dtype=torch.float64).numpy()
    if k >= d:  # ARPACK cannot compute all eigenvalues
        values, vectors = np.linalg.eigh(np.stack([multiply(row) for row in np.eye(d)]))
    else:
        operator = LinearOperator((d, d), matvec=multiply, dtype=np.float64)
        try:
            values, vectors = eigsh(operator, k, which="LA", v0=start, tol=TOLERANCE, maxiter=MAX_RESTARTS)
        except ArpackNoConvergence as error:
            converged = f"{len(error.eigenvalues)} of {k} eigenvalues have converged"
            raise UserError(f"curvature: {converged}; use more --samples, or a smaller --top") from error
    order = np.argsort(-values)[:k]
    return torch.from_numpy(values[order]), torch.from_numpy(vectors.T[order]).to(like)


class SubsetLoss:
    """The mean loss over a fixed random subset of all clients' training samples, as a function of the weights w (d,).

    Raises:
        UserError: if the clients' samples are not all in one data set, as is the case with data.silos.
    """

    BATCH = 512

    def __init__(self, experiment: Experiment, samples: int) -> None:
        self.experiment = experiment
        train = experiment.data.train
        if not train or len({id(x) for _, x, _ in iter_samples_once_if_shared(train)}) > 1:
            raise UserError("curvature: not available with data.silos, because it needs all samples in one process")
        pool = merge_shards(train)
        order = torch.randperm(len(pool), generator=seeds.torch_generator(experiment.settings.seed, "curvature"))
        self.shard = Shard(pool.x, pool.y, pool.index[order[:samples]].sort().values)
        self.weight = experiment.task.batch_weight(self.shard.y[self.shard.index])

    def __call__(self, w: Tensor) -> float:
        self.experiment.model.load(w)
        with torch.no_grad():
            return sum(self._batch_loss(x, y).item() for x, y in self._iterate_batches())

    def hessian_vector_product(self, w: Tensor, v: Tensor) -> Tensor:
        """Return H v, computed by two backward passes, for v (d,) and the Hessian H of the loss at w (d,)."""
        model = self.experiment.model
        model.load(w)
        segments = [(s, p) for s, p in model.segment_parameters if p.requires_grad]
        parameters, out = [p for _, p in segments], torch.zeros_like(w)
        along = [s.view(v) for s, _ in segments]
        for x, y in self._iterate_batches():
            with without_cudnn_rnn(model.module):
                part = self._batch_loss(x, y)
            first = torch.autograd.grad(part, parameters, create_graph=True, allow_unused=True)
            slope = sum((g * u).sum() for g, u in zip(first, along, strict=True) if g is not None)
            if isinstance(slope, Tensor) and slope.requires_grad:
                second = torch.autograd.grad(slope, parameters, allow_unused=True)
                for (s, _), h in zip(segments, second, strict=True):
                    if h is not None:
                        s.view(out).add_(h)
        return out

    def _iterate_batches(self) -> Any:
        self.experiment.model.module.eval()
        return batches(self.shard, self.BATCH, None)

    def _batch_loss(self, x: Any, y: Tensor) -> Tensor:
        """Return the part of the mean loss over the subset that comes from one batch."""
        f = call_module(self.experiment.model.module, x)
        return validation.eval_loss(self.experiment.task, f, x, y) * (
            self.experiment.task.batch_weight(y) / self.weight
        )
