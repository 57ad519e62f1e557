"""Run FedLab (`fedlab`, tested with 1.3.0) on tasks from fedmpi.

    python by_fedlab.py FOLDER ...

options: {"algorithm": "fedprox", "handler": "FedProxServerHandler", "trainer": "FedProxSerialClientTrainer",
"setup": arguments of the trainer's setup_optim, "server": arguments of the handler's setup_optim}.
"""

import importlib

import torch
from fedlab.core.standalone import StandalonePipeline
from task import Loader, flat, serve
from torch import nn


class Losses(nn.CrossEntropyLoss):
    """A loss function that records its values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, f, y):
        value = super().forward(f, y)
        self.seen.append(value.item())
        return value


class Data:
    """The clients' data in fedmpi's order, in the form that FedLab expects."""

    def __init__(self, task):
        self.task = task

    def get_dataloader(self, client, batch_size):
        return Loader(self.task, client)


class Pipeline(StandalonePipeline):
    """FedLab's pipeline, which records the global model after each round."""

    def __init__(self, handler, trainer, task, loss):
        super().__init__(handler, trainer)
        self.task, self.means, self.w, self.loss = task, loss, [], []

    def evaluate(self):
        task, t = self.task, len(self.w)
        steps = [task.epochs * len(Loader(task, k)) for k in task.cohorts[t].tolist()]
        parts = torch.tensor(self.means.seen).split(steps)
        self.loss.append(task.p[t] @ torch.stack([part.mean() for part in parts]))
        self.means.seen = []
        self.w.append(flat(self.handler.model.parameters()))


def run(task):
    """Train the task with the other program, and record the results."""
    asked = task.options
    module = importlib.import_module(f"fedlab.contrib.algorithm.{asked['algorithm']}")
    net = nn.Sequential(*task.network())
    rounds, m = task.cohorts.shape
    handler = getattr(module, asked["handler"])(net, rounds, m / task.clients)
    trainer = getattr(module, asked["trainer"])(net, task.clients)
    loss, cohorts = Losses(), iter(task.cohorts.tolist())
    trainer.setup_dataset(Data(task))
    trainer.setup_optim(task.epochs, task.batch, task.lr, **asked.get("setup", {}))
    trainer.criterion = loss
    if "server" in asked:
        handler.setup_optim(**asked["server"])
    handler.sample_clients = lambda: next(cohorts)
    pipeline = Pipeline(handler, trainer, task, loss)
    pipeline.main()
    task.finish(w=pipeline.w, loss=pipeline.loss)


if __name__ == "__main__":
    serve(run)
