"""Seconds of this machine: a client's round, evaluation, transfers. Measured on a few samples, in a second or two.

A client's round takes  a + b x,  x its samples (or steps, where train.steps is set): a and b come from rounds of two
sizes, REPEATS of each in turn, after one that nobody counts. The error is half the range of the repeats. Clients that
would be trained at once (compute.pack) are. What one thread computes is measured by its own clock, which stands still
while others use the core: login nodes are shared.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from fedmpi.common import seeds
from fedmpi.data.batches import PerClient, Shard
from fedmpi.engine.evaluate import evaluate
from fedmpi.engine.federation import Federation
from fedmpi.engine.packed import together
from fedmpi.engine.worker import Worker

REPEATS, ENOUGH_S, SHARE = 3, 1.5, 3  # seconds of one measured round; the small one's part of it
BATCHES = 10  # of evaluation
LOOPBACK = 1 << 25  # bytes


@dataclass(frozen=True)
class Client:
    """Seconds of a client's round: a + b x. error: relative. in_steps: whether x are steps, else samples."""

    a: float
    b: float
    error: float
    in_steps: bool

    def seconds(self, samples: int, steps: int | None) -> float:
        return self.a + self.b * ((steps or 0) if self.in_steps else samples)


def client(fed: Federation) -> Client:
    """The client with most samples, cut to fewer; where several are trained at once, those with most."""
    worker = fed.worker
    sizes = worker.data.train_sizes
    ordered = sorted(worker.data.train, key=lambda k: (-sizes[k], k))
    chosen = ordered[: fed.states.at_once(worker.pack)]
    steps, n = worker.recipe.steps, int(sizes[chosen[-1]])
    most = steps if steps is not None else n
    batch = 1 if steps is not None else min(worker.recipe.batch_size or n, n)
    unit = max(batch * worker.method.batches_a_step, 1)

    def once(x: int) -> float:
        return _round(fed, chosen, x) / len(chosen)

    once(min(unit, most))
    few = min(unit, most)
    each = once(few)
    many = min(most, max(int(ENOUGH_S / max(each / few, 1e-9)) // unit * unit, SHARE * unit))
    few = min(few if many <= SHARE * unit else many // SHARE // unit * unit, many)
    pairs = [(once(few), once(many)) for _ in range(REPEATS)]
    small, large = (median(pair[i] for pair in pairs) for i in range(2))
    b = max((large - small) / (many - few), 0.0) if many > few else large / many
    a = max(large - b * many, 0.0)
    larges = [pair[1] for pair in pairs]
    return Client(a, b, (max(larges) - min(larges)) / 2 / large, steps is not None)


def _round(fed: Federation, clients: Sequence[int], x: int) -> float:
    """Seconds of these clients' rounds with x samples, or steps, each; nothing of it is kept."""
    worker = fed.worker
    data, sizes, recipe = worker.data, worker.sizes, worker.recipe
    try:
        if recipe.steps is not None:
            worker.recipe = replace(recipe, steps=x)
        else:
            shards = {k: data.train[k] for k in clients}
            few = {k: Shard(shard.x, shard.y, shard.index[:x]) for k, shard in shards.items()}
            worker.data = replace(data, train=PerClient(data.clients, lambda k: few[k] if k in few else data.train[k]))
            worker.sizes = sizes.copy()
            worker.sizes[list(few)] = x
        row = worker.model.w.new_zeros(worker.messages.upload(0).packing.size)

        def trained() -> None:
            write = together.rounds([fed.client(k, 0, fed.transport.no_download()) for k in clients], lambda _: None)
            for k in clients:
                write[k](row)

        with seeds.restored():
            return _timed(trained, worker)
    finally:
        worker.data, worker.sizes, worker.recipe = data, sizes, recipe
        for k in clients:
            fed.states.rows.pop(k, None)


def evaluation(worker: Worker, batch_size: int, shard: Shard | None) -> float:
    """Seconds a sample; 0 where there is none."""
    if shard is None or not len(shard):
        return 0.0
    few = Shard(shard.x, shard.y, shard.index[: BATCHES * batch_size])
    found = [_timed(lambda: evaluate(worker, few, batch_size), worker) for _ in range(1 + REPEATS)]
    return median(found[1:]) / len(few)


def bandwidth() -> float:
    """Bytes a second from one thread to another through this host's network code."""
    server = socket.create_server(("127.0.0.1", 0))
    came = bytearray(LOOPBACK)

    def take() -> None:
        connection, _ = server.accept()
        with connection:
            at = 0
            while at < LOOPBACK and (got := connection.recv_into(memoryview(came)[at:])):
                at += got
            connection.send(b"x")

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    content = bytes(LOOPBACK)
    with server, socket.create_connection(server.getsockname()) as connection:

        def send() -> None:
            connection.sendall(content)
            connection.recv(1)

        seconds = _timed(send)
    thread.join()
    return LOOPBACK / seconds


def _timed(call: Callable[[], object], worker: Worker | None = None) -> float:
    """Seconds that it takes; on one thread of a CPU those of that thread, where a worker computes."""
    clock = time.perf_counter
    if worker is not None and not worker.model.w.is_cuda and torch.get_num_threads() == 1:
        clock = time.thread_time
    began = clock()
    call()
    if worker is not None and worker.model.w.is_cuda:  # which works on after the call
        torch.cuda.synchronize(worker.model.w.device)
    return clock() - began
