"""What a round's line says: the figures of its evaluation, and whether the run has come apart."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedmpi.engine.evaluate import Evaluator
from fedmpi.engine.faults.divergence import Watch
from fedmpi.method.base import overrides

if TYPE_CHECKING:
    from fedmpi.engine.federation import Federation


class Reporter:
    """Evaluates rounds, and hands their lines on. Every rank has one; the lines are rank 0's."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.evaluator = Evaluator(fed.states, fed.plan.protocol, fed.plan.eval_batch)
        self.watch = self._watch()

    def __call__(self, t: int, line: dict[str, Any] | None, *, due: bool, last: bool) -> None:
        """Evaluate round t and hand its line on. Every rank takes part where clients evaluate."""
        began, fed = time.perf_counter(), self.fed
        figures: dict[str, float] = {}
        if due and (fed.server is not None or self.evaluator.asks_clients):
            downloads = self._downloads(t) if self.evaluator.asks_clients else {}
            model = None if fed.server is None else (fed.server.w, fed.server.b)
            lr = fed.plan.learning_rate(min(t + 1, max(fed.plan.rounds - 1, 0)))
            figures, lines = self.evaluator(t, lr, model, fed.exchange.inbox, downloads, last=last)
            fed.sink.clients(lines)
        if line is None:
            return
        first = {"round": t, **{n: figures[n] for n in ("loss", *fed.worker.task.names) if n in figures}}
        row = {**first, **line, **figures, "evaluate_s": time.perf_counter() - began}
        since = self.watch.see(row, last)
        fed.sink.round(row if since is None else {**row, "diverged": since})

    def _watch(self) -> Watch:
        """A global model of which parts stay with the clients is nobody's: there the personal ones are looked at."""
        fed = self.fed
        plan, data, task = fed.plan, fed.data, fed.worker.task
        whole = fed.worker.messages.shared.whole
        looked = [p for p in plan.protocol if not p.startswith("ft(") and (whole or p == "personal")]
        names = [f"{p}_loss" if p != "global" else "loss" for p in looked] if data.test_sizes.any() else []
        return Watch(data.classes if getattr(task, "classification", False) else None, next(iter(names), None))

    def _downloads(self, t: int) -> dict[int, Tensor]:
        """What differs from client to client goes to all of them where the method's evaluation may look at it."""
        fed = self.fed
        asked = self.evaluator.asked()
        if any(overrides(fed.worker.method, hook) for hook in ("weights", "predict", "tune")):
            return fed.exchange.deliver(t, asked, fed.states.owner, fed.server)
        return dict.fromkeys(asked, fed.exchange.no_download())
