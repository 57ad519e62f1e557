"""The ways of filter decomposition and of FedAvg over one loss landscape, with the clients of some rounds.   Fig. 4

Both are trained from the same kernels, with the same clients, cohorts and batches; FedAvg on the plain network. A model
is a point theta: all its weights, with kernels alpha x D in place of alpha and D, so that both ways lie in one space.
    plane     through the last model of filter decomposition, along the two principal directions of all models of both
              ways (Li 2018); a model is shown where it projects to, and the loss is that of the plane's own points
    (i, j)    alpha_i x D_j of a round, the rest as in the aggregate (virtual.py): i = j the local clients, i != j the
              virtual ones. Without momentum at the server their mean with weights p_i p_j is the next model
The loss is the mean over a fixed part of the clients' training samples, in evaluation mode, without augmentation; all
points have the last model's statistics of normalisation layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.analysis import figures, local_models, report
from fedmpi.analysis.curvature import Loss
from fedmpi.analysis.filter_decomposition.kernels import atom_layers, dense
from fedmpi.analysis.filter_decomposition.virtual import product
from fedmpi.comm.base import Solo
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import call
from fedmpi.common.redaction import redacted
from fedmpi.config.schema import Settings
from fedmpi.data.batches import batches
from fedmpi.engine import scheduler
from fedmpi.engine.federation import Federation
from fedmpi.engine.plan import Sink
from fedmpi.flat import linear
from fedmpi.models.atoms import AtomConv2d
from fedmpi.runtime import build
from fedmpi.runtime.build import Experiment
from fedmpi.tasks import contract

LOCAL = (
    "local: a client's atoms and coefficients in the model that the round makes, whose other layers are all clients' "
    "mean; distance: from that model, mean"
)
MARGIN = 0.15  # of the landscape around the models


@dataclass(frozen=True)
class Asked:
    first: int = 4  # rounds whose clients are shown, to `last`, which is not
    last: int = 8
    samples: int = 1024  # training samples that the loss is over
    grid: int = 21  # points a side of a landscape


def analyse(settings: Settings, plain: Settings, asked: Asked, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse trajectory`; plain: the same with FedAvg."""
    to, made = report.folder(to), local_models.experiment(settings)
    facts = measure(made, local_models.experiment(plain), asked, say)
    for line in lines(facts):
        say(line)
    say(f"written: {report.write(to / 'trajectory.json', facts)}")
    say(f"written: {figures.save(figures.trajectory(facts), to / 'trajectory.png')}")


