"""Two experiments from the paper on filter decomposition (`fedmpi analyse variance` and `fedmpi analyse virtual`).

Chen, Qiu. Extra Clients at No Extra Cost: Overcome Data Heterogeneity in Federated Learning with Filter Decomposition.
2025. https://arxiv.org/abs/2503.08652

The convolution kernels of client k are W_k = alpha_k D_k, with coefficients alpha_k and atoms D_k. They can be averaged
over the clients in two ways:
    kernel_mean     sum_k p_k alpha_k D_k                      FedAvg on the kernels                             (1)
    product_mean    (sum_i p_i alpha_i)(sum_j p_j D_j)         filter decomposition                              (2)
                    = (1) - sum_{i<j} p_i p_j (alpha_i - alpha_j)(D_i - D_j)
For scalars alpha_k = a + e_k, D_k = d + h_k with independent noise and p_k = 1/m,
    Var (1) = (d^2 Var e + a^2 Var h + Var e Var h) / m
    Var (2) = (d^2 Var e + a^2 Var h) / m + Var e Var h / m^2
so decomposition reduces only the cross term. (Prop. 4.1 of the paper assumes that the products of one round are
independent, and derives a larger gain.)

variance, Fig. 3(b): for every `evaluate.every`-th round, from round 0 on, the training is repeated R times from the
same global model, each time with a different cohort and different batches. W_r is the mean (1) or (2) in replicate r,
for the kernels of all layers that have atoms. The result is 1/(R-1) sum_r ||W_r - mean W||^2, an unbiased estimate of
the variance (the paper does not describe its estimator). It is compared with the variance of the clients' own kernels,
sum_k p_k ||W_k - W_bar||^2, averaged over replicates. The server's optimiser is not applied. Rounds in which the method
does not send coefficients are marked in the output.

virtual, Eq. 10, Sec. 4.1 and 6.7: starting from the final model of a run, the clients train for one more round. This
round takes the number of the next round in which coefficients are sent. The product (2) is the weighted mean of alpha_i
D_j over all pairs: the m clients (i = j), and m (m - 1) virtual clients (i != j; the paper counts unordered pairs, 6
for 4 clients). Coefficients, biases of convolutions, and convolutions without atoms come from client i, and atoms come
from client j. The paper does not mention the other parameters; here they come from the aggregate, so that the models
with i = j differ slightly from those of the clients. State that is not part of the global model, such as the states of
clients, starts from its initial values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmpi.analysis import charts, output
from fedmpi.analysis.local_models import build_one_process_experiment, make_trainer_with_seed, train_local_models
from fedmpi.comm.base import SingleProcess
from fedmpi.common import formatting, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import redact
from fedmpi.common.text import format_metric
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.schema import Settings
from fedmpi.engine import scheduler
from fedmpi.engine.evaluate import evaluate_model
from fedmpi.engine.federation import Federation
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.flat import linear
from fedmpi.flat.layout import ATOM, COEF
from fedmpi.models.filter_atoms import AtomConv2d
from fedmpi.runtime import build
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.finished_runs.models import load_global_model
from fedmpi.tasks.metrics import Metrics

Row = dict[str, Any]
RESULT_LABELS = {
    "kernel_mean": "kernels averaged",
    "product_mean": "product of averages",
    "ratio": "ratio",
    "clients": "clients",
}


# ---- two averages of kernels ----
def kernel_mean(p: Tensor, alpha: Tensor, D: Tensor) -> Tensor:
    """Return sum_k p_k alpha_k D_k (..., n, q), the weighted mean of kernels.

    The shapes are p (m,), alpha (..., m, n, a) and D (..., m, a, q).
    """
    return torch.einsum("k,...kna,...kaq->...nq", p, alpha, D)


def product_mean(p: Tensor, alpha: Tensor, D: Tensor) -> Tensor:
    """Return (sum_i p_i alpha_i)(sum_j p_j D_j), the product of weighted means; shapes as in `kernel_mean`."""
    return torch.einsum("k,...kna->...na", p, alpha) @ torch.einsum("k,...kaq->...aq", p, D)


def replicate_variance(W: Tensor) -> float:
    """Return the sample variance of vectors, an unbiased estimate of E||W - EW||^2.

    It is 1/(R-1) sum_r ||W_r - mean W||^2, for W (R, n) in float64 and R > 1.

    >>> replicate_variance(torch.tensor([[0.0, 1.0], [2.0, 1.0]], dtype=torch.float64))
    2.0
    """
    return W.var(0).sum().item()


def client_variance(p: Tensor, alpha: Tensor, D: Tensor) -> float:
    """Return the variance of the clients' kernels around their weighted mean.

    For p (m,), alpha (m, n, a) and D (m, a, q), it is sum_k p_k ||W_k - W_bar||^2, with W_k = alpha_k D_k and W_bar as
    in `kernel_mean`.
    """
    mean = kernel_mean(p, alpha, D)
    squares = torch.stack([(one @ atoms - mean).square().sum() for one, atoms in zip(alpha, D, strict=True)])
    return (p @ squares).item()


def extract_factors(experiment: Experiment, w: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return {layer name: (coefficients, atoms)} of m models, for all AtomConv2d layers.

    Args:
        experiment: an experiment with the architecture of the models.
        w: the weights of the m models, (m, d).

    Returns:
        In float64, the coefficients (m, o i, a) and the atoms (m, a, u v) of each layer. The layer has o x i kernels
        of u x v pixels, which are combinations of `a` atoms.

    Raises:
        UserError: if the model has no such layer.
    """
    segments, layers = {segment.name: segment for segment in experiment.model.layout.segments}, {}
    for path, layer in experiment.model.module.named_modules():
        if isinstance(layer, AtomConv2d):
            alpha, D = (torch.stack([segments[f"{path}.{name}"].view(row) for row in w]) for name in ("coef", "atoms"))
            layers[path] = (alpha.reshape(len(w), -1, D.shape[1]).double(), D.flatten(2).double())
    if not layers:
        s = experiment.settings
        raise UserError(
            f"method.name: {s.method.name} on model {s.model.name} has no filter atoms; "
            "use method fedatom, and a model with convolutions larger than 1x1"
        )
    return layers


