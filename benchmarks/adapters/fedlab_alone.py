"""Run FedLab (`fedlab`, tested with 1.3.0): its standalone pipeline, whose trainer trains one client after another."""

import sys
import time
from itertools import pairwise

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from task import images, model, parse_arguments, report
from torch.utils.data import DataLoader, TensorDataset


class Data:
    """The clients' data, in the form that FedLab expects."""

    def __init__(self, x, y):
        self.clients = [TensorDataset(*each) for each in zip(x, y, strict=True)]

    def get_dataloader(self, client, batch_size):
        return DataLoader(self.clients[client], batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    """FedLab's pipeline, which records the time after each round instead of evaluating."""

    def __init__(self, handler, trainer):
        super().__init__(handler, trainer)
        self.stamps = [time.perf_counter()]

    def evaluate(self):
        self.stamps.append(time.perf_counter())


def main():
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    net = model(sys.argv[1])
    handler = SyncServerHandler(net, rounds, task["cohort"] / task["clients"])
    trainer = SGDSerialClientTrainer(net, task["clients"])
    trainer.setup_dataset(Data(*images(task)))
    trainer.setup_optim(1, task["batch"], task["lr"])
    pipeline = Pipeline(handler, trainer)
    pipeline.main()
    report([b - a for a, b in pairwise(pipeline.stamps)])


if __name__ == "__main__":
    main()
