"""Whether what a config wants to be measured can be, what it trains is, and its server rule has updates."""

from __future__ import annotations

import warnings
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data.federated import Federated
from fedmpi.engine.messages import Messages
from fedmpi.engine.plan import SERVERS
from fedmpi.engine.reporting import own_parts
from fedmpi.method.base import Method, overrides
from fedmpi.models.net import Net

FEATURES = ("features", "similarity")  # analyses of what the head is given
OF_CLASSES = ("knowledge", "orthogonality")


def check(settings: Settings, method: Method, task: Any, net: Net, data: Federated, messages: Messages) -> None:
    """analysis, record.updates, evaluate.protocol. Raises UserError."""
    _analysis(settings, task, net, data, messages)
    _record(settings, messages)
    _rule(settings, messages)
    _protocol(settings, method, messages)


def _analysis(settings: Settings, task: Any, net: Net, data: Federated, messages: Messages) -> None:
    """What `analysis` names needs a global model, and a round that is the same when it is done twice."""
    if not settings.analysis:
        return
    named = f"analysis: {', '.join(settings.analysis)}"
    if not messages.shared.whole:
        name = settings.method.name
        raise UserError(
            f"{named} compares global and local models, and with method {name} clients keep parts; remove it"
        )
    for key in ("on_lost_rank", "on_client_error", "on_bad_update"):
        value = getattr(settings.faults, key)
        if value != "abort":
            raise UserError(f"{named} needs all clients of a round: set faults.{key}: abort, not {value}")
    for name in ("knowledge", *FEATURES):
        if name in settings.analysis and data.global_test is None:
            raise UserError(f"analysis: {name} needs a global test set, which silos do not have; remove it")
    for name in FEATURES:
        if name in settings.analysis and net.feature_dim is None:
            raise UserError(
                f"analysis: {name} looks at what the last linear layer is given, a row of features a sample, and model "
                f"{settings.model.name} has no such layer; remove it, or choose a model that ends in one"
            )
    for name in OF_CLASSES:
        if name in settings.analysis and not getattr(task, "classification", False):
            raise UserError(f"analysis: {name} is about classes, and task {settings.task.name} has none; remove it")


def _record(settings: Settings, messages: Messages) -> None:
    """Whether there are updates of which more than nothing can be said."""
    sent = (messages.upload(t) for t in range(max(settings.rounds, 1)))
    if settings.record.updates == "gram" and not any("dw" in up.packing.shapes and up.w.size for up in sent):
        at = settings.origin("record.updates")
        raise UserError(
            f"{f'{at}: ' if at else ''}record.updates: gram: method {settings.method.name} sends no updates of the "
            "model; use norms (nothing is recorded then) or false"
        )


def _rule(settings: Settings, messages: Messages) -> None:
    """Whether server.rule has updates to act on."""
    rule, method = settings.server.rule.name, messages.method
    if rule != "auto" and "dw" not in method.sends:
        name = settings.method.name
        raise UserError(f"server.rule: method {name} sends no updates of the model to act on; leave {rule} out")


def _protocol(settings: Settings, method: Method, messages: Messages) -> None:
    """Tell of clients' own models that nobody evaluates."""
    if {*settings.evaluate.protocol} - SERVERS:
        return
    own = own_parts(messages)
    mixed = overrides(method, "weights") and method.client_state
    if own or mixed or overrides(method, "predict"):
        what = "parts of the model" if own and own != messages.every else "models"
        warnings.warn(
            f"method {settings.method.name}: clients have {what} of their own, and evaluate.protocol never looks "
            "at them; set evaluate.protocol=[personal], or [global,personal]",
            stacklevel=2,
        )
