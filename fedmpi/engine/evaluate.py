"""Evaluation of models: on the global test set, on each client's own test split, and how evenly.

    global               the global model on the global test set; in silo mode, where no rank sees one, on every
                         client's own and pooled by samples
    sites                the global model on the test rows of each site that the data set knows, trained on or not:
                         accuracy@SITE, and sites_accuracy, their mean
    personal             what a client uses (the method's `weights`) on the client's own test split: mean, standard
                         deviation and worst tenth over all clients
    personal_on_global   the same models on the global test set
    ft(e)                the same models after e epochs of plain fine-tuning, own test split; after the last round only
With evaluate.best also on the validation rows (`validation_...`): the global model on those of all clients, in silo
mode on each client's own, pooled by samples. Where parts of the model stay with clients, or the method gives clients
models of their own (Ditto) and no protocol evaluates the global one, each client's model on its own rows.
If clients keep parts of the model, `global` and `sites` are left out beside other protocols: there is no global model.
If a model's outputs for its samples are not finite, the metrics over all clients are nan.
Metrics are functions of outputs gathered in a fixed order: they depend neither on the rank that computes them nor on
the number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import isnan, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.inputs import call
from fedmpi.common.text import lower_is_better
from fedmpi.common.user_code_errors import attribute_errors, located_error
from fedmpi.data.batches import Shard, batches, pooled_rows
from fedmpi.engine.checks import not_passed, wrong
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.federation_config import SERVERS
from fedmpi.engine.local.context import ClientContext
from fedmpi.tasks import contract
from fedmpi.tasks.measures import Figures, pooled, spread

MOST_CLASSES = 100  # for which accuracies by class are recorded


class EvaluationInputs(NamedTuple):
    """The round that is evaluated, and the models and messages of which that is made."""

    t: int
    lr: float
    model: tuple[Tensor, Tensor] | None  # w, b of the global model, at rank 0
    inbox: Tensor  # the latest broadcast
    downloads: Mapping[int, Tensor]  # of the clients to be evaluated
    last: bool  # whether no round follows


class Evaluation(NamedTuple):
    """The results of one model on one shard."""

    figures: Figures  # loss, and the task's metrics
    outputs: Tensor  # (n, ...) what the task holds of them
    targets: Tensor  # (n, ...)


def evaluate(
    trainer: ClientTrainer, shard: Shard, batch_size: int, predict: Callable[[Tensor], Tensor] | None = None
) -> Evaluation:
    """Evaluate the trainer's model on a shard, in evaluation mode.

    The loss is the mean over samples, over targets that count, or the task's loss of a whole split. Every metric of an
    empty shard is nan. predict: x -> outputs, in place of the model's forward pass.
    """
    task = trainer.task
    if not len(shard):
        return Evaluation(dict.fromkeys(("loss", *task.names), nan), torch.empty(0), torch.empty(0))
    module = trainer.model.module.eval()
    loss, outputs, targets = torch.zeros((), dtype=torch.float64, device=trainer.model.w.device), [], []
    weight: int | Tensor = 0
    with torch.inference_mode(), trainer.precision() if trainer.bf16 else nullcontext():
        for x, y in batches(shard, batch_size, None):
            f = _outputs(trainer, module, x, predict)
            of_batch = task.batch_weight(y)
            loss, weight = loss + contract.mean_loss(task, f, x, y).double() * of_batch, weight + of_batch
            outputs.append(contract.hold(task, f, y))
            targets.append(y)
        trainer.frozen_guard.check()
        f, y = torch.cat(outputs), torch.cat(targets)
        whole = contract.whole_loss(task, f, y)
        if f.is_floating_point() and bool(f.isnan().any()):  # no answer, though argmax would name one
            figures = dict.fromkeys(task.names, nan)
        else:
            figures = contract.figures(task, f, y)
        return Evaluation({"loss": (loss / weight if whole is None else whole).item(), **figures}, f, y)


def _outputs(
    trainer: ClientTrainer, module: nn.Module, x: Tensor, predict: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return the outputs (B, ...) for a batch of samples, in the model's type."""
    try:
        f = predict(x) if predict else call(module, x)
    except Exception as error:
        raise not_passed(module, x, error) from error
    shape = (len(x), *trainer.net.output_shape)
    if not isinstance(f, Tensor) or f.shape != shape or f.is_complex():
        given = f"{f.dtype} {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        who = "the function that hook predict gave" if predict else f"model {type(module).__name__}"
        text = f"{who} returned {given} for {len(x)} samples; it must return a tensor {shape}"
        raise located_error(text, predict or module)
    return f.to(trainer.model.w.dtype)


