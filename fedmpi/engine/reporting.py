"""What a round's line says: the figures of its evaluation, and whether the run has come apart."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.evaluate import Evaluator
from fedmpi.engine.faults.divergence import Watch
from fedmpi.engine.messages import Messages
from fedmpi.engine.plan import SERVERS, Plan, Sink
from fedmpi.engine.server import FederationServer
from fedmpi.engine.travel.exchange import Exchange
from fedmpi.engine.worker import Worker
from fedmpi.flat.layout import EVERYTHING
from fedmpi.method.base import overrides
from fedmpi.models.gaussian import REFERENCE

OWN = ("weights", "buffers", "predict")  # hooks that give a client a model of its own


class Reporter:
    """Evaluates rounds, and hands their lines on. Every rank has one; the lines are rank 0's."""

    def __init__(
        self, plan: Plan, states: ClientStates, exchange: Exchange, server: FederationServer | None, sink: Sink
    ) -> None:
        self.plan, self.exchange, self.server, self.sink, self.worker = plan, exchange, server, sink, states.worker
        protocol = in_force(states.worker, plan.protocol, states.comm.rank == 0)
        validates = None if plan.best is None else "own" if validates_own(states.worker, protocol) else "global"
        self.states, self.evaluator = states, Evaluator(states, protocol, plan.eval_batch, validates)
        self.watch = self._watch()
        self.line: dict[str, Any] | None = None  # rank 0's: the metrics of the latest round, None where it was aborted
        self.saved: dict[str, Any] = {}  # rank 0's memory after the latest round that counts
        self.reported_in = -1  # the round in whose beginning the one before was reported

    def report(self, t: int, *, made: bool, last: bool, began: float) -> bool:
        """Report the round before t at the beginning of round t, once; return whether it was evaluated here and now.

        Args:
            t: the round that begins.
            made: whether round t is made; who was asked to stop has moments, and does not evaluate.
            last: whether all rounds are made.
            began: when round t began (time.perf_counter).
        """
        if self.reported_in == t:
            return False
        due = last or (made and t % self.plan.every == 0)
        if t > 0:
            self(t - 1, self.line, due=due, last=last)
        elif last:  # rounds: 0
            self.initial(began)
        self.reported_in = t
        return due and t > 0

    def __call__(self, t: int, line: dict[str, Any] | None, *, due: bool, last: bool) -> None:
        """Evaluate round t and hand its line on. Every rank takes part where clients evaluate."""
        began = time.perf_counter()
        figures: dict[str, float] = {}
        if due and (self.server is not None or self.evaluator.asks_clients):
            downloads = self._downloads(max(t, 0)) if self.evaluator.asks_clients else {}
            model = None if self.server is None else (self.server.w, self.server.b)
            lr = self.plan.learning_rate(max(t, 0))
            exact = self.exchange.exact(self.server) if self.evaluator.asks_for_global else None
            with seeds.scoped(self.plan.seed, "evaluate", t):
                figures, lines = self.evaluator(max(t, 0), lr, model, exact, self.exchange.inbox, downloads, last=last)
            self.sink.clients([{**each, "round": t} for each in lines])
            self._choose(t, figures)
        if line is None:
            return
        first = {"round": t, **{n: figures[n] for n in ("loss", *self.worker.task.names) if n in figures}}
        row = {**first, **line, **figures, "evaluate_s": time.perf_counter() - began}
        if updates := row.pop("updates", None):
            self.sink.updates({"round": t, **dict(sorted(updates.items()))})  # as they come out of a checkpoint
        if due and self.evaluator.by_class:
            row["class_accuracy"] = [round(v, 3) if v == v else None for v in self.evaluator.by_class]
        since = self.watch.see(row, last, self.evaluator.only if due else None)
        self.sink.round(row if since is None else {**row, "diverged": since})

    def memory(self) -> dict[str, Any]:
        """What earlier rounds have left, for `recall` when a run goes on."""
        return {"watch": self.watch.memory(), "best": self.plan.best and self.plan.best.figure}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """The server's tensors are back already."""
        self.watch.recall(memory["watch"])
        best = self.server.best if self.server else None
        if best and memory.get("best") != best.choice.figure:
            best.forget()  # it was chosen by another one

    def _choose(self, t: int, figures: dict[str, float]) -> None:
        """Keep the model that was evaluated, if it is the best one so far."""
        if self.server is None or self.server.best is None:
            return
        best = self.server.best
        if best.see(t, figures[best.choice.figure], self.server.w, self.server.b):
            self.sink.best(best)

    def initial(self, began: float) -> None:
        """The same of the model as it starts, as round -1."""
        line, server = None, self.server
        if server is not None:
            nothing = dict.fromkeys(("up_parameters", "down_parameters", "sent_bytes", "received_bytes"), 0)
            wall_s, digest = time.perf_counter() - began, self.worker.model.layout.sha256(server.w)
            line = {"cohort": [], "refused": [], **nothing, "wall_s": wall_s, "sha256": digest}
        self(-1, line, due=True, last=True)

    def _watch(self) -> Watch:
        """A global model of which parts stay with the clients is nobody's: there the personal ones are looked at."""
        plan, data, task = self.plan, self.worker.data, self.worker.task
        whole = self.worker.messages.shared.whole
        looked = [p for p in plan.protocol if not p.startswith("ft(") and (whole or p == "personal")]
        names = [f"{p}_loss" if p != "global" else "loss" for p in looked] if data.test_sizes.any() else []
        classes = data.classes if getattr(task, "classification", False) else None
        return Watch(classes, next(iter(names), None), plan.stop_apart)

    def _downloads(self, t: int) -> dict[int, Tensor]:
        """What differs from client to client goes to all of them where the method's evaluation may look at it."""
        asked = self.evaluator.asked()
        if any(overrides(self.worker.method, hook) for hook in ("weights", "predict", "tune")):
            return self.exchange.send_downloads(t, asked, self.states.owner, self.server)
        return dict.fromkeys(asked, self.exchange.no_download())


def own_parts(messages: Messages) -> frozenset[str]:
    """The groups that clients keep and train; FedBABU's head, which all leave as it began, is none. Nor are references,
    which are no part of the outputs."""
    left = messages.every - messages.shared_groups - {REFERENCE}
    return left if EVERYTHING in messages.method.trains else left.intersection(messages.method.trains)


def in_force(worker: Worker, protocol: Sequence[str], tell: bool) -> tuple[str, ...]:
    """The protocols, without those of a global model that is nobody's: one of which clients keep parts that they train.

    Where nothing else is asked for, they stay. tell: whether this rank says so.
    """
    asked, left = SERVERS.intersection(protocol), tuple(each for each in protocol if each not in SERVERS)
    own = own_parts(worker.messages)
    if not own or not asked or not left:
        return tuple(protocol)
    if tell:
        kept = ", ".join(sorted(own))
        text = f"evaluate.protocol: {', '.join(sorted(asked))} is left out: method {type(worker.method).__name__} "
        text += f"keeps {kept} with each client, and the global model has its initial values there: nobody uses it"
        warnings.warn(RankWarning(text), stacklevel=2)
    return left


def validates_own(worker: Worker, protocol: Sequence[str]) -> bool:
    """Whether validation rows judge what each client uses, not the global model."""
    models = any(overrides(worker.method, hook) for hook in OWN)
    return not worker.messages.shared.whole or (models and not SERVERS.intersection(protocol))
