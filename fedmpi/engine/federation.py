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
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmpi.aggregation.optimizers import ServerOptimizer
from fedmpi.comm import Communicator, Lost
from fedmpi.engine import sampling
from fedmpi.engine.checks import check_figures
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.faults import recovery
from fedmpi.engine.faults.uploads import Guard
from fedmpi.engine.local.client import LocalClient
from fedmpi.engine.messages import FAILED, STOP
from fedmpi.engine.packed import together
from fedmpi.engine.plan import Begun, Order, Plan, Sink, Word
from fedmpi.engine.probes.probes import Probes
from fedmpi.engine.reporting import Reporter
from fedmpi.engine.sampling import Roster
from fedmpi.engine.server import FederationServer, Rule, ServerView
from fedmpi.engine.timeline import Timeline
from fedmpi.engine.travel import words
from fedmpi.engine.travel.exchange import Exchange
from fedmpi.engine.travel.gathering import Gathering, Received
from fedmpi.engine.worker import Worker


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
        self.roster = Roster(plan, self.data, comm, self.ranks)
        self.states = ClientStates(comm, worker, self.ranks)
        self.careful = plan.on_lost != "abort"
        how = {"sums": plan.adds_up, "keep": self.careful, "reduce": plan.reduce}
        self.exchange = Exchange(comm, worker.messages, worker.model.w, plan.sharded, **how)
        self.first = 0  # the round to begin with
        self.line: dict[str, Any] | None = None  # that of the round before, if any
        self.at = -1  # the round in which this rank is
        self.server: FederationServer | None = None
        if comm.rank == 0:
            places, initial = self.exchange.model_storage(), (worker.model.w, worker.model.b)
            made = (places, initial, optimizer, ServerView(self.data, optimizer.lr, plan.rounds, plan.seed), rule)
            self.server = FederationServer(worker.messages, *made, self.exchange.held(), plan.best, plan.updates)
            if comm.rank not in self.ranks and self.server.w.device == worker.model.w.device:
                worker.model.move_into(self.server.w)  # which it evaluates; no client will be loaded into it
        self.guard, self.refused = Guard(plan.max_norm, plan.drop, plan.clip), list[int]()  # rank 0's
        self.report = Reporter(plan, self.states, self.exchange, self.server, self.sink)
        self.probes = Probes(self, plan.probes)
        self.undoes = (plan.undo or self.careful) and worker.messages.client_state.size > 0
        self.states.careful, self.sites = self.careful, self.data.global_test is None
        self.alive = list(comm.alive)  # rank 0's: as it last knew
        self.begun, self.before = Begun(), dict[str, Any]()
        self.longest_s, self.timeline = 0.0, Timeline()  # a round's

    # ---- the loop ----
    def run(self) -> str:
        """All rounds; returns why it ended: "finished", "stopped", "apart" or "enough"."""
        try:
            return self._rounds()
        finally:
            self.timeline.end()

    def _rounds(self) -> str:
        t, self.at = self.first, self.first - 1
        while True:
            try:
                if ended := self._turn(t):
                    return ended
                t += 1
                continue
            except Lost as error:
                if not self.careful:
                    raise
                why = str(error)
            # Nothing holds the error here: with its last reference the sockets of a broken group close.
            t, self.exchange.fresh = recovery.recover(self, why), True
            self.timeline.lap("recover")

    def _turn(self, t: int) -> str | None:
        """Round t; why the run has ended, if it has. It may begin once more where it was cut by a loss."""
        began, counted = time.perf_counter(), self._bytes()
        self.timeline.begin(t)
        order = self._announced(t)
        announced = self._bytes(counted)
        self._conclude(t, order.word)
        if order.word is not Word.GO:
            return words.end(self, order.word)
        if self.plan.replay:
            recovery.replay(self, t, evaluated=True)
        began, counted = began if self.server is None else self.begun.began, self._bytes()
        self.roster.consider(t + 1)
        line = self.round(t, began)
        if line is not None:
            sent, received = (a + b for a, b in zip(announced, self._bytes(counted), strict=True))
            line |= {"sent_bytes": sent, "received_bytes": received}
        self.line = line
        if self.careful:
            recovery.lasted(self, time.perf_counter() - began)
        return None

    def _announced(self, t: int) -> Order:
        """Rank 0's order and the model have come, and the round before is settled."""
        said, lap = Order(Word.GO), self.timeline.lap
        if self.server is not None:
            self.begin(t)
            if self.begun.order is None:
                self.begun.order, self.begun.refused = words.order(self, t), self.refused
            said = self.begun.order
        if t > self.first:
            self.exchange.close_round(t - 1)
        moves = said.word is not Word.ABANDONED
        order = Order.of(self.exchange.announce(said.number, self.server, t, moves))
        lap("word" if self.server is None else "announce")
        self.timeline.tell()
        self.begin(t)
        words.heed(self, t, order)
        lap("settle")
        return order

    def _conclude(self, t: int, word: Word) -> None:
        """Hash, keep and report the round before. The other ranks train round t meanwhile."""
        began, now, lap = time.perf_counter(), self.begun, self.timeline.lap
        if self.server is not None and self.line and "sha256" not in self.line:
            self.line["sha256"] = self.worker.model.layout.sha256(self.server.w)
            lap("hash")
        if not now.kept:
            self._keep(t, word)
        now.kept = True
        lap("checkpoint")
        if not now.reported and self.report.before(t, word, self.line, now.began):
            self.roster.evaluated(time.perf_counter() - began)
        now.reported = True
        lap("evaluate")

    def _keep(self, t: int, word: Word) -> None:
        """Hand out the state of the last complete round."""
        if t > self.first and word is not Word.ABANDONED:
            self.before = self.memory()
            self.sink.keep(self, t - 1, self.before, word is not Word.GO)
        elif t > self.first + 1:
            self.sink.keep(self, t - 2, self.before, True)

    def begin(self, t: int) -> None:
        """This rank is in round t, and the one before is over: rank 0 says so, who has sent its uploads cannot know."""
        if self.at == t:
            return
        if self.at >= self.first:
            self.states.took_part(self.at, self.roster.cohort(self.at))
            self.states.close()
        self.at, self.begun = t, Begun()

    def memory(self) -> dict[str, Any]:
        """What rank 0 needs, beside the server's tensors, to go on after the round of this line."""
        guard, pace = self.guard.memory(), self.roster.memory()
        return {"line": self.line, "guard": guard, "pace": pace, **self.report.memory()}

    def go_on(self, t: int, memory: Mapping[str, Any] | None, server: Mapping[str, Tensor] | None) -> None:
        """Begin after round t. memory, server (its snapshot): rank 0's; client states are on the shelf."""
        self.first = self.exchange.told = t + 1
        for earlier in range(t + 1):
            self.exchange.versions.count(earlier, self.roster.cohort(earlier))
        self.states.trained, self.states.shelved_to = self.roster.last_rounds(t), t
        if self.server is not None and memory and server:
            self.line = memory["line"]
            self.guard.recall(memory["guard"])
            self.roster.recall(memory.get("pace"))  # which earlier versions did not keep
            self.server.restore(server)
            self.report.recall(memory)

    def _bytes(self, since: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        return self.comm.sent_bytes - since[0], self.comm.received_bytes - since[1]

    # ---- a round ----
    def round(self, t: int, began: float) -> dict[str, Any] | None:
        """Round t, announced at `began`; at the root its line of metrics, None where it was abandoned or elsewhere."""
        members, where = self.roster.cohort(t), self.roster.placed(t)
        self.states.move(where)
        self.timeline.lap("move")
        downloads = self.exchange.deliver(t, members, where, self.server)
        self.timeline.lap("download")
        self.probes.train(t, members, where, downloads)
        self.timeline.lap("analyse")
        gathering = self.exchange.gathering(t, members, where, self.roster.weights(members)[1])
        heard = recovery.heard(self.comm, t, where) if self.careful or self.states.shelf is not None else lambda: None
        mine, many = [k for k in members if where[k] == self.comm.rank], self.states.at_once(self.worker.pack)
        with self.worker.chance():
            for at in range(0, len(mine), many):
                self._some(mine[at : at + many], t, downloads, gathering)
        trained, came, arrived = time.perf_counter(), gathering.finish(), time.perf_counter()
        heard()
        self.timeline.lap("uploads")
        line = None
        if came is not None and self.server is not None:
            line = self._stepped(t, members, where, came, (began, trained, arrived))
            came.release()
            self.timeline.lap("step")
        self.probes.measure(t, members, where)
        self.timeline.lap("analyse")
        return line

    def _stepped(
        self, t: int, members: Sequence[int], where: Mapping[int, int], came: Received, times: tuple[float, ...]
    ) -> dict[str, Any] | None:
        """What rank 0 makes of the uploads: round t's line. times: announced, trained, all uploads arrived."""
        assert self.server is not None
        (began, trained, arrived), sent, shared = times, came.small, self.worker.messages.upload(t).w
        if bool((sent._flag == STOP).any()):
            return None
        seconds, flags = sent._seconds.tolist(), sent._flag.tolist()
        failed = [k for k, flag in zip(members, flags, strict=True) if flag == FAILED]
        self.roster.saw(t, members, where, [0.0 if flag else s for s, flag in zip(seconds, flags, strict=True)])
        refused = self.guard.refused(t, members, came, shared.take(self.server.w), failed)
        self.refused = [each["client"] for each in refused]
        said, figures = self._step(t, members, came)
        line = {
            "round": t,
            **said,
            "cohort": list(members),
            "refused": refused,
            **({"lost": lost} if (lost := [k for k in self.roster.drawn(t) if k not in members]) else {}),
            **({"clipped": self.guard.clipped} if self.plan.clip else {}),
            **self.exchange.versions.count(t, members),
            "wall_s": time.perf_counter() - began,
            "train_s": sampling.busiest(where, members, seconds),
            "wait_s": arrived - trained,
            "server_s": time.perf_counter() - arrived,
        }
        check_figures(self.worker.method, figures, self.worker.task.names, f"round {t}")
        return line | figures

    def _step(self, t: int, members: Sequence[int], came: Received) -> tuple[dict[str, Any], dict[str, float]]:
        """The server's step with the uploads that count, if any: what it says of them, the method's own figures."""
        assert self.server is not None
        good = [k for k in members if k not in self.refused]
        if not good:
            return {"train_loss": float("nan")}, {}
        if self.refused:
            came.only([members.index(k) for k in good])
        up = came.uploads(good, *self.roster.weights(good))
        lr, upload = self.plan.learning_rate(t), self.worker.messages.upload(t)
        figures = self.server.step(t, lr, up, upload, came, self.guard.norms)
        return {**came.train_loss(up.p), **self.server.updates}, figures

    def _some(self, clients: Sequence[int], t: int, downloads: Mapping[int, Tensor], gathering: Gathering) -> None:
        """Train some clients together, and send their uploads; those that a loss has cut off once more."""
        made, lap, alone = self.begun.made, self.timeline.lap, len(clients) == 1
        for client in clients if self.undoes else ():
            self.states.remember(client)
        # Those of one group are trained together again, if any is: alone they would have other bits.
        new = clients if any(client not in made for client in clients) else []
        write = together.rounds([self.client(k, t, downloads[k]) for k in new], gathering.block)
        if not alone:  # a group is one lap
            lap("train", list(clients))
        for client in clients:
            row = gathering.row(client)
            if alone:
                lap("send")
            if client in made:
                upload, state = made[client]
                row.copy_(upload)
                if state is not None:
                    self.states.put(client, state)
            else:
                write[client](row)
                if alone:
                    lap("train", client)
            self.states.took_part(t, [client])  # before another client needs the memory of its row
            self.begun.uploads[client] = row
            gathering.done(client)
        lap("send")

    def client(self, client: int, t: int, download: Tensor) -> LocalClient:
        """A client in round t with what it received."""
        return self.states.view(client, t, self.plan.learning_rate(t), self.exchange.inbox, download)
