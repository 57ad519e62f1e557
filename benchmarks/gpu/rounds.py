"""Compare a round on a device with a loop by hand.

    python benchmarks/gpu/rounds.py [cnn cifar10 packed profile]

cnn       100 clients of 600 grey 28x28 images, 10 per round, the 1.66 M-parameter CNN, batch 50, one local epoch,
          momentum 0.9; the global model is evaluated on 10,000 images
cifar10   pfl-research's configuration (its benchmarks/image_classification/configs/baseline.yaml): 1,000 users of 50
          colour 32x32 images, cohort 50, two 3x3 convolutions, pooling, dropout, 128 units, 1.63 M parameters, batch
          10, one local epoch, SGD without momentum, uniform weights; no evaluation
packed    1,000 clients of 30 images, 100 per round, softmax regression, batches of 10: fedmpi with
          compute.clients_per_pass: 32 compared with fedmpi training one client after another
profile   only if named: ten steps of one client of the CNN by operation, and how often the host waited for the device
The loop by hand, for each client: copy w into the model, make the steps with torch's fused kernel on the model's own
parameters, add the difference to a sum. All images are on the device. Both run in turn in one process; results are
medians and their ratio. The images are random, since their content does not affect speed. Memory is torch's peak on the
GPU during fedmpi's round.
"""

import argparse
import math
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine import images, settings
from measure import print_result, run_in_turn
from vectors import run_one_round

from fedmpi.comm.base import SingleProcess
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime import build, build_model

LR = 0.1
PROFILED = {  # name of a count -> beginnings of the names of operations in the profile that it counts
    "kernel launches": ("cudaLaunchKernel", "cuLaunchKernel"),
    "graph launches": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpy",),
    "waits of the host for the device": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "values that Python read": ("aten::_local_scalar_dense",),
}


