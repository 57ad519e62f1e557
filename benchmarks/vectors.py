"""What moving and adding vectors costs: fedmpi's whole round against a hand-written loop.

A model that is one vector of 25.6 M parameters, trivial training (one step on one sample whose gradient is a constant),
8 clients. By hand:
    python benchmarks/vectors.py                copy w into the model, take the same step, keep the difference; add the
                                                rows to w
    mpirun -n 3 python benchmarks/vectors.py    the same over ranks: broadcast, clients, point-to-point to rank 0, sum
                                                (torch.distributed)
Both forms add in float32 by hand, in float64 in fedmpi. The two run in turn in one process; medians and their ratio.
Then the server alone: FedLD's rule against the weighted mean of the same 12 rows.
"""

import argparse
import os
import socket
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from fedmpi.aggregation import principal
from fedmpi.comm import connect, detect
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.engine.federation import GO
from fedmpi.flat import linear
from fedmpi.runtime import build

CLIENTS = 8


class Vector(nn.Module):
    """d parameters; the loss is <w, 1> / d, so that a step costs one pass over w."""

    def __init__(self, d):
        super().__init__()
        self.v = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return self.v.mean() * x.new_ones(len(x), 1)


class Task:
    names = ("zero",)

    def __init__(self, classes):
        pass

    def loss(self, model, x, y):
        return model(x).mean()

    def metrics(self, outputs, y):
        return {"zero": 0.0}


def ours(d, rounds, comm):
    s = Settings.model_validate(
        {
            "rounds": rounds,
            "data": {"source": "x", "partition": {"scheme": "iid", "clients": CLIENTS}},
            "model": {"name": f"{__file__}:Vector"},
            "method": {"name": "fedavg"},
            "task": {"name": f"{__file__}:Task"},
            "train": {"batch_size": "full", "lr": 0.1, "momentum": 0.0},
            "evaluate": {"every": 10**6},
        }
    )
    x, y = torch.zeros(CLIENTS, 1), torch.zeros(CLIENTS)
    data = split(Dataset(x, y, x[:1], y[:1], classes=1), "iid", CLIENTS, 0, "global")
    build.make_module, made_module = (lambda *_: Vector(d)), build.make_module
    try:
        made = build.experiment(s, data, torch.device("cpu"))
    finally:
        build.make_module = made_module
    return build.federation(made, comm, lambda: False)


def by_hand(model, w, rows, rank, size, comm_w):
    """One round; `rows` (clients, d) at rank 0, (own clients, d) elsewhere."""
    if size > 1:
        dist.broadcast(comm_w, 0)
    mine = range(CLIENTS) if size == 1 else range(rank - 1, CLIENTS, size - 1) if rank else ()
    p = model.v
    for i, k in enumerate(mine):
        with torch.no_grad():
            p.copy_(comm_w)
        p.grad = None
        model(torch.zeros(1, 1)).mean().backward()
        with torch.no_grad():
            torch._fused_sgd_(
                [p], [p.grad], [], lr=0.1, momentum=0.0, weight_decay=0.0, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=False,
            )  # fmt: skip
        torch.sub(p.detach(), comm_w, out=rows[k if size == 1 else i])
    if size > 1 and rank == 0:
        for work in [dist.irecv(rows[k], 1 + k % (size - 1)) for k in range(CLIENTS)]:
            work.wait()
    elif size > 1:
        for work in [dist.isend(rows[i], 0) for i in range(len(mine))]:
            work.wait()
    if rank == 0:
        for row in rows:
            comm_w.add_(row, alpha=1 / CLIENTS)


def group_by_hand(comm):
    """torch's default process group, which the hand-written loop uses; fedmpi has one of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    port = comm.allgather_bytes(port.encode(), 60)[0].decode()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size)


def rounds_of(d, repeats):
    job = detect(os.environ)
    comm = connect(job, "gloo" if job.size > 1 else "auto")
    if job.size > 1:
        group_by_hand(comm)
    fed = ours(d, repeats, comm)
    model, w = Vector(d), torch.zeros(d)
    held = CLIENTS if comm.rank == 0 else len(range(comm.rank - 1, CLIENTS, comm.size - 1))
    rows = torch.empty(held, d)
    fedmpi_s, hand_s = [], []
    for t in range(repeats):
        began = time.perf_counter()
        fed.exchange.announce(GO, fed.server)
        fed.round(t, began)
        fedmpi_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        by_hand(model, w, rows, comm.rank, comm.size, w)
        hand_s.append(time.perf_counter() - began)
    if comm.rank == 0:
        ratio = median(fedmpi_s[1:]) / median(hand_s[1:])
        print(
            f"{comm.size} rank(s), {d:,} parameters, {CLIENTS} clients: fedmpi {median(fedmpi_s[1:]):.3f} s  "
            f"by hand {median(hand_s[1:]):.3f} s  ratio {ratio:.2f}"
        )
    comm.close()
    return comm.rank


def server(d, m=12, repeats=5):
    rows, p = torch.randn(m, d), torch.full((m,), 1 / m, dtype=torch.float64)
    means, principals = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        linear.combine(rows, p)
        means.append(time.perf_counter() - began)
        began = time.perf_counter()
        principal.principal_mean(rows, p)
        principals.append(time.perf_counter() - began)
    a, b = median(principals[1:]), median(means[1:])
    print(f"server, m={m}, d={d:,}: FedLD's rule {a:.3f} s  weighted mean {b:.3f} s  ratio {a / b:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=25_600_000)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if rounds_of(arguments.d, arguments.repeats) == 0:
        server(arguments.d)
