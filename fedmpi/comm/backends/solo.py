"""One process that is server and clients at once: nothing travels, but everything is counted as if it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from fedmpi.comm.base import Communicator, Message, Posted


@final
class Solo(Communicator):
    def __init__(self, device: torch.device) -> None:
        Communicator.__init__(self, rank=0, size=1, device=device)
        self.can_regroup = "there is a single process"

    def _meet(self) -> None:
        """There are no other ranks to wait for."""

    def _part(self) -> None:
        """Nor is anything open."""

    def _broadcast(self, x: Tensor) -> None:
        """The only rank has x already."""

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        """The caller has copied messages to oneself, and there are no other ranks."""
        return []

    def _finish(self, posted: Posted) -> None:
        """Nothing is under way."""

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        return [payload]
