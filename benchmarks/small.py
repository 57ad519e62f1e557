"""Measure the cost of a client in runs with many clients and small models.

    python benchmarks/small.py

fedmpi trains clients one by one, and with compute.clients_per_pass: auto.

1,000 clients with 30 samples of 28x28 pixels, 100 per round, batches of 10, one local epoch (3 steps), SGD; softmax
regression and a multilayer perceptron. The loop by hand, for each client: copy w into the model, read all samples at
once, make the steps with torch's fused kernel on the model's own parameters, write the difference into a row; then
compute the weighted mean of the rows in float32. It has no checks, seeds, metrics or stored state. One process, one
thread, no evaluation. Results are milliseconds of processor time per client, measured in turn in one run: medians and
their ratios.
"""

import argparse
import time
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from fedmpi.comm.base import SingleProcess
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime import build, build_model
from fedmpi.runtime.device import keep_freed_memory

CLIENTS, COHORT, SAMPLES, BATCH, LR = 1000, 100, 30, 10, 0.05


def settings(model, rounds):
    """Return fedmpi's settings of the task."""
    return Settings.model_validate(
        {
            "rounds": rounds,
            "data": {"source": "benchmark", "partition": {"scheme": "iid", "clients": CLIENTS}},
            "model": model,
            "method": {"name": "fedavg"},
            "train": {"batch_size": BATCH, "lr": LR, "momentum": 0.0},
            "cohort": {"fraction": COHORT / CLIENTS},
            "evaluate": {"protocol": ["global"], "every": 10**6},
            "compute": {"clients_per_pass": "auto"},
        }
    )


class HandWrittenLoop:
    """A minimal loop that does the same work; the parameters are views of one vector."""

    def __init__(self, module, data):
        self.module, self.data = module, data
        self.parameters = list(module.parameters())
        self.w = torch.cat([p.detach().flatten() for p in self.parameters])
        self.live = self.w.clone()
        self.rows = torch.empty(COHORT, len(self.w))
        at = 0
        for p in self.parameters:
            p.data = self.live[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.places = [p.detach() for p in self.parameters]  # the same memory, which can be written to without no_grad

    def round(self, members):
        parameters, sizes = self.parameters, [len(self.data.train[k]) for k in members]
        for row, k in zip(self.rows, members, strict=True):
            self.live.copy_(self.w)
            shard = self.data.train[k]
            order = shard.index.index_select(0, torch.randperm(len(shard)))
            x, y = shard.x.index_select(0, order), shard.y.index_select(0, order)
            for batch, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
                for p in parameters:
                    p.grad = None
                cross_entropy(self.module(batch), labels).backward()
                torch._fused_sgd_(
                    self.places, [p.grad for p in parameters], [], lr=LR, momentum=0.0, weight_decay=0.0,
                    dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
                )  # fmt: skip
            torch.sub(self.live, self.w, out=row)
        p = torch.tensor(sizes, dtype=torch.float32)
        self.w.add_((p / p.sum()) @ self.rows)


def compare(model, rounds):
    """Run rounds of fedmpi and of the loop by hand in turn, and print the comparison."""
    s = settings(model, 2 * rounds + 2)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES + 100, 1, 28, 28, generator=g)
    y = torch.randint(10, (len(x),), generator=g)
    n = CLIENTS * SAMPLES
    data = split(Dataset(x[:n], y[:n], x[n:], y[n:], classes=10), "iid", CLIENTS, 0, "global")
    experiment = build.make_experiment(s, data, torch.device("cpu"))
    hand = HandWrittenLoop(build_model.make_module(s, data.input_shape, data.classes), experiment.data)
    fed = build.make_federation(experiment, SingleProcess(torch.device("cpu")), lambda: False)
    times, mark = {"one": [], "packed": [], "hand": []}, [time.process_time()]

    def between(line):
        """Record the time of a round, run a round by hand, and switch packing, which only odd rounds use."""
        times["packed" if line["round"] % 2 else "one"].append(time.process_time() - mark[0])
        fed.trainer.clients_per_pass = 1 if line["round"] % 2 else experiment.clients_per_pass
        began = time.process_time()
        hand.round(line["cohort"])
        mark[0] = time.process_time()
        times["hand"].append(mark[0] - began)

    fed.reporter.callbacks.record_round, fed.trainer.clients_per_pass = between, 1
    fed.run()
    one, packed, bare = (1e3 * median(seconds[1:]) / COHORT for seconds in times.values())
    print(
        f"{model['name']:9} {len(hand.w):>8,} parameters   by hand {bare:.3f} ms   one by one {one:.3f} ms, "
        f"ratio {one / bare:.2f}   packed {packed:.3f} ms, {one / packed:.1f} times as fast"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # the setting of every run
    for model in ({"name": "logistic"}, {"name": "mlp"}):
        compare(model, arguments.rounds)