def load_own_model(client: ClientContext, fine_tuned: int = 0) -> Callable[[Tensor], Tensor] | None:
    """Load the model that is evaluated as this client's: its weights (d,) and batch statistics (b,).

    fine_tuned: epochs of fine-tuning that follow.

    Returns:
        The client's function from samples to outputs, if it has one beyond the model; else None.
    """
    method = client.trainer.method
    w = client.check("weights", method.weights(client))
    client.trainer.model.load(w, client.check("buffers", method.buffers(client), tuple(client.b0.shape)))
    if fine_tuned:
        client.fine_tune(fine_tuned)
    predict = method.predict(client)
    if predict is not None and not callable(predict):
        text = f"returned {type(predict).__name__}; it must return None or a function x (B, ...) -> (B, outputs)"
        raise wrong(method, "predict", client.where, text)
    return predict


class Evaluator:
    """Evaluates the protocols of one experiment. Every rank calls it; the results are at rank 0."""

    def __init__(
        self, states: ClientStates, protocol: Sequence[str], batch_size: int, validates: str | None = None
    ) -> None:
        """validates: the model evaluated on validation rows, "global" or each client's "own"; None: none."""
        self.states, self.protocol, self.batch_size = states, tuple(protocol), batch_size
        self.trainer, self.comm = states.trainer, states.comm
        self.data, self.names = self.trainer.data, ("loss", *self.trainer.task.names)
        self.by_class: list[float] = []  # accuracy of the global model on each class; [] if unknown
        self.warned = set[str]()  # protocols for which models without finite outputs were reported
        self.silo = self.data.global_test is None
        self.validates, self.own = validates is not None, validates == "own"
        # Whether clients evaluate; else rank 0 alone.
        self.asks_clients = self.silo or bool({*self.protocol} - SERVERS) or self.own
        if self.silo and "personal_on_global" in self.protocol:
            raise UserError("evaluate.protocol: personal_on_global needs a global test set, which silos do not have")
        if "sites" in self.protocol and not self.data.test_by_site:
            raise UserError("evaluate.protocol: sites needs a data set that says whose each test row is; take personal")

    def __call__(self, now: EvaluationInputs) -> tuple[Figures, list[dict[str, Any]]]:
        """Return the metrics of a round, and a row for each client."""
        t, model, figures, lines = now.t, now.model, Figures(), list[dict[str, Any]]()
        for protocol in self.protocol:
            if protocol.startswith("ft(") and not now.last:
                continue
            if protocol == "sites" or (protocol == "global" and not self.silo):  # of rank 0 alone
                if model is not None:
                    figures |= self._by_site(t, *model) if protocol == "sites" else self._global(t, *model)
                continue
            rows, weights = self._evaluate_clients(protocol, now)
            if model is None:
                continue
            figures |= self._combine(t, protocol, rows, weights)
            names, shared = self.data.site_names, self.data.global_test if protocol == "personal_on_global" else None
            for k in sorted(rows):
                samples = int(self.data.test_sizes[k]) if shared is None else len(shared)
                site = {"site": names[k]} if names else {}
                lines.append({"round": t, "client": k, **site, "protocol": protocol, "samples": samples, **rows[k]})
        if self.validates:
            figures |= {f"validation_{name}": value for name, value in self._validated(now).items()}
        return figures, lines

    def _global(self, t: int, w: Tensor, b: Tensor) -> Figures:
        """Return the metrics of the global model on the global test set; set `by_class`."""
        assert self.data.global_test is not None
        self.trainer.model.load(w, b)
        with attribute_errors(f"evaluation after round {t}"):
            figures, f, y = evaluate(self.trainer, self.data.global_test, self.batch_size)
        self.by_class = []
        logits = getattr(self.trainer.task, "classification", False) and f.ndim == 2 and f.shape[1] <= MOST_CLASSES
        if logits and y.dtype == torch.int64 and y.ndim == 1 and bool(f.isfinite().all()):
            known = int(y.min()) >= 0 and int(y.max()) < f.shape[1]
            if known and bool((y != y[0]).any()):
                right, every = (torch.bincount(c, minlength=f.shape[1]).double() for c in (y[f.argmax(1) == y], y))
                self.by_class = (100 * right / every).cpu().tolist()
        return figures

    def _by_site(self, t: int, w: Tensor, b: Tensor) -> Figures:
        """Return metrics on each site's test rows, and their spread over sites."""
        self.trainer.model.load(w, b)
        rows, weights = dict[str, Figures](), dict[str, float]()
        for site, shard in self.data.test_by_site.items():
            with attribute_errors(f"evaluation after round {t}"):
                rows[site], weights[site] = self._with_weight(evaluate(self.trainer, shard, self.batch_size))
        spread_ = self._combine(t, "sites", rows, weights)
        return spread_ | {f"{name}@{site}": row[name] for site, row in rows.items() for name in self.names}

    def _with_weight(self, of: Evaluation) -> tuple[Figures, float]:
        """Return the metrics, and their weight in a mean over shards: the samples, or targets, that count."""
        weight = float(self.trainer.task.split_weight(of.targets)) if len(of.targets) else 0.0
        return of.figures if weight else {**of.figures, "loss": nan}, weight

    def _combine(self, t: int, protocol: str, rows: Mapping[Any, Figures], weights: Mapping[Any, float]) -> Figures:
        """Return metrics over all clients or sites: pooled by samples for one model, else their spread.

        They are nan, with a warning, if a model with samples has no finite loss: a mean over the others would be the
        better the more models fail.
        """
        bad = [k for k in sorted(rows) if weights[k] and isnan(rows[k]["loss"])]
        if bad and protocol not in self.warned:
            self.warned.add(protocol)
            who = f"{'site' if protocol == 'sites' else 'client'} {', '.join(map(str, bad[:5]))}"
            text = f"round {t}, {protocol}: the loss of {who} (of {len(rows)}) is no number, and so no figure of all is"
            warnings.warn(RankWarning(text), stacklevel=2)
        if protocol in ("global", "validation"):
            return dict.fromkeys(self.names, nan) if bad else pooled(rows, weights)
        figures: Figures = {}
        for name in self.names:
            falling = lower_is_better(name, getattr(self.trainer.task, "falling", ()))
            figures |= spread(f"{protocol}_{name}", [nan] if bad else [rows[k][name] for k in sorted(rows)], falling)
        return figures

    def _validated(self, now: EvaluationInputs) -> Figures:
        """Return the metrics on the validation rows, at rank 0."""
        if self.silo or self.own:
            rows, weights = self._evaluate_clients("validation", now)
            return {} if now.model is None else self._combine(now.t, "validation", rows, weights)
        if now.model is None:
            return {}
        self.trainer.model.load(*now.model)
        with attribute_errors(f"evaluation after round {now.t}"):
            return evaluate(self.trainer, pooled_rows(self.data.validation), self.batch_size).figures

    def _evaluate_clients(self, protocol: str, now: EvaluationInputs) -> tuple[dict[int, Figures], dict[int, float]]:
        """Return each client's metrics and their weights, computed on the rank that has its state; complete at rank 0.

        To be called within `seeds.preserve_rng`.
        """
        comm, owner, rows = self.comm, self.states.owner, dict[int, Tensor]()
        for client, download in now.downloads.items():
            if owner[client] == comm.rank:
                seeds.reseed(self.trainer.seed, "evaluate", protocol, now.t, client)
                with attribute_errors(f"evaluation after round {now.t}, client {client}"):
                    view = self.states.view(client, now.t, now.lr, now.inbox, download)
                    row, weight = self._evaluate_client(protocol, view)
                numbers = [weight, *(row[n] for n in self.names)]
                rows[client] = torch.tensor(numbers, dtype=torch.float64, device=comm.device)
            elif comm.rank == 0:
                rows[client] = torch.empty(1 + len(self.names), dtype=torch.float64, device=comm.device)
        comm.about = now.t, ("weight", *self.names)
        outgoing = [(0, row) for row in rows.values()] if comm.rank else []
        comm.exchange(outgoing, [(owner[k], row) for k, row in rows.items() if owner[k] != comm.rank])
        numbers_of = {k: row.tolist() for k, row in rows.items()}
        figures = {k: dict(zip(self.names, numbers[1:], strict=True)) for k, numbers in numbers_of.items()}
        return figures, {k: numbers[0] for k, numbers in numbers_of.items()}

    def _evaluate_client(self, protocol: str, client: ClientContext) -> tuple[Figures, float]:
        """Return one client's metrics under one protocol, and their weight."""
        trainer, inputs, predict = self.trainer, client.read_only_check(), None
        if protocol == "global" or (protocol == "validation" and not self.own):
            trainer.model.load(client.received, client.b0)
        else:
            predict = load_own_model(client, int(protocol[3:-1]) if protocol.startswith("ft(") else 0)
        own = self.data.validation if protocol == "validation" else self.data.test
        shard = self.data.global_test if protocol == "personal_on_global" else own[client.id]
        assert shard is not None
        result = self._with_weight(evaluate(trainer, shard, self.batch_size, predict))
        inputs.check_hooks(trainer.method, client.where, "weights", "buffers", "tune", "predict")
        return result
