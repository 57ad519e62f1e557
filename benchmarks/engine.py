"""Measure the engine's overhead: a round of fedmpi and the same work by hand in PyTorch.

    python benchmarks/engine.py

100 clients, 10 per round, the 1.66 M-parameter CNN on 28x28 images, batch 50, 600 samples per client, one local epoch;
then the global model is evaluated on 10,000 test images in batches of 100. The images are random, since their content
does not influence the speed. The hand-written loop consists of forward and backward passes, torch's fused SGD step, a
running average and the evaluation. Both run on the same cores with one thread, in turn (fedmpi, bare, fedmpi, ...), in
the same memory format; the ratio is that of the medians.
"""

import argparse
import copy
import time
from statistics import median

import torch

from fedmpi.comm.base import SingleProcess
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime import build, build_model


def settings(rounds, channels_last, model="mcmahan_cnn", clients=100, fraction=0.1):
    """Return fedmpi's settings of the task."""
    return Settings.model_validate(
        {
            "rounds": rounds,
            "data": {"source": "benchmark", "partition": {"scheme": "iid", "clients": clients}},
            "model": {"name": model},
            "method": {"name": "fedavg"},
            "train": {"batch_size": 50, "lr": 0.01, "momentum": 0.9},
            "cohort": {"fraction": fraction},
            "compute": {"channels_last": channels_last},
        }
    )


def images(clients, samples, test):
    """Return a data set of random images, since their content does not affect speed."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients * samples + test, 1, 28, 28, generator=g)
    y = torch.randint(10, (len(x),), generator=g)
    n = clients * samples
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes=10)


def bare(module, data, members, channels_last):
    """Train one round by hand, starting from the module's weights, and return the seconds."""
    began = time.perf_counter()
    format_ = torch.channels_last if channels_last else torch.contiguous_format
    start = copy.deepcopy(module.state_dict())
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    for k in members:
        module.load_state_dict(start)
        module.train()
        optimiser = torch.optim.SGD(module.parameters(), 0.01, 0.9, fused=True)
        shard = data.train[k]
        order = shard.index[torch.randperm(len(shard))]
        for at in range(0, len(order), 50):
            rows = order[at : at + 50]
            x = shard.x[rows].contiguous(memory_format=format_)
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(module(x), shard.y[rows]).backward()
            optimiser.step()
        for name, value in module.state_dict().items():
            total[name].add_(value, alpha=1 / len(members))
    module.load_state_dict(total)
    module.eval()
    correct, loss = 0, 0.0
    test = data.global_test
    with torch.inference_mode():
        for at in range(0, len(test), 100):
            x = test.x[at : at + 100].contiguous(memory_format=format_)
            y = test.y[at : at + 100]
            f = module(x)
            loss += torch.nn.functional.cross_entropy(f, y).item() * len(y)
            correct += (f.argmax(1) == y).sum().item()
    return time.perf_counter() - began


def compare(rounds, channels_last, samples=600, test=10_000):
    """Run rounds of fedmpi and of the loop by hand in turn, and print the comparison."""
    s = settings(rounds, channels_last)
    data = split(images(100, samples, test), "iid", 100, 0)
    experiment = build.make_experiment(s, data, torch.device("cpu"))
    module = build_model.make_module(s, data.input_shape, data.classes)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    ours, theirs = [], []
    fed = build.make_federation(experiment, SingleProcess(torch.device("cpu")), lambda: False)
    members = range(10)

    def between(_):
        """Record the time of fedmpi's round, which has just been evaluated, and run a round by hand."""
        nonlocal mark
        ours.append(time.perf_counter() - mark)
        theirs.append(bare(module, experiment.data, members, channels_last))
        mark = time.perf_counter()

    fed.reporter.callbacks.record_round = between
    mark = time.perf_counter()
    fed.run()
    ratios = [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]
    print(
        f"channels_last={channels_last!s:5}  fedmpi {median(ours[1:]):.3f} s  bare {median(theirs[1:]):.3f} s  "
        f"ratio {median(ours[1:]) / median(theirs[1:]):.3f}  "
        f"(pairs {min(ratios):.3f} to {max(ratios):.3f}, {rounds - 1} rounds)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for channels_last in (False, True):
        compare(arguments.rounds, channels_last)
