"""Run flgo (`flgo`, tested with 0.4.4) on tasks from fedmpi.

    python by_flgo.py FOLDER ...

options: {"algorithm": "feddyn", "args": arguments of the algorithm}. The clients' `train` and the server's `aggregate`
are flgo's; this file calls them, because flgo's own rounds read tasks from disk.
"""

import copy
import importlib
from types import SimpleNamespace

import torch
from flgo.utils.fmodule import FModule
from task import flat, serve
from torch.nn.functional import cross_entropy


class Net(FModule):
    """The model of the task, in the form that flgo expects."""

    task = None  # a class attribute, since flgo creates instances without arguments

    def __init__(self):
        super().__init__()
        self.body, self.head = Net.task.network()

    def forward(self, x):
        return self.head(self.body(x))


class Calculator:
    """The part of a flgo task that provides the loss and the optimiser; it also records the losses."""

    def __init__(self):
        self.losses = []

    def get_optimizer(self, model, lr, weight_decay, momentum):
        return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay, momentum=momentum)

    def compute_loss(self, model, batch):
        value = cross_entropy(model(batch[0]), batch[1])
        self.losses.append(value.item())
        return {"loss": value}


def run(task):
    """Train the task with the other program, and record the results."""
    asked, Net.task = task.options, task
    module = importlib.import_module(f"flgo.algorithm.{asked['algorithm']}")
    calculator, server = Calculator(), module.Server.__new__(module.Server)
    server.__dict__ |= {"model": Net(), "num_clients": task.clients, "_object_map": {}, "_cache_vars": []}
    server.init_algo_para = lambda _: server.__dict__.update(asked["args"])
    server.gv = SimpleNamespace(logger=None)
    server.initialize()
    clients = [module.Client.__new__(module.Client) for _ in range(task.clients)]
    for k, client in enumerate(clients):
        client.__dict__ |= {"calculator": calculator, "learning_rate": task.lr, "device": torch.device("cpu"), **USUAL}
        client.__dict__ |= {**asked["args"], "batches": iter(()), "server": server, "id": k}
        client.initialize()
    w, loss = [], []
    for cohort, p in zip(task.cohorts.tolist(), task.p, strict=True):
        models, means = [], []
        for k in cohort:
            batches = [batch for _ in range(task.epochs) for batch in task.passes(k)]
            clients[k].num_steps, drawn = len(batches), iter(batches)
            clients[k].get_batch_data = lambda drawn=drawn: next(drawn)
            calculator.losses = []
            model = copy.deepcopy(server.model)
            clients[k].train(model)
            models.append(model)
            means.append(sum(calculator.losses) / len(calculator.losses))
        server.received_clients = cohort
        server.model = server.aggregate(models)
        w.append(flat(server.model.parameters()))
        loss.append(p @ torch.tensor(means))
    task.finish(w=w, loss=loss)


USUAL = {"weight_decay": 0.0, "momentum": 0.0, "clip_grad": 0.0, "_cache_vars": []}

if __name__ == "__main__":
    serve(run)
