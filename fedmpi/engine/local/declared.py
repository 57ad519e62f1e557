"""What a client's hooks gave is what its method declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmpi.engine.checks import check_names, check_values, wrong
from fedmpi.engine.messages import Upload
from fedmpi.engine.worker import Worker
from fedmpi.method.values import Row, State


def check_given(worker: Worker, upload: Upload, states: Mapping[str, Any], sent: Any, where: str) -> None:
    """Raise UserError that names hook and slot, if these are not what the method declares.

    Args:
        states: hook -> the client state that it returned.
        sent: what is uploaded.
    """
    method, declared = worker.method, worker.method.client_state
    due = [name for name in upload.packing.shapes if name in method.sends and name != "dw"]
    if type(sent) is Row and not (sent or due or declared) and all(type(s) is State and not s for s in states.values()):
        return  # as of many methods: nothing is given, nothing is due
    like = worker.model.w
    check_names(method, "upload", sent, method.sends, where, due)
    check_values(method, "upload", sent, upload.packing, where, like)
    by: dict[str, str] = {}
    for hook, new in states.items():
        check_names(method, hook, new, declared, where, ())
        check_values(method, hook, new, worker.messages.client_state, where, like)
        for name in new:
            if name in by:
                text = f"both returned the slot {name!r}; one of them returns it"
                raise wrong(method, f"{by[name]}, {hook}", where, text)
            by[name] = hook
    check_names(method, "train, upload", by, declared, where)
