"""Measure the cost of sending and summing vectors: a complete round of fedmpi and a loop by hand.

The model is one vector of 25.6 M parameters, training is one step on one sample with a constant gradient, and there are
8 clients. The loop by hand:
    python benchmarks/vectors.py                copy w into the model, make the same step, store the difference; add the
                                                rows to w
    mpirun -n 3 python benchmarks/vectors.py    the same over ranks: broadcast, clients, point-to-point to rank 0, sum
                                                (torch.distributed)
The loop by hand sums in float32, fedmpi in float64. The two run in turn in one process; results are medians and their
ratio. Then the server alone: FedLD's rule is compared with the weighted mean of the same 12 rows.
"""

import argparse
import os
import socket
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from measure import print_result, run_in_turn
from torch import nn

from fedmpi.aggregation import rules
from fedmpi.comm import connect, detect
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.flat import linear
from fedmpi.runtime import build

CLIENTS = 8


class Vector(nn.Module):
    """A model of d parameters w with the loss <w, 1> / d, so that a step costs one pass over w."""

    def __init__(self, d):
        super().__init__()
        self.v = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return self.v.mean() * x.new_ones(len(x), 1)


def vector(input_shape: tuple[int, ...], classes: int, *, d: int) -> Vector:
    """Return the model of d parameters."""
    return Vector(d)


class Task:
    """A task whose loss pauses for `seconds`, as if another device made the step."""

    names = ("zero",)

    def __init__(self, classes: int, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def loss(self, model, x, y):
        time.sleep(self.seconds)
        return model(x).mean()

    def metrics(self, outputs, y):
        return {"zero": 0.0}


def make_vector_federation(d, rounds, comm, clients=CLIENTS, device="cpu", seconds=0.0, epochs=1, **server):
    """Build a federation of fedmpi for a model of d parameters, with one step per client and epoch."""
    here = str(Path(__file__).resolve())
    s = Settings.model_validate(
        {
            "rounds": rounds,
            "data": {"source": "x", "partition": {"scheme": "iid", "clients": clients}},
            "model": {"name": f"{here}:vector", "d": d},
            "method": {"name": "fedavg"},
            "task": {"name": f"{here}:Task", "seconds": seconds},
            "train": {"batch_size": "full", "lr": 0.1, "momentum": 0.0, "epochs": epochs},
            "server": server,
            "evaluate": {"every": 10**6},
        }
    )
    x, y = torch.zeros(clients, 1), torch.zeros(clients)
    data = split(Dataset(x, y, x[:1], y[:1], classes=1), "iid", clients, 0, "global")
    return build.make_federation(build.make_experiment(s, data, torch.device(device)), comm, lambda: False)


def run_one_round(fed, t):
    """Run round t on this rank, from the broadcast to the server's step."""
    fed.control.first_round = fed.reporter.reported_in = t  # the previous round is neither hashed nor evaluated
    fed.reporter.metrics_row = None
    fed.run_round(t)


def run_round_by_hand(model, rows, rank, size, comm_w):
    """Run one round by hand; `rows` is (clients, d) on rank 0, and (own clients, d) on other ranks."""
    if size > 1:
        dist.broadcast(comm_w, 0)
    mine = range(CLIENTS) if size == 1 else range(rank - 1, CLIENTS, size - 1) if rank else ()
    p = model.v
    for i, k in enumerate(mine):
        with torch.no_grad():
            p.copy_(comm_w)
        p.grad = None
        model(p.new_zeros(1, 1)).mean().backward()
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


def create_process_group(comm):
    """Create torch's default process group for the loop by hand; fedmpi has a group of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    port = comm.allgather_bytes(port.encode(), 60)[0].decode()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size)


def wait_for_device(device):
    """Wait until the device has finished all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def compare_rounds(d, repeats, device):
    """Run rounds of fedmpi and of the loop by hand in turn, print the results, and return the number of this rank."""
    job = detect(os.environ)
    if job.size > 1 and device != "cpu":
        raise SystemExit("--device goes with one process")
    comm = connect(job, "gloo" if job.size > 1 else "auto", torch.device(device))
    if job.size > 1:
        create_process_group(comm)
    fed = make_vector_federation(d, repeats, comm, device=device)
    model, w = Vector(d).to(device), torch.zeros(d, device=device)
    num_rows = CLIENTS if comm.rank == 0 else len(range(comm.rank - 1, CLIENTS, comm.size - 1))
    rows = torch.empty(num_rows, d, device=device)
    fedmpi_s, hand_s = [], []
    for t in range(repeats):
        began = time.perf_counter()
        run_one_round(fed, t)
        wait_for_device(device)
        fedmpi_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        run_round_by_hand(model, rows, comm.rank, comm.size, w)
        wait_for_device(device)
        hand_s.append(time.perf_counter() - began)
    if comm.rank == 0:
        peak = f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB on the GPU" if device == "cuda" else ""
        what = f"{comm.size} rank(s), {d:,} parameters, {CLIENTS} clients"
        print_result(what, ("fedmpi", median(fedmpi_s[1:])), ("by hand", median(hand_s[1:])), note=peak)
    comm.close()
    return comm.rank


def compare_server_rules(d, device, m=12, repeats=5):
    """Compare FedLD's rule with the weighted mean of the same rows."""
    rows, p = torch.randn(m, d, device=device), torch.full((m,), 1 / m, dtype=torch.float64)
    sides = {
        "mean": lambda: (linear.weighted_sum(rows, p), wait_for_device(device))[1],
        "principal": lambda: (
            linear.weighted_sum(rows, rules.principal_coefficients(linear.gram(rows), p)),
            wait_for_device(device),
        )[1],
    }
    seconds = run_in_turn(sides, repeats)
    what = f"server, m={m}, d={d:,}"
    print_result(what, ("FedLD's rule", seconds["principal"]), ("weighted mean", seconds["mean"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=25_600_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if compare_rounds(arguments.d, arguments.repeats, arguments.device) == 0:
        compare_server_rules(arguments.d, arguments.device)
