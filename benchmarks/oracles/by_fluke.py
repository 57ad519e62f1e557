"""Run fluke (`fluke-fl`, tested with 0.8.1) on tasks from fedmpi.

    python by_fluke.py FOLDER ...

options: {"algorithm": "fedprox.FedProx", "client": {...}, "server": {...}, "kept": the part of a client to compare}.
The algorithm is fluke's; it gets loaders with fedmpi's passes, the initial model and the cohorts.
"""

import importlib
from copy import deepcopy

import torch
from fluke import DDict, FlukeENV
from fluke.data import FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.utils import ClientObserver, FederationObserver
from task import flat, serve


class Loader(FastDataLoader):
    """A client's rows; each iteration yields the next pass in fedmpi's order."""

    def __init__(self, task, client):
        rows = task.rows(client)
        super().__init__(task.x[rows], task.y[rows], num_labels=task.classes, batch_size=task.batch)
        self.task, self.client, self.batches = task, client, iter(())

    def __len__(self):
        return self.n_batches

    def __iter__(self):
        self.batches = iter(self.task.passes(self.client))
        return self

    def __next__(self):
        return next(self.batches)


class Splitter:
    """The clients' data, in the form that fluke expects."""

    def __init__(self, task):
        self.task = task

    def assign(self, n, batch):
        return ([Loader(self.task, k) for k in range(n)], [None] * n), None


class Watch(FederationObserver, ClientObserver):
    """An observer that records mean loss and global model after each round."""

    def __init__(self, task):
        self.task, self.w, self.loss, self.seen, self.algorithm = task, [], [], {}, None

    def end_fit(self, round, client_id, model, loss, **_):
        self.seen[client_id] = loss

    def end_round(self, round):
        if self.algorithm.server.model is not None:
            self.w.append(flat(self.algorithm.server.model.parameters()))
        of_cohort = [float(self.seen[k]) for k in self.task.cohorts[round - 1].tolist()]
        self.loss.append(self.task.p[round - 1] @ torch.tensor(of_cohort))


def kept(client, what):
    """Return the part of a client to compare after the last round: prototypes, a model, or a part of a model."""
    if what == "prototypes":
        return client.prototypes
    model = client.personalized_model if what == "personal" else client.model
    if what in ("personal", "whole"):
        return flat(model.parameters())
    return flat((model.model if hasattr(model, "model") else model).get_submodule(f"_{what}").parameters())


def run(task):
    """Train the task with the other program, and record the results."""
    asked, model = task.options, EncoderHeadNet(*task.network())
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    module, name = asked["algorithm"].split(".")
    own = dict(asked.get("client", {}))
    client = {
        "batch_size": task.batch,
        "local_epochs": own.pop("local_epochs", task.epochs),
        "loss": torch.nn.CrossEntropyLoss,
        "optimizer": DDict({"name": "SGD", "lr": task.lr, **own.pop("optimizer", {})}),
        "scheduler": DDict({"name": "StepLR", "step_size": 1, "gamma": 1.0}),
        **own,
    }
    found = importlib.import_module(f"fluke.algorithms.{module}")
    algorithms = getattr(found, name)
    if hasattr(found, "FastDataLoader"):  # loaders that clients create use fedmpi's order, too
        found.FastDataLoader = lambda x, y, **_: Loader(task, task.owner(x))
    if asked.get("own_model"):
        client["model"] = deepcopy(model)
    server = DDict(asked.get("server", {}))
    given = (
        model.encoder if asked.get("shared") == "encoder" else model.head if asked.get("shared") == "head" else model
    )
    settings = DDict(model=given, client=DDict(client), server=server)
    fluke, watch = algorithms(task.clients, Splitter(task), settings), Watch(task)
    if asked.get("copies"):  # fluke creates one model per client if it is given by name, but not if given as a module
        for each in fluke.clients:
            each.model = deepcopy(each.model)
    watch.algorithm, cohorts = fluke, iter(task.cohorts.tolist())
    fluke.server.get_eligible_clients = lambda _: [fluke.clients[k] for k in next(cohorts)]
    fluke.set_callbacks([watch])
    fluke.finalize = lambda: None  # skip evaluation and fine-tuning after the last round
    fluke.run(len(task.cohorts), task.cohorts.shape[1] / task.clients)
    what = asked.get("kept")
    own_parts = [kept(each, what) for each in fluke.clients] if what else []
    task.finish(w=watch.w, loss=watch.loss, kept=own_parts)


if __name__ == "__main__":
    serve(run)
