"""Run BlazeFL (`blazefl`, tested with 2.0.3, which needs Python 3.12): its trainer of one client after another."""

import sys
import time

from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler
from task import images, model, parse_arguments, report
from torch.utils.data import DataLoader, TensorDataset


class Data:
    """The clients' data, in the form that BlazeFL expects."""

    def __init__(self, x, y):
        self.clients = [TensorDataset(*each) for each in zip(x, y, strict=True)]

    def get_dataloader(self, type_, cid, batch_size, generator):
        return DataLoader(self.clients[cid], batch_size, shuffle=True, generator=generator)


class Models:
    """The model of the task, in the form that BlazeFL expects."""

    def select_model(self, name):
        return model(name)


def main():
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    data, name, n, batch, seed = Data(*images(task)), sys.argv[1], task["clients"], task["batch"], 0
    server = FedAvgBaseServerHandler(Models(), name, data, rounds, n, task["cohort"] / n, "cpu", batch, seed)
    trainer = FedAvgBaseClientTrainer(Models(), name, data, "cpu", n, 1, batch, task["lr"], seed)
    seconds = []
    while not server.if_stop():
        began = time.perf_counter()
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        seconds.append(time.perf_counter() - began)
    report(seconds)


if __name__ == "__main__":
    main()
