"""Check that data, model, task, method and server settings are compatible.

Without these errors and warnings, some combinations would run, but train something that the user does not intend.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import floor
from typing import Any

import numpy as np
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs
from fedmpi.common.text import is_lower_better, locate_key, shorten, suggest_name
from fedmpi.common.user_code_errors import make_located_error
from fedmpi.config.schema import Settings
from fedmpi.data.batches import iter_samples_once_if_shared
from fedmpi.data.federated import FederatedData
from fedmpi.engine import scheduler
from fedmpi.engine.evaluate import personal_groups
from fedmpi.engine.federation_config import SERVER_PROTOCOLS
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.messages import MessageLayouts, is_change
from fedmpi.engine.model_selection import SelectionCriterion
from fedmpi.engine.transport.gather import ChunkPlan
from fedmpi.method import base
from fedmpi.method.base import Method, get_mean_only_slots, has_sample_mean_loss, overrides
from fedmpi.method.slots import SharedParts
from fedmpi.models.net import FeaturesAndHead
from fedmpi.tasks import validation
from fedmpi.tasks.survival import Survival

ROBUST_RULES = (
    "krum",
    "geometric_median",
    "median",
    "trimmed_mean",
)  # rules that limit the influence of a single client
FAULT_KEYS = ("on_bad_update", "on_client_error", "on_lost_rank")
REMEDIES = {  # config key -> value that meets a requirement of methods
    "train.optim": "sgd",
    "train.clip_norm": "null",
    "train.persist_optimizer": "false",
    "train.momentum": "0",
    "data.share_label_counts": "true",
    "data.validation": "0.1",
    "task.label_smoothing": "0",
}


# ---- the model alone ----
def check_trainable_parameters(where: str, module: Any, made_by: Any) -> None:
    """Check that a module has trainable parameters, and that all of them have the same floating-point type.

    Args:
        where: The origin of the module, for messages, such as "model.name: cnn".
        made_by: The function or class that made the module; error messages name its file.
    """
    trained = [p for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []
    if not trained:
        returned = "a module without any" if isinstance(module, nn.Module) else type(module).__name__
        raise make_located_error(
            f"{where} must return a torch.nn.Module with trainable parameters; it returned {returned}", made_by
        )
    kinds = sorted({str(p.dtype) for p in trained})
    if len(kinds) > 1 or not trained[0].is_floating_point():
        raise make_located_error(
            f"{where} has trainable parameters of {', '.join(kinds)}; all must have the same floating-point type, as "
            "they are stored in one vector; convert them, for example with module.float()",
            made_by,
        )


# ---- what the method needs ----
def check_method(
    settings: Settings, method: Method, task: Any, net: FeaturesAndHead, local_training: LocalTrainingConfig
) -> None:
    """Check that model, task and settings meet all requirements of the method (`Method.needs`). Raises UserError."""
    lacking = _find_unmet_requirements(settings, task, net, local_training)
    for needed in sorted(method.needs):
        if reason := lacking.get(needed, "fedmpi.method defines no such requirement"):
            key = str(reason).partition(" ")[0]
            remedy = f"; set {key}: {REMEDIES[key]}" if key in REMEDIES else ""
            raise UserError(f"method {settings.method.name} needs {needed}, but {reason}{remedy}")


def _find_unmet_requirements(
    settings: Settings, task: Any, net: FeaturesAndHead, local_training: LocalTrainingConfig
) -> dict[str, Any]:
    """Return, for each requirement, the reason why it is not met, or a falsy value if it is met."""
    train, server, model = settings.train, settings.server, settings.model.name
    beyond, smoothing = local_training.not_plain_sgd_reason(), settings.task.options.get("label_smoothing")
    no_head = net.head is None and f"model {model} does not end in a linear layer that can be split off"
    plain_server = (server.optim, server.lr, server.rule.name) == ("sgd", 1.0, "auto")
    return {
        base.FEATURES: net.feature_dim is None
        and (no_head or f"model {model} returns more than one row of features or outputs per sample"),
        base.LAST_LAYER: no_head,
        base.CLASSES: not getattr(task, "classification", False)
        and f"task {settings.task.name} is not a classification task (its class does not set classification = True)",
        base.SGD_STEPS: beyond,
        base.PLAIN_SGD: beyond or (train.momentum and f"train.momentum is {train.momentum}"),
        base.PLAIN_SERVER: not plain_server
        and f"server is {{optim: {server.optim}, lr: {server.lr:g}, rule: {server.rule.name}}}",
        base.LABEL_COUNTS: not settings.data.share_label_counts and "data.share_label_counts is false",
        base.ONE_CLASS: smoothing and f"task.label_smoothing is {smoothing:g}",
        base.VALIDATION: not settings.data.validation and "data.validation is 0",
    }


def check_accumulation(settings: Settings, method: Method, task: Any, data: FederatedData) -> None:
    """Check that the loss of a batch is a mean over samples, so that train.accumulate can divide the batch.

    Raises:
        UserError: The loss of the method or of the task is no such mean.
    """
    parts, name = settings.train.accumulate, settings.method.name
    problem, culprit = f"train.accumulate: {parts} divides each batch into parts, but", type(method)
    if method.loss_is_sample_mean is False:
        problem += f" with its options the loss of method {name} uses statistics of the whole batch"
    elif not has_sample_mean_loss(method):
        hook = "loss" if overrides(method, "loss") else "step"
        problem += f" method {name} overrides the hook {hook}. If all losses of the method are means of terms that "
        problem += "depend on one sample each, declare loss_is_sample_mean = True in its class; otherwise"
    elif task.loss_weight(data.example_targets()) is None:
        problem += f" the loss of task {settings.task.name} for a batch is no mean of the losses of its parts"
        culprit = type(task)
    else:
        return
    remedy = "set train.accumulate: 1, and to save memory a smaller train.batch_size or compute.gradient_checkpointing"
    separator = " " if problem.endswith("otherwise") else "; "
    raise make_located_error(f"{problem}{separator}{remedy}", culprit)


# ---- data ----
def check_targets_and_outputs(settings: Settings, data: FederatedData, task: Any, net: FeaturesAndHead) -> None:
    """Raise UserError if the targets do not suit the task, or the model's outputs do not suit the targets.

    Warn if the test set is empty.
    """
    if getattr(task, "classification", False) and net.output_shape != (data.classes,):
        has = net.num_outputs if len(net.output_shape) == 1 else net.output_shape
        raise UserError(
            f"model {settings.model.name} has {has} outputs, but the data have {data.classes} classes; "
            "classification needs one output per class (to predict the next token or symbol of texts, set task.name: "
            "language_model; to predict classes of texts, set data.label_column)"
        )
    # Only clients whose rows this rank has are checked. If all are parts of one data set, each tensor is checked once.
    targets = {} if data.global_test is None else {"test data": data.global_test.y}
    for part, shards in (("training data", data.train), ("test data", data.test)):
        for k, _, y in iter_samples_once_if_shared(shards):
            client = data.site_names[k] if data.site_names else f"client {k}"
            targets[part if data.parts is not None else f"{part} of {client}"] = y
    for part, y in targets.items():
        validation.check_targets(settings.task.name, task, y, net.output_shape, part)
    _check_token_ids(settings, data, net.module)
    if isinstance(task, Survival) and settings.train.batch_size == 1:
        raise UserError(
            "train.batch_size: 1 is not allowed with task survival, whose loss compares the samples of a batch with "
            "each other and is 0 for a single sample; use for example 32, or full"
        )
    if data.global_test is not None and not len(data.global_test):
        warnings.warn("data: the test set is empty, so there will be no metrics of the global model", stacklevel=3)


def _check_token_ids(settings: Settings, data: FederatedData, module: nn.Module) -> None:
    """Raise UserError if the data have token ids that the model does not know (`module.num_embeddings`)."""
    limit = getattr(module, "num_embeddings", None)
    if limit is None:
        return
    tests = [] if data.global_test is None else [data.global_test.x]
    for x in (*tests, *(x for shards in (data.train, data.test) for _, x, _ in iter_samples_once_if_shared(shards))):
        ids = x["input_ids"] if isinstance(x, Inputs) else x
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            wrong = int(ids.max()) if int(ids.max()) >= limit else int(ids.min())
            raise UserError(
                f"model {settings.model.name} knows the token ids 0 to {limit - 1}, but the data contain {wrong}: they "
                "were made by a tokenizer with another vocabulary; use the tokenizer of the model, or set "
                "model.vocab_size for a model with random weights"
            )


def check_cohort_and_batch_sizes(settings: Settings, data: FederatedData) -> None:
    """Check that there are enough clients for a cohort, and that clients have enough samples for one batch.

    With train.drop_last, clients with too few samples for a batch do not train; a warning gives their number.

    Raises:
        UserError: cohort.size exceeds the number of clients, or no client has enough samples for a batch.
    """
    size, train, idle = settings.cohort.size, settings.train, len(_find_idle_clients(settings, data))
    if size is not None and size > data.clients:
        raise UserError(
            f"{locate_key(settings.origin('cohort.size'), 'cohort.size')}: {size} clients per round, but there are "
            f"only {data.clients}; set it to at most {data.clients}, or use more clients"
        )
    if idle == data.clients:
        raise UserError(
            f"train.drop_last: true drops every batch: train.batch_size is {train.batch_size}, but the largest client "
            f"has only {data.train_sizes.max()} samples; lower train.batch_size, or set train.drop_last: false"
        )
    if idle:
        warnings.warn(
            f"train.drop_last: {idle} of {data.clients} clients have fewer than train.batch_size = "
            f"{train.batch_size} samples and will not train",
            stacklevel=3,
        )


def _find_idle_clients(settings: Settings, data: FederatedData) -> list[int]:
    """Return the clients that do not train, because train.drop_last is true and their samples do not fill a batch."""
    size = settings.train.batch_size
    if not settings.train.drop_last or size == "full":
        return []
    clients: list[int] = np.flatnonzero(data.train_sizes < size).tolist()
    return clients


def make_selection_criterion(settings: Settings, task: Any, data: FederatedData) -> SelectionCriterion:
    """Make the criterion that selects the best model (evaluate.best): its metric, and whether lower is better.

    Raises:
        UserError: The task has no such metric, or no client has validation samples.
    """
    best, names = settings.evaluate.best, ("loss", *task.names)
    assert best.metric is not None
    if best.metric not in names:
        raise UserError(
            f"{locate_key(settings.origin('evaluate.best.metric'), 'evaluate.best.metric')}: task "
            f"{settings.task.name} has no metric {best.metric!r}; {suggest_name(best.metric, names)}"
        )
    if not data.validation_sizes.any():
        raise UserError(
            f"evaluate.best.metric: {best.metric} is measured on validation samples, but no client has two samples (or "
            "groups of samples), so none can be held out"
        )
    falls = is_lower_better(best.metric, getattr(task, "lower_is_better", ()))
    lowest = best.goal == "lowest" or (best.goal == "auto" and falls)
    return SelectionCriterion(f"validation_{best.metric}", lowest, best.patience, best.min_delta)


# ---- uploads ----
def check_uploads_suit_aggregation(settings: Settings, data: FederatedData, messages: MessageLayouts) -> None:
    """Raise UserError if aggregation rule, wire format, server settings or record.updates do not suit the uploads."""
    rule, name, sends, form = settings.server.rule, settings.method.name, messages.method.sends, messages.upload_format
    model, wire_name, first = settings.model.name, settings.comm.compression, messages.shared_parts(0)
    uploads = [messages.upload_layout(t) for t in range(max(settings.rounds, 1))]
    large = [key for key, slot in sends.items() if messages.is_large(slot)]
    no_changes = form is not None and form.changes_only and large and not any(is_change(k, sends[k]) for k in large)
    refusals = [
        settings.server.reduce == "local" and _reason_against_local_sums(settings, messages),
        settings.server.placement == "sharded"
        and form is not None
        and f"comm.compression: {wire_name} encodes uploads to one rank, but server.placement: sharded distributes "
        "them over ranks; set server.placement: root, or remove comm.compression",
        no_changes
        and f"comm.compression: {wire_name} encodes only updates (differences from the server's values), but method "
        f"{name} sends {', '.join(large)}; use bf16 or fp16 (in a method of your own, declare a slot that contains an "
        "update as Slot(..., is_update=True))",
        rule.name != "auto"
        and "dw" not in sends
        and f"server.rule: {rule.name} needs updates of the model, but method {name} sends none; remove server.rule",
        settings.record.updates == "gram"
        and not any("dw" in up.packing.shapes and up.w.size for up in uploads)
        and f"record.updates: gram needs updates of the model, but method {name} sends none; use norms or false",
    ]
    if reason := next(filter(None, refusals), None):
        raise UserError(str(reason))
    if rule.name in ROBUST_RULES:
        members = scheduler.cohort_size(data.clients, settings.cohort.fraction, settings.cohort.size)
        check_robust_rule(rule.name, rule.options, members, _find_idle_clients(settings, data))
    if (first.groups != SharedParts().groups or first.exclude) and messages.shared.selects_all:
        text = f"method {name} keeps some layer groups with the clients, but model {model} has none of them"
        warnings.warn(f"{text}; the complete model is sent", stacklevel=2)
    if name != "local" and not messages.shared.size and {*sends} <= {"dw"}:
        warnings.warn(
            f"method {name} shares no weights of model {model}: all layer groups "
            f"({', '.join(sorted(messages.all_groups))}) stay with the clients, each of which trains alone; choose "
            "another model or another method",
            stacklevel=3,
        )


def _reason_against_local_sums(settings: Settings, messages: MessageLayouts) -> str:
    """Return an error message if server.reduce is local although individual uploads are needed; otherwise ""."""
    faults, method, means = settings.faults, settings.method.name, get_mean_only_slots(messages.method) or {}
    uploads = {messages.upload_layout(t).packing for t in range(max(settings.rounds, 1))}
    single = sorted({name for packing in uploads for name in ChunkPlan(packing).large} - {*means, "_b"})
    drops = [f"faults.{key}: {value}" for key in FAULT_KEYS if (value := getattr(faults, key)) != "abort"]
    reasons = [
        not means
        and f"method {method} uses individual uploads (a method of your own whose aggregate only uses updates.mean can "
        'declare it with mean_only_slots = {"dw": ("p",)})',
        single and f"method {method} uses individual uploads of {', '.join(single)}",
        settings.server.rule.name != "auto" and f"server.rule {settings.server.rule.name} uses individual uploads",
        settings.model.lora is not None and "server.lora uses individual uploads",
        drops and f"{drops[0]} may exclude some of them",
        settings.data.silos and "with data.silos the uploads of a site may only be sent to rank 0",
        faults.replay is not None and "faults.replay may exclude some of them",
        settings.record.updates == "gram" and "record.updates: gram compares individual uploads",
        messages.upload_format is not None
        and f"comm.compression: {settings.comm.compression} encodes individual uploads",
    ]
    reason = next(filter(None, reasons), "")
    return f"server.reduce: local adds up uploads on each rank, but {reason}; set server.reduce: root" if reason else ""


def check_robust_rule(rule: str, options: Mapping[str, Any], members: int, idle: Sequence[int]) -> None:
    """Warn if a robust aggregation rule does not have its intended effect for this cohort size.

    Args:
        members: The number of clients per round.
        idle: Clients that do not train. If there are any, UserError is raised, because their zero updates would
            distort the result.
    """
    if idle:
        raise UserError(
            f"server.rule: {rule} would use the zero updates of clients {shorten(', '.join(map(str, idle)))}, which "
            "make no step (train.drop_last); lower train.batch_size, or set train.drop_last: false"
        )
    trim, f, select, text = options.get("trim", 0.1), options.get("byzantine", 1), options.get("select", 1), ""
    if rule == "trimmed_mean" and trim and not floor(trim * members + 1e-9):
        text = f"trimmed_mean with trim {trim:g} excludes none of {members} clients per round, so it is the plain mean"
        text += "; raise trim, or use more clients"
    elif rule == "krum" and select >= members:
        text = f"krum with select {select} of {members} clients per round is the plain mean"
        text += "; lower select, or use more clients"
    elif rule == "krum" and members < 2 * f + 3:
        text = f"krum with byzantine {f} needs {2 * f + 3} clients per round for its guarantee, but there are {members}"
        text += "; use more clients, or another rule"
    if text:
        warnings.warn(f"server.rule: {text}", stacklevel=3)


# ---- evaluation ----
def check_analysis_and_protocols(
    settings: Settings, method: Method, task: Any, net: FeaturesAndHead, data: FederatedData, messages: MessageLayouts
) -> None:
    """Check that the configured analyses are possible; warn if clients have models that no protocol evaluates."""
    if settings.analysis:
        _check_analysis(settings, task, net, data, messages)
    own, mixed = personal_groups(messages), overrides(method, "personal_weights") and method.client_state
    if (own or mixed or overrides(method, "predict")) and not {*settings.evaluate.protocol} - SERVER_PROTOCOLS:
        what = "parts of the model" if own and own != messages.all_groups else "models"
        warnings.warn(
            f"method {settings.method.name}: clients have {what} of their own, but evaluate.protocol does not evaluate "
            "them; set evaluate.protocol: [personal] or [global, personal]",
            stacklevel=2,
        )


def _check_analysis(
    settings: Settings, task: Any, net: FeaturesAndHead, data: FederatedData, messages: MessageLayouts
) -> None:
    """Raise UserError if a configured analysis is not possible with this model, method, data or fault handling."""
    named = f"analysis: {', '.join(settings.analysis)}"
    if not messages.shared.selects_all:
        method = settings.method.name
        raise UserError(
            f"{named} compares global and local models, but with method {method} clients keep parts of the model; "
            "remove analysis"
        )
    for key in FAULT_KEYS:
        if (value := getattr(settings.faults, key)) != "abort":
            raise UserError(
                f"{named} needs all clients of a round, but faults.{key} is {value}; set faults.{key}: abort"
            )
    classification = getattr(task, "classification", False)
    needs = (
        ({"knowledge", "features"}, data.global_test is None, "a global test set, which silos do not have"),
        ({"features"}, net.feature_dim is None, "a model that ends in a linear layer on its features"),
        ({"knowledge", "orthogonality"}, not classification, f"classes, which task {settings.task.name} does not have"),
    )
    for names, lacks, what in needs:
        if lacks and (concerned := names & {*settings.analysis}):
            kinds = ", ".join(sorted(concerned))
            raise UserError(f"analysis: {kinds} cannot be computed without {what}; remove {kinds} from analysis")
