"""How much the aggregated kernels of one round vary with who is sampled and how they train.   Fig. 3(b)

From the same w^t a round is made R times, each time with another cohort and other batches. The local models of
replicate r give two aggregates from the same alpha_k, D_k, over the kernels of all layers with atoms:
    W_r by (1) or (2) of products.py            variance = 1/(R-1) sum_r ||W_r - mean W||^2
The table also has the variance of the clients' own kernels, sum_k p_k ||W_k - W_bar||^2, as a mean over replicates. The
paper does not say how it measured; this is an unbiased estimate, in squared units of the weights. The server's
optimiser plays no part in it. The table marks rounds in which the server keeps its coefficients. The rounds measured
are 0, e, 2e, ... for e = `evaluate.every`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedmpi.analysis import figures, local_models, report
from fedmpi.analysis.filter_decomposition.kernels import AtomLayer, atom_layers
from fedmpi.analysis.filter_decomposition.products import client_variance, kernel_mean, product_mean, replicate_variance
from fedmpi.comm.base import Solo
from fedmpi.common import formatting, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import redacted
from fedmpi.config.schema import Settings
from fedmpi.engine import scheduler
from fedmpi.engine.federation import Federation
from fedmpi.engine.plan import Sink
from fedmpi.flat.layout import COEF
from fedmpi.runtime import build
from fedmpi.runtime.build import Experiment

Row = dict[str, Any]
NAMES = {
    "kernel_mean": "kernels averaged",
    "product_mean": "product of averages",
    "ratio": "ratio",
    "clients": "clients",
}


def analyse(settings: Settings, replicates: int, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse variance`."""
    to, made = report.folder(to), local_models.experiment(settings)

    def each(row: Row) -> None:
        if row["round"] == 0:
            say("variance of the aggregated kernels, and of the clients' own")
        figures_of = ", ".join(f"{name} {formatting.number(row[key])}" for key, name in NAMES.items())
        rests = "" if COEF in made.messages.groups(row["round"]) else " (coefficients rest)"
        say(f"round {row['round']}: {figures_of}{rests}")

    facts = measure(made, replicates, each)
    say(f"written: {report.write(to / 'variance.json', facts)}")
    say(f"written: {figures.save(figures.variance(facts['rounds']), to / 'variance.png')}")


def measure(made: Experiment, replicates: int, each: Callable[[Row], None] = lambda row: None) -> dict[str, Any]:
    """Train as the settings say, with results equal to the bit, and measure; `each` is called with each new row."""
    layers, s, rows = atom_layers(made), made.settings, []
    if s.rounds == 0:
        raise UserError("rounds: 0 leaves no round to measure; at least 1 is needed")
    final: list[str] = []

    def at(t: int) -> None:
        if t % s.evaluate.every == 0 and t < s.rounds:
            rows.append(one_round(made, fed, layers, t, replicates))
            each(rows[-1])

    def on_round(line: dict[str, Any]) -> None:
        final[:] = [line["sha256"]]
        at(line["round"] + 1)  # called when the global model is the one that the next round starts from

    fed = build.federation(made, Solo(made.model.w.device), lambda: False, Sink(on_round))
    at(0)
    fed.run()
    return {"config": redacted(s.resolved()), "replicates": replicates, "sha256": final[0], "rounds": rows}


def one_round(made: Experiment, fed: Federation, layers: list[AtomLayer], t: int, replicates: int) -> Row:
    """Round t, made `replicates` times from the global model of `fed`."""
    by_kernels, by_product, clients = [], [], 0.0
    for number in range(replicates):
        seed = seeds.derive(fed.plan.seed, "replicate", number)
        members = scheduler.draw_cohort(
            seed, t, fed.worker.data.clients, fed.plan.fraction, fed.plan.draw, fed.plan.members
        )
        found = local_models.local_models(fed, local_models.worker_with_seed(made, seed), members, t)
        factors, p = [layer.factors(found.w) for layer in layers], found.p.to(found.w.device)
        by_kernels.append(torch.cat([kernel_mean(p, alpha, D).flatten() for alpha, D in factors]))
        by_product.append(torch.cat([product_mean(p, alpha, D).flatten() for alpha, D in factors]))
        clients += sum(client_variance(p, alpha, D) for alpha, D in factors) / replicates
    kernels, product = (replicate_variance(torch.stack(W)) for W in (by_kernels, by_product))
    ratio = product / kernels if kernels else float("nan")  # all replicates are alike with full batches of all clients
    return {"round": t, "kernel_mean": kernels, "product_mean": product, "ratio": ratio, "clients": clients}
