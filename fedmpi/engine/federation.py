"""The round loop: Algorithm 1 of every paper.

    for t in 0 .. T-1
        S_t = sampling.cohort(seed, t)                                   the same on every rank, no message
        rank 0 broadcasts  [word | declared state | w]
        rank r             for its clients of S_t, in id order: load, train, upload
        server             w <- server_optim(w, direction(uploads))
Rank 0 evaluates round t while the clients train round t+1: every round begins with the report of the one before. The
broadcast after the last round carries the final model and the word that ends the loop; nothing else ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedmpi.aggregation.optimizers import ServerOptimizer
from fedmpi.comm import Communicator
from fedmpi.engine import sampling
from fedmpi.engine.checks import check_figures
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.divergence import Watch
from fedmpi.engine.evaluate import Evaluator
from fedmpi.engine.exchange import Exchange
from fedmpi.engine.faults import Guard
from fedmpi.engine.local_client import LocalClient
from fedmpi.engine.server import FederationServer, Rule, ServerView
from fedmpi.engine.worker import Worker
from fedmpi.method.base import overrides
from fedmpi.method.context import Uploads

GO, DONE, STOPPED, ABANDONED = 0.0, 1.0, 2.0, 3.0  # rank 0's word at the start of a round
UNDO = 4.0  # added to the word: whose round is undone follows
LATER = ("loss", "sent_bytes", "received_bytes", "evaluate_s")  # what a round's line gets after its step


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know of the settings."""

    rounds: int
    seed: int
    learning_rate: Callable[[int], float]  # round -> eta_t
    fraction: float = 1.0
    placement: str = "balanced"  # balanced | pinned
    weighting: str = "samples"  # samples | uniform
    server_trains: bool = False
    every: int = 1
    protocol: Sequence[str] = ("global",)
    eval_batch: int = 100
    max_norm: float | str | None = "auto"  # of an update; "auto", a number, or no bound
    drop: bool = False  # do without bad uploads, rather than end the run


@dataclass
class Sink:
    """Where results go, at rank 0; and, on every rank, the state when a round t is over: keep(fed, t, line, last)."""

    round: Callable[[dict[str, Any]], None] = field(default=lambda row: None)
    clients: Callable[[list[dict[str, Any]]], None] = field(default=lambda rows: None)
    keep: Callable[[Federation, int, dict[str, Any] | None, bool], None] = field(default=lambda *_: None)


