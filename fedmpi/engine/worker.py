"""What one rank needs to train any client: a model to load it into, frozen copies of it, the data, the method."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.data.federated import Federated
from fedmpi.engine.messages import Messages
from fedmpi.flat.model import FlatModel
from fedmpi.flat.packing import Views
from fedmpi.method.base import Method
from fedmpi.models.net import Net


@dataclass(frozen=True)
class LocalSGD:
    """How clients train."""

    epochs: int
    batch_size: int | None  # None: full batch
    momentum: float = 0.0
    weight_decay: float = 0.0
    drop_last: bool = False


class Worker:
    """One a rank; its clients pass through it one after another."""

    def __init__(
        self,
        model: FlatModel,
        net: Net,
        task: Any,
        method: Method,
        data: Federated,
        messages: Messages,
        sgd: LocalSGD,
        seed: int,
        *,
        bf16: bool = False,
        drop: bool = False,
        spares: bool = False,
        pack: int = 1,
        strict: bool = True,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """drop: clients whose numbers are not finite are for the server to refuse; spares: those with an error, too.
        pack: how many are trained at once; strict: where that turns out to be impossible the run ends.
        """
        self.model, self.net, self.task, self.method = model, net, task, method
        self.data, self.messages, self.sgd, self.seed = data, messages, sgd, seed
        self.bf16, self.drop, self.spares, self.stop = bf16, drop, spares, stop
        self.pack, self.strict = pack, strict
        self._twins: list[tuple[FlatModel, Net]] = []
        self.nothing = model.w.new_empty(0)
        self._told: tuple[Tensor | None, Views] = (None, Views({}))
        self._parts = tuple(model.module.modules())
        self._own_train = any(type(part).train is not nn.Module.train for part in self._parts)
        self.label_counts = torch.from_numpy(data.label_counts).to(model.w.device)  # (N, classes)

    def precision(self) -> AbstractContextManager[Any]:
        """bf16 autocast where asked for; weights, gradients and messages stay in the model's type."""
        return torch.autocast(self.model.w.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def told(self, announcement: Tensor) -> Views:
        """The fields of an announcement, which is the same tensor for all clients of a rank."""
        if self._told[0] is not announcement:
            self._told = announcement, self.messages.announcement().packing.views(announcement)
        return self._told[1]

    def training(self) -> None:
        """Training mode. nn.Module.train() writes to every submodule, in Python; mostly all are in it."""
        if self._own_train or not all(part.training for part in self._parts):
            self.model.module.train()

    def twin(self, number: int) -> tuple[FlatModel, Net]:
        """One of the frozen models of the same layout; made on first use."""
        while len(self._twins) <= number:
            model = self.model.twin()
            self._twins.append((model, Net(model.module, self.data.input_shape, self.data.x_dtype)))
        return self._twins[number]