# ---- variance ----
def analyse_variance(settings: Settings, replicates: int, to: Path, print_line: Callable[[str], None]) -> None:
    """Measure how much the averaged kernels differ between repetitions of a round (`fedmpi analyse variance`).

    The kernels are averaged in the two ways (1) and (2) of the module docstring. The variances are printed and written
    to variance.json and variance.png in the folder `to`.
    """
    to, experiment = output.create_output_folder(to), build_one_process_experiment(settings)

    def report_row(row: Row) -> None:
        if row["round"] == 0:
            print_line("variance of the aggregated kernels and of the clients' kernels")
        values = ", ".join(f"{name} {formatting.format_number(row[key])}" for key, name in RESULT_LABELS.items())
        note = "" if COEF in experiment.messages.groups_in_round(row["round"]) else " (coefficients are not sent)"
        print_line(f"round {row['round']}: {values}{note}")

    facts = train_and_measure_variance(experiment, replicates, report_row)
    print_line(f"written: {output.write_json(to / 'variance.json', facts)}")
    t = [row["round"] for row in facts["rounds"]]
    lines = [
        charts.Series(RESULT_LABELS[key], t, [row[key] for row in facts["rounds"]])
        for key in RESULT_LABELS
        if key != "ratio"
    ]
    chart = charts.LineChart(lines, "round", "variance (squared weights)", from_zero=True)
    print_line(f"written: {charts.write_chart(chart, to / 'variance.png', 'variance of aggregated kernels')}")


