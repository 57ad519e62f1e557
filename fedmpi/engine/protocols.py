"""Whose model is judged: what evaluate.protocol asks for, and what there is with this method."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fedmpi.common.errors import RankWarning
from fedmpi.engine.plan import SERVERS
from fedmpi.engine.worker import Worker
from fedmpi.method.base import overrides

OWN = ("weights", "buffers", "predict")  # hooks that give a client a model of its own


def in_force(worker: Worker, protocol: Sequence[str], tell: bool) -> tuple[str, ...]:
    """The protocols, without those of a global model that is nobody's: one of which parts stay with the clients.

    Where nothing else is asked for, they stay. tell: whether this rank says so.
    """
    asked, left = SERVERS.intersection(protocol), tuple(each for each in protocol if each not in SERVERS)
    if worker.messages.shared.whole or not asked or not left:
        return tuple(protocol)
    if tell:
        kept = ", ".join(sorted(worker.model.layout.groups() - set(worker.messages.shared_groups)))
        text = f"evaluate.protocol: {', '.join(sorted(asked))} is left out: method {type(worker.method).__name__} "
        text += f"keeps {kept} with each client, and the global model has its initial values there: nobody uses it"
        warnings.warn(RankWarning(text), stacklevel=2)
    return left


def validates_own(worker: Worker, protocol: Sequence[str]) -> bool:
    """Whether validation rows judge what each client uses, not the global model."""
    models = any(overrides(worker.method, hook) for hook in OWN)
    return not worker.messages.shared.whole or (models and not SERVERS.intersection(protocol))
