"""One client's round, and the only batch loop of the project.

The hot path is flat. While no hook reads gradients, autograd allocates its own and torch's fused SGD walks the views; a
hook that reads them gets one flat g that autograd accumulates into; small chains do without autograd (by_hand.py). None
of this changes the bits.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, final

import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.blame import blaming, once, told
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.data.batches import batches, grouped
from fedmpi.engine.checks import Untouched, are_finite, check_finite, check_pair, own_slots, slot_not_finite
from fedmpi.engine.local.adaptive import Adaptive, make
from fedmpi.engine.local.autograd import backward
from fedmpi.engine.local.clipping import clip
from fedmpi.engine.local.declared import check_given
from fedmpi.engine.local.descent import Descent
from fedmpi.engine.local.kept import Kept
from fedmpi.engine.local.losses import add_regularizer, loss_of
from fedmpi.engine.local.sgd import SGD
from fedmpi.engine.local.view import ClientView, LossMeter
from fedmpi.engine.messages import FAILED, STOP, Upload
from fedmpi.flat.layout import Selection
from fedmpi.flat.packing import share_memory
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import Loss, Regularizer
from fedmpi.method.values import Fitted

LEFT_OUT = "left out of the round (faults.on_client_error: drop)"
PLAIN = Method()  # FedAvg's client


@final
class LocalClient(ClientView):
    """A client that takes part in a round, or is evaluated."""

    def take_part(self, row: Tensor) -> bool:
        """The client's round: load, train, write its upload into `row` and its new state into its state row.

        row: one row of `messages.upload(round)`. With worker.spares an error on the way is told and marks the row;
        whether there was none.
        """
        began, worker, model = time.perf_counter(), self.worker, self.worker.model

        def trained(row: Tensor) -> tuple[dict[str, Tensor], Tensor | float | None]:
            model.load(self.received, self.b0)
            worker.training()
            untouched = self.untouched() if worker.hooked else Untouched(worker.method, {})
            if worker.draws:
                self.reseed()
            with blaming(self.where):
                self.begin()
                self.recall()
                untouched.check(self.where, "receive")
                new = worker.method.train(self)
                untouched.check(self.where, "train", "loss", "regularizer", "gradient", "step")
                sent, more = check_pair(worker.method, "upload", worker.method.upload(self), self.where)
                untouched.check(self.where, "upload")
            state = self.write(row, (new, sent, more), lambda p, w0, out: p.subtract(model.w, w0, out))
            return state, self.meter.number()

        fine = self.store_result(row, trained, began)
        # Not within `store_result`, which may leave the client out: frozen tensors are those of all clients.
        worker.still.check(self.where)
        return fine

    def store_result(
        self, row: Tensor, trained: Callable[[Tensor], tuple[dict[str, Tensor], Tensor | float | None]], began: float
    ) -> bool:
        """Store what the client's round leaves; return whether it came to no error.

        Args:
            row: where the client's upload is needed; where it is trained on another device, all of it is copied there
                at once.
            trained: writes the upload, but for the engine's own numbers, into the row that it is given; makes the
                client's new state, and its loss: mean over the steps, None without any.
            began: `time.perf_counter` when the client's round began.
        """
        worker, messages = self.worker, self.worker.messages
        upload = messages.upload(self.round)
        here = row if row.device == self.w.device else self.w.new_empty(len(row))
        try:
            state, loss = trained(here)
        except Exception as error:
            if not worker.spares:
                raise
            # Its state row, too, is undone by the server's word.
            warnings.warn(RankWarning(f"{once(error, self.where)}; {LEFT_OUT}"), stacklevel=2)
            flag = STOP if worker.stop() else FAILED
            upload.tell(row.zero_(), 0.0, time.perf_counter() - began, flag)
            return False
        if len(self.state_row):
            messages.client_state.write(self.state_row, state)
        if isinstance(loss, Tensor):
            upload.packing.write(here, {"_loss": loss})
        if not self._check_result(upload, here, row):
            loss = torch.nan  # the server refuses the upload, which undoes the round
        upload.tell(row, loss, time.perf_counter() - began, STOP if worker.stop() else 0.0)
        return True

    def _check_result(self, upload: Upload, here: Tensor, row: Tensor) -> bool:
        """Give an upload its format, and copy it from `here` to `row` if it is needed there. Return whether all numbers
        of the client's state are finite; raise UserError if some of its upload are not.

        All of it is one question to a GPU, which answers when it has done the client's work: only then it is known how
        long that has taken, and the copy, which was asked for before, is complete.
        """
        worker, messages = self.worker, self.worker.messages
        slots = {} if worker.drop else own_slots(upload.packing, here)
        sums = [x.sum() for x in slots.values()]
        halves = messages.settle(upload, here, self.state_row)
        if here is not row:
            row.copy_(here, non_blocking=True)
        rows = [*halves.values(), *([self.state_row] if len(self.state_row) else ())]
        if not sums and not rows:
            worker.wait()
            return True
        finite = iter(are_finite([*slots.values(), *rows], [*sums, *(x.sum() for x in rows)]))
        for name in slots:
            if not next(finite):
                raise slot_not_finite(worker.method, name, self.where)
        for name in halves:
            if not next(finite):
                beyond = f"{self.where}: slot {name!r} is beyond fp16, which ends at 65,504, or not finite itself"
                warnings.warn(RankWarning(f"{beyond}; comm.wire.up: bf16 has the range of fp32"), stacklevel=2)
        if next(finite, True):
            return True
        if not worker.drop:
            check_finite(worker.method, "train, upload", messages.client_state, self.state_row, self.where)
        return False

    def write(
        self,
        row: Tensor,
        given: tuple[Any, Any, Any],
        subtract: Callable[[Selection, Tensor, Tensor], None],
    ) -> dict[str, Tensor]:
        """Check what `train` and `upload` gave, write the upload; returns what becomes of the client's state.

        subtract: (selection of w, w0, out) writes that part of w - w0.
        """
        worker, model, messages = self.worker, self.worker.model, self.worker.messages
        upload, (trained, sent, more) = messages.upload(self.round), given
        check_given(worker, upload, {"receive": self.new, "train": trained, "upload": more}, sent, self.where)
        if "dw" in upload.packing.shapes and "dw" not in sent:
            subtract(upload.w, self.w0, upload.packing.view(row, "dw"))
        values = {name: sent[name] for name in sent if name in upload.packing.shapes}
        if upload.b.size:
            values["_b"] = upload.b.take(model.b)
        if values:
            upload.packing.write(row, values)
        new = [state for state in (self.new, trained, more) if state is not self.state]
        state = {name: value for each in new for name, value in each.items()}
        if not len(self.state_row):
            return state
        own = {"_w": messages.personal.take(model.w), "_b": messages.personal_b.take(model.b)}
        own |= self.optim.state() if self.optim else {}
        return {**own, **state}

    def untouched(self) -> Untouched:
        """What the client's hooks only read, as it is now."""
        return Untouched(
            self.worker.method,
            {
                "k.w0 (k.received) or k.down": self.announcement,
                "k.down": self.download,
                "k.state": self.state_row,
                "k.w0 (k.received)": self.received,  # its own vector where parts stay with the client
                "k.w": self.w,
                "k.b": self.b,
                "k.label_counts": self.worker.label_counts,
            },
        )

    def reseed(self) -> None:
        """Dropout, and whatever else draws from global generators, is seeded; within `Worker.chance`."""
        seeds.reseed(self.worker.seed, "torch", self.round, self.id)

    def begin(self) -> None:
        """The weights that training starts from; looking for them moves neither buffers nor counters."""
        model = self.worker.model
        if overrides(self.worker.method, "receive"):
            given = self.worker.method.receive(self)
            w0, self.new = given if isinstance(given, tuple) and len(given) == 2 else (given, self.new)
            w0 = self.check("receive", w0)
            self.w0 = w0.clone() if share_memory(w0, model.w) else w0  # k.w is about to move
            self._frozen.clear()  # of the w0 from before
            if self.w0 is not self.received:
                model.load(self.w0, self.b0)
        self.version_at_w0 = model.w._version

    def recall(self) -> None:
        """What the client has kept of its optimiser, which `fit` goes on with."""
        messages = self.worker.messages
        if self.worker.recipe.keep:
            self.optim = Kept(messages.client_state.views(self.state_row), self.worker.model.layout)

    # ---- the batch loop ----
    def fit(
        self,
        epochs: float | None = None,
        *,
        groups: Sequence[str] | None = None,
        lr: float | None = None,
        start: Tensor | None = None,
        buffers: Tensor | None = None,
        loss: Loss | None = None,
        regularizer: Regularizer | None = None,
        plain: bool = False,
        bare: bool = False,
    ) -> Fitted:
        worker, recipe, model = self.worker, self.worker.recipe, self.worker.model
        recipe, plain = recipe.bare() if bare else recipe, plain or bare
        method = PLAIN if plain else worker.method
        passes, steps = self._amount(epochs, groups, method.batches_a_step)
        generators = worker.generators(self.round, self.id, self.fits)
        self.fits += 1
        momentum, later, nesterov, carry = recipe.momentum, 1 - recipe.dampening, recipe.nesterov, 0.0
        with self._beside(start, buffers), model.only(method.trains if groups is None else groups) as parameters:
            meter, before = self.meter, len(self.meter.losses)
            if parameters:  # else the model has nothing in these groups
                trained = [s for s, p in model.members() if p.requires_grad]
                kept = self.optim.of(trained) if self.optim and not plain and start is None else None
                optimiser = make(recipe, parameters, self.lr if lr is None else lr, kept)
                how = Descent.of(worker, method, loss, regularizer, parameters, trained, recipe.clips)
                for x, y in self._batches(generators, passes, steps, method.batches_a_step):
                    self.step_loss, self.passed = None, False
                    untouched = x._version, y._version
                    self._gradient(how, optimiser, x, y)
                    if (x._version, y._version) != untouched:
                        raise self._touched()
                    if self.watch and start is None:
                        self.watch(x, y)
                    optimiser.step()
                    self.passed, self.version_at_w0 = True, None
                    carry = momentum * carry + later if carry else 1.0  # times a constant gradient: the velocity
                    self.steps, self.a = self.steps + 1, self.a + (1 + momentum * carry if nesterov else carry)
                    if self.step_loss is not None:
                        meter.losses.append(self.step_loss)
            w, b = (model.w, model.b) if start is None else (model.w.clone(), model.b.clone())
        return Fitted(w, b, partial(meter.mean, before, len(meter.losses)))

    @contextmanager
    def _beside(self, start: Tensor | None, buffers: Tensor | None) -> Iterator[None]:
        """Train from other weights: the live model, and what is told of its steps, is then what it was. None: stay."""
        if start is None:
            yield
            return
        told, self.meter = (self.steps, self.a, self.meter), LossMeter(self.w.device)
        with self.elsewhere(start, buffers):
            yield
        self.steps, self.a, self.meter = told

    def _amount(self, epochs: float | None, groups: Sequence[str] | None, many: int) -> tuple[int, int]:
        """Passes and steps of one fit, of `many` batches each."""
        self._check_groups(() if groups is None else groups, "fit, groups")
        if epochs is not None and not (isinstance(epochs, int | float) and 0 <= epochs < inf):
            raise UserError(f"k.fit: epochs is {epochs!r}; a number >= 0 is needed")
        return self.worker.recipe.amount(self.n, many, epochs)

    def _touched(self) -> UserError:
        """Of an x or y that is not what it was before its step."""
        said = (
            f"{self.where}: the model ({type(self.worker.model.module).__name__}) or a hook of method "
            f"{type(self.worker.method).__name__} wrote to its batch, x or y (an operation that ends in _, an "
            "assignment to [...], or ReLU(inplace=True) as the first layer): other passes would see it; make a copy"
        )
        return told(said, self.worker.model.module, type(self.worker.method))

    def _gradient(self, how: Descent, optimiser: SGD | Adaptive, x: Tensor, y: Tensor) -> None:
        """One batch's gradient, to where the optimiser looks for it."""
        model, graphs = self.worker.model, self.worker.graphs
        flat = model.attach_gradient() if how.flat else self.worker.nothing
        if how.step:
            g = self.check("step", how.step(self, x, y))
        else:
            if graphs is not None and how.repeats and isinstance(x, Tensor):
                at = model.live.data_ptr(), flat.data_ptr() if how.flat else 0
                kind = (*at, how.loss is self.worker.direct, *map(id, optimiser.parameters))
                loss = graphs.run(kind, partial(self._passes, how, optimiser), x, y, optimiser.parameters)
            else:
                loss = self._passes(how, optimiser, x, y)
            self.note(loss)
            if not how.flat:
                return
            g = flat
        if how.regularizer:
            g = add_regularizer(self, how.regularizer, self.w, g if g is flat else flat.copy_(g))
        if how.correct:
            g = self.check("gradient", how.correct(self, g), by=how.correct)
        if g is not flat:
            flat.copy_(g)
        if how.clipped:
            clip(flat, how.clipped, self.worker.recipe)

    def _passes(self, how: Descent, optimiser: SGD | Adaptive, x: Tensor, y: Tensor) -> Tensor:
        """A forward and a backward pass; returns the loss."""
        if how.by_hand:
            return how.by_hand(x, y)
        if how.flat:
            self.worker.model.attach_gradient().zero_()
        else:
            optimiser.forget()
        value, leaf = loss_of(self, how.loss, x, y)
        if leaf is not None and how.flat:
            leaf.grad = self.worker.model.attach_gradient()
        backward(value)
        if leaf is not None and leaf.grad is not None and not how.flat:
            self.worker.model.add_gradient(leaf.grad)
        return value

    def _batches(self, drawn: tuple[Any, Any], passes: int, steps: int, many: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of so many steps, `many` at a time, pass after pass. drawn: `worker.generators`.

        Where a step cuts up all rows their order counts, and is drawn; else it does not.
        """
        worker, recipe, (order, augment) = self.worker, self.worker.recipe, drawn
        _, a_pass = recipe.amount(self.n, many, 1)
        for self.epoch in range(passes):
            rows = worker.data.train[self.id]
            size = recipe.batch_size or (len(rows) if many > 1 else None)
            found = batches(rows, size, order, recipe.drop_last, augment=augment)
            for batch in found if many == 1 else grouped(found, many):
                if self.cut_short and worker.stop():
                    return
                self.last_epoch = steps <= a_pass
                yield batch
                steps -= 1
                if not steps:
                    return

    def fine_tune(self, epochs: int) -> None:
        """The method's fine-tuning from the weights at hand; nothing of it is kept.   FT(e)"""
        self.worker.model.module.train()
        self.cut_short = False  # what is measured does not go up with a word of it
        self.version_at_w0 = self.w._version if torch.equal(self.w, self.w0) else None
        with seeds.scoped(self.worker.seed, "tune", self.round, self.id):
            self.worker.method.tune(self, epochs)
