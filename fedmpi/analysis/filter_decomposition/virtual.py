"""The m x m models alpha_i x D_j that an aggregated model of atoms stands for.   Eq. 10

From the final model of a run, one more round of local training is made, the next in which coefficients travel.
alpha_bar x D_bar is the weighted mean of alpha_i x D_j over all i, j: on the diagonal the m clients, off it m (m - 1)
virtual clients (the paper counts unordered pairs, 6 of 4 clients). Client i gives its group COEF, the coefficients with
the biases and 1x1 convolutions that go with them; client j gives its atoms. The paper says nothing about the rest
(theta_h, normalisation layers, batch statistics): all models here have the aggregate's, so they differ in their
convolutions alone, and the diagonal is not quite what the clients had. They are compared with the aggregate, and with
the aggregate whose kernels are sum_k p_k alpha_k D_k.

A run directory holds the global model only. Other state of server and clients has the values of the start of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fedmpi.analysis import report
from fedmpi.analysis.filter_decomposition.kernels import atom_layers, dense
from fedmpi.analysis.filter_decomposition.products import kernel_mean
from fedmpi.analysis.local_models import LocalModels, experiment, local_models
from fedmpi.comm.base import Solo
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import flow, redacted
from fedmpi.common.text import figure
from fedmpi.config.schema import Settings
from fedmpi.engine import scheduler
from fedmpi.engine.evaluate import evaluate
from fedmpi.flat import linear
from fedmpi.flat.layout import ATOM, COEF
from fedmpi.runtime import build
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.record import saved_model
from fedmpi.tasks.measures import Figures


def analyse(run: Path, settings: Settings, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse virtual`; settings: those of the run."""
    to, module = report.folder(to), saved_model.rebuilt(run, settings)
    options = f" {flow(redacted(settings.data.options))}" if settings.data.options else ""
    say(f"data: {settings.data.source}{options}, files below {settings.data.root}")
    made = experiment(settings)
    made.model.module.load_state_dict(module.state_dict())
    facts = measure(made, say)
    for line in lines(facts):
        say(line)
    say(f"written: {report.write(to / 'virtual.json', {'run': str(run), **facts})}")


def measure(made: Experiment, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Make one more round from the model of `made` and evaluate the resulting models on the global test set."""
    atom_layers(made)
    if made.data.global_test is None:
        raise UserError("data.silos: there is no global test set to judge the models by; `virtual` needs one")
    s, worker = made.settings, build.make_worker(made, lambda: False)
    fed = build.federation(made, Solo(made.model.w.device), lambda: False)
    t = next((t for t in range(s.rounds, 2 * s.rounds + 1) if COEF in made.messages.groups(t)), s.rounds)
    members = scheduler.draw_cohort(s.seed, t, made.data.clients, s.cohort.fraction, s.cohort.draw, s.cohort.size)
    say(f"round {t}: {len(members)} clients train, then {len(members) ** 2 + 2} models are evaluated")
    found = local_models(fed, worker, members, t)
    w, b = linear.combine(found.w, found.p), linear.combine(found.b, found.p)

    def judge(at: Tensor, predict: Callable[[Tensor], Tensor] | None = None) -> Figures:
        worker.model.load(at, b)
        assert made.data.global_test is not None
        return evaluate(worker, made.data.global_test, s.evaluate.batch_size, predict).figures

    models = [
        {"alpha": i, "atoms": j, **judge(product(made, w, alpha, D))}
        for i, alpha in zip(members, found.w, strict=True)
        for j, D in zip(members, found.w, strict=True)
    ]
    return {
        "round": t,
        "clients": members,
        "weights": found.p,
        "headline": made.task.names[0],
        "models": models,
        "aggregate": judge(w),
        "kernel_mean": judge(w, kernel_averaged(made, found, w, b)),
    }


def product(made: Experiment, w: Tensor, alpha: Tensor, D: Tensor) -> Tensor:
    """The model w with the coefficients of one model and the atoms of another.   (d,), (d,), (d,) -> (d,)"""
    out = w.clone()
    for group, source in ((COEF, alpha), (ATOM, D)):
        part = made.model.layout.select({group})
        part.put(part.take(source), out)
    return out


def kernel_averaged(made: Experiment, found: LocalModels, w: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    """x -> outputs of the model w, b with the clients' kernels averaged: FedAvg on kernels."""
    made.model.load(w, b)
    p = found.p.to(w.device)
    return dense(made.model.module, {each.path: kernel_mean(p, *each.factors(found.w)) for each in atom_layers(made)})


def shown(name: str, value: float) -> str:
    return "-" if value != value else figure(name, value, 4)


def lines(facts: dict[str, Any]) -> list[str]:
    """Lines of text: the matrix of the headline metric, and the means and aggregates to compare it with."""
    name, clients = facts["headline"], facts["clients"]
    at = {(row["alpha"], row["atoms"]): row[name] for row in facts["models"]}
    matrix = [[f"alpha {i}", *(shown(name, at[i, j]) for j in clients)] for i in clients]
    groups: dict[str, list[Figures]] = {
        "clients (diagonal), mean of {}": [row for row in facts["models"] if row["alpha"] == row["atoms"]],
        "virtual clients, mean of {}": [row for row in facts["models"] if row["alpha"] != row["atoms"]],
        "alpha_bar x D_bar": [facts["aggregate"]],
        "kernels averaged": [facts["kernel_mean"]],
    }
    rows = [
        [label.format(len(found)), *(shown(key, sum(row[key] for row in found) / len(found)) for key in (name, "loss"))]
        for label, found in groups.items()
        if found
    ]
    return [
        f"{name} on the global test set of alpha_i x D_j",
        *formatting.table([["", *(f"D {j}" for j in clients)], *matrix]),
        *formatting.table([["", name, "loss"], *rows]),
    ]