class Federation:
    """One experiment on one rank. `run` is the whole of it; `server` is rank 0's alone, and holds the global model."""

    def __init__(
        self,
        plan: Plan,
        comm: Communicator,
        worker: Worker,
        optimizer: ServerOptimizer,
        rule: Rule | None = None,
        sink: Sink | None = None,
    ) -> None:
        """rule: in place of the method's own direction."""
        self.plan, self.comm, self.worker, self.data, self.sink = plan, comm, worker, worker.data, sink or Sink()
        self.ranks = list(range(0 if comm.size == 1 or plan.server_trains else 1, comm.size))  # those that train
        self.states = ClientStates(comm, worker, self.ranks)
        self.exchange = Exchange(comm, worker.messages, worker.model.w)
        self.evaluator = Evaluator(self.states, plan.protocol, plan.eval_batch)
        self.first = 0  # the round to begin with
        self.line: dict[str, Any] | None = None  # that of the round before it, if any
        self.server: FederationServer | None = None
        if comm.rank == 0:
            view = ServerView(self.data, optimizer.lr, plan.rounds, plan.seed)
            storage, initial = self.exchange.model_storage(), (worker.model.w, worker.model.b)
            self.server = FederationServer(worker.messages, storage, initial, optimizer, view, rule)
        self.guard, self.refused = Guard(plan.max_norm, plan.drop), list[int]()  # rank 0's
        self.watch = self._watch()
        self.undoes = plan.drop and worker.messages.client_state.size > 0

    # ---- the loop ----
    def run(self) -> str:
        """All rounds; returns why it ended: "finished" or "stopped"."""
        line = self.line
        for t in range(self.first, self.plan.rounds + 1):
            began, counted = time.perf_counter(), self._bytes()
            word = self._settled(t, self.exchange.announce(self._word(t, line), self.server))
            announced = self._bytes(counted)
            if t > self.first and word != ABANDONED:
                self.sink.keep(self, t - 1, line, word != GO)
            if t and word != ABANDONED:
                # The other ranks train round t meanwhile. Who was told to stop has moments, not minutes: the model is
                # written, not evaluated.
                due = word == DONE or (word == GO and t % self.plan.every == 0)
                self.report(t - 1, line, due=due, last=word == DONE)
            if word != GO:
                return "finished" if word == DONE else "stopped"
            counted = self._bytes()
            line = self.round(t, began)
            if line is not None:
                sent, received = (a + b for a, b in zip(announced, self._bytes(counted), strict=True))
                line |= {"sent_bytes": sent, "received_bytes": received}
        raise AssertionError("unreachable: the last announcement ends the loop")

    def _word(self, t: int, line: dict[str, Any] | None) -> float:
        """What rank 0 says at the start of round t; `line` is that of the round before, None where it was abandoned."""
        if self.server is not None and t > self.first and line is None:
            return ABANDONED
        word = DONE if t == self.plan.rounds else STOPPED if self.worker.stop() else GO
        return word + UNDO if self.undoes and self.refused else word

    def _settled(self, t: int, word: float) -> float:
        """The word itself. What clients keep of round t - 1 stands, or is undone where their upload was refused."""
        undone: list[int] = []
        if word >= UNDO:
            members = self._cohort(t - 1)
            told = torch.tensor([float(k in self.refused) for k in members], device=self.comm.device)
            self.comm.broadcast(told)
            undone = [k for k, bad in zip(members, told.tolist(), strict=True) if bad]
        self.states.settle(undone)
        return word % UNDO

    def memory(self, line: dict[str, Any] | None) -> dict[str, Any]:
        """What rank 0 needs, beside the server's tensors, to go on after a round with this line."""
        return {"line": line, "guard": self.guard.memory(), "watch": self.watch.memory()}

    def go_on(self, t: int, memory: Mapping[str, Any] | None, server: Mapping[str, Tensor] | None) -> None:
        """Begin after round t. memory, server (its snapshot): rank 0's; client states are on the shelf."""
        self.first = t + 1
        for earlier in range(t + 1):
            self.exchange.versions.count(earlier, self._cohort(earlier))
        self.states.trained, self.states.shelved_to = self.last_rounds(t), t
        if self.server is not None and memory and server:
            self.line = memory["line"]
            self.guard.recall(memory["guard"])
            self.watch.recall(memory["watch"])
            self.server.restore(server)

    def last_rounds(self, t: int) -> dict[int, int]:
        """client -> the last of the rounds 0..t that it takes part in."""
        return {client: earlier for earlier in range(t + 1) for client in self._cohort(earlier)}

    def _cohort(self, t: int) -> list[int]:
        return sampling.cohort(self.plan.seed, t, self.data.clients, self.plan.fraction)

    def _bytes(self, since: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        return self.comm.sent_bytes - since[0], self.comm.received_bytes - since[1]

    # ---- a round ----
    def round(self, t: int, began: float) -> dict[str, Any] | None:
        """Round t, announced at `began`; at the root its line of metrics, None where it was abandoned or elsewhere."""
        members = self._cohort(t)
        where = self.place(members)
        self.states.move(where)
        downloads = self.exchange.deliver(t, members, where, self.server)
        rows = self._train(t, members, where, downloads)
        trained = time.perf_counter()
        self.comm.about = t, tuple(self.worker.messages.upload(t).packing.shapes)
        self.exchange.gather(rows, members, where)
        arrived = time.perf_counter()
        self.exchange.close_round(t)
        self.states.took_part(t, members)
        if self.server is None:
            return None
        upload = self.worker.messages.upload(t)
        sent = upload.packing.views(rows)
        if bool(sent._stop.any()):
            return None
        train_s = _busiest(where, members, sent._seconds.tolist())
        refused = self.guard.refused(t, members, rows, upload, upload.w.take(self.server.w))
        self.refused = [each["client"] for each in refused]
        loss, figures = self._step(t, members, rows)
        line = {
            "round": t,
            "train_loss": loss,
            "cohort": list(members),
            "refused": refused,
            **self.exchange.versions.count(t, members),
            "wall_s": time.perf_counter() - began,
            "train_s": train_s,
            "wait_s": arrived - trained,
            "server_s": time.perf_counter() - arrived,
            "sha256": self.worker.model.layout.sha256(self.server.w),
        }
        check_figures(self.worker.method, figures, (*line, *LATER, *self.worker.task.names), f"round {t}")
        return line | figures

    def _step(self, t: int, members: Sequence[int], rows: Tensor) -> tuple[float, dict[str, float]]:
        """The server's step with the uploads that count: mean loss of training, and the method's own figures.

        rows: those that count close up, in place. Where none counts nothing changes.
        """
        assert self.server is not None
        good = [k for k in members if k not in self.refused]
        if not good:
            return float("nan"), {}
        if self.refused:
            for place, k in enumerate(good):
                rows[place] = rows[members.index(k)]
        rows, upload = rows[: len(good)], self.worker.messages.upload(t)
        sent = upload.packing.views(rows)
        up = Uploads(good, *self.weights(good), sent)
        figures = self.server.step(t, self.plan.learning_rate(t), up, upload, rows)
        return float(up.p @ sent._loss.double().cpu()), figures

    def place(self, members: Sequence[int]) -> dict[int, int]:
        """client -> rank that trains it in this round."""
        if self.plan.placement == "pinned":
            return sampling.pinned(members, self.ranks)
        return sampling.balanced(members, [float(self.data.train_sizes[k]) for k in members], self.ranks)

    def _train(
        self, t: int, members: Sequence[int], where: Mapping[int, int], downloads: Mapping[int, Tensor]
    ) -> Tensor:
        """This rank's clients train. Returns their uploads (m, row); at the root with places for all members."""
        here = [client for client in members if self.server is not None or where[client] == self.comm.rank]
        rows = self.exchange.rows(t, len(here))
        for client, row in zip(here, rows, strict=True):
            if where[client] == self.comm.rank:
                if self.undoes:
                    self.states.remember(client)
                self.client(client, t, downloads[client]).take_part(row)
                self.states.took_part(t, [client])  # before another client needs the memory of its row
        return rows

    def client(self, client: int, t: int, download: Tensor) -> LocalClient:
        """A client in round t with what it received."""
        return self.states.view(client, t, self.plan.learning_rate(t), self.exchange.inbox, download)

    def weights(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Training samples n_k and weights p_k of a cohort, (m,) float64 each."""
        n = torch.tensor([float(self.data.train_sizes[k]) for k in members], dtype=torch.float64)
        return n, n / n.sum() if self.plan.weighting == "samples" else torch.full_like(n, 1 / len(n))

    # ---- evaluation ----
    def report(self, t: int, line: dict[str, Any] | None, *, due: bool, last: bool) -> None:
        """Evaluate round t and hand its line on. Every rank takes part where clients evaluate."""
        began = time.perf_counter()
        figures: dict[str, float] = {}
        if due and (self.server is not None or self.evaluator.asks_clients):
            downloads = self._evaluation_downloads(t) if self.evaluator.asks_clients else {}
            model = None if self.server is None else (self.server.w, self.server.b)
            lr = self.plan.learning_rate(min(t + 1, max(self.plan.rounds - 1, 0)))
            figures, lines = self.evaluator(t, lr, model, self.exchange.inbox, downloads, last=last)
            self.sink.clients(lines)
        if line is None:
            return
        first = {"round": t, **{n: figures[n] for n in ("loss", *self.worker.task.names) if n in figures}}
        row = {**first, **line, **figures, "evaluate_s": time.perf_counter() - began}
        since = self.watch.see(row, last)
        self.sink.round(row if since is None else {**row, "diverged": since})

    def _watch(self) -> Watch:
        """A global model of which parts stay with the clients is nobody's: there the personal ones are looked at."""
        plan, data, task = self.plan, self.data, self.worker.task
        whole = self.worker.messages.shared.whole
        looked = [p for p in plan.protocol if not p.startswith("ft(") and (whole or p == "personal")]
        names = [f"{p}_loss" if p != "global" else "loss" for p in looked] if data.test_sizes.any() else []
        return Watch(data.classes if getattr(task, "classification", False) else None, next(iter(names), None))

    def _evaluation_downloads(self, t: int) -> dict[int, Tensor]:
        """What differs from client to client goes to all of them where the method's evaluation may look at it."""
        method = self.worker.method
        if any(overrides(method, hook) for hook in ("weights", "predict", "tune")):
            return self.exchange.deliver(t, range(self.data.clients), self.states.owner, self.server)
        return dict.fromkeys(range(self.data.clients), self.exchange.no_download())


def _busiest(where: Mapping[int, int], members: Sequence[int], seconds: Sequence[float]) -> float:
    """Training seconds of the rank that trained longest."""
    busy: dict[int, float] = {}
    for client, each in zip(members, seconds, strict=True):
        busy[where[client]] = busy.get(where[client], 0.0) + each
    return max(busy.values())
