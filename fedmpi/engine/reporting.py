"""Evaluation and reporting of rounds: one row of metrics per round, which also says whether the run has diverged."""

from __future__ import annotations

import time
from typing import Any

from fedmpi.common import seeds
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.evaluate import Evaluator
from fedmpi.engine.faults.divergence import DivergenceMonitor
from fedmpi.engine.federation_config import FederationConfig, RunCallbacks
from fedmpi.engine.server import FederationServer
from fedmpi.engine.transport.round_transport import RoundTransport


class Reporter:
    """Evaluates the model after each round, and passes the round's row of metrics to the callbacks on rank 0."""

    def __init__(
        self,
        config: FederationConfig,
        states: ClientStates,
        transport: RoundTransport,
        server: FederationServer | None,
        callbacks: RunCallbacks,
    ) -> None:
        """Create the reporter; `server` is None except on rank 0."""
        self.config, self.states, self.transport, self.server = config, states, transport, server
        self.trainer, self.callbacks = states.trainer, callbacks
        self.evaluator = Evaluator(config, states, transport, server)
        # If clients keep parts of the model, divergence is detected by the losses of their personal models.
        trainer, all_shared = self.trainer, self.trainer.messages.shared.selects_all
        watched = [p for p in config.protocol if not p.startswith("ft(") and (all_shared or p == "personal")]
        names = [f"{p}_loss" if p != "global" else "loss" for p in watched] if trainer.data.test_sizes.any() else []
        classes = trainer.data.classes if getattr(trainer.task, "classification", False) else None
        self.divergence = DivergenceMonitor(classes, next(iter(names), None), config.stops_on_divergence)
        # the row of the latest round, on rank 0; None if the round was aborted
        self.metrics_row: dict[str, Any] | None = None
        self.saved_state: dict[str, Any] = {}  # `Federation.rank0_state` after the latest round that counts
        self.reported_in = -1  # the round at whose beginning the previous round was reported

    def report(self, t: int, *, trains: bool, last: bool, started_at: float) -> None:
        """Evaluate and report round t - 1 at the beginning of round t, unless it has been reported already.

        All ranks take part if clients are evaluated. If the run has no rounds, the initial model is reported as round
        -1.

        Args:
            t: the round that begins.
            trains: whether round t will be run; if not, the model is evaluated only if `last` is true, because a run
                that was asked to stop has no time to evaluate.
            last: whether round t - 1 is the last one of the run.
            started_at: the value of time.perf_counter() when round t began.
        """
        if t == 0 and not last:
            self.reported_in = t
        if self.reported_in == t:
            return
        due, before, metrics_row = last or (trains and t % self.config.evaluate_every == 0), t - 1, self.metrics_row
        due = due and not self.config.withholds_evaluation
        if t == 0 and self.server is not None:
            metrics_row = self._initial_row(self.server, started_at)
        started_at = time.perf_counter()
        metrics = self._evaluate(before, last) if due else {}
        if metrics_row is not None:
            first = {"round": before, **{n: metrics[n] for n in ("loss", *self.trainer.task.names) if n in metrics}}
            row = {**first, **metrics_row, **metrics, "evaluate_s": time.perf_counter() - started_at}
            if updates := row.pop("updates", None):  # sorted, like rows that were read from a checkpoint
                self.callbacks.append_rows("update_stats.jsonl", {"round": before, **dict(sorted(updates.items()))})
            if due and self.evaluator.class_accuracy:
                row["class_accuracy"] = self.evaluator.class_accuracy
            since = self.divergence.record(row, last)
            self.callbacks.record_round(row if since is None else {**row, "diverged": since})
        self.reported_in = t

    def _evaluate(self, t: int, last: bool) -> dict[str, float]:
        """Evaluate round t and return its metrics; pass client metrics and a new best model to the callbacks."""
        server = self.server
        with seeds.temporary_seed(self.config.seed, "evaluate", t):
            metrics, client_rows = self.evaluator.evaluate_round(t, last)
        self.callbacks.append_rows("clients.jsonl", *client_rows)
        if server is not None and server.best is not None:
            best = server.best
            if best.update(t, metrics[best.criterion.metric], server.w, server.b):
                self.callbacks.save_best_model(best)
        return metrics

    def _initial_row(self, server: FederationServer, started_at: float) -> dict[str, Any]:
        """Return the row of metrics of the initial model, for a run without training rounds."""
        nothing = dict.fromkeys(("up_parameters", "down_parameters", "sent_bytes", "received_bytes"), 0)
        wall_s, digest = time.perf_counter() - started_at, self.trainer.model.layout.sha256(server.w)
        return {"cohort": [], "refused": [], **nothing, "wall_s": wall_s, "sha256": digest}
