"""What a client's hooks gave is what its method declares."""

from __future__ import annotations

from typing import Any

from fedmpi.engine.checks import check_names, check_values, wrong
from fedmpi.engine.messages import Upload
from fedmpi.engine.worker import Worker
from fedmpi.method.values import Row, State


def check_given(worker: Worker, upload: Upload, given: tuple[Any, Any, Any], where: str) -> None:
    """given: what `train` returned, and the pair that `upload` returned. Raises UserError that names hook and slot."""
    (trained, sent, more), method, declared = given, worker.method, worker.method.client_state
    due = [name for name in upload.packing.shapes if name in method.sends and name != "dw"]
    plain = type(sent) is Row and type(trained) is type(more) is State
    if plain and not (sent or trained or more or due or declared):
        return  # as of many methods: nothing is given, nothing is due
    like = worker.model.w
    check_names(method, "upload", sent, method.sends, where, due)
    check_values(method, "upload", sent, upload.packing, where, like)
    for hook, new in (("train", trained), ("upload", more)):
        check_names(method, hook, new, declared, where, ())
        check_values(method, hook, new, worker.messages.client_state, where, like)
    twice = [name for name in trained if name in more]
    if twice:
        raise wrong(method, "train, upload", where, f"both returned the slot {twice[0]!r}; one of them returns it")
    check_names(method, "train, upload", dict.fromkeys([*trained, *more]), declared, where)
