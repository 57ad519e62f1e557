"""Run fluke (`fluke-fl`, tested with 0.8.1) on a task."""

import sys
import time

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.utils import FederationObserver
from task import images, model, parse_arguments, report


class Watch(FederationObserver):
    """An observer that records the seconds of each round."""

    def __init__(self):
        self.began, self.seconds = 0.0, []

    def start_round(self, round, global_model):
        self.began = time.perf_counter()

    def end_round(self, round):
        self.seconds.append(time.perf_counter() - self.began)


def main():
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    x, y = (each.flatten(0, 1) for each in images(task))
    data = DataContainer(x, y, x[:10], y[:10], 10)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    client = {
        "batch_size": task["batch"],
        "local_epochs": 1,
        "loss": torch.nn.CrossEntropyLoss,
        "optimizer": {"name": "SGD", "lr": task["lr"]},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
    }
    settings = DDict(model=model(sys.argv[1]), client=DDict(client), server=DDict(weighted=True))
    fluke, watch = FedAVG(task["clients"], DataSplitter(data), settings), Watch()
    fluke.set_callbacks([watch])
    sys.stdout, out = sys.stderr, sys.stdout  # progress bars
    fluke.run(rounds, task["cohort"] / task["clients"])
    sys.stdout = out
    report(watch.seconds)


if __name__ == "__main__":
    main()
