"""One client's round, and the only batch loop of the project.

The hot path is flat. While no hook reads gradients, autograd allocates its own and torch's fused SGD walks the views; a
hook that reads them gets one flat g that autograd accumulates into. Neither changes the bits.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.blame import blaming, once, told
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.data.batches import batches
from fedmpi.engine.checks import Untouched, check_finite, check_names, check_pair, check_values, finite
from fedmpi.engine.client_view import ClientView, LossMeter
from fedmpi.engine.messages import FAILED, STOP, Upload
from fedmpi.engine.sgd import SGD
from fedmpi.flat.layout import Selection
from fedmpi.flat.packing import share_memory
from fedmpi.method.base import Method, overrides
from fedmpi.method.context import Client, Fitted, Loss, Row, State

LEFT_OUT = "left out of the round (faults.on_client_error: drop)"
PLAIN = Method()  # FedAvg's client


class Descent(NamedTuple):
    """What a local step descends along: a loss, its gradient corrected, or a rule with gradients of its own."""

    loss: Loss
    correct: Callable[[Client, Tensor], Tensor] | None
    step: Callable[[Client, Tensor, Tensor], Tensor] | None


def _subtract(w: Tensor, part: Selection, w0: Tensor, out: Tensor) -> None:
    part.subtract(w, w0, out)


@final
class LocalClient(ClientView):
    """A client that takes part in a round, or is evaluated."""

    def take_part(self, row: Tensor) -> bool:
        """The client's round: load, train, write its upload into `row` and its new state into its state row.

        row: one row of `messages.upload(round)`. With worker.spares an error on the way is told and marks the row;
        whether there was none.
        """
        began, worker, model = time.perf_counter(), self.worker, self.worker.model

        def trained() -> dict[str, Tensor]:
            model.load(self.received, self.b0)
            worker.training()
            untouched = self.untouched()
            # Dropout, and whatever else draws from torch's global generators, is seeded.
            with blaming(self.where), seeds.scoped(worker.seed, "torch", self.round, self.id):
                self.begin()
                untouched.check(self.where, "receive")
                new = worker.method.train(self)
                untouched.check(self.where, "train", "loss", "gradient", "step", "proximal")
                sent, more = check_pair(worker.method, "upload", worker.method.upload(self), self.where)
                untouched.check(self.where, "upload")
            seconds = time.perf_counter() - began
            return self.write(row, (new, sent, more), self.meter.mean(), seconds, partial(_subtract, model.w))

        return self.kept(row, trained, began)

    def kept(self, row: Tensor, trained: Callable[[], dict[str, Tensor]], began: float) -> bool:
        """Store what `trained` makes of the client's state; whether it came to no error."""
        worker, messages = self.worker, self.worker.messages
        upload = messages.upload(self.round)
        try:
            state = trained()
        except Exception as error:
            if not worker.spares:
                raise
            # Its state row, too, is undone by the server's word.
            warnings.warn(RankWarning(f"{once(error, self.where)}; {LEFT_OUT}"), stacklevel=2)
            flag = STOP if worker.stop() else FAILED
            upload.packing.write(row.zero_(), {"_flag": flag, "_seconds": time.perf_counter() - began})
            return False
        if len(self.state_row):
            messages.client_state.write(self.state_row, state)
        beyond = messages.settle(upload, row, self.state_row)
        if beyond:
            said = f"{self.where}: slot {beyond!r} is beyond fp16, which ends at 65,504, or not finite itself"
            warnings.warn(RankWarning(f"{said}; comm.wire.up: bf16 has the range of fp32"), stacklevel=2)
        if not worker.drop:
            check_finite(worker.method, "train, upload", messages.client_state, self.state_row, self.where)
        elif not finite(self.state_row):
            upload.packing.write(row, {"_loss": torch.nan})  # the server refuses the upload, which undoes the round
        return True

    def write(
        self,
        row: Tensor,
        given: tuple[Any, Any, Any],
        loss: Tensor,
        seconds: float,
        subtract: Callable[[Selection, Tensor, Tensor], None],
    ) -> dict[str, Tensor]:
        """Check what `train` and `upload` gave, write the upload; returns what becomes of the client's state.

        loss: mean over the steps; subtract: (selection of w, w0, out) writes that part of w - w0.
        """
        worker, model, messages = self.worker, self.worker.model, self.worker.messages
        upload, (trained, sent, more) = messages.upload(self.round), given
        self._check(upload, trained, sent, more)
        if "dw" in upload.packing.shapes and "dw" not in sent:
            subtract(upload.w, self.w0, upload.packing.views(row).dw)
        values = {name: sent[name] for name in sent if name in upload.packing.shapes}
        values |= {"_loss": loss, "_flag": STOP if worker.stop() else 0.0, "_seconds": seconds}
        if upload.b.size:
            values["_b"] = upload.b.take(model.b)
        upload.packing.write(row, values)
        state = {name: value for new in (trained, more) if new is not self.state for name, value in new.items()}
        if not len(self.state_row):
            return state
        own = {"_w": messages.personal.take(model.w), "_b": messages.personal_b.take(model.b)}
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
                "k.label_counts": self.label_counts,
            },
        )

    def begin(self) -> None:
        """The weights that training starts from; looking for them moves neither buffers nor counters."""
        model = self.worker.model
        w0 = self.check("receive", self.worker.method.receive(self))
        self.w0 = w0.clone() if share_memory(w0, model.w) else w0  # k.w is about to move
        self.forget_frozen()
        if self.w0 is not self.received:
            model.load(self.w0, self.b0)

    def _check(self, upload: Upload, trained: Any, sent: Any, more: Any) -> None:
        """What `train` and `upload` returned is what the method declares."""
        method, where, declared = self.worker.method, self.where, self.worker.method.client_state
        due = [name for name in upload.packing.shapes if name in method.sends and name != "dw"]
        if (
            type(sent) is Row
            and type(trained) is type(more) is State
            and not (sent or trained or more or due or declared)
        ):
            return  # as of many methods: nothing is given, nothing is due
        check_names(method, "upload", sent, method.sends, where, due)
        check_values(method, "upload", sent, upload.packing, where, self.w)
        for hook, new in (("train", trained), ("upload", more)):
            check_names(method, hook, new, declared, where, ())
            check_values(method, hook, new, self.worker.messages.client_state, where, self.w)
        check_names(method, "train, upload", dict.fromkeys([*trained, *more]), declared, where)

    # ---- the batch loop ----
    def fit(
        self,
        epochs: int | None = None,
        *,
        groups: Sequence[str] | None = None,
        lr: float | None = None,
        start: Tensor | None = None,
        loss: Loss | None = None,
        gradient: Callable[[Client, Tensor], Tensor] | None = None,
        plain: bool = False,
    ) -> Fitted:
        worker, sgd, model = self.worker, self.worker.sgd, self.worker.model
        method = PLAIN if plain else worker.method
        generator = seeds.generator(worker.seed, "batches", self.round, self.id, self.fits)
        self.fits += 1
        how = Descent(
            loss=loss or method.loss,
            correct=gradient or (method.gradient if overrides(method, "gradient") else None),
            step=method.step if overrides(method, "step") and gradient is None and loss is None else None,
        )
        epochs = self._checked_epochs(epochs, groups)
        counted, meter = (self.steps, self.a, self.meter), self.meter if start is None else LossMeter(self.w.device)
        before, self.meter = len(meter.losses), meter
        with self.elsewhere(start), model.only(method.trains if groups is None else groups) as parameters:
            if parameters:  # else the model has nothing in these groups
                rate = self.lr if lr is None else lr
                optimiser = SGD(parameters, rate, sgd.momentum, sgd.weight_decay)
                if not (how.correct or how.step):
                    model.drop_gradient()
                carry = 0.0
                for self.epoch in range(epochs):
                    self.last_epoch = self.epoch == epochs - 1
                    for x, y in self._batches(generator, method.batches_a_step):
                        if worker.stop():
                            break
                        self.step_loss, self.passed = None, False
                        untouched = x._version, y._version
                        self._gradient(how, optimiser, x, y)
                        if (x._version, y._version) != untouched:
                            raise self._touched()
                        optimiser.step()
                        self.passed = True
                        carry = sgd.momentum * carry + 1
                        self.steps, self.a = self.steps + 1, self.a + carry
                        if self.step_loss is not None:
                            meter.losses.append(self.step_loss)
            w = model.w if start is None else model.w.clone()
        if start is not None:
            self.steps, self.a, self.meter = counted
        return Fitted(w, partial(meter.mean, before, len(meter.losses)))

    def _checked_epochs(self, epochs: int | None, groups: Sequence[str] | None) -> int:
        self._check_groups(() if groups is None else groups, "fit, groups")
        if epochs is None:
            return self.epochs
        if not isinstance(epochs, int) or epochs < 0:
            raise UserError(f"k.fit: epochs is {epochs!r}; a whole number >= 0 is needed")
        return epochs

    def _touched(self) -> UserError:
        """Of an x or y that is not what it was before its step."""
        said = (
            f"{self.where}: the model ({type(self.worker.model.module).__name__}) or a hook of method "
            f"{type(self.worker.method).__name__} wrote to its batch, x or y (an operation that ends in _, an "
            "assignment to [...], or ReLU(inplace=True) as the first layer): other passes would see it; make a copy"
        )
        return told(said, self.worker.model.module, type(self.worker.method))

    def _gradient(self, how: Descent, optimiser: SGD, x: Tensor, y: Tensor) -> None:
        """One batch's gradient, to where the optimiser looks for it."""
        model = self.worker.model
        if how.step:
            g = self.check("step", how.step(self, x, y))
            model.attach_gradient().copy_(self._corrected(how.correct, g) if how.correct else g)
        elif how.correct:
            g = model.attach_gradient().zero_()
            self._backward(how.loss, x, y)
            corrected = self._corrected(how.correct, g)
            if corrected is not g:
                g.copy_(corrected)
        else:
            optimiser.forget()
            self._backward(how.loss, x, y)

    def _corrected(self, correct: Callable[[Client, Tensor], Tensor], g: Tensor) -> Tensor:
        return self.check("gradient", correct(self, g), by=correct)

    def _backward(self, loss: Loss, x: Tensor, y: Tensor) -> None:
        value = self.checked_loss(loss(self, x, y), loss)
        value.backward()
        self.note(value)

    def _batches(self, generator: torch.Generator, many: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch's batches, `many` at a time; an incomplete group is left out unless it is the only one."""
        sgd = self.worker.sgd
        drawn = batches(self.worker.data.train[self.id], sgd.batch_size, generator, sgd.drop_last)
        if many == 1:
            yield from drawn
            return
        held: list[tuple[Tensor, Tensor]] = []
        groups = 0
        for batch in drawn:
            held.append(batch)
            if len(held) == many:
                yield torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
                held, groups = [], groups + 1
        if held and not groups:
            yield torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])

    def fine_tune(self, epochs: int) -> None:
        """The method's fine-tuning from the weights at hand; nothing of it is kept.   FT(e)"""
        self.worker.model.module.train()
        with seeds.scoped(self.worker.seed, "tune", self.round, self.id):
            self.worker.method.tune(self, epochs)
