"""The batch loop of n clients at once: each makes its own steps on its own batches, in its own order.

Batches of one size are one batched pass. First come the full batches of an epoch, of all clients that have so many;
then the smaller ones that are left over, size by size. What becomes of a client is a function of its own data and does
not depend on who is trained beside it, but for the last bits of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence

from fedmpi.data.batches import drawn, gather, order
from fedmpi.engine.checks import ReadOnlyCheck
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.local.context import ClientContext
from fedmpi.engine.local.losses import backward
from fedmpi.engine.packed.batched_view import BatchedClientView, CannotPackError
from fedmpi.engine.packed.linear_chain import LinearChain
from fedmpi.engine.packed.low_rank import LowRankWeights, is_worthwhile
from fedmpi.engine.packed.stacked_weights import StackedWeights
from fedmpi.method.base import overrides
from fedmpi.method.values import Quadratic
from fedmpi.tasks.classification import Classification
from fedmpi.tasks.regression import Regression

Members = slice | Tensor  # clients by their places


class PackedFit:
    """One `fit` of n clients. Afterwards `stack` holds their weights, `scratch` their accumulators, `loss` (n,) the
    mean over the steps made; clients know their number of steps."""

    def __init__(self, trainer: ClientTrainer, clients: Sequence[ClientContext]) -> None:
        """clients: those with the most batches first (`by_batches`)."""
        method, model, config = trainer.method, trainer.model, trainer.local_training
        self.trainer, self.method, self.clients = trainer, method, clients
        self.view = BatchedClientView(trainer, clients)
        with model.only(method.trains):
            self.trained = [p.requires_grad for p in model.parameters]
        self.regularized, self.corrected = overrides(method, "regularizer"), overrides(method, "gradient")
        self.flat = self.regularized or self.corrected  # whether hooks are given weights and gradients as vectors
        if overrides(method, "loss"):
            trainer.twin(0)  # for k.frozen; under vmap none can be made
        self.chain = LinearChain.of(model.module, [s.name for s in model.layout.segments])
        self.plain = None if overrides(method, "loss") or self.chain is None else _each_loss(trainer.task)
        self.cuts = [cut(trainer, k) for k in clients]
        rows, lr = [k.w0 for k in clients], clients[0].lr
        self.stack = StackedWeights(model.layout, rows, lr, config, self.flat, self._thin())
        self.alike, self.each = ({}, {}) if self.plain and not self.flat else self._seen()
        self.scratch = self.each.get("scratch", trainer.nothing)
        self.sum = torch.zeros(len(clients), dtype=torch.float64, device=model.w.device)
        self.carry = [0.0] * len(clients)
        # Of the step at hand: what moves; where gradients go that are asked for, and which tensors' are there.
        self.at, self.g, self.written, self.direct = self.stack, torch.empty(0), set[int](), False

    def _seen(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What hooks see of the clients: tensors that they have in common, and those of which each has its own."""
        clients, device = self.clients, self.trainer.model.w.device
        names = {"w0": "w0", "received": "received", "state": "state_row", "download": "download"}
        rows = {name: [getattr(k, attribute).to(device) for k in clients] for name, attribute in names.items()}
        alike = {name: tensors[0] for name, tensors in rows.items() if all(row is tensors[0] for row in tensors)}
        each = {name: torch.stack(tensors) for name, tensors in rows.items() if name not in alike}
        each["label_counts"] = self.trainer.label_counts[[k.id for k in clients]]
        each["scratch"] = torch.stack([k.scratch_row for k in clients])
        return alike, each

    def _thin(self) -> dict[int, LowRankWeights]:
        """The layers whose weights are kept as factors."""
        w0, config, n = self.clients[0].w0, self.trainer.local_training, len(self.clients)
        plain = self.plain and not (self.flat or config.momentum or config.weight_decay)
        if not plain or not all(k.w0 is w0 for k in self.clients):
            return {}
        a_pass = self.cuts[0][0] * (config.batch_size or 0) + sum({rest for _, rest in self.cuts})
        samples = int(config.epochs or 0) * a_pass
        weights = {i: s.view(w0) for i, s in enumerate(self.trainer.model.layout.segments) if self.trained[i]}
        return {i: LowRankWeights.of(w, n, samples) for i, w in weights.items() if is_worthwhile(w, samples)}

    def __call__(self) -> None:
        epochs, view = int(self.trainer.local_training.epochs or 0), self.view
        generators = [self.trainer.generators(k.round, k.id, k.fits) for k in self.clients]
        for view.epoch in range(epochs):
            view.last_epoch = view.epoch == epochs - 1
            for places, rows, u in self._batches(generators):
                if self.trainer.stop():
                    break
                self._step(places, rows, u)
        for k in self.clients:
            k.fits, k.epoch, k.last_epoch = k.fits + 1, view.epoch, view.last_epoch
        steps = torch.tensor([max(k.steps, 1) for k in self.clients], dtype=torch.float64)
        self.loss = self.sum / steps.to(self.sum.device, non_blocking=True)

    def _batches(
        self, generators: Sequence[tuple[torch.Generator, torch.Generator | None]]
    ) -> Iterator[tuple[Sequence[int], Tensor, Tensor | None]]:
        """One epoch: places of clients, the rows (clients, B) of their next batches, and what augmentation draws for
        them."""
        size, shards = self.trainer.local_training.batch_size, [self.trainer.data.train[k.id] for k in self.clients]
        orders = [order(shard, size, g) for shard, (g, _) in zip(shards, generators, strict=True)]
        numbers = [drawn(shard, g) for shard, (_, g) in zip(shards, generators, strict=True)]
        cuts = self.cuts
        padded = pad_sequence(orders, batch_first=True).to(shards[0].x.device, non_blocking=True)
        u = pad_sequence([each for each in numbers if each is not None], batch_first=True) if shards[0].draws else None
        for s in range(cuts[0][0]):
            assert size is not None
            many = sum(full > s for full, _ in cuts)
            columns = slice(s * size, (s + 1) * size)
            yield range(many), padded[:many, columns], None if u is None else u[:many, columns]
        for rest in sorted({rest for _, rest in cuts if rest}, reverse=True):
            places = [i for i, (_, each) in enumerate(cuts) if each == rest]
            first = [cuts[i][0] * (size or 0) for i in places]
            parts = [(i, slice(at, at + rest)) for i, at in zip(places, first, strict=True)]
            rows = torch.stack([padded[part] for part in parts])
            yield places, rows, None if u is None else torch.stack([u[part] for part in parts])

    def _read(self, rows: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (clients, B, ...), y (clients, B). u: (clients, B, columns) that augmentation draws."""
        shards = [self.trainer.data.train[self.clients[i].id] for i in self.view.members]
        x, y = shards[0].x, shards[0].y
        if all(shard.x is x and shard.y is y for shard in shards):
            flat = rows.reshape(-1)
            x, y = gather(x, flat, None if u is None else u.flatten(0, 1)), y.index_select(0, flat)
        else:
            alone = list(zip(shards, rows, [None] * len(rows) if u is None else u, strict=True))
            x = torch.cat([gather(k.x, each, v) for k, each, v in alone])
            y = torch.cat([k.y.index_select(0, each) for k, each, _ in alone])
        return x.unflatten(0, rows.shape), y.unflatten(0, rows.shape)

    # ---- a step ----
    def _step(self, places: Sequence[int], rows: Tensor, u: Tensor | None) -> None:
        view, whole = self.view, len(rows) == len(self.clients)
        view.members = places
        members: Members = slice(places[0], places[-1] + 1)
        if places[-1] - places[0] != len(places) - 1:
            members = torch.tensor(places).to(rows.device, non_blocking=True)
        self.at = self.stack if whole else self.stack.part(members)
        each = self.each if whole else {name: value[members] for name, value in self.each.items()}
        x, y = self._read(rows, u)
        read = {name: value for name, value in (self.alike | each).items() if name != "scratch"}
        check = ReadOnlyCheck(read | {"x": x, "y": y} | {f"w[{i}]": raw for i, raw in enumerate(self.at.raw)})
        leaves = self.at.leaves(self.trained)
        losses = self._losses(leaves, x, y, each)
        if not isinstance(losses, Tensor) or losses.shape != rows.shape[:1] or not losses.requires_grad:
            raise CannotPackError("hook loss returned something else than a loss")
        if check.written() is not None:
            raise CannotPackError("a hook or the model wrote to what it may only read")
        if each and each["scratch"].requires_grad:
            raise CannotPackError("hook loss added client.w to client.scratch; write client.w.detach()")
        self.direct = not self.flat and not (self.chain and view.uses_leaves)
        if not self.direct:
            self._collect()
        backward(losses)
        for i, leaf in enumerate(leaves):
            if leaf.grad is not None:
                self.move(i, leaf.grad)
        if not self.direct:
            self._move_collected(each)
        self.stack.seen(rows.shape[1])
        self.sum[members] += losses.detach().double()
        for i in view.members:
            k, self.carry[i] = self.clients[i], self.trainer.local_training.momentum * self.carry[i] + 1
            k.steps, k.a = k.steps + 1, k.a + self.carry[i]
        if isinstance(members, Tensor) and not whole:
            self.stack.put(members, self.at)
            if each:
                self.scratch[members] = each["scratch"]

    def _losses(self, leaves: list[Tensor], x: Tensor, y: Tensor, each: dict[str, Tensor]) -> Any:
        """(n,) the clients' losses of their batches."""
        given, self.view.uses_leaves = {"x": x, "y": y, **each}, False
        if self.chain:
            z, f = self.chain.forward(leaves, x, self, self.at.thin)
            if self.plain:
                return self.plain(f, y)
            given |= {"z": z, "f": f}

        def loss(given: dict[str, Tensor], leaves: list[Tensor]) -> Tensor:
            self.view.given, self.view.leaves = self.alike | given, leaves
            return self.method.loss(self.view, given["x"], given["y"])  # type: ignore[arg-type]

        return torch.vmap(loss)(given, leaves)

    # ---- where gradients go ----
    def move(self, i: int, g: Tensor) -> None:
        """Gradients (n, *shape) of tensor i: a step, or to be collected."""
        if self.direct:
            self.at.move(i, g)
        elif i in self.written:
            self._collected(i).add_(g)
        else:
            self._collected(i).copy_(g)
        self.written.add(i)

    def move_by_product(self, i: int, a: Tensor, b: Tensor) -> None:
        """The same for gradients a @ b."""
        if self.direct:
            self.at.move_by_product(i, a, b)
        elif i in self.written:
            self._collected(i).baddbmm_(a, b)
        else:
            torch.bmm(a, b, out=self._collected(i))
        self.written.add(i)

    def _collect(self) -> None:
        self.written.clear()
        if len(self.g) < len(self.at):
            self.g = self.sum.new_empty(len(self.at), self.stack.layout.size, dtype=self.stack.raw[0].dtype)

    def _collected(self, i: int) -> Tensor:
        s = self.stack.layout.segments[i]
        return self.stack.shaped(i, self.g[: len(self.at), s.start : s.stop])

    def _move_collected(self, each: dict[str, Tensor]) -> None:
        g = self.g[: len(self.at)]
        if self.flat:
            for i in range(len(self.trained)):
                if i not in self.written:
                    self._collected(i).zero_()
        if self.regularized:
            self._add_regularizer(g, each)
        if self.corrected:
            g = self._corrected(g, each)
        for i, (s, on) in enumerate(zip(self.stack.layout.segments, self.trained, strict=True)):
            if on and (self.flat or i in self.written):
                self.at.move(i, self.stack.shaped(i, g[:, s.start : s.stop]))

    def _add_regularizer(self, g: Tensor, each: dict[str, Tensor]) -> None:
        """Add the gradients of the hook `regularizer` to g (n, d)."""
        assert self.at.flat is not None
        leaf, added = self.at.flat.detach().requires_grad_(), True

        def regularizer(given: dict[str, Tensor]) -> Tensor:
            nonlocal added
            value = self.method.regularizer(self.view)  # type: ignore[arg-type]
            if isinstance(value, Quadratic):
                return value.add_gradient(given["g"], given["w"].detach())
            added = value is None
            return given["g"] if value is None else value  # None is nothing that vmap can return

        values = self._call("regularizer", regularizer, {"g": g, "w": leaf, **each})
        if added:
            return
        if not isinstance(values, Tensor) or values.shape != g.shape[:1] or not values.requires_grad:
            raise CannotPackError("hook regularizer returned something else than a number that depends on client.w")
        leaf.grad = g
        backward(values)

    def _corrected(self, g: Tensor, each: dict[str, Tensor]) -> Tensor:
        """What the hook `gradient` makes of g (n, d)."""
        assert self.at.flat is not None

        def gradient(given: dict[str, Tensor]) -> Tensor:
            return self.method.gradient(self.view, given["g"])  # type: ignore[arg-type]

        new = self._call("gradient", gradient, {"g": g, "w": self.at.flat, **each})
        if not isinstance(new, Tensor) or new.shape != g.shape or not new.is_floating_point():
            raise CannotPackError("hook gradient returned something else than a gradient")
        return new

    def _call(self, hook: str, function: Callable[[dict[str, Tensor]], Tensor], given: dict[str, Tensor]) -> Any:
        """Call a hook under vmap, with what each client is given; only g and accumulators may be written to."""
        read = self.alike | {name: value for name, value in given.items() if name not in ("g", "scratch")}
        check = ReadOnlyCheck(read)

        def call(given: dict[str, Tensor]) -> Tensor:
            self.view.given = self.alike | given
            return function(given)

        result = torch.vmap(call)(given)
        if check.written() is not None:
            raise CannotPackError(f"hook {hook} wrote to what it may only read")
        return result


def cut(trainer: ClientTrainer, k: ClientContext) -> tuple[int, int]:
    """How many full batches an epoch of a client has, and how many samples are left over for one more."""
    size = trainer.local_training.batch_size
    if size is None:
        return 0, k.n
    return k.n // size, 0 if trainer.local_training.drop_last else k.n % size


def _each_loss(task: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """f (n, B, c), y (n, B) -> (n,) of a task of fedmpi's own: what vmap would make of it, at a tenth of the calls."""
    if type(task).loss is Classification.loss and task.plain:
        return lambda f, y: cross_entropy(f.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    if type(task).loss is Regression.loss and task.ignore is None:
        return lambda f, y: mse_loss(f.view_as(y), y, reduction="none").flatten(1).mean(1)
    return None