def train_and_measure_variance(
    experiment: Experiment, replicates: int, report_row: Callable[[Row], None] = lambda row: None
) -> dict[str, Any]:
    """Run an experiment, and measure in some rounds how much the averaged kernels vary.

    A measured round is trained several times, and the variance over these repetitions is computed. This does not change
    the results of the experiment.

    Args:
        experiment: the experiment.
        replicates: how many times each measured round is trained.
        report_row: called with the result of `measure_round_variance` for each measured round.

    Returns:
        A dict with `config`, `replicates`, `sha256` of the final model, and `rounds`, the results of
        `measure_round_variance`.
    """
    extract_factors(experiment, experiment.model.w[None])  # raises an error for a model without atoms
    s, rows, final_hash = experiment.settings, list[Row](), ""
    if s.rounds == 0:
        raise UserError("rounds: 0 is not allowed for this analysis, which measures rounds; must be >= 1")

    def measure_before_round(t: int) -> None:
        if t % s.evaluate.every == 0 and t < s.rounds:
            rows.append(measure_round_variance(experiment, fed, t, replicates))
            report_row(rows[-1])

    def on_round(line: dict[str, Any]) -> None:
        nonlocal final_hash
        final_hash = line["sha256"]
        measure_before_round(
            line["round"] + 1
        )  # at this time the global model is the one from which the next round starts

    fed = build.make_federation(
        experiment, SingleProcess(experiment.model.w.device), lambda: False, RunCallbacks(on_round)
    )
    measure_before_round(0)
    fed.run()
    return {"config": redact(s.model_dump(mode="json")), "replicates": replicates, "sha256": final_hash, "rounds": rows}


def measure_round_variance(experiment: Experiment, fed: Federation, t: int, replicates: int) -> Row:
    """Train round t several times from the same global model, and measure how much the averaged kernels vary.

    Args:
        experiment: the experiment.
        fed: the federation, whose current global model is the starting point.
        t: the round.
        replicates: the number of repetitions.

    Returns:
        A dict. `round`: t; `kernel_mean`: the variance over the replicates of the mean of the kernels; `product_mean`:
        the same for the product of mean coefficients and mean atoms; `ratio`: the second divided by the first;
        `clients`: the variance of the clients' own kernels.
    """
    by_kernels, by_product, clients = [], [], 0.0
    for number in range(replicates):
        seed = seeds.derive_seed(fed.config.seed, "replicate", number)
        members = scheduler.draw_cohort(
            seed, t, fed.trainer.data.clients, fed.config.fraction, fed.config.sampling, fed.config.cohort_size
        )
        local = train_local_models(fed, make_trainer_with_seed(experiment, seed), members, t)
        layers, p = extract_factors(experiment, local.w).values(), local.p.to(local.w.device)
        by_kernels.append(torch.cat([kernel_mean(p, alpha, D).flatten() for alpha, D in layers]))
        by_product.append(torch.cat([product_mean(p, alpha, D).flatten() for alpha, D in layers]))
        clients += sum(client_variance(p, alpha, D) for alpha, D in layers) / replicates
    kernels, product = (replicate_variance(torch.stack(W)) for W in (by_kernels, by_product))
    ratio = product / kernels if kernels else float("nan")  # kernels: 0 if all clients train on full batches
    return {"round": t, "kernel_mean": kernels, "product_mean": product, "ratio": ratio, "clients": clients}


# ---- virtual clients ----
def analyse_virtual_clients(run: Path, settings: Settings, to: Path, print_line: Callable[[str], None]) -> None:
    """Evaluate models that combine the coefficients of one client with the atoms of another (`fedmpi analyse virtual`).

    The results are printed as a table and written to virtual.json in the folder `to`.
    """
    to, module = output.create_output_folder(to), load_global_model(run, settings)
    options = f" {describe_value(redact(settings.data.options))}" if settings.data.options else ""
    print_line(f"data: {settings.data.source}{options}, files below {settings.data.root}")
    experiment = build_one_process_experiment(settings)
    experiment.model.module.load_state_dict(module.state_dict())
    facts = evaluate_virtual_clients(experiment, print_line)
    for line in format_virtual_clients(facts):
        print_line(line)
    print_line(f"written: {output.write_json(to / 'virtual.json', {'run': str(run), **facts})}")


