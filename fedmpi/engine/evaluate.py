"""Evaluation of models on the global test set and on the test rows of clients and sites.

The protocols (evaluate.protocol) are:

    global               the global model on the global test set. With data.silos no rank has a global test set; the
                         model is then evaluated on the test rows of each client, and metrics are averaged, weighted by
                         samples
    sites                the global model on the test rows of each site of the data set, whether its clients train or
                         not: accuracy@SITE, and their mean, sites_accuracy
    personal             each client's own model (the hook `personal_weights`) on the client's test rows: mean, standard
                         deviation, and mean of the worst tenth of all clients
    personal_on_global   the clients' own models on the global test set
    ft(e)                the clients' own models on the clients' test rows, after e epochs of plain fine-tuning; only
                         after the last round

If clients keep parts of the model, there is no complete global model. `global` and `sites` are then left out, unless
they are the only protocols.

With evaluate.best, metrics on validation rows are added (`validation_...`). Normally, the global model is evaluated on
the validation rows of all clients. If clients keep parts of the model, each client's model is evaluated on the client's
own validation rows. The same applies if the method gives clients models of their own (Ditto) and no protocol evaluates
the global model.

If a model's loss is not finite, the metrics over all clients are nan. Metrics are computed from outputs in a fixed
order, so that they depend neither on the number of ranks nor on which rank computes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import isnan, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.common.inputs import call_module
from fedmpi.common.text import is_lower_better
from fedmpi.common.user_code_errors import add_error_context, make_located_error
from fedmpi.data.batches import Shard, batches, merge_shards
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.federation_config import SERVER_PROTOCOLS, FederationConfig
from fedmpi.engine.hook_checks import forward_error, hook_error
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.messages import MessageLayouts
from fedmpi.engine.server import FederationServer
from fedmpi.engine.transport.round_transport import RoundTransport
from fedmpi.flat.layout import ALL_GROUPS
from fedmpi.method.base import overrides
from fedmpi.models.probabilistic_features import REFERENCE_GROUP
from fedmpi.tasks import validation
from fedmpi.tasks.metrics import Metrics, client_statistics, count_hits_by_class, weighted_client_mean

MAX_CLASSES = 100  # largest number of classes for which accuracies by class are recorded
# hooks that give each client a model of its own
PERSONAL_MODEL_HOOKS = ("personal_weights", "personal_buffers", "predict")


class Evaluation(NamedTuple):
    """The results of evaluating one model on one shard of data."""

    metrics: Metrics  # the loss and the metrics of the task
    outputs: Tensor  # (n, ...) outputs, as the task reduces them
    targets: Tensor  # (n, ...)


def evaluate_model(
    trainer: ClientTrainer, shard: Shard, batch_size: int, predict: Callable[[Tensor], Tensor] | None = None
) -> Evaluation:
    """Evaluate the trainer's model on a shard, in evaluation mode.

    The loss is the mean over samples (or over targets that are not ignored), unless the task defines a loss for the
    split as a whole. All metrics of an empty shard are nan.

    Args:
        batch_size: number of samples per forward pass.
        predict: a function that computes outputs from samples x (B, ...), in place of the model's forward pass.
    """
    task = trainer.task
    if not len(shard):
        return Evaluation(dict.fromkeys(("loss", *task.names), nan), torch.empty(0), torch.empty(0))
    module = trainer.model.module.eval()
    loss, outputs, targets = torch.zeros((), dtype=torch.float64, device=trainer.model.w.device), [], []
    weight: int | Tensor = 0
    with torch.inference_mode(), trainer.autocast_context() if trainer.bf16 else nullcontext():
        for x, y in batches(shard, batch_size, None):
            f = _compute_outputs(trainer, module, x, predict)
            batch_weight = task.batch_weight(y)
            loss, weight = loss + validation.eval_loss(task, f, x, y).double() * batch_weight, weight + batch_weight
            outputs.append(validation.reduce_outputs(task, f, y))
            targets.append(y)
        trainer.unsent_tensor_guard.check()
        f, y = torch.cat(outputs), torch.cat(targets)
        split_loss = validation.split_loss(task, f, y)
        if f.is_floating_point() and bool(f.isnan().any()):  # argmax would return a class for nan
            metrics = dict.fromkeys(task.names, nan)
        else:
            metrics = validation.compute_metrics(task, f, y)
        return Evaluation({"loss": (loss / weight if split_loss is None else split_loss).item(), **metrics}, f, y)


def _compute_outputs(
    trainer: ClientTrainer, module: nn.Module, x: Tensor, predict: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Compute the outputs (B, ...) for a batch of samples and check their shape; errors name the model or the hook."""
    try:
        f = predict(x) if predict else call_module(module, x)
    except Exception as error:
        raise forward_error(module, x, error) from error
    shape = (len(x), *trainer.net.output_shape)
    if not isinstance(f, Tensor) or f.shape != shape or f.is_complex():
        given = f"{f.dtype} {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        who = "the function from hook predict" if predict else f"model {type(module).__name__}"
        text = f"{who} returned {given} for {len(x)} samples; it must return a tensor of shape {shape}"
        raise make_located_error(text, predict or module)
    return f.to(trainer.model.w.dtype)


