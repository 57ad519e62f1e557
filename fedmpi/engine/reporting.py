"""Evaluates rounds and reports them: one row of metrics each, with a note if the run has diverged."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.evaluate import EvaluationInputs, Evaluator
from fedmpi.engine.faults.divergence import DivergenceMonitor
from fedmpi.engine.federation_config import SERVERS, FederationConfig, RunCallbacks
from fedmpi.engine.messages import Messages
from fedmpi.engine.server import FederationServer
from fedmpi.engine.transport.round_transport import RoundTransport
from fedmpi.flat.layout import EVERYTHING
from fedmpi.method.base import overrides
from fedmpi.models.gaussian import REFERENCE

OWN = ("weights", "buffers", "predict")  # hooks that give a client a model of its own


class Reporter:
    """Evaluates rounds and passes their rows of metrics on; on every rank, the rows at rank 0."""

    def __init__(
        self,
        config: FederationConfig,
        states: ClientStates,
        transport: RoundTransport,
        server: FederationServer | None,
        callbacks: RunCallbacks,
    ) -> None:
        self.config, self.transport, self.server, self.callbacks = config, transport, server, callbacks
        self.trainer = states.trainer
        trainer, protocol, own = states.trainer, tuple(config.protocol), own_parts(states.trainer.messages)
        asked, left = SERVERS.intersection(protocol), tuple(each for each in protocol if each not in SERVERS)
        if own and asked and left:  # without the parts that clients keep there is no global model
            protocol = left
            if states.comm.rank == 0:
                text = f"evaluate.protocol: {', '.join(sorted(asked))} is left out: "
                text += f"method {type(trainer.method).__name__} keeps {', '.join(sorted(own))} with each client"
                warnings.warn(RankWarning(text), stacklevel=2)
        validates = None if config.best is None else "own" if validates_own(trainer, protocol) else "global"
        self.states, self.evaluator = states, Evaluator(states, protocol, config.eval_batch, validates)
        # Where clients keep parts of the model, their personal models are watched.
        all_shared = trainer.messages.shared.whole
        watched = [p for p in config.protocol if not p.startswith("ft(") and (all_shared or p == "personal")]
        names = [f"{p}_loss" if p != "global" else "loss" for p in watched] if trainer.data.test_sizes.any() else []
        classes = trainer.data.classes if getattr(trainer.task, "classification", False) else None
        self.divergence = DivergenceMonitor(classes, next(iter(names), None), config.stops_on_divergence)
        self.metrics_row: dict[str, Any] | None = None  # of the latest round, at rank 0; None if it was aborted
        self.saved: dict[str, Any] = {}  # rank 0's memory after the latest round that counts
        self.reported_in = -1  # the round in whose beginning the one before was reported

    def report(self, t: int, *, made: bool, last: bool, began: float) -> bool:
        """Evaluate the round before t at the beginning of round t, and report it, once.

        Every rank takes part where clients evaluate. Before round 0 there is something to report only if there are no
        rounds: the model as it starts, as round -1.

        Args:
            t: the round that begins.
            made: whether round t is made; a run that is asked to stop has no time to evaluate.
            last: whether all rounds are made.
            began: when round t began (time.perf_counter).

        Returns:
            Whether the round was evaluated here and now.
        """
        if self.reported_in == t:
            return False
        due, before, line = last or (made and t % self.config.evaluate_every == 0), t - 1, self.metrics_row
        if t == 0:
            if not last:
                self.reported_in = t
                return False
            line = None if self.server is None else self._initial_line(self.server, began)
        began = time.perf_counter()
        figures = self._evaluate(before, last) if due else {}
        if line is not None:
            first = {"round": before, **{n: figures[n] for n in ("loss", *self.trainer.task.names) if n in figures}}
            row = {**first, **line, **figures, "evaluate_s": time.perf_counter() - began}
            if updates := row.pop("updates", None):  # sorted, as they come out of a checkpoint
                self.callbacks.append("updates.jsonl", {"round": before, **dict(sorted(updates.items()))})
            if due and self.evaluator.by_class:
                row["class_accuracy"] = [round(v, 3) if v == v else None for v in self.evaluator.by_class]
            since = self.divergence.record(row, last)
            self.callbacks.round(row if since is None else {**row, "diverged": since})
        self.reported_in = t
        return due and t > 0

    def _evaluate(self, t: int, last: bool) -> dict[str, float]:
        """Return rank 0's metrics of round t; pass on those of clients, and the model if it is the best one so far."""
        server, evaluator, t_seen = self.server, self.evaluator, max(t, 0)
        if server is None and not evaluator.asks_clients:
            return {}
        downloads: dict[int, Tensor] = {}
        if evaluator.asks_clients:
            asked = [k for k in range(self.trainer.data.clients) if k not in self.states.unavailable]
            downloads = dict.fromkeys(asked, self.transport.no_download)
            if any(overrides(self.trainer.method, hook) for hook in ("weights", "predict", "tune")):  # may look at it
                downloads = self.transport.send_downloads(t_seen, asked, self.states.owner, server)
        model = None if server is None else (server.w, server.b)
        lr, inbox = self.config.learning_rate(t_seen), self.transport.inbox
        with seeds.seeded(self.config.seed, "evaluate", t):
            figures, lines = evaluator(EvaluationInputs(t_seen, lr, model, inbox, downloads, last))
        self.callbacks.append("clients.jsonl", *({**each, "round": t} for each in lines))
        if server is not None and server.best is not None:
            best = server.best
            if best.update(t, figures[best.criterion.figure], server.w, server.b):
                self.callbacks.save_best_model(best)
        return figures

    def _initial_line(self, server: FederationServer, began: float) -> dict[str, Any]:
        """Return the row of a model that is not trained."""
        nothing = dict.fromkeys(("up_parameters", "down_parameters", "sent_bytes", "received_bytes"), 0)
        wall_s, digest = time.perf_counter() - began, self.trainer.model.layout.sha256(server.w)
        return {"cohort": [], "refused": [], **nothing, "wall_s": wall_s, "sha256": digest}


def own_parts(messages: Messages) -> frozenset[str]:
    """The groups that clients keep and train; FedBABU's head, which all leave as it began, is none. Nor are references,
    which are no part of the outputs."""
    left = messages.every - messages.shared_groups - {REFERENCE}
    return left if EVERYTHING in messages.method.trains else left.intersection(messages.method.trains)


def validates_own(trainer: ClientTrainer, protocol: Sequence[str]) -> bool:
    """Whether validation rows judge what each client uses, not the global model."""
    models = any(overrides(trainer.method, hook) for hook in OWN)
    return not trainer.messages.shared.whole or (models and not SERVERS.intersection(protocol))
