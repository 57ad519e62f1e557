"""What a round's line says: the figures of its evaluation, and whether the run has come apart."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedmpi.engine.evaluate import Evaluator
from fedmpi.engine.faults.divergence import watch
from fedmpi.method.base import overrides

if TYPE_CHECKING:
    from fedmpi.engine.federation import Federation


class Reporter:
    """Evaluates rounds, and hands their lines on. Every rank has one; the lines are rank 0's."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.evaluator = Evaluator(fed.states, fed.plan.protocol, fed.plan.eval_batch)
        self.watch = watch(fed.plan.protocol, fed.worker, fed.plan.stop_apart)

    def __call__(self, t: int, line: dict[str, Any] | None, *, due: bool, last: bool) -> None:
        """Evaluate round t and hand its line on. Every rank takes part where clients evaluate."""
        began, fed = time.perf_counter(), self.fed
        figures: dict[str, float] = {}
        if due and (fed.server is not None or self.evaluator.asks_clients):
            downloads = self._downloads(max(t, 0)) if self.evaluator.asks_clients else {}
            model = None if fed.server is None else (fed.server.w, fed.server.b)
            lr = fed.plan.learning_rate(min(t + 1, max(fed.plan.rounds - 1, 0)))
            figures, lines = self.evaluator(max(t, 0), lr, model, fed.exchange.inbox, downloads, last=last)
            fed.sink.clients([{**each, "round": t} for each in lines])
        if line is None:
            return
        first = {"round": t, **{n: figures[n] for n in ("loss", *fed.worker.task.names) if n in figures}}
        row = {**first, **line, **figures, "evaluate_s": time.perf_counter() - began}
        since = self.watch.see(row, last, self.evaluator.only if due else None)
        fed.sink.round(row if since is None else {**row, "diverged": since})

    def initial(self, began: float) -> None:
        """The line of no round (-1), for the model as it starts: of a run of 0 rounds."""
        fed, line = self.fed, None
        if fed.server is not None:
            nothing = dict.fromkeys(("up_parameters", "down_parameters", "sent_bytes", "received_bytes"), 0)
            digest = fed.worker.model.layout.sha256(fed.server.w)
            wall_s = time.perf_counter() - began
            line = {"cohort": [], "refused": [], **nothing, "wall_s": wall_s, "sha256": digest}
        self(-1, line, due=True, last=True)

    def _downloads(self, t: int) -> dict[int, Tensor]:
        """What differs from client to client goes to all of them where the method's evaluation may look at it."""
        fed = self.fed
        asked = self.evaluator.asked()
        if any(overrides(fed.worker.method, hook) for hook in ("weights", "predict", "tune")):
            return fed.exchange.deliver(t, asked, fed.states.owner, fed.server)
        return dict.fromkeys(asked, fed.exchange.no_download())