def load_own_model(client: ClientContext, fine_tuned: int = 0) -> Callable[[Tensor], Tensor] | None:
    """Load the weights and float buffers with which a client is evaluated, as the hooks of the method return them.

    Args:
        fine_tuned: the number of epochs for which the client's model is fine-tuned after loading.

    Returns:
        The result of the method's hook `predict`: a function that computes outputs from samples in place of the forward
        pass, or None.
    """
    method = client.trainer.method
    w = client.check_result("personal_weights", method.personal_weights(client))
    client.trainer.model.load(
        w, client.check_result("personal_buffers", method.personal_buffers(client), tuple(client.b0.shape))
    )
    if fine_tuned:
        client.fine_tune(fine_tuned)
    predict = method.predict(client)
    if predict is not None and not callable(predict):
        text = f"returned {type(predict).__name__}; it must return None or a function x (B, ...) -> (B, outputs)"
        raise hook_error(method, "predict", client.where, text)
    return predict


class Evaluator:
    """Evaluates the models of one experiment; all ranks take part, and rank 0 gets the results."""

    def __init__(
        self,
        config: FederationConfig,
        states: ClientStates,
        transport: RoundTransport,
        server: FederationServer | None,
    ) -> None:
        """Create the evaluator; `server` is None except on rank 0."""
        self.config, self.states, self.transport, self.server = config, states, transport, server
        self.trainer, self.comm = states.trainer, states.comm
        self.data, self.names = self.trainer.data, ("loss", *self.trainer.task.names)
        self.protocol = tuple(config.protocol)
        # accuracy of the global model for each class, in percent; [] if unknown
        self.class_accuracy: list[float | None] = []
        self.warned_protocols = set[str]()  # those for which a warning about losses that are not finite was issued
        self.is_silo = self.data.global_test is None
        personal, method = personal_groups(self.trainer.messages), self.trainer.method
        server_protocols = SERVER_PROTOCOLS.intersection(self.protocol)
        other_protocols = tuple(p for p in self.protocol if p not in SERVER_PROTOCOLS)
        # without the parts that clients keep there is no global model
        if personal and server_protocols and other_protocols:
            self.protocol = other_protocols
            if self.comm.rank == 0:
                text = f"evaluate.protocol: {', '.join(sorted(server_protocols))} is not evaluated, because method "
                text += f"{type(method).__name__} has no global model: clients keep {', '.join(sorted(personal))}"
                warnings.warn(RankWarning(text), stacklevel=2)
        # Whether the best model is selected by each client's model on its own rows, and not by the global model.
        own = any(overrides(method, hook) for hook in PERSONAL_MODEL_HOOKS) and not server_protocols.intersection(
            self.protocol
        )
        self.selects_by_own_models = config.best is not None and (own or not self.trainer.messages.shared.selects_all)
        # otherwise rank 0 evaluates alone
        self.clients_evaluate = self.is_silo or bool({*self.protocol} - SERVER_PROTOCOLS) or self.selects_by_own_models
        if self.is_silo and "personal_on_global" in self.protocol:
            raise UserError(
                "evaluate.protocol: personal_on_global needs a global test set, which does not exist with data.silos; "
                "use personal instead"
            )
        if "sites" in self.protocol and not self.data.test_by_site:
            raise UserError(
                "evaluate.protocol: sites needs a data set that assigns its test rows to sites; use personal instead"
            )

    def evaluate_round(self, t: int, last: bool) -> tuple[Metrics, list[dict[str, Any]]]:
        """Evaluate the models after round t under all protocols (evaluate.protocol).

        The caller must preserve the state of the random generators (`seeds.preserve_rng_state`).

        Args:
            t: the round; -1 for the initial model.
            last: whether this is the last round.

        Returns:
            The metrics of the round, and the rows of clients.jsonl; both are complete only on rank 0.
        """
        metrics, client_rows = Metrics(), list[dict[str, Any]]()
        if self.server is None and not self.clients_evaluate:
            return metrics, client_rows
        evaluated_round, t = t, max(t, 0)  # the initial model (round -1) is evaluated like that of round 0
        # the downloads of all clients that are evaluated; those of clients of other ranks are not used
        downloads = dict[int, Tensor]()
        if self.clients_evaluate:
            clients = [k for k in range(self.data.clients) if k not in self.states.unavailable]
            downloads = dict.fromkeys(clients, self.transport.empty_download)
            # only these hooks may read the download
            if any(overrides(self.trainer.method, hook) for hook in ("personal_weights", "predict", "finetune")):
                downloads = self.transport.send_downloads(t, clients, self.states.owners, self.server)
        for protocol in self.protocol:
            if protocol.startswith("ft(") and not last:
                continue
            if protocol == "sites" or (protocol == "global" and not self.is_silo):  # rank 0 evaluates these alone
                if self.server is not None:
                    metrics |= self._evaluate_sites(t) if protocol == "sites" else self._evaluate_global_test(t)
                continue
            rows, weights = self._evaluate_clients(protocol, t, downloads)
            if self.server is not None:
                metrics |= self._combine_metrics_of_shards(t, protocol, rows, weights)
                shared = self.data.global_test if protocol == "personal_on_global" else None
                for k in sorted(rows):
                    samples = int(self.data.test_sizes[k]) if shared is None else len(shared)
                    site = {"site": self.data.site_names[k]} if self.data.site_names else {}
                    head = {"round": evaluated_round, "client": k, **site, "protocol": protocol, "samples": samples}
                    client_rows.append(head | rows[k])
        if self.config.best is not None:
            metrics |= {f"validation_{name}": value for name, value in self._evaluate_validation(t, downloads).items()}
        return metrics, client_rows

    # ---- the global model, on rank 0 ----
    def _evaluate_global_model(self, t: int, shard: Shard) -> Evaluation:
        """Evaluate the global model of round t on a shard of data."""
        assert self.server is not None
        self.trainer.model.load(self.server.w, self.server.b)
        with add_error_context(f"evaluation after round {t}"):
            return evaluate_model(self.trainer, shard, self.config.eval_batch)

    def _evaluate_global_test(self, t: int) -> Metrics:
        """Return the metrics of the global model on the global test set; set the attribute `class_accuracy`."""
        assert self.data.global_test is not None
        metrics, f, y = self._evaluate_global_model(t, self.data.global_test)
        self.class_accuracy = []
        logits = getattr(self.trainer.task, "classification", False) and f.ndim == 2 and f.shape[1] <= MAX_CLASSES
        classes = logits and y.dtype == torch.int64 and y.ndim == 1 and 0 <= int(y.min()) < int(y.max()) < f.shape[1]
        if classes and bool(f.isfinite().all()):
            correct, totals, _ = count_hits_by_class(f.argmax(1), y, f.shape[1])
            self.class_accuracy = [None if isnan(v) else round(v, 3) for v in (100 * correct / totals).tolist()]
        return metrics

    def _evaluate_sites(self, t: int) -> Metrics:
        """Return the metrics of the global model on each site's test rows, and their mean over sites."""
        rows, weights = dict[str, Metrics](), dict[str, float]()
        for site, shard in self.data.test_by_site.items():
            rows[site], weights[site] = self._metrics_and_weight(self._evaluate_global_model(t, shard))
        over_sites = self._combine_metrics_of_shards(t, "sites", rows, weights)
        return over_sites | {f"{name}@{site}": row[name] for site, row in rows.items() for name in self.names}

    def _evaluate_validation(self, t: int, downloads: Mapping[int, Tensor]) -> Metrics:
        """Return, on rank 0, the metrics on the validation rows of all clients; return {} on other ranks."""
        if self.is_silo or self.selects_by_own_models:
            rows, weights = self._evaluate_clients("validation", t, downloads)
            return {} if self.server is None else self._combine_metrics_of_shards(t, "validation", rows, weights)
        return {} if self.server is None else self._evaluate_global_model(t, merge_shards(self.data.validation)).metrics

    # ---- clients and sites ----
    def _metrics_and_weight(self, evaluation: Evaluation) -> tuple[Metrics, float]:
        """Return the metrics of an evaluation, and their weight in a mean over shards.

        The weight is the number of samples, or of targets that are not ignored in the loss.
        """
        weight = float(self.trainer.task.split_weight(evaluation.targets)) if len(evaluation.targets) else 0.0
        return evaluation.metrics if weight else {**evaluation.metrics, "loss": nan}, weight

    def _combine_metrics_of_shards(
        self, t: int, protocol: str, rows: Mapping[Any, Metrics], weights: Mapping[Any, float]
    ) -> Metrics:
        """Combine the metrics of all clients or sites.

        If all shards are evaluated with the same model, return the mean of the metrics, weighted by samples; otherwise
        return their mean, standard deviation and mean of the worst tenth. If the loss of any client with samples is not
        finite, warn and return nan for all metrics: if such clients were left out, each failure would improve the mean.
        """
        bad = [k for k in sorted(rows) if weights[k] and isnan(rows[k]["loss"])]
        if bad and protocol not in self.warned_protocols:
            self.warned_protocols.add(protocol)
            who = f"{'site' if protocol == 'sites' else 'client'} {', '.join(map(str, bad[:5]))}"
            text = f"round {t}, protocol {protocol}: the loss of {who} (of {len(rows)}) is nan, "
            text += "and so are the metrics over all"
            warnings.warn(RankWarning(text), stacklevel=2)
        if protocol in ("global", "validation"):
            return dict.fromkeys(self.names, nan) if bad else weighted_client_mean(rows, weights)
        metrics: Metrics = {}
        for name in self.names:
            lower_is_better = is_lower_better(name, getattr(self.trainer.task, "lower_is_better", ()))
            values = [nan] if bad else [rows[k][name] for k in sorted(rows)]
            metrics |= client_statistics(f"{protocol}_{name}", values, lower_is_better)
        return metrics

    def _evaluate_clients(
        self, protocol: str, t: int, downloads: Mapping[int, Tensor]
    ) -> tuple[dict[int, Metrics], dict[int, float]]:
        """Evaluate the clients in `downloads` under one protocol, each on the rank that has its state.

        Returns:
            client -> metrics, and client -> weight; both are complete only on rank 0.
        """
        comm, owners, rows = self.comm, self.states.owners, dict[int, Tensor]()
        received = self.config.learning_rate(t), self.transport.broadcast_copy
        for client, download in downloads.items():
            if owners[client] == comm.rank:
                seeds.seed_global_generators(self.trainer.seed, "evaluate", protocol, t, client)
                with add_error_context(f"evaluation after round {t}, client {client}"):
                    row, weight = self._evaluate_client(
                        protocol, self.states.client_context(client, t, *received, download)
                    )
                numbers = [weight, *(row[n] for n in self.names)]
                rows[client] = torch.tensor(numbers, dtype=torch.float64, device=comm.device)
            elif comm.rank == 0:
                rows[client] = torch.empty(1 + len(self.names), dtype=torch.float64, device=comm.device)
        comm.message_info = t, ("weight", *self.names)
        outgoing = [(0, row) for row in rows.values()] if comm.rank else []
        comm.exchange(outgoing, [(owners[k], row) for k, row in rows.items() if owners[k] != comm.rank])
        values = {k: row.tolist() for k, row in rows.items()}
        metrics = {k: dict(zip(self.names, numbers[1:], strict=True)) for k, numbers in values.items()}
        return metrics, {k: numbers[0] for k, numbers in values.items()}

    def _evaluate_client(self, protocol: str, client: ClientContext) -> tuple[Metrics, float]:
        """Evaluate one client under one protocol; return its metrics and their weight."""
        trainer, inputs, predict = self.trainer, client.read_only_check(), None
        if protocol == "global" or (protocol == "validation" and not self.selects_by_own_models):
            trainer.model.load(client.received, client.b0)
        else:
            predict = load_own_model(client, int(protocol[3:-1]) if protocol.startswith("ft(") else 0)
        own = self.data.validation if protocol == "validation" else self.data.test
        shard = self.data.global_test if protocol == "personal_on_global" else own[client.id]
        assert shard is not None
        result = self._metrics_and_weight(evaluate_model(trainer, shard, self.config.eval_batch, predict))
        inputs.raise_if_written(
            trainer.method, client.where, "personal_weights", "personal_buffers", "finetune", "predict"
        )
        return result


def personal_groups(messages: MessageLayouts) -> frozenset[str]:
    """Return the layout groups that clients train but do not send to the server.

    Groups that no client trains (such as the head in FedBABU) are excluded, and so are reference parameters, which do
    not affect outputs.
    """
    left = messages.all_groups - messages.shared_groups - {REFERENCE_GROUP}
    return left if ALL_GROUPS in messages.method.trains else left.intersection(messages.method.trains)
