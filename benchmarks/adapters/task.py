"""The tasks of benchmarks/peers.py and benchmarks/many_clients.py for adapters of any program; it needs only torch.

An adapter is a file of this folder that trains a task with another program and ends with `report(seconds)`. Its first
argument is the name of the task, the second one the number of rounds. Adapters switch evaluation off if they can.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import torch
from torch import nn

TASKS = {
    "softmax": {"clients": 1000, "cohort": 100, "samples": 30, "batch": 10, "lr": 0.05},
    "cnn": {"clients": 100, "cohort": 10, "samples": 100, "batch": 50, "lr": 0.01},
}
FEATURES, CLASSES, COHORT, BATCH, LR = 16, 10, 50, 50, 0.05  # of many_clients.py: rows of numbers


def parse_arguments():
    """Return the task and the number of rounds from the command line."""
    torch.set_num_threads(1)
    return TASKS[sys.argv[1]], int(sys.argv[2])


def images(task):
    """Return random images x (clients, samples, 1, 28, 28) and labels y (clients, samples)."""
    g = torch.Generator().manual_seed(0)
    shape = task["clients"], task["samples"]
    return torch.randn(*shape, 1, 28, 28, generator=g), torch.randint(10, shape, generator=g)


@cache
def images_of(name):
    """Return the images of the task with this name, created once per process."""
    return images(TASKS[name])


def model(name):
    """Return the model of a task: softmax regression, or the CNN of FedAvg's paper."""
    torch.manual_seed(0)
    if name == "softmax":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    convolutions = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2)]
    dense = [nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *dense)


def report(seconds):
    """Print the seconds of each round as JSON."""
    print(json.dumps(seconds))


def numbers(rows):
    """Return random data x (rows, FEATURES) and labels y (rows,)."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, FEATURES, generator=g), torch.randint(CLASSES, (rows,), generator=g)


def report_peak():
    """Print the peak memory of this process in bytes."""
    results = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    print(json.dumps({"peak": int(results[1]) * 1024}), flush=True)