def simple_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return the model of pfl-research's benchmarks."""
    flat = 64 * math.prod((side - 4) // 2 for side in input_shape[1:])
    layers = [nn.Conv2d(input_shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Dropout(0.25), nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(128, classes))


def cnn(rounds, share):
    """Return the settings and data of the task cnn, with 1/share of its images."""
    return settings(rounds, True), split(images(100, 600 // share, 10_000 // share), "iid", 100, 0, "global")


def cifar10(rounds, share):
    """Return the settings and data of the task cifar10, with 1/share of its clients."""
    clients = 1000 // share
    g = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(clients * 50 + 100, 3, 32, 32, generator=g),
        torch.randint(10, (clients * 50 + 100,), generator=g),
    )
    data = Dataset(x[:-100], y[:-100], x[-100:], y[-100:], classes=10)
    tree = {
        "rounds": rounds,
        "data": {"source": "benchmark", "partition": {"scheme": "iid", "clients": clients}},
        "model": {"name": f"{Path(__file__).resolve()}:simple_cnn"},
        "method": {"name": "fedavg"},
        "train": {"batch_size": 10, "lr": LR, "momentum": 0.0},
        "cohort": {"fraction": 50 / 1000, "weighting": "uniform"},
        "evaluate": {"every": 10**6},
    }
    return Settings.model_validate(tree), split(data, "iid", clients, 0, "global")


class HandWrittenLoop:
    """A minimal loop that does the same work on the model's own parameters and gradients."""

    def __init__(self, s, module, data, evaluates):
        self.module, self.data, self.evaluates = module, data, evaluates
        self.batch, self.momentum, self.lr = s.train.batch_size, s.train.momentum, s.train.lr
        self.p = list(module.parameters())
        self.w = [p.detach().clone() for p in self.p]

    def round(self, members):
        total = [torch.zeros_like(w) for w in self.w]
        self.module.train()
        for k in members:
            self.client(self.data.train[k])
            torch._foreach_add_(total, torch._foreach_sub(self.p, self.w))
        torch._foreach_add_(self.w, total, alpha=1 / len(members))
        if self.evaluates:
            self.test()

    @torch.no_grad()
    def client(self, shard):
        torch._foreach_copy_(self.p, self.w)
        v = [torch.empty_like(w) for w in self.w] if self.momentum else []
        order = shard.index[torch.randperm(len(shard))].to(shard.x.device)
        for at in range(0, len(order), self.batch):
            rows = order[at : at + self.batch]
            with torch.enable_grad():
                loss = cross_entropy(self.module(shard.x[rows]), shard.y[rows])
                grads = list(torch.autograd.grad(loss, self.p))
            torch._fused_sgd_(
                self.p, grads, v, lr=self.lr, momentum=self.momentum, weight_decay=0.0, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=at == 0,
            )  # fmt: skip

    @torch.inference_mode()
    def test(self):
        torch._foreach_copy_(self.p, self.w)
        self.module.eval()
        test, correct = self.data.global_test, 0
        for at in range(0, len(test), 100):
            correct += (self.module(test.x[at : at + 100]).argmax(1) == test.y[at : at + 100]).sum()
        return int(correct)


def wait_for_device(device):
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(name, device, rounds, share):
    """Run rounds of fedmpi and of the loop by hand in turn, and print the comparison."""
    s, data = {"cnn": cnn, "cifar10": cifar10}[name](rounds + 1, share)
    experiment = build.make_experiment(s, data, device)
    module = build_model.make_module(s, data.input_shape, data.classes).to(device, memory_format=torch.channels_last)
    hand = HandWrittenLoop(s, module, experiment.data, evaluates=s.evaluate.every == 1)
    fed = build.make_federation(experiment, SingleProcess(device), lambda: False)
    ours, theirs, peaks, mark = [], [], [], [time.perf_counter()]

    def between(row):
        wait_for_device(device)
        ours.append(time.perf_counter() - mark[0])
        if device.type == "cuda":
            peaks.append(torch.cuda.max_memory_allocated(device))
        began = time.perf_counter()
        hand.round(row["cohort"])
        wait_for_device(device)
        mark[0] = time.perf_counter()
        theirs.append(mark[0] - began)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    fed.reporter.callbacks.record_round = between
    fed.run()
    note = (
        f"peak {max(peaks[1:] or peaks) / 2**20:.0f} MiB on the GPU" if peaks else f"on the CPU, 1/{share} of the task"
    )
    what = f"{name}, {len(experiment.data.train)} clients, {len(fed.scheduler.cohort(0))} a round"
    print_result(what, ("fedmpi", median(ours[1:])), ("by hand", median(theirs[1:])), note=note)


def packed(device, rounds, share):
    """Compare training 32 clients at once with training them one by one."""
    clients, sides = 1000 // share, {}
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(clients * 30, 1, 28, 28, generator=g), torch.randint(10, (clients * 30,), generator=g)
    data = split(Dataset(x, y, x[:100], y[:100], classes=10), "iid", clients, 0, "global")
    for clients_per_pass in (32, 1):
        tree = settings(rounds + 1, True, "logistic", clients).model_dump(mode="json")
        tree["compute"]["clients_per_pass"], tree["train"]["batch_size"], tree["train"]["momentum"] = (
            clients_per_pass,
            10,
            0.0,
        )
        experiment = build.make_experiment(Settings.model_validate(tree), data, device)
        fed, t = build.make_federation(experiment, SingleProcess(device), lambda: False), count()
        sides[clients_per_pass] = partial(
            lambda fed, t: (run_one_round(fed, next(t)), wait_for_device(device))[1], fed, t
        )
    seconds = run_in_turn(sides, rounds + 1)
    print_result(
        f"packed, {clients} clients, {clients // 10} a round", ("32 at once", seconds[32]), ("one by one", seconds[1])
    )


def profile(device):
    """Profile ten training steps, and print the time by operation and the waits of the host."""
    experiment = build.make_experiment(
        settings(2, True, clients=1, fraction=1.0), split(images(1, 500, 100), "iid", 1, 0), device
    )
    fed = build.make_federation(experiment, SingleProcess(device), lambda: False)
    run_one_round(fed, 0)
    wait_for_device(device)
    with torch.profiler.profile() as results:
        run_one_round(fed, 1)
        wait_for_device(device)
    events = results.key_averages()
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(events.table(sort_by=by, row_limit=20, max_name_column_width=48))
    for what, keys in PROFILED.items():
        print(f"{what}: {sum(each.count for each in events if each.key.startswith(keys))}")


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["cnn", "cifar10", "packed"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--share", type=int, default=1, help="1/share of the images, and of cifar10's clients")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        if name == "profile":
            profile(torch.device(args.device))
        elif name == "packed":
            packed(torch.device(args.device), args.rounds, args.share)
        else:
            compare(name, torch.device(args.device), args.rounds, args.share)


if __name__ == "__main__":
    main()
