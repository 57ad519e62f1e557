"""What hooks see of n clients that train at once: under torch.vmap, of each of them what they would see of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.local.context import ClientContext
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views
from fedmpi.method.values import State
from fedmpi.models.net import Net

EACH = ("id", "n", "steps", "a")  # numbers that a client has for itself
GIVEN = ("w0", "received", "label_counts")  # tensors that `given` holds


class CannotPackError(Exception):
    """A hook asks for what n clients do not have in common."""


class _Call(nn.Module):
    """A net as a module, into which functional_call puts other weights for one pass."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.module, self.net = net.module, net

    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.net.forward(x)


class BatchedClientView:
    """method.context.Client, but for what only steps and phases of a method's own ask for.

    Tensors are those of one client, with vmap's hidden dimension: `given` holds those of the hook that is being called.
    """

    def __init__(self, trainer: ClientTrainer, clients: Sequence[ClientContext]) -> None:
        first = clients[0]
        self.trainer, self.views = trainer, clients
        self.round, self.rounds, self.lr, self.clients = first.round, first.rounds, first.lr, first.clients
        self.classes, self.batch_size, self.epochs = first.classes, first.batch_size, first.epochs
        self.epoch, self.last_epoch = 0, False
        self.b, self.announcement = first.b, first.announcement
        self.given: dict[str, Tensor] = {}
        self.leaves: list[Tensor] = []  # the live weights, tensor by tensor
        # Whether a hook has used the leaves itself: gradients reach them not only by the pass that was made already.
        self.uses_leaves = False
        self.members: Sequence[int] = range(len(clients))  # places in `views` of those at hand
        self._calls: dict[int, _Call] = {}

    def __getattr__(self, name: str) -> Any:
        if name in GIVEN:
            return self.given[name]
        if name in EACH:
            values = {getattr(self.views[i], name) for i in self.members}
            if len(values) == 1:
                return values.pop()
            raise CannotPackError(f"a hook asks for client.{name}, which differs from client to client")
        raise CannotPackError(f"a hook asks for client.{name}, which there is for one client at a time")

    # ---- tensors ----
    @property
    def w(self) -> Tensor:
        if "w" not in self.given:  # in `loss`
            self.uses_leaves = True
            self.given["w"] = torch.cat([_flat(s, p) for s, p in zip(self._segments, self.leaves, strict=True)])
        return self.given["w"]

    @property
    def state(self) -> State:
        views = self.trainer.messages.client_state.views(self.given["state"])
        return State({name: getattr(views, name) for name in self.trainer.method.client_state})

    @property
    def down(self) -> Views:
        broadcast, per_client = self.trainer.unpack_broadcast(self.announcement), self.trainer.messages.per_client
        return broadcast.beside(per_client.views(self.given["download"])) if per_client.size else broadcast

    @property
    def scratch(self) -> Views:
        scratch = self.trainer.messages.scratch
        return scratch.views(self.given["scratch"]) if scratch.size else Views({})

    # ---- forward passes ----
    def logits(self, x: Tensor) -> Tensor:
        return self.forward(x)[1]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if "f" in self.given and x is self.given["x"]:  # made already
            return self.given["z"], self.given["f"]
        self.uses_leaves = True
        return self._call(self.trainer.net, self.leaves, x)

    def _call(self, net: Net, tensors: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return net.forward(x) at these weights; without features the outputs stand for them."""
        call = self._calls.setdefault(id(net), _Call(net))
        names = [f"module.{s.name}" for s in self._segments]
        z, f = functional_call(call, dict(zip(names, tensors, strict=True)), (x,))
        return (f if z is None else z), f

    def frozen(self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        w = self.w0 if at is None else at
        with torch.no_grad():
            return self._call(self.trainer.twin(0)[1], [s.view(w) for s in self._segments], x)

    def task_loss(self, f: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.trainer.task.loss(lambda _: f, x, y)
        return loss

    # ---- the flat vector's parts ----
    @property
    def _segments(self) -> Sequence[Segment]:
        return self.trainer.model.layout.segments

    def take(self, group: str, flat: Tensor) -> Tensor:
        return self.views[0].take(group, flat)

    def lift(self, group: str, part: Tensor, into: Tensor) -> Tensor:
        return self.views[0].lift(group, part, into)

    def segments(self, groups: Sequence[str] | None = None) -> Sequence[Segment]:
        return self.views[0].segments(groups)


def _flat(s: Segment, tensor: Tensor) -> Tensor:
    """A tensor's entries in the order in which they lie in the flat vector."""
    return (tensor.permute(0, 2, 3, 1) if s.channels_last else tensor).reshape(-1)
