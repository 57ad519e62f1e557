"""Check that method, server and other settings suit the aggregation of adapters (server.lora)."""

from __future__ import annotations

from fedmpi.aggregation.lora import CHANGES_BASE, LoraAggregation
from fedmpi.common.errors import UserError
from fedmpi.common.text import locate_key
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.schema import Settings
from fedmpi.engine.messages import MessageLayouts
from fedmpi.method.base import Method, overrides


def check_adapters(settings: Settings, method: Method, lora: LoraAggregation, messages: MessageLayouts) -> None:
    """Raise UserError if server.lora sets the adapters itself, but method, server or another setting do so, too."""
    rule, server, name = lora.rule, settings.server, settings.method.name
    if rule in ("separate", "freeze_a"):
        return
    for key, value, needed in (
        ("server.rule", server.rule.name, "auto"),
        ("server.optim", server.optim, "sgd"),
        ("server.lr", server.lr, 1.0),
        ("evaluate.best.metric", settings.evaluate.best.metric, None),
        # The optimiser's state would belong to factors that the server has replaced by others.
        ("train.persist_optimizer", rule != "exact" and settings.train.persist_optimizer, False),
    ):
        if value != needed:
            raise UserError(
                f"{locate_key(settings.origin(key), key)}: {describe_value(value)} is not possible with "
                f"server.lora: {rule}, which sets the adapters itself; set {key}: {describe_value(needed)}, or "
                "server.lora: separate"
            )
    if overrides(method, "aggregate"):
        raise UserError(
            f"server.lora: {rule} needs a method that averages updates, but {name} has an aggregation rule of its own; "
            "set server.lora: separate, or method.name: fedavg"
        )
    large_slots = [slot for slot in method.client_state if messages.is_large(method.client_state[slot])]
    if rule in CHANGES_BASE and large_slots:
        raise UserError(
            f"server.lora: {rule} changes the base weights in every round, but method {name} keeps adapters with the "
            f"clients (client_state: {large_slots[0]}), which suit the base weights of an earlier round; set "
            "server.lora: separate, or choose another method"
        )
    if rule in CHANGES_BASE and settings.model.lora and settings.model.lora.base_precision == "bf16":
        key = "model.lora.base_precision"
        raise UserError(
            f"{locate_key(settings.origin(key), key)}: bf16 is not possible with server.lora: {rule}, because the "
            f"changes that it adds to the base weights would be rounded away; set {key}: fp32"
        )
    for t in range(max(settings.rounds, 1)):
        sent = {segment.name for segment in messages.upload_layout(t).dw_layout.segments}
        if unsent := [part for adapter in lora.adapters for part in (adapter.a, adapter.b) if part not in sent]:
            raise UserError(
                f"server.lora: {rule} needs the adapters of all clients in every round, but method {name} keeps "
                f"{unsent[0]} with the clients; set server.lora: separate, or choose another method"
            )
