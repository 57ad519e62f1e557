"""The round loop of federated learning, as each rank runs it.

    for t in 0 .. T-1
        S_t = cohort(seed, t)                               the same on every rank, without a message
        rank 0 broadcasts  command, w, declared server state
        rank r             trains its clients of S_t (compute.clients_per_pass at once) and contributes their uploads:
                           as rows, or as sums of rows (transport/gather.py)
        rank 0             w <- server_optim(w, direction(uploads))

Round t - 1 is evaluated and reported at the beginning of round t: rank 0 alone evaluates the global model, while the
other ranks train. If client models are evaluated, too (with a protocol of personal models, or if sites have their own
data), all ranks evaluate before they train. Early stopping and divergence, which depend on metrics, therefore end the
run one round later. The broadcast after the last round contains the final model and the command that ends the loop.

A round is a function of t, the cohort, and the states of the server and the clients at its start. After a rank failure,
faults/recovery.py restores these states, and the round is run again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmpi.aggregation.lora import LoraAggregation
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.comm import Communicator, RankLostError
from fedmpi.common import seeds
from fedmpi.engine.base_weights import BaseWeights
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.diagnostics.probes import Probes
from fedmpi.engine.faults.recovery import FailurePolicy
from fedmpi.engine.faults.upload_filter import UpdateFilter
from fedmpi.engine.federation_config import FederationConfig, RunCallbacks
from fedmpi.engine.hook_checks import check_no_metric_name_clash
from fedmpi.engine.messages import CLIP, FAILED, STOP, UploadLayout
from fedmpi.engine.packed import packed_rounds
from fedmpi.engine.private_release import PrivateRelease
from fedmpi.engine.reporting import Reporter
from fedmpi.engine.round_control import TRAIN, RoundCommand, RoundControl
from fedmpi.engine.scheduler import ClientScheduler
from fedmpi.engine.server import FederationServer, ServerRule, ServerView
from fedmpi.engine.tracing import Timeline
from fedmpi.engine.transport.gather import GatheredUploads, UploadGather
from fedmpi.engine.transport.round_transport import RoundTransport


class Federation:
    """One rank's part of a federated training run; `run` executes it. Only rank 0 has a `server` (the global model)."""

    def __init__(
        self,
        config: FederationConfig,
        comm: Communicator,
        trainer: ClientTrainer,
        optimizer: ServerOptimizer,
        rule: ServerRule | None = None,
        callbacks: RunCallbacks | None = None,
        lora: LoraAggregation | None = None,
        base_weights: BaseWeights | None = None,
        privacy: PrivateRelease | None = None,
    ) -> None:
        """Set up the run.

        Args:
            trainer: trains the clients of this rank.
            optimizer: the server optimiser; used only on rank 0.
            rule: a server rule that replaces the aggregation of the method; None: the method aggregates.
            lora: the aggregation of adapters (server.lora); None: the model has none.
            base_weights: the base weights that it changes; None: it changes none.
            privacy: makes noisy means of the uploads (differential privacy of clients); only on rank 0, otherwise None.
        """
        data, model, messages = trainer.data, trainer.model, trainer.messages
        tolerant, stateful = config.on_lost_rank != "abort", bool(messages.client_state.size)
        training_ranks = list(range(0 if comm.size == 1 or config.server_trains else 1, comm.size))
        self.config, self.comm, self.trainer = config, comm, trainer
        self.scheduler = ClientScheduler(config, data, comm, training_ranks)
        self.states = ClientStates(comm, trainer, training_ranks)
        self.states.keeps_undo, self.states.keeps_moves = (config.needs_undo or tolerant) and stateful, tolerant
        self.transport = RoundTransport(
            comm,
            messages,
            model.w,
            config.gather,
            acknowledges=tolerant or config.acknowledges,
            base_weights=base_weights,
            secure_aggregation=config.secure_aggregation,
            reads_means_only=trainer.bounds_uploads,
        )
        self.server: FederationServer | None = None
        if comm.rank == 0:
            self.server = FederationServer(
                messages,
                storage=self.transport.model_storage(),
                initial=(model.w, model.b),
                optimizer=optimizer,
                view=ServerView(data, optimizer.lr, config.rounds, config.seed),
                rule=rule,
                criterion=config.best,
                recorded_stats=config.update_stats,
                update_filter=UpdateFilter(config.max_norm, config.drops_bad_updates),
                lora=lora,
                base_weights=base_weights,
                privacy=privacy,
            )
            if comm.rank not in training_ranks and self.server.w.device == model.w.device:
                # Rank 0 evaluates in this memory. It trains no clients, so no client's weights are ever loaded into it.
                model.move_into(self.server.w)
        callbacks = callbacks or RunCallbacks()
        self.reporter = Reporter(config, self.states, self.transport, self.server, callbacks)
        self.probes: Probes | None = None
        if config.probes:
            self.probes = Probes(config, self.states, self.transport, self.scheduler, self.server, callbacks)
        self.control = RoundControl(comm, self.scheduler, self.reporter, trainer.stop)
        self.timeline = Timeline()
        self.failure_policy: FailurePolicy | None = None
        if tolerant:
            self.failure_policy = FailurePolicy(
                config, self.control, self.timeline, can_move_clients=data.global_test is not None
            )

    # ---- the loop ----
    def run(self) -> str:
        """Train all rounds; return why the run ended.

        The reason is "finished", "stopped", "diverged", "early_stopped" or "budget_spent".
        """
        t, reason = self.control.first_round, None
        try:
            while reason is None:
                failure = None
                try:
                    reason = self.run_round(t)
                except RankLostError as error:
                    if self.failure_policy is None:
                        raise
                    failure = str(error)
                # This is outside of the handler, because the sockets of the broken group stay open as long as the error
                # is referenced, and ranks that wait for this one would not notice. After a failure, t is repeated.
                t = t + 1 if self.failure_policy is None else self.failure_policy.next_round(t, failure)
            return reason
        finally:
            self.timeline.end()

    def run_round(self, t: int) -> str | None:
        """Run round t; return None, or why the run ended if it ends before this round."""
        bytes_before, span = (self.comm.sent_bytes, self.comm.received_bytes), self.timeline.span
        self.timeline.begin(t)
        command = self.control.open_round(t)  # rank 0 broadcasts: command, w, declared server state
        span("wait_command" if self.server is None else "broadcast")
        self.report_previous_round(t, command)  # rank 0 evaluates round t - 1; all ranks do if clients evaluate, too
        if command is not TRAIN:
            return self.control.finish_run_on_this_rank(command)

        cohort = self.scheduler.cohort(t)  # a function of (seed, t): the same on every rank
        placement = self.scheduler.assign_clients(t)  # client -> rank
        self.states.move_states(placement)  # the state of a client is sent to the rank that trains it
        span("migrate_state")
        downloads = self.transport.send_downloads(t, cohort, placement, self.server)
        span("download")
        if self.probes is not None:
            self.probes.train_local_models(t, cohort, placement, downloads)
            span("analyse")

        gather = self.transport.begin_gather(t, cohort, placement, self.scheduler.cohort_weights(cohort)[1])
        mine, at_once = [k for k in cohort if placement[k] == self.comm.rank], self.trainer.clients_per_pass
        if self.states.store is not None:  # the states of clients that train together must fit into memory together
            at_once = min(at_once, max(self.states.max_in_memory, 1))
        with seeds.preserve_rng_state():  # each client seeds the global generators
            for i in range(0, len(mine), at_once):
                self.train_clients(mine[i : i + at_once], t, downloads, gather)
        trained, uploads, arrived = time.perf_counter(), gather.finish(), time.perf_counter()
        span("uploads")
        if uploads is not None:  # on rank 0: w <- server_optim(w, direction(uploads))
            self.reporter.metrics_row = self.step_server(t, cohort, placement, uploads, trained, arrived, bytes_before)
            span("step")
        if self.probes is not None:
            self.probes.measure(t, cohort, placement)
            span("analyse")
        return None

    # ---- the steps of a round ----
    def report_previous_round(self, t: int, command: RoundCommand) -> None:
        """Hash, save and evaluate the model of round t - 1 at the beginning of round t."""
        row = self.reporter.metrics_row
        self.timeline.flush()
        self.timeline.span("undo")
        if self.server is not None and row and "sha256" not in row:
            row["sha256"] = self.trainer.model.layout.sha256(self.server.w)
            self.timeline.span("hash")
        first, callbacks = self.control.first_round, self.reporter.callbacks
        if command is RoundCommand.ABORTED:  # round t - 1 does not count: t - 2 is the last one
            if t > first + 1:
                callbacks.save_state(self, t - 2, self.reporter.saved_state, True)
            return
        if t > first:
            self.reporter.saved_state = self.rank0_state()
            callbacks.save_state(self, t - 1, self.reporter.saved_state, command is not TRAIN)
        self.timeline.span("checkpoint")
        last = command in (RoundCommand.FINISHED, RoundCommand.EARLY_STOPPED, RoundCommand.BUDGET_SPENT)
        with self.comm.exclude_from_counts():
            self.reporter.report(t, trains=command is TRAIN, last=last, started_at=self.control.opened_at)
        self.timeline.span("evaluate")
        if command is TRAIN and self.config.replays_failures:
            self.states.replay_failures(t, self.scheduler.lost_ranks, evaluated=True)

    def train_clients(
        self, clients: Sequence[int], t: int, downloads: Mapping[int, Tensor], gather: UploadGather
    ) -> None:
        """Train these clients, together if there are several, and send their uploads."""
        span, is_single = self.timeline.span, len(clients) == 1
        for client in clients if self.states.keeps_undo else ():
            self.states.save_before_training(client)
        received = self.config.learning_rate(t), self.transport.broadcast_copy
        write = packed_rounds.train_clients(
            [self.states.client_context(k, t, *received, downloads[k]) for k in clients], gather.acquire_adjacent_rows
        )
        if not is_single:  # clients that train together are one span
            span("train", list(clients))
        for client in clients:
            row = gather.acquire_row(client)
            if is_single:
                span("send")
            write[client](row)
            if is_single:
                span("train", client)
            self.states.last_trained[client] = t  # before another client needs the memory of its row
            gather.submit(client)
        span("send")

    def step_server(
        self,
        t: int,
        cohort: Sequence[int],
        placement: Mapping[int, int],
        received: GatheredUploads,
        trained: float,
        arrived: float,
        bytes_before: tuple[int, int],
    ) -> dict[str, Any] | None:
        """Update the global model with the uploads of round t, except refused ones.

        Args:
            placement: client -> the rank that trained it.
            trained: the value of time.perf_counter() after this rank had trained its clients.
            arrived: the value of time.perf_counter() when the last upload arrived.
            bytes_before: bytes that this rank had sent and received before the round.

        Returns:
            The row of metrics of the round, without evaluation results; None if a rank was asked to stop in this round.
        """
        server, sent = self.server, received.small
        assert server is not None
        if bool((sent._flag == STOP).any()):
            received.release()
            return None
        seconds, flags = sent._seconds.tolist(), sent._flag.tolist()
        failed = [k for k, flag in zip(cohort, flags, strict=True) if flag == FAILED]
        timings = [0.0 if flag else s for s, flag in zip(seconds, flags, strict=True)]
        self.scheduler.record_timings(t, {k: placement[k] for k in cohort}, timings)
        upload = self.trainer.messages.upload_layout(t)
        if server.privacy is not None:
            return self.step_with_noise(t, cohort, upload, received, arrived, bytes_before)
        refused = (
            server.update_filter.find_refused(t, cohort, received, upload.w.take(server.w), failed) if cohort else []
        )
        server.refused_clients = [each["client"] for each in refused]
        accepted = [k for k in cohort if k not in server.refused_clients]
        recorded, metrics = {"train_loss": float("nan")}, {}
        if accepted:
            if server.refused_clients:
                received.keep_rows([cohort.index(k) for k in accepted])
            updates = received.as_uploads(accepted, *self.scheduler.cohort_weights(accepted))
            lr = self.config.learning_rate(t)
            metrics = server.step(t, lr, updates, upload, received, server.update_filter.norms)
            recorded = {**received.mean_train_loss(updates.p), **server.update_stats}
        busy_s = Counter[int]()  # rank -> seconds in which it has trained
        for k, s in zip(cohort, seconds, strict=True):
            busy_s[placement[k]] += s
        absent = [k for k in self.scheduler.sample_cohort(t) if k not in cohort]
        budget = self.control.privacy_budget
        row = {
            "round": t,
            **recorded,
            **({} if budget is None else {"epsilon": budget.epsilon}),
            "cohort": list(cohort),
            "refused": refused,
            **({"lost": absent} if absent else {}),
            **self.transport.traffic.count(t, cohort),
            "wall_s": time.perf_counter() - self.control.opened_at,
            "train_s": max(busy_s.values(), default=0.0),
            "wait_s": arrived - trained,
            "server_s": time.perf_counter() - arrived,
        }
        self._check_metric_names(t, metrics)
        received.release()
        sent_bytes, received_bytes = self.comm.sent_bytes - bytes_before[0], self.comm.received_bytes - bytes_before[1]
        return row | metrics | {"sent_bytes": sent_bytes, "received_bytes": received_bytes}

    def step_with_noise(
        self,
        t: int,
        cohort: Sequence[int],
        upload: UploadLayout,
        received: GatheredUploads,
        arrived: float,
        bytes_before: tuple[int, int],
    ) -> dict[str, Any]:
        """Update the global model with the noisy means of round t (differential privacy of clients).

        The row of metrics contains nothing that depends on single uploads. If nobody may know which clients took part,
        it does not contain the cohort, and no sizes and times that depend on it. See `step_server` for the arguments.
        """
        server, config = self.server, self.config
        assert server is not None
        assert server.privacy is not None
        clip = float(getattr(server.rule_state, CLIP))
        updates = server.release_means(t, upload, received, self.scheduler.cohort_weights(cohort)[1])
        metrics = server.step(t, config.learning_rate(t), updates, upload, received, {})
        self._check_metric_names(t, metrics)
        received.release()
        row: dict[str, Any] = {"round": t, "epsilon": server.privacy.budget.epsilon, "clip": clip}
        if config.withholds_participation:
            return row | {"wall_s": time.perf_counter() - self.control.opened_at} | metrics
        sent_bytes, received_bytes = self.comm.sent_bytes - bytes_before[0], self.comm.received_bytes - bytes_before[1]
        absent = [k for k in self.scheduler.sample_cohort(t) if k not in cohort]
        return {
            **row,
            "cohort": list(cohort),
            "refused": [],
            **({"lost": absent} if absent else {}),
            **self.transport.traffic.count(t, cohort),
            "wall_s": time.perf_counter() - self.control.opened_at,
            "server_s": time.perf_counter() - arrived,
            **metrics,
            "sent_bytes": sent_bytes,
            "received_bytes": received_bytes,
        }

    def _check_metric_names(self, t: int, metrics: Mapping[str, float]) -> None:
        """Raise UserError if the method logs a metric with the name of another one."""
        if metrics:
            check_no_metric_name_clash(self.trainer.method, metrics, self.trainer.task.names, f"round {t}")

    # ---- checkpoints ----
    def rank0_state(self) -> dict[str, Any]:
        """Return the part of rank 0's state that checkpoints store as JSON, in addition to tensors."""
        reporter, best = self.reporter, self.config.best and self.config.best.metric
        idle_since = self.server.update_filter.idle_since if self.server else None
        divergence = reporter.divergence.state_dict()
        return {"line": reporter.metrics_row, "idle_since": idle_since, "watch": divergence, "best": best}

    def restore(self, t: int, memory: Mapping[str, Any] | None, server: Mapping[str, Tensor] | None) -> None:
        """Restore the state after round t, to resume a run. Client states are read from their store when needed.

        Args:
            t: the last completed round.
            memory: the result of `rank0_state` after that round, on rank 0; None on other ranks.
            server: the server's tensors from the checkpoint, on rank 0; None on other ranks.
        """
        self.control.first_round = t + 1
        self.scheduler.first_round = max(self.scheduler.first_round, t + 1)
        self.states.round = t
        for earlier in range(t + 1):
            self.transport.traffic.count(earlier, self.scheduler.cohort(earlier))
        self.states.last_trained, self.states.stored_up_to = self.scheduler.last_trained_rounds(t), t
        if self.server is not None and memory and server:
            self.reporter.metrics_row = memory["line"]
            self.server.update_filter.idle_since = memory["idle_since"]
            self.server.restore(server)
            self.reporter.divergence.load_state_dict(memory["watch"])
            if self.server.best and memory.get("best") != self.server.best.criterion.metric:
                self.server.best.reset()  # it was selected by another metric
        if self.transport.base_weights is not None:
            self.transport.base_weights.send_to_all(self.comm)
