"""SGD steps for n clients at once under torch.vmap; hooks see each client as if it were trained alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.hook_checks import ReadOnlyCheck
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.local.losses import backward
from fedmpi.engine.packed.chain import ClientIndex
from fedmpi.flat.packing import Views
from fedmpi.method.base import overrides
from fedmpi.method.context import Quadratic, State
from fedmpi.models.net import FeaturesAndHead

# Attributes of the hooks' `client`: those that are equal for all clients of a pack; numbers that may differ between
# clients; and tensors, which `BatchedClientView.values` holds.
SHARED_ATTRIBUTES = (
    "round",
    "rounds",
    "lr",
    "clients",
    "classes",
    "batch_size",
    "accumulate",
    "epochs",
    "b",
    "task_loss",
    "extract_group",
    "replace_group",
    "segments",
)
NUMERIC_ATTRIBUTES = ("id", "n", "steps", "gradient_weight")
TENSOR_ATTRIBUTES = ("w", "w0", "received", "label_counts")


class _FunctionalNet(nn.Module):
    """A wrapper module around a model, so that functional_call can replace the model's weights for one pass."""

    def __init__(self, net: FeaturesAndHead) -> None:
        super().__init__()
        self.module, self.net = net.module, net

    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.net.forward(x)


class BatchedClientView:
    """The `client` that hooks receive under torch.vmap; an implementation of method.context.Client.

    Attributes that only the hooks `step` and `train` need are missing. While a hook runs, `values` holds the tensors
    that the hook sees. They look like the tensors of one client, but have vmap's hidden dimension over the clients.
    """

    def __init__(self, trainer: ClientTrainer, clients: Sequence[ClientContext]) -> None:
        self.trainer, self.contexts, self.first = trainer, clients, clients[0]
        self.epoch, self.last_epoch = 0, False
        self.values: Mapping[str, Tensor] = {}
        # Positions in `contexts` of the clients that make the current step.
        self.members: Sequence[int] = range(len(clients))
        segments = trainer.model.layout.segments
        self.sizes, self.names = [s.stop - s.start for s in segments], [f"module.{s.name}" for s in segments]
        # Created here because modules cannot be created under vmap.
        self.functional_nets = {net: _FunctionalNet(net) for net in (trainer.net, trainer.frozen_copy(0)[1])}

    def __getattr__(self, name: str) -> Any:
        if name in SHARED_ATTRIBUTES:
            return getattr(self.first, name)
        if name in TENSOR_ATTRIBUTES:
            return self.values[name]
        if name in NUMERIC_ATTRIBUTES and len({getattr(self.contexts[i], name) for i in self.members}) == 1:
            return getattr(self.contexts[self.members[0]], name)
        reason = "differs between clients" if name in NUMERIC_ATTRIBUTES else "exists only for one client at a time"
        raise RuntimeError(f"a hook reads client.{name}, which {reason}")

    @property
    def state(self) -> State:
        views = self.trainer.messages.client_state.views(self.values["state"])
        return State({name: getattr(views, name) for name in self.trainer.method.client_state})

    @property
    def downloads(self) -> Views:
        broadcast = self.trainer.unpack_broadcast(self.first.broadcast_row)
        each = self.trainer.messages.per_client_download
        return broadcast.with_overrides(each.views(self.values["download"])) if each.size else broadcast

    @property
    def accumulators(self) -> Views:
        return self.trainer.messages.accumulators.views(self.values["accumulators"])

    def logits(self, x: Tensor) -> Tensor:
        return self.forward(x)[1]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._call(self.trainer.net, self.w, x)

    def reference_forward(
        self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self._call(self.trainer.frozen_copy(0)[1], self.w0 if at is None else at, x)

    def _call(self, net: FeaturesAndHead, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits of a model with weights w (d,); if it has no features, return the logits twice."""
        pieces = zip(self.trainer.model.layout.segments, w.split(self.sizes), strict=True)
        tensors = dict(zip(self.names, (s.reshape_entries(piece) for s, piece in pieces), strict=True))
        z, f = functional_call(self.functional_nets[net], tensors, (x,))
        return (f if z is None else z), f


class VmapSteps:
    """Takes SGD steps for n clients; holds their weights w (n, d), velocities v (n, d) and accumulators."""

    def __init__(self, trainer: ClientTrainer, clients: Sequence[ClientContext]) -> None:
        self.trainer, self.method, self.view = trainer, trainer.method, BatchedClientView(trainer, clients)
        self.w = torch.stack([k.w0 for k in clients])
        self.v = torch.zeros_like(self.w) if trainer.local_training.momentum else None
        self.accumulators = torch.stack([k.accumulator_row for k in clients])
        with trainer.model.train_only(self.method.trains):
            trained = trainer.model.layout.select_segments(
                s for s, p in trainer.model.segment_parameters if p.requires_grad
            )
        untrained = torch.ones_like(self.w[0], dtype=torch.bool)  # entries that are not trained
        for a, b in trained.ranges:
            untrained[a:b] = False
        self.untrained = None if trained.selects_all else untrained
        # Tensors that hooks read: those that all clients share, and stacks of those that differ between clients.
        names = {"w0": "w0", "received": "received", "state": "state_row", "download": "download_row"}
        rows = {name: [getattr(k, attribute).to(self.w.device) for k in clients] for name, attribute in names.items()}
        self.common = {name: each[0] for name, each in rows.items() if all(row is each[0] for row in each)}
        self.per_client = {name: torch.stack(each) for name, each in rows.items() if name not in self.common}
        self.per_client["label_counts"] = trainer.label_counts[[k.id for k in clients]]

    def step(self, members: ClientIndex, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """Take one training step for some of the clients; return their losses.

        Args:
            members: the positions of these clients among all clients.
            x, y: a batch for each of them, (members, B, ...) and (members, B).
        """
        tensors = [self.w, self.accumulators] + ([] if self.v is None else [self.v])
        parts = [tensor[members] for tensor in tensors]  # views if `members` is a slice, else copies
        w, accumulators, own = parts[0], parts[1], {name: value[members] for name, value in self.per_client.items()}
        check = ReadOnlyCheck({**self.common, **own, "x": x, "y": y, "w": w})
        leaf, own = w.detach().requires_grad_(), {**own, "accumulators": accumulators}
        losses, g = self._gradient(leaf, x, y, own)
        if overrides(self.method, "correct_gradient"):
            g = self._call(lambda g: self.method.correct_gradient(self.view, g), own | {"w": w}, g)  # type: ignore[arg-type]
            if not isinstance(g, Tensor) or g.shape != w.shape or not g.is_floating_point():
                raise RuntimeError("hook correct_gradient did not return a float tensor of the shape of g")
        if check.find_write() is not None:
            raise RuntimeError("a hook or the model wrote to a tensor that is read-only")
        if accumulators.requires_grad:
            raise RuntimeError("a hook added client.w to client.accumulators; write client.w.detach()")
        self._sgd_step(w, g, lr, parts[2] if self.v is not None else None)
        if isinstance(members, Tensor):
            for tensor, part in zip(tensors, parts, strict=True):
                tensor[members] = part
        return losses

    def _gradient(self, leaf: Tensor, x: Tensor, y: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the losses (n,), and the gradients (n, d) of loss plus regularizer at weights `leaf` (n, d).

        own: the other tensors that hooks may read and that differ between clients, by name.
        """
        regularized = overrides(self.method, "regularizer")

        def terms(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            loss = self.method.loss(self.view, x, y)  # type: ignore[arg-type]
            term = self.method.regularizer(self.view) if regularized else None  # type: ignore[arg-type]
            if term is None:
                return (loss,)
            return loss, term.value(self.view.w) if isinstance(term, Quadratic) else term

        values = self._call(terms, {**own, "w": leaf}, x, y)
        for value in values:
            if not isinstance(value, Tensor) or value.shape != leaf.shape[:1] or not value.requires_grad:
                raise RuntimeError("hook loss or regularizer did not return a scalar with a gradient")
        backward(torch.stack(values))
        assert leaf.grad is not None
        return values[0].detach(), leaf.grad

    def _call(self, function: Callable[..., Any], values: Mapping[str, Tensor], *arguments: Tensor) -> Any:
        """Apply a function written for one client to all clients under vmap.

        `values` are stacked tensors of all clients; the function reads its client's part through `self.view`.
        """

        def call(values: dict[str, Tensor], *arguments: Tensor) -> Any:
            self.view.values = self.common | values
            return function(*arguments)

        return torch.vmap(call)(dict(values), *arguments)

    def _sgd_step(self, w: Tensor, g: Tensor, lr: float, v: Tensor | None) -> None:
        """Take an SGD step on w (n, d) in place, with gradients g (n, d) and velocities v (n, d)."""
        config = self.trainer.local_training
        if config.weight_decay:
            g = g.add(w, alpha=config.weight_decay)
        if v is not None:
            g = v.mul_(config.momentum).add_(g)
        w.add_(g if self.untrained is None else g.masked_fill(self.untrained, 0), alpha=-lr)

    def write_differences(self, w0: Tensor, rows: Tensor) -> None:
        """Write w - w0 of all clients into rows (n, d)."""
        torch.sub(self.w, w0, out=rows)