def measure(
    made: Experiment, plain: Experiment, asked: Asked, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train both, and measure: see the module. The run of `made` has the bits of `fedmpi run`."""
    atom_layers(made)
    if not 0 <= asked.first < asked.last <= made.settings.rounds:
        raise UserError(
            f"--first {asked.first} --last {asked.last}: rounds of the {made.settings.rounds} are needed, "
            "the first before the last"
        )
    plain.model.module.load_state_dict(plain_copy(made).state_dict())
    own, clients, sha256 = walk(made, asked)
    other, _, _ = walk(plain, Asked(first=0, last=0))
    scale = Points(made, asked.samples)
    say(f"loss over {len(scale.loss.shard)} training samples, {own.shape[1]} weights, {made.settings.rounds} rounds")
    ways = {made.settings.method.name: own, "fedavg": other}
    plane = Plane(own[-1], torch.cat([own, other]))
    rounds = []
    for t, found in clients.items():
        at = [{"alpha": i, "atoms": j, "at": plane(v), "loss": scale(v), "apart": apart} for i, j, v, apart in found]
        rounds.append({"round": t, "models": at})
    shown = [own[asked.first : asked.last + 1], *(v[None] for found in clients.values() for *_, v, _ in found)]
    return {
        "config": redacted(made.settings.resolved()),
        "sha256": sha256,
        "samples": len(scale.loss.shard),
        "explained": plane.explained,
        "first": asked.first,
        "last": asked.last,
        "ways": {name: {"at": plane(way), "loss": [scale(v) for v in way]} for name, way in ways.items()},
        "rounds": rounds,
        "landscape": plane.landscape(scale, torch.cat([own, other]), asked.grid),
        "near": plane.landscape(scale, torch.cat(shown), asked.grid),
    }


def walk(made: Experiment, asked: Asked) -> tuple[Tensor, dict[int, list[tuple[int, int, Tensor, float]]], str]:
    """The models after 0, 1, ... rounds, (T + 1, n); the products of the rounds asked for; the last model's hash."""
    way: list[Tensor] = []
    clients: dict[int, list[tuple[int, int, Tensor, float]]] = {}
    final: list[str] = []

    def at(t: int) -> None:
        assert fed.server is not None
        way.append(theta(made, fed.server.w, fed.server.b))
        if asked.first <= t < asked.last:
            clients[t] = products(made, fed, t)

    def on_round(line: dict[str, Any]) -> None:
        final[:] = [line["sha256"]]
        at(line["round"] + 1)

    fed = build.federation(made, Solo(made.model.w.device), lambda: False, Sink(on_round))
    at(0)
    fed.run()
    return torch.stack(way), clients, final[0]


def products(made: Experiment, fed: Federation, t: int) -> list[tuple[int, int, Tensor, float]]:
    """(i, j, theta of alpha_i x D_j, its distance from the aggregate) of round t's clients."""
    members = scheduler.draw_cohort(
        fed.plan.seed, t, fed.worker.data.clients, fed.plan.fraction, fed.plan.draw, fed.plan.members
    )
    found = local_models.local_models(fed, build.make_worker(made, lambda: False), members, t)
    w, b = linear.combine(found.w, found.p), linear.combine(found.b, found.p)
    middle = theta(made, w, b)
    points = []
    for i, alpha in zip(members, found.w, strict=True):
        for j, D in zip(members, found.w, strict=True):
            v = theta(made, product(made, w, alpha, D), b)
            points.append((i, j, v, (v - middle).norm().item()))
    return points


def theta(made: Experiment, w: Tensor, b: Tensor) -> Tensor:
    """The model w, b as a point (n,): a plain network's parameters."""
    made.model.load(w, b)
    return torch.cat([p.detach().reshape(-1) for p in plain_copy(made).parameters()])


def plain_copy(made: Experiment) -> nn.Module:
    """The model as it is now, with alpha x D in plain convolutions."""
    layers = made.model.module.named_modules()
    return dense(
        made.model.module, {path: each.kernels.detach() for path, each in layers if isinstance(each, AtomConv2d)}
    )


class Points:
    """theta (n,) -> loss. Statistics of normalisation layers are those of the model as it is now."""

    def __init__(self, made: Experiment, samples: int) -> None:
        self.made, self.loss = made, Loss(made, samples)
        self.module = plain_copy(made)

    def __call__(self, theta: Tensor) -> float:
        places = list(self.module.parameters())
        with torch.no_grad():
            for place, values in zip(places, theta.split([p.numel() for p in places]), strict=True):
                place.copy_(values.view(place.shape))
            parts = (
                contract.mean_loss(self.made.task, call(self.module, x), x, y).item()
                * float(self.made.task.batch_weight(y))
                for x, y in batches(self.loss.shard, Loss.BATCH, None)
            )
            return sum(parts) / float(self.loss.weight)


class Plane:
    """origin + x v1 + y v2 along the two unit directions in which the models (m, n) vary most.

    explained: their share of the variance of the models.
    """

    def __init__(self, origin: Tensor, models: Tensor) -> None:
        centred = models - models.mean(0)
        _, s, v = torch.linalg.svd(centred.double(), full_matrices=False)
        self.origin, self.v = origin.double(), v[:2]  # (n,), (2, n)
        squares = s.square()
        self.explained = (squares[:2].sum() / squares.sum()).item() if squares.sum() else 1.0

    def __call__(self, theta: Tensor) -> list[Any]:
        """Where models (..., n) project to, (..., 2)."""
        return ((theta.double() - self.origin) @ self.v.T).tolist()

    def landscape(self, loss: Callable[[Tensor], float], models: Tensor, grid: int) -> dict[str, Any]:
        """The loss of grid x grid points of the plane, MARGIN around where models project to."""
        at = torch.tensor(self(models), dtype=torch.float64)
        low, high = at.amin(0), at.amax(0)
        room = MARGIN * (high - low).clamp(min=1e-9)
        x, y = (torch.linspace(*ends, grid).double() for ends in zip(low - room, high + room, strict=True))
        dtype = models.dtype
        height = [[loss((self.origin + a * self.v[0] + b * self.v[1]).to(dtype)) for a in x] for b in y]
        return {"x": x, "y": y, "loss": height}


def lines(facts: dict[str, Any]) -> list[str]:
    """Losses of both ways, and what the rounds' local and virtual clients are."""
    names = list(facts["ways"])
    losses = [facts["ways"][name]["loss"] for name in names]
    every = max(1, (len(losses[0]) - 1) // 10)
    shown = [*range(0, len(losses[0]), every)]
    rows: list[Sequence[object]] = [("training loss after so many rounds", *names)]
    rows += [(str(t), *(each[t] for each in losses)) for t in shown]
    table: list[Sequence[object]] = [("round", "local: loss", "distance", "virtual: loss", "distance")]
    for each in facts["rounds"]:
        own, virtual = ([m for m in each["models"] if (m["alpha"] == m["atoms"]) == same] for same in (True, False))
        table.append((str(each["round"]), *(_mean(of, key) for of in (own, virtual) for key in ("loss", "apart"))))
    said = f"the plane holds {100 * facts['explained']:.0f} % of how the models of both ways vary"
    return [*formatting.table(rows), *formatting.table(table), LOCAL, said]


def _mean(models: Sequence[dict[str, Any]], key: str) -> float:
    return sum(model[key] for model in models) / len(models) if models else float("nan")
