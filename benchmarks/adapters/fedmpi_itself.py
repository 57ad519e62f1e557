"""Run fedmpi in one process on the task, without checkpoints and evaluation."""

import sys
import time
from itertools import pairwise

import torch
from task import TASKS, images, parse_arguments, report

from fedmpi.comm.base import SingleProcess
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime import build

MODELS = {"softmax": "logistic", "cnn": "mcmahan_cnn"}


def main():
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    x, y = (each.flatten(0, 1) for each in images(task))
    assert TASKS.keys() == MODELS.keys()
    tree = {
        "rounds": rounds,
        "data": {"source": "benchmark", "partition": {"scheme": "iid", "clients": task["clients"]}},
        "model": {"name": MODELS[sys.argv[1]]},
        "method": {"name": "fedavg"},
        "train": {"batch_size": task["batch"], "lr": task["lr"], "momentum": 0.0},
        "cohort": {"fraction": task["cohort"] / task["clients"]},
        "evaluate": {"every": 10**6},
    }
    settings = Settings.model_validate(tree)
    data = split(Dataset(x, y, x[:10], y[:10], classes=10), "iid", task["clients"], 0, "global")
    experiment = build.make_experiment(settings, data, torch.device("cpu"))
    fed = build.make_federation(experiment, SingleProcess(torch.device("cpu")), lambda: False)
    stamps = [time.perf_counter()]
    fed.reporter.callbacks.record_round = lambda row: stamps.append(time.perf_counter())
    fed.run()
    report([b - a for a, b in pairwise(stamps)])


if __name__ == "__main__":
    main()