def evaluate_virtual_clients(
    experiment: Experiment, print_line: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train the clients for one more round from the model of `experiment`, and evaluate all pairwise combinations.

    Each combination has the coefficients alpha_i of one client's model and the atoms D_j of the same or another
    client's.

    Returns:
        A dict. `round`: the number of the round; `clients`: the cohort; `weights`: the clients' weights p; `headline`:
        the name of the task's main metric; `models`: for each ordered pair of clients a dict with `alpha` (i), `atoms`
        (j) and the metrics on the global test set; `aggregate`: the metrics of the aggregate.
    """
    extract_factors(experiment, experiment.model.w[None])  # raises an error for a model without atoms
    test, s, trainer = experiment.data.global_test, experiment.settings, build.make_trainer(experiment, lambda: False)
    if test is None:
        raise UserError("virtual: not available with data.silos, because it needs a global test set")
    fed = build.make_federation(experiment, SingleProcess(experiment.model.w.device), lambda: False)
    t = next((t for t in range(s.rounds, 2 * s.rounds + 1) if COEF in experiment.messages.groups_in_round(t)), s.rounds)
    members = scheduler.draw_cohort(
        s.seed, t, experiment.data.clients, s.cohort.fraction, s.cohort.sampling, s.cohort.size
    )
    print_line(f"round {t}: {len(members)} clients train, then {len(members) ** 2 + 1} models are evaluated")
    local = train_local_models(fed, trainer, members, t)
    w, b = linear.weighted_sum(local.w, local.p), linear.weighted_sum(local.b, local.p)

    def evaluate_weights(model: Tensor) -> Metrics:
        trainer.model.load(model, b)
        return evaluate_model(trainer, test, s.evaluate.batch_size).metrics

    models = [
        {"alpha": i, "atoms": j, **evaluate_weights(recombine_filters(experiment, w, alpha, D))}
        for i, alpha in zip(members, local.w, strict=True)
        for j, D in zip(members, local.w, strict=True)
    ]
    facts = {"round": t, "clients": members, "weights": local.p, "headline": experiment.task.names[0]}
    return {**facts, "models": models, "aggregate": evaluate_weights(w)}


def recombine_filters(experiment: Experiment, w: Tensor, alpha: Tensor, D: Tensor) -> Tensor:
    """Return a copy of w with the coefficients of the model `alpha` and the atoms of the model `D`; all are (d,)."""
    out = w.clone()
    for group, source in ((COEF, alpha), (ATOM, D)):
        part = experiment.model.layout.select({group})
        part.put(part.take(source), out)
    return out


def format_virtual_clients(facts: dict[str, Any]) -> list[str]:
    """Format the results of `evaluate_virtual_clients` as two tables.

    The first contains the main metric for each pair of clients i, j. The second contains the mean over the clients
    (i = j), the mean over the virtual clients (i != j), and the metrics of the aggregate.
    """
    name, clients = facts["headline"], facts["clients"]

    def format_value(name: str, value: float) -> str:
        return "-" if value != value else format_metric(name, value, 4)

    value_of_pair = {(row["alpha"], row["atoms"]): row[name] for row in facts["models"]}
    matrix = [[f"alpha {i}", *(format_value(name, value_of_pair[i, j]) for j in clients)] for i in clients]
    groups: dict[str, list[Metrics]] = {
        "clients (diagonal), mean of {}": [row for row in facts["models"] if row["alpha"] == row["atoms"]],
        "virtual clients, mean of {}": [row for row in facts["models"] if row["alpha"] != row["atoms"]],
        "alpha_bar x D_bar": [facts["aggregate"]],
    }
    rows = [
        [
            label.format(len(group)),
            *(format_value(key, sum(row[key] for row in group) / len(group)) for key in (name, "loss")),
        ]
        for label, group in groups.items()
        if group
    ]
    return [
        f"{name} on the global test set of alpha_i x D_j",
        *formatting.format_table([["", *(f"D {j}" for j in clients)], *matrix]),
        *formatting.format_table([["", name, "loss"], *rows]),
    ]
